"""The inference server ranks candidates with rows and weights that are about a second old.

It reads `<model>.rows`, the row store and the version store, and writes the topic of served events. Its only
state is a read-only copy of all rows in memory.

Guarantees: an answer uses one version of the weights, and published rows; a version that is corrupt, not
finite or of another spec never serves; the code that decodes features is that of training. A served event
may be lost if the queue is full or the server is killed: it gives no sample; a full queue is counted.

`POST /v1/rank`, `GET /v1/progress`, the Open Inference Protocol v2 under `/v2`, `/health/live`,
`/health/ready`, `/status`, `/metrics`.
"""
