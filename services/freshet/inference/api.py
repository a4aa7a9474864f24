"""The inference server's own routes, described; `oip_endpoints` has the Open Inference Protocol's."""

from __future__ import annotations

from freshet.http.endpoint import (
    TOKEN_CODES,
    Answer,
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

__all__ = ["PROGRESS", "RANK", "READY", "STATUS"]

OBJECT = {"type": "object"}
CONTEXT = {**OBJECT, "description": "the served event's fields outside the candidates"}

RANK_REQUEST = record(
    "RankRequest",
    {"candidates": {"type": "array", "items": OBJECT, "minItems": 1, "description": "the items' fields"}},
    {
        "context": CONTEXT,
        "k": integer("items wanted; all without it", minimum=1),
        "request_id": {
            "type": ["string", "integer", "null"],
            "description": "of the impression that is logged, not empty; made if neither this nor the "
            "context has one",
        },
        "dry_run": boolean("nothing is logged as served, and nothing is explored"),
        "explain": boolean("each item tells what its rows are"),
    },
)
ROWS = record(
    "Rows",
    {
        "known": integer("values that have a row", minimum=0),
        "of": integer("values: one, or as many as a list holds; 0 for a null", minimum=0),
        "age_s": nullable(
            integer(minimum=0), "seconds since the newest event that one of the rows has learned from"
        ),
    },
)
ITEM = record(
    "Item",
    {
        "index": integer("of the candidate in the request"),
        "score": nullable(number(), "by serve.score; null if it is not a number"),
        "predictions": mapping(nullable(number()), "by label"),
        "propensity": number("probability that the policy puts it in this place", minimum=0, maximum=1),
    },
    {"rows": mapping(ROWS, "by feature; where `explain` asks for it")},
)
RANKING = record(
    "Ranking",
    {
        "request_id": {"type": ["string", "integer"], "description": "to be named by shown and actions"},
        "items": array(ITEM, "best first, or in random order"),
        "version": integer("number of the dense version that scored"),
        "freshness_ms": nullable(integer(), "now minus the newest event learned from"),
        "unknown_rows": mapping(integer(), "values without a row, by feature"),
        "explored": boolean("whether the order is random"),
    },
)

RANK = Endpoint(
    "POST",
    "/v1/rank",
    "Order candidates by the spec's score, and log what was served.",
    (
        Answer(200, "the order", (json(RANKING),)),
        *refusals(
            "bad_input",
            "host",
            "origin",
            *TOKEN_CODES,
            "body_timeout",
            "body_too_large",
            "too_large",
            "content_type",
            "encoding",
            "overloaded",
            "internal",
            "unavailable",
        ),
    ),
    "What was served is logged as an impression with its predictions, so that training sees what serving "
    "saw. A request id and the time are filled in where the context has none. A request whose impression the "
    "log's schema or the joiner would not take is refused before it is scored: 400, with the field; every "
    "candidate is checked, as any may be served. A `dry_run`, and a spec with `log_served = false`, log "
    "nothing and need only what features read.",
    bodies=(
        json(
            RANK_REQUEST,
            {
                "context": {"reader": "u1"},
                "candidates": [{"article": "a7", "topic": "music"}, {"article": "a9", "topic": "film"}],
                "k": 1,
            },
        ),
    ),
    scope="rank",
)

_ROWS_NEXT = mapping(integer(), "by partition of `rows`: the next offset to be read")
PROGRESS_BODY = record(
    "Progress",
    {
        "rows_next": _ROWS_NEXT,
        "rows_event_time_ms": integer("newest event that the rows have learned from; 0: none"),
        "version": nullable(integer(), "the dense version served"),
        "dense_applied": mapping(integer(), "by partition of samples: what the dense version has learned"),
        "dense_event_time_ms": nullable(integer()),
    },
    {
        "served": boolean("whether the rows served have learned from the event asked about"),
        "waits_for": words(("joiner", "trainer", "rows", ""), 'who has not got to it yet; "": nobody'),
    },
)

PROGRESS = Endpoint(
    "GET",
    "/v1/progress",
    "How far serving has learned; and, asked about an event, whether it has learned from it.",
    (
        Answer(200, "how far", (json(PROGRESS_BODY),)),
        *refusals("bad_input", *TOKEN_CODES, "overloaded", "internal", "unavailable"),
    ),
    "topic, partition and offset are what the gateway acknowledged; all three or none.",
    parameters=(
        Parameter("topic", "query", "topic of the event"),
        Parameter("partition", "query", "its partition", integer(minimum=0)),
        Parameter("offset", "query", "its offset", integer(minimum=0)),
    ),
    scope="rank",
    or_scope="send",
)

_FIGURES = {
    "version": nullable(integer(), "the dense version served"),
    "freshness_ms": nullable(integer(), "now minus the newest event learned from"),
    "rows_held": integer("rows in memory"),
    "corrupt_deltas": integer("damaged row deltas left out"),
    "not_finite_rows": integer("rows left out because a value was not finite"),
    "missing_rows": integer("rows of damaged buckets of the row store, not served as they were learned"),
    "requests": integer("answered with scores"),
    "candidates": integer("scored"),
    "explored": integer("requests ordered at random"),
    "rows_next": _ROWS_NEXT,
    "rows": text('what is wrong with the rows; "": nothing'),
    "versions": text('what is wrong with the versions; "": nothing'),
    "losses": {**OBJECT, "description": "shares of served events that were not logged: recent, and begun"},
    "served_log": text('why the last served event was not logged; "": it was'),
}
READY = ready_page("Inference", _FIGURES)
STATUS = status_page(record("InferenceStatus", _FIGURES))
