"""Open-loop load: requests at a given rate, independent of the answers to earlier ones.

Request times are a Poisson process, drawn in advance, and latencies count from them. A server that stalls for
a second so delays each request of that second, not only one: coordinated omission (Gil Tene, "How NOT to
Measure Latency", 2013) is avoided.
"""
