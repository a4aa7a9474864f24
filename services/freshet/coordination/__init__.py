"""Leases, partition assignment and the shard map, agreed on in the topic `control`."""
