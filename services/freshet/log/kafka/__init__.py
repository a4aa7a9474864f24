"""The event log on Apache Kafka."""
