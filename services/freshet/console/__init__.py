"""The console: one page for people, and the JSON and events behind it.

Consumes the other services' /status, and the topics measures, versions, joiner, dead-letters, refused and
served. Produces records of the kinds vitals, clicks and drift in `<model>.measures`, which is also its
memory: what it shows of the past is read back from there. Owns nothing; stopping it loses nothing.

Guarantees: it changes nothing but `stable`, and that only for whoever holds the token. What it does not know
it says is not known (null), and one part that is away, slow or broken never keeps it from showing the
others. Reading it costs the others a few small requests a second, whoever looks on: pages that are open
share one look, and a page that does not read costs no memory.

`core`, `merging`, `series`, `segments`, `history`, `tracing` decide and are pure; `services`, `process`,
`following`, `versions`, `letters`, `served`, `tracer` look; `collector` puts a `State` together once a
second; `service` answers.
"""
