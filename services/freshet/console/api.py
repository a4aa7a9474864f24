"""The console's routes, described."""

from __future__ import annotations

from typing import Any

from freshet.http.endpoint import (
    TOKEN_CODES,
    Answer,
    Body,
    Endpoint,
    Parameter,
    array,
    boolean,
    integer,
    json,
    mapping,
    nullable,
    number,
    ready_page,
    record,
    refusals,
    status_page,
    text,
    words,
)
from freshet.versions.promotions import PEOPLE

ANY: dict[str, Any] = {"type": "object"}
TIME = integer("ms since 1970")

SERVICE = record(
    "ServiceSeen",
    {
        "name": text("its role, or one of several"),
        "role": text(),
        "state": words(("ready", "starting", "down")),
        "reason": text('why it is not ready; "": it is'),
        "host": nullable(text("where it answers; null: on this machine")),
        "port": nullable(integer()),
        "pid": nullable(integer("of a process of this run")),
        "up_s": nullable(number()),
        "restarts": nullable(integer("of a process elsewhere: since the console began")),
        "last_exit": text('how it last ended; "": it never did'),
        "memory_mb": nullable(number("resident")),
    },
)
ROLE = record(
    "RoleSeen",
    {
        "role": text(),
        "state": words(("ready", "degraded", "starting", "down"), "degraded: some are ready, or some answer"),
        "ready": integer("instances that are"),
        "of": integer("instances"),
        "memory_mb": nullable(number("resident, of those that are known")),
    },
)
EDGE = record(
    "Edge",
    {
        "from": text("a service, or client"),
        "to": text(),
        "what": text("what passes"),
        "rate": nullable(number(), "over the last few seconds"),
        "unit": text("of the rate"),
        "lag": nullable(integer(), "what waits on the way"),
        "lag_unit": nullable(text()),
        "level": words(("ok", "warn", "bad", "idle", "unknown"), "by seconds of work that wait"),
        "note": text(),
    },
)
STAGE = record(
    "Stage",
    {
        "stage": words(("logged", "joined", "trained", "published", "served")),
        "ms": number("median, since the log took the action"),
        "p90": number(),
    },
)
FAILED = record("TraceGivenUp", {"at_ms": TIME, "stage": text("the one not reached"), "reason": text()})
TRACE = record(
    "Trace",
    {
        "at_ms": TIME,
        "n": integer("actions followed"),
        "stages": array(STAGE),
        "failed": nullable(FAILED, "the last that was given up, if it is among the newest"),
    },
)
LABEL = record(
    "LabelSeen",
    {
        "name": text(),
        "kind": words(("truth", "number"), "truth: it is true or false"),
        "given": nullable(text(), "the label that must be true for this one to count"),
    },
)
QUALITY = record(
    "Quality",
    {
        "labels": array(LABEL),
        "totals": mapping(ANY, "training, served, …: by label the measures since the model began"),
        "open": array(ANY, "windows that are not closed yet, as records of `<model>.measures`"),
        "reliability": mapping(array(array(number())), "by label: [n, mean predicted, mean label]"),
    },
)
SEGMENT = record(
    "SegmentChange",
    {
        "of": text("served or training"),
        "segment": text(),
        "value": integer("key of the value"),
        "text": nullable(text(), "the value, if an event that the console read had it"),
        "label": text(),
        "n": integer("samples"),
        "ne": number("normalised entropy of the last hour's newer half"),
        "change": number("against the older half"),
        "low": number("of a 95 % interval"),
        "high": number(),
    },
)
TABLE = record(
    "TableSeen",
    {
        "table": text(),
        "rows": nullable(integer()),
        "bytes": nullable(integer("of its rows in memory; indexes and unused capacity are not counted")),
        "evicted": nullable(integer()),
    },
)
WIRE = record(
    "WireSeen",
    {
        "wire": text("lookup, push, batch, gradients, publish or dense"),
        "tables": text("of a store group, or weights"),
        "codec": text(),
        "rows": integer("since the processes began"),
        "bytes_raw": integer("of these rows in fp32"),
        "bytes_wire": integer("as they were sent"),
        "error": nullable(number(), "relative; of the process with the largest"),
        "codec_s": number("spent to encode and decode them, at both ends"),
    },
)
LINK = record(
    "LinkSeen",
    {
        "service": text("whose link it is"),
        "address": text("of its peer"),
        "carries": text("rows or gradients"),
        "codec": nullable(text()),
        "why": nullable(text()),
    },
)
VERSION = record(
    "VersionSeen",
    {
        "number": integer(),
        "created_ms": nullable(TIME),
        "step": nullable(integer()),
        "verdict": nullable(text("promoted, held or pending")),
        "reason": text("of the verdict, with the gate's figures"),
        "aliases": array(text()),
        "measures": ANY,
    },
)
VERSIONS = record(
    "Versions",
    {
        "serving": nullable(integer(), "of replicas the oldest"),
        "aliases": mapping(integer()),
        "pinned": boolean("whether a person rolled back, and the gate promotes nothing"),
        "list": array(VERSION, "newest first"),
    },
)
LETTER = record(
    "Letter",
    {
        "time_ms": nullable(TIME),
        "from": words(("gateway", "joiner", "trainer")),
        "topic": text(),
        "reason": text(),
        "text": text("the event; hexadecimal digits if it is no text"),
    },
)
LETTERS = record(
    "Letters",
    {"refused": integer("that the log holds"), "joiner": integer(), "newest": array(LETTER)},
)
LOSS = record(
    "Loss",
    {
        "figure": text("as docs/operations.md, Losses, defines it"),
        "lost": integer("events of the last five minutes"),
        "of": integer(),
    },
)
SYSTEM = record(
    "State",
    {
        "v": integer("1"),
        "now_ms": TIME,
        "model": text(),
        "freshet": text("release"),
        "folder": text("absolute path of the run folder"),
        "token_file": text("absolute path of the file that holds the console's token, where that runs"),
        "health": words(("good", "degraded", "starting", "down")),
        "notes": array(text(), "why it is not good"),
        "services": array(SERVICE),
        "roles": array(ROLE, "services by their role"),
        "edges": array(EDGE),
        "freshness_ms": nullable(
            integer(), "now minus the newest event that serving has learned from; of replicas the worst"
        ),
        "trace": nullable(TRACE),
        "quality": QUALITY,
        "segments": array(SEGMENT),
        "tables": array(TABLE),
        "rows_bytes": nullable(integer()),
        "wires": array(WIRE, "what they carried"),
        "links": array(LINK, "links between processes that carry rows"),
        "versions": VERSIONS,
        "dead_letters": LETTERS,
        "losses": array(LOSS, "what of the events taught nothing lately; empty: not known yet"),
        "simulator": nullable(ANY),
        "asking": record(
            "Asking",
            {
                "scheme": words(("http", "https")),
                "token": boolean("whether clients of this run's services need one"),
                "certificate": boolean("likewise"),
            },
        ),
        "console": record("ConsoleFigures", {"streams": integer("pages kept up to date")}),
    },
)
MOVE = record(
    "VersionMove",
    {
        "time_ms": TIME,
        "number": integer(),
        "what": words(("promoted", "held", "moved")),
        "by": words(("gate", *PEOPLE)),
        "reason": text(),
    },
)
PAST = record(
    "History",
    {
        "now_ms": TIME,
        "next": integer("offset of the measures from which on events follow"),
        "vitals": array(ANY),
        "windows": array(ANY),
        "clicks": array(ANY),
        "drifts": array(ANY),
        "versions": array(MOVE),
    },
)
RANKABLE = {
    "context": {**ANY, "description": "the served event's fields outside the candidates"},
    "candidates": array(ANY, "the items' fields"),
}
RECENT = record("Recent", {"request_id": {"type": ["string", "integer", "null"]}, **RANKABLE})
MOVED = record(
    "Moved",
    {
        "v": integer("1"),
        "kind": words(("alias",)),
        "alias": words(("stable",)),
        "number": integer(),
        "by": words(("console",)),
        "pinned": boolean("whether the gate promotes nothing until the next promote"),
        "time_ms": TIME,
    },
)

STATE = Endpoint(
    "GET",
    "/api/state",
    "Everything that the page shows of now.",
    (
        Answer(200, "as of the last look, about a second ago", (json(SYSTEM),)),
        *refusals("host", "origin", "unavailable"),
    ),
    "null is what is not known. Totals of a service fall back to 0 with its process.",
)
HISTORY = Endpoint(
    "GET",
    "/api/history",
    "The past: vitals, windows of measures, clicks, drifts, versions.",
    (
        Answer(200, "the past, at most 720 points a series", (json(PAST),)),
        *refusals("bad_input", "host", "origin", "overloaded", "unavailable"),
    ),
    "Windows hold all samples, no segments. Clicks that were thinned are sums of neighbouring windows; of "
    "the others the newest of a place is kept.",
    (Parameter("span_s", "query", "seconds back; 3600 without it", integer(minimum=0)),),
)
EVENTS = Endpoint(
    "GET",
    "/api/events",
    "Server-sent events: the state about once a second, and records as they are written.",
    (
        Answer(200, "until either side ends it", (Body("text/event-stream"),)),
        *refusals("bad_input", "host", "origin", "streams", "unavailable"),
    ),
    "`state`: as /api/state. `record`, its id the offset: a new record of the measures. `version`: what "
    "became of a version; after a gap it may come twice. `reset`: records were missed that are no longer at "
    "hand, or the log began anew; read the history again. A comment comes where nothing else does for 10 s. "
    "A client that does not read skips states.",
    (
        Parameter("from", "query", "offset to begin at: `next` of the history", integer(minimum=0)),
        Parameter("Last-Event-ID", "header", "goes on after this offset, a whole number; wins over `from`"),
    ),
)
REQUESTS = Endpoint(
    "GET",
    "/api/requests",
    "Recent served requests, to be tried again.",
    (Answer(200, "newest first", (json(array(RECENT)),)), *refusals("host", "origin", "overloaded")),
)
TRY = Endpoint(
    "POST",
    "/api/try",
    "Rank candidates without logging or exploring, with the rows explained.",
    (Answer(200, "as inference answers /v1/rank; its errors, too", (json(ANY),)),
     *refusals("bad_input", *TOKEN_CODES, "host", "origin", "body_timeout", "body_too_large", "too_large",
               "content_type", "encoding", "overloaded", "unavailable")),
    bodies=(json(record("TryRequest", {"candidates": RANKABLE["candidates"]},
                        {"context": RANKABLE["context"], "k": integer(minimum=1)})),),
)  # fmt: skip
_MOVES = (Answer(200, "it is done, and written to `<model>.versions`", (json(MOVED),)),
          *refusals("bad_input", *TOKEN_CODES, "host", "origin", "no_such_version",
                    "body_timeout", "version_damaged", "body_too_large", "content_type", "encoding",
                    "unavailable"))  # fmt: skip
PROMOTE = Endpoint(
    "POST",
    "/api/promote",
    "Serve a version whose weights are finite, whatever the gate said, and let the gate go on.",
    _MOVES,
    bodies=(json(record("PromoteRequest", {"number": integer(minimum=0)}), {"number": 12}),),
    scope="operate",
)
ROLLBACK = Endpoint(
    "POST",
    "/api/rollback",
    "Serve an older version, without a number the last that the gate promoted, but never 0, the untrained "
    "model; stay there until a promote.",
    _MOVES,
    bodies=(json(record("RollbackRequest", {}, {"number": nullable(integer(minimum=0))}), {"number": 11}),),
    scope="operate",
)
READY = ready_page("Console")
STATUS = status_page(record("ConsoleStatus", {"streams": integer("pages kept up to date")}))


def file_at(path: str) -> Endpoint:
    """One file of the page."""
    return Endpoint(
        "GET",
        path,
        "The page." if path == "/" else "A file of the page.",
        (
            Answer(200, "the file", (Body("text/html" if path == "/" else "*/*"),), {"ETag": "of its bytes"}),
            Answer(304, "the browser has it already"),
            *refusals("host", "origin"),
        ),
    )


PAGE = (file_at("/"), file_at("/static/{file}").at("/static/{file}", Parameter(
    "file", "path", "a name of the fixed list that was read at the start", required=True)))  # fmt: skip

ENDPOINTS = (STATE, HISTORY, EVENTS, REQUESTS, TRY, PROMOTE, ROLLBACK, *PAGE)
