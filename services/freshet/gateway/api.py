"""The gateway's routes, described."""

from __future__ import annotations

from typing import Any

from freshet.http.endpoint import (
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
from freshet.http.error_codes import ERROR

__all__ = ["AVRO", "AVRO_BATCH", "AVRO_RAW", "READY", "ROLES", "STATUS", "events"]

AVRO = "application/vnd.freshet.avro"
"""One Confluent-framed record."""
AVRO_BATCH = "application/vnd.freshet.avro-batch"
"""Confluent-framed records, each after its length (u32, big-endian)."""
AVRO_RAW = "avro/binary"
"""One record without a frame; its schema id stands in the header `freshet-schema-id`."""

ROLES = {"served": "impressions", "shown": "shown", "action": "actions"}
"""Streams of the spec, and the last part of the path that takes them."""

_WHAT = {
    "served": "What was served: the features as they were when the model was asked.",
    "shown": "What was really seen.",
    "action": "What was done.",
}

EVENT: dict[str, Any] = {"type": "object", "description": "an event with the fields of your own schema"}

ACK = record(
    "Ack",
    {"topic": text(), "partition": integer(), "offset": integer("its place in the partition, for ever")},
)
REFUSED = record(
    "Refused",
    {
        "index": integer("of the event within the request"),
        "path": text('the field; "" for the event as a whole'),
        "expected": text(),
        "found": text(),
    },
)
_ACCEPTED = {"accepted": integer("events taken"), "acks": array(ACK, "of the accepted events, in order")}
ACCEPTED = record("Accepted", _ACCEPTED)
PARTLY = record(
    "PartlyAccepted", {**_ACCEPTED, "error": ERROR["properties"]["error"], "refused": array(REFUSED)}
)

EVENT_COUNTS = record("EventCounts", {"accepted": integer(), "refused": integer()})
FIGURES = record(
    "GatewayStatus",
    {
        "events_appended": integer("events and refusals made durable"),
        "events_waiting": integer("for the log"),
        "bytes_waiting": integer("for the log"),
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
        f"{_WHAT[role]} One event or many.",
        (
            Answer(202, "every event is durable in the log", (json(ACCEPTED, example),)),
            Answer(
                422,
                "some were refused, with the reason for each; the others are durable",
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
        "An event that is sent again after an answer was lost counts once: by its id, or by its content.",
        parameters=(
            Parameter("freshet-schema-id", "header", f"the record's schema, for `{AVRO_RAW}`", integer()),
        ),
        bodies=(
            json({"anyOf": [EVENT, array(EVENT)]}),
            Body("application/x-ndjson", text("an event a line")),
            Body("application/jsonl", text("an event a line")),
            Body(AVRO),
            Body(AVRO_BATCH),
            Body(AVRO_RAW),
        ),
        scope="send",
    )
