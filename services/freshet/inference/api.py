"""Descriptions of `/v1` routes; `oip_endpoints` has those of the Open Inference Protocol."""

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

OBJECT = {"type": "object"}
CONTEXT = {**OBJECT, "description": "the served event's fields outside the candidates"}

RANK_REQUEST = record(
    "RankRequest",
    {"candidates": {"type": "array", "items": OBJECT, "minItems": 1, "description": "the items' fields"}},
    {
        "context": CONTEXT,
        "k": integer("number of items to return; default: all", minimum=1),
        "request_id": {
            "type": ["string", "integer", "null"],
            "description": "id of the logged impression, not empty; generated if neither this nor the "
            "context has one",
        },
        "dry_run": boolean("no impression is logged, and the order is not random"),
        "explain": boolean("each item has `rows`: whether its features' rows exist, and their age"),
    },
)
ROWS = record(
    "Rows",
    {
        "known": integer("values that have a row", minimum=0),
        "of": integer("values: the length of a list, else 1; 0 for a null", minimum=0),
        "age_s": nullable(
            integer(minimum=0), "seconds since the newest event that one of these rows has learned from"
        ),
    },
)
ITEM = record(
    "Item",
    {
        "index": integer("position of the candidate in the request"),
        "score": nullable(number(), "value of serve.score; null if it is not finite"),
        "predictions": mapping(nullable(number()), "by label"),
        "propensity": number("probability that the policy gives it this position", minimum=0, maximum=1),
    },
    {"rows": mapping(ROWS, "by feature; only with `explain`")},
)
RANKING = record(
    "Ranking",
    {
        "request_id": {"type": ["string", "integer"], "description": "id for shown events and actions"},
        "items": array(ITEM, "best first, or in random order"),
        "version": integer("number of the version whose weights scored"),
        "freshness_ms": nullable(integer(), "now minus the newest event learned from"),
        "unknown_rows": mapping(integer(), "values without a row, by feature; those of defaulted rows, too"),
        "defaulted_rows": mapping(
            integer(),
            "by reason: rows that the scores lack though the local disk may have them; only with "
            "FRESHET_INFERENCE_SSD_FOLDER. late, unreadable or busy",
        ),
        "explored": boolean("whether the order is random"),
    },
)

RANK = Endpoint(
    "POST",
    "/v1/rank",
    "Order candidates by the spec's score, and log the impression.",
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
    "The impression is logged with features and predictions, so that training reads the values that serving "
    "used. Request id and time are filled in if the context lacks them. If the log's schema or the joiner "
    "would refuse the impression, the request is refused before scoring: 400, with the field; every "
    "candidate is checked, as any may be served. With `dry_run`, or `log_served = false` in the spec, "
    "nothing is logged and only the fields of features are needed.",
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

_ROWS_NEXT = mapping(integer(), "by partition of `rows`: the next offset to read")
PROGRESS_BODY = record(
    "Progress",
    {
        "rows_next": _ROWS_NEXT,
        "rows_event_time_ms": integer("newest event that the rows have learned from; 0: none"),
        "version": nullable(integer(), "number of the version served"),
        "dense_applied": mapping(integer(), "by partition of samples: offset that the version has applied"),
        "dense_event_time_ms": nullable(integer()),
    },
    {
        "served": boolean(
            "whether the joiner has read the event, and the rows served have learned all samples up to then; "
            "it may have made none of the event"
        ),
        "waits_for": words(("joiner", "trainer", "rows", ""), 'first hop that has not passed it; "": none'),
    },
)

PROGRESS = Endpoint(
    "GET",
    "/v1/progress",
    "Report how far serving has learned, and whether it has learned from a given event.",
    (
        Answer(200, "the progress", (json(PROGRESS_BODY),)),
        *refusals("bad_input", *TOKEN_CODES, "overloaded", "internal", "unavailable"),
    ),
    "topic, partition and offset are those of the gateway's acknowledgement; all three or none. The first "
    "answer for an old event may wait for samples of newer events: send the request again.",
    parameters=(
        Parameter("topic", "query", "topic of the event"),
        Parameter("partition", "query", "its partition", integer(minimum=0)),
        Parameter("offset", "query", "its offset", integer(minimum=0)),
    ),
    scope="rank",
    or_scope="send",
)

_FIGURES = {
    "version": nullable(integer(), "number of the version served"),
    "freshness_ms": nullable(integer(), "now minus the newest event learned from"),
    "rows_held": integer("rows in memory and on the local disk; with rows on disk an estimate"),
    "row_bytes": integer("memory of rows with their indexes"),
    "ssd": {**OBJECT, "description": "rows on the local disk, and reads and writes of them"},
    "corrupt_deltas": integer("damaged row deltas that were skipped"),
    "not_finite_rows": integer("rows skipped because a value was not finite"),
    "missing_rows": integer("rows of damaged buckets of the row store, served as if never learned"),
    "requests": integer("requests answered with scores"),
    "candidates": integer("candidates scored"),
    "explored": integer("requests ordered at random"),
    "rows_next": _ROWS_NEXT,
    "rows": text('problem with the rows; "": none'),
    "versions": text('problem with the versions; "": none'),
    "losses": {
        **OBJECT,
        "description": "shares of served events that were not logged: recent, and since the start (begun)",
    },
    "served_log": text('reason why a served event was last not logged; "": none'),
}
READY = ready_page("Inference", _FIGURES)
STATUS = status_page(record("InferenceStatus", _FIGURES))
