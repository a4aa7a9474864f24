"""Requests at a stated rate, whatever becomes of those before: how a system answers under load.

An open loop: when each request is sent is drawn before, as a Poisson process, and its latency counts from
that moment. A server that stands still for a second is seen in every request of that second, and not in one
alone, which is called coordinated omission (Gil Tene, "How NOT to Measure Latency", 2013).
"""
