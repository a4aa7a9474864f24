"""The parameter server: rows and optimiser state of its buckets, under a lease.

Consumes: lookups and pushes (`RowService`), claims on `control`.
Produces: `<model>.rows` (changed rows, for serving), flushes to the row store.
Owns: a range of buckets, from the claim until the lease is lost.
Guarantees: a push changes rows and `applied` together, whole or not at all; what it acknowledged before a
kill is replayed from the smallest offset that was flushed; a fenced shard stops.
"""
