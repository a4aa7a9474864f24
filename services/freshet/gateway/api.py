"""Descriptions of the gateway's routes."""

from __future__ import annotations

from typing import Any

from freshet.http.endpoint import (
    ERROR,
    TOKEN_CODES,
    Answer,
    Body,
    Endpoint,
    Parameter,
    array,
    integer,
    json,
    mapping,
    ready_page,
    record,
    refusals,
    status_page,
    text,
)

AVRO = "application/vnd.freshet.avro"
"""One Confluent-framed record."""
AVRO_BATCH = "application/vnd.freshet.avro-batch"
"""Confluent-framed records, each after its length (u32, big-endian)."""
AVRO_RAW = "avro/binary"
"""One record without a frame; the header `freshet-schema-id` has its schema id."""

ROLES = {"served": "impressions", "shown": "shown", "action": "actions"}
"""{stream of the spec: last part of its route}."""

_SUMMARIES = {
    "served": "Append impressions: served items with the features that the model scored.",
    "shown": "Append events that say which served items a person saw.",
    "action": "Append actions of persons on items.",
}

EVENT: dict[str, Any] = {"type": "object", "description": "an event with the fields of your own schema"}

ACK = record(
    "Ack",
    {"topic": text(), "partition": integer(), "offset": integer("position in the partition")},
)
REFUSED = record(
    "Refused",
    {
        "index": integer("position of the event in the request"),
        "path": text('the field; "" for the whole event'),
        "expected": text(),
        "found": text(),
    },
)
_ACCEPTED = {"accepted": integer("accepted events"), "acks": array(ACK, "one per accepted event, in order")}
ACCEPTED = record("Accepted", _ACCEPTED)
PARTLY = record(
    "PartlyAccepted", {**_ACCEPTED, "error": ERROR["properties"]["error"], "refused": array(REFUSED)}
)

EVENT_COUNTS = record("EventCounts", {"accepted": integer(), "refused": integer()})
FIGURES = record(
    "GatewayStatus",
    {
        "events_appended": integer("events and dead letters that are durable in the log"),
        "events_waiting": integer("events that wait for the log"),
        "bytes_waiting": integer("bytes that wait for the log"),
        "appends_failed": integer(),
        "events": mapping(EVENT_COUNTS, "by stream: served, shown, action"),
    },
)

READY = ready_page("Gateway")
STATUS = status_page(FIGURES)


def events(role: str) -> Endpoint:
    """`POST /v1/impressions`, `/v1/shown` or `/v1/actions`."""
    example = {"accepted": 1, "acks": [{"topic": ROLES[role], "partition": 3, "offset": 1201}]}
    return Endpoint(
        "POST",
        f"/v1/{ROLES[role]}",
        f"{_SUMMARIES[role]} One event or many.",
        (
            Answer(202, "every event is durable in the log", (json(ACCEPTED, example),)),
            Answer(
                422,
                "some events were refused, each with the reason; the others are durable",
                (json(PARTLY),),
            ),
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
        "If a client sends an event again because the answer was lost, the event counts once: by its id, or "
        "by its content.",
        parameters=(
            Parameter("freshet-schema-id", "header", f"the record's schema, for `{AVRO_RAW}`", integer()),
        ),
        bodies=(
            json({"anyOf": [EVENT, array(EVENT)]}),
            Body("application/x-ndjson", text("one event per line")),
            Body("application/jsonl", text("one event per line")),
            Body(AVRO),
            Body(AVRO_BATCH),
            Body(AVRO_RAW),
        ),
        scope="send",
    )
