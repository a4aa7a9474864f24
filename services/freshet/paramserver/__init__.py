"""The parameter server: rows with their optimiser state, in buckets that this process owns by claims.

Consumes: lookups and pushes (`RowService`), claims and load reports on `control`.
Produces: `<model>.rows` (changed rows, for serving), flushes to the row store, plans on `control`.
Owns: the buckets of its slices, from the claim until it is released or the lease is lost.
Guarantees: a push changes the rows and `applied` of a bucket together or not at all; pushes that a kill undid
are replayed from the smallest flushed offset; buckets with a fenced flush are dropped, and a shard with one
claim for all buckets, as in the trainer's process, stops.
"""
