"""The gateway: events in over HTTP, records of the log out.

Consumes HTTP requests. Produces the topics of `spec.events` and `<model>.refused`. Owns nothing.

Guarantees: 202 means that every event of the request is durable in the log. What does not fit the user's
schema, or is dated too far ahead, is refused one event at a time with the reason (422), and is in
`<model>.refused` before the answer; the others of the request are accepted and acknowledged. 429 and 503
say that nothing is known to be written: sending the same again is safe, as events carry ids.

Bodies: JSON (an object, an array, or an object a line), `application/vnd.freshet.avro` (one
Confluent-framed record), `application/vnd.freshet.avro-batch` (framed records, each after its length: u32,
big-endian), `avro/binary` (one record without frame, its schema id in the header `freshet-schema-id`).
"""
