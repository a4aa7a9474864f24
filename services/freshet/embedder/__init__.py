"""The embedder: partitions of `samples` turned into batches of rows, and gradients brought home.

Consumes: `<model>.samples`.
Produces: batches for a trainer rank (`BatchStream`), lookups and pushes (`RowService`), undecodable samples
to `<model>.refused`.
Owns: the assignment of partitions to lanes; nothing durable.
Guarantees: batches are contiguous ranges of whole blocks, start at the smallest offset any store has applied,
and cross no cut point; at most `staleness_rows` rows of other batches are in flight when a batch is looked
up.
"""
