"""The gateway appends events from HTTP and gRPC requests to the log. It owns no state.

It produces the topics of `spec.events` and `<model>.refused`.

Guarantees: 202 means that every event of the request is durable in the log. An event that does not fit the
user's schema, or is dated too far ahead, is refused with the reason (422) and is in `<model>.refused` before
the answer; the other events of the request are accepted. After 429 and 503 it is not known whether events
were written; the client can send the same request again, as events carry ids.

Bodies: JSON (an object, an array, or an object a line), `application/vnd.freshet.avro` (one
Confluent-framed record), `application/vnd.freshet.avro-batch` (framed records, each after its length: u32,
big-endian), `avro/binary` (one record without frame, its schema id in the header `freshet-schema-id`).
"""
