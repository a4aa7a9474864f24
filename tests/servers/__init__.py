"""Real servers for tests and measurements: Kafka, Redis Cluster. Each in a folder of its own, on free ports
of 127.0.0.1; each can be killed, paused and started again on its data."""
