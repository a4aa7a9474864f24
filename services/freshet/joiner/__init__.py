"""Joiner: joins impressions, shown events and actions into samples.

Reads the topics of `spec.events`, partition by partition. Writes `<model>.samples` (blocks),
`<model>.samples.late`, `<model>.dead-letters` and `<model>.joiner` (its commits) in one atomic append.
Keeps the pending impressions of its partitions in memory only; a restart rebuilds them from the log.

Guarantees (PROTOCOL 18-21): each impression is decided once per label, and counted as trained, late, dropped
or pending, with the reason; a kill at any moment neither loses nor duplicates a sample.
"""
