"""The inference server: ranks candidates with rows and weights that are about a second old.

Consumes `<model>.rows`, the row store and the version store. Produces answers, and the topic of served
events: what was served, as it was served. Owns a read-only copy of all rows, in memory; stateless otherwise.

Guarantees: an answer is made with one version of the weights and rows that were published; a version that
is corrupt, not finite or of another spec never serves; features are decoded by the code that training uses.
A served event may be lost (queue full, server killed) and is then counted: it is no acknowledged event, and
no sample comes of it.

`POST /v1/rank`, `GET /v1/progress`, the Open Inference Protocol v2 under `/v2`, `/health/live`,
`/health/ready`, `/status`, `/metrics`.
"""
