"""The embedder: batches of samples with their rows for trainer ranks, and pushes of their gradients.

Consumes: `<model>.samples`.
Produces: batches for a trainer rank (`BatchStream`), lookups and pushes (`RowService`), undecodable samples
to `<model>.refused`.
Owns: the assignment of partitions to lanes; nothing durable.
Guarantees: batches are contiguous ranges of whole blocks, start at the smallest offset that any store has
applied, and cross no larger applied offset; at most `staleness_rows` rows of other batches are in flight when
a batch is looked up.
"""
