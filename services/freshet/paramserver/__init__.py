"""The parameter server: rows with their optimiser state, in buckets that this process owns by claims.

Consumes: lookups and pushes (`RowService`), claims and load reports on `control`.
Produces: `<model>.rows` (changed rows, for serving), flushes to the row store, plans on `control`.
Owns: the buckets of its slices, from the claim until it is released or the lease is lost.
Guarantees: a push changes rows and `applied` together or not at all; pushes that a kill undid are replayed
from the smallest flushed offset; a fenced shard stops.
"""
