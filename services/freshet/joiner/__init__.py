"""The joiner: impressions, what was shown and actions in, samples out.

Consumes the topics of `spec.events`, partition by partition. Produces `<model>.samples` (blocks),
`<model>.samples.late`, `<model>.dead-letters` and `<model>.joiner` (its commits), all in one atomic append.
Owns the pending impressions of its partitions, in memory only: a restart builds them anew from the log.

Guarantees (PROTOCOL 18-21): every impression is decided once for each label and ends as trained, late,
dropped or pending, counted with its reason; a kill at any moment neither loses nor doubles a sample.
"""
