"""The console: one page for people, and the JSON and events behind it.

Consumes the other services' /status, and the topics measures, versions, joiner, dead-letters, refused and
served. Produces records of the kinds vitals, clicks and drift in `<model>.measures`, from which it reads its
past back. Owns nothing; stopping it loses nothing.

Guarantees: it changes nothing but `stable`, and that only for requests with the token. Unknown figures are
null, and a part that is away, slow or broken never hides the others. The console costs the others a few small
requests a second, however many pages are open: they share one look, and a page that does not read costs no
memory.

`core`, `instances`, `segments` and `history` decide and are pure; `services`, `topic_readers`,
`served_events` and `traces` read; `collector` composes the state about once a second; `service` answers.
"""
