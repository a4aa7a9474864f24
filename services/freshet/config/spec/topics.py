"""Names and shapes of a model's topics; the one place that spells them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import isqrt
from typing import Literal

from freshet.config.spec.model import Spec
from freshet.config.spec.schemas import streams_of
from freshet.errors import ConfigError

__all__ = [
    "BLOCK_BYTES",
    "COMMIT_SKIPS",
    "KINDS_OF_TOPICS",
    "LEAST_TOPIC_BYTES",
    "MAX_ELEMENTS",
    "MAX_EXPANDED_BYTES",
    "ROWS_PARTITIONS",
    "SCHEMAS_TOPIC",
    "RecordLimits",
    "TopicKind",
    "TopicPlan",
    "Topics",
    "block_bytes",
    "largest_records",
    "topics_of",
]

# --- The largest records that an accepted event leads to, topic by topic, and from them the largest
# event.
#
# An event is copied on its way: its context into each of its samples, a sample into a block, a
# refused record into a letter. Whatever accepts an event checks it against these bounds first, so
# that every record derived from an accepted event fits its topic.


BLOCK_BYTES = 1 << 20
"""A block of samples is closed before it grows beyond this; a larger sample stands alone in its block."""

MAX_EXPANDED_BYTES = 512 << 20
"""Of all samples of one event together: its context is copied into every sample, one for each element and
label. They are decided at one moment and appended in one transaction, so this bounds the joiner's memory."""

LEAST_TOPIC_BYTES = 1_000_000
"""What each topic of a model must take as one record. Deltas of rows (768 KiB) and the joiner's commits are
the largest records that do not depend on the size of an event. Kafka's default for topics is 1,048,588."""

COMMIT_SKIPS = 8_192
"""Single impressions or actions that a commit of the joiner names as left out of a replay, about 20 bytes
each, before it is written; those of the last 256 KiB of records, or of one event, come on top."""

MAX_ELEMENTS = 32_768
"""Of one event: a repeat of which some are known may leave out each of them."""

_BLOCK_HEAD_BYTES, _SAMPLE_BYTES = 16, 37
"""Of a block, and of a sample in it beside its payload (schemas/README.md, "Samples: blocks")."""

_FRAME_BYTES = 5


def block_bytes(samples: int, payload_bytes: int) -> int:
    """Length of a block of so many samples whose payloads have `payload_bytes` together."""
    return _BLOCK_HEAD_BYTES + -(-_SAMPLE_BYTES * samples // 8) * 8 + payload_bytes


def largest_records(event_bytes: int, key_bytes: int, limits: RecordLimits) -> Mapping[str, int]:
    """The largest record in each topic that one served event leads to, by the topic's role.

    Args:
        event_bytes: of the event's record in the log.
        key_bytes: of its key.
        limits: of the model's topics; letters are cut to what their topics take.
    """
    block = max(BLOCK_BYTES, block_bytes(1, event_bytes))
    letter = 4 * -(-event_bytes // 3) + _ENVELOPE_BYTES
    return {
        "served": event_bytes + key_bytes,
        "samples": block,
        "late": block,
        "dead_letters": min(letter, limits.dead_letter_bytes),
        "refused": min(letter, limits.refused_bytes),
    }


_ENVELOPE_BYTES = 64 << 10
"""Of a letter beside the bytes of its record: its texts are cut (`freshet.log.dead_letters`)."""


@dataclass(frozen=True, slots=True)
class RecordLimits:
    """What a model's topics take, and so what one event may be."""

    event_bytes: Mapping[str, int]  # stream's role -> largest record with its key
    sample_bytes: int  # largest payload of one sample
    expanded_bytes: int  # largest sum of the payloads of one event's samples
    dead_letter_bytes: int  # largest record of `<model>.dead-letters`
    refused_bytes: int  # largest record of `<model>.refused`
    block_bytes: int  # where a block of samples is closed

    def safe_event_bytes(self, labels: int) -> int:
        """No event up to this length can exceed `expanded_bytes`, however it divides into context and
        elements of at least one byte: c bytes of context and n - c elements make c (n - c) + (n - c) bytes a
        label at most."""
        return max(0, 2 * isqrt(self.expanded_bytes // labels) - 2)

    @classmethod
    def of(cls, spec: Spec, limits: Mapping[str, int]) -> RecordLimits:
        """From the largest record that each topic takes (topic -> bytes).

        Raises ConfigError for a topic that takes too little for the records that do not depend on events.
        """
        topics = topics_of(spec)
        theirs = {stream.topic for stream in streams_of(spec) if stream.theirs}
        for plan in topics.plans:
            if plan.name not in theirs and limits[plan.name] < LEAST_TOPIC_BYTES:
                raise ConfigError(
                    "event log",
                    f"largest record of topic {plan.name}",
                    limits[plan.name],
                    f"at least {LEAST_TOPIC_BYTES:,} bytes, which changed rows and commits of the joiner may "
                    "have",
                    "raise the topic's max.message.bytes, and max_record_bytes in the log's URL",
                )
        block = min(limits[topics.samples], limits[topics.late])
        sample = block - block_bytes(1, 0)
        events: dict[str, int] = {stream.role: limits[stream.topic] for stream in streams_of(spec)}
        events["served"] = min(events["served"], sample + _FRAME_BYTES)
        return cls(
            event_bytes=events,
            sample_bytes=sample,
            expanded_bytes=MAX_EXPANDED_BYTES,
            dead_letter_bytes=limits[topics.dead_letters],
            refused_bytes=limits[topics.refused],
            block_bytes=min(BLOCK_BYTES, block),
        )


ROWS_PARTITIONS = 8
"""Partitions of `<model>.rows`, fixed for life: as many readers can share the work of following rows."""

SCHEMAS_TOPIC = "schemas"
"""One for all models of a log: a schema's id is its first record's offset, plus 1."""


@dataclass(frozen=True, slots=True)
class TopicPlan:
    """How a topic is to be created. `group`: topics that one atomic append may span."""

    name: str
    partitions: int
    retention_ms: int | None
    group: str | None = None
    may_have_more: bool = (
        False  # more partitions than planned are read, too: event topics, the joiner's commits
    )


@dataclass(frozen=True, slots=True)
class TopicKind:
    """What one of a model's topics is for. From these come the plans, the reference and a test of running
    systems."""

    role: str  # how `Topics` calls it
    name: str  # `<model>` stands for the spec's name; of event topics: without a topic of the spec's own
    partitions: int | None  # None: as many as the spec says
    kept: Literal["events", "rows", "measures"] | None  # by which key of [retention]; None: for ever
    holds: str
    written_by: str
    read_by: str
    kinds: tuple[str, ...] = ()  # of its JSON records; none: the records are no JSON of ours
    joined: bool = False  # changes in one atomic append with the other joined ones (PROTOCOL 18)


KINDS_OF_TOPICS = (
    TopicKind(
        "schemas",
        SCHEMAS_TOPIC,
        1,
        None,
        "Avro schemas as canonical JSON; a schema's id is its first record's offset, plus 1",
        "gateway, inference, joiner",
        "every service",
    ),
    TopicKind(
        "served",
        "impressions",
        None,
        "events",
        "what was served, framed Avro or JSON; with `freshet_served` where inference logged it",
        "inference, gateway, or others",
        "joiner, console, `freshet late`",
    ),
    TopicKind(
        "shown",
        "shown",
        None,
        "events",
        "what was really seen",
        "gateway, or others",
        "joiner, `freshet late`",
    ),
    TopicKind(
        "action",
        "actions",
        None,
        "events",
        "what was done",
        "gateway, or others",
        "joiner, console, `freshet late`",
    ),
    TopicKind(
        "samples",
        "<model>.samples",
        None,
        "events",
        "samples in blocks",
        "joiner, `freshet late join`",
        "trainer, embedder, console, `freshet late join`",
        joined=True,
    ),
    TopicKind(
        "late",
        "<model>.samples.late",
        None,
        "events",
        "impressions that came too late to be joined, as samples without a value; not trained on unless "
        "`freshet late join` joins them",
        "joiner",
        "`freshet late join`, people",
        joined=True,
    ),
    TopicKind(
        "joiner",
        "<model>.joiner",
        None,
        "events",
        "the joiner's commits: next offsets, watermark, counts; one a commit and partition",
        "joiner, `freshet late set-back`",
        "joiner (its history), inference (progress), console, `freshet late`",
        ("commit",),
        joined=True,
    ),
    TopicKind(
        "dead_letters",
        "<model>.dead-letters",
        1,
        "measures",
        "records of event topics that the joiner cannot read, with the reason; the bytes in base64",
        "joiner",
        "console, people",
        ("dead-letter",),
        joined=True,
    ),
    TopicKind(
        "refused",
        "<model>.refused",
        1,
        "measures",
        "events that the gateway refused and samples that trainer or embedder cannot decode, with the reason",
        "gateway, trainer, embedder",
        "console, people",
        ("refused", "sample"),
    ),
    TopicKind(
        "rows",
        "<model>.rows",
        ROWS_PARTITIONS,
        "rows",
        "changed rows as serving needs them; the row store has the rest",
        "trainer, paramserver",
        "inference",
    ),
    TopicKind(
        "control",
        "<model>.control",
        1,
        None,
        "who owns buckets, partitions and seats of services: claims with their fences; who should own what, "
        "and how much each shard has to do",
        "trainer, joiner on Kafka, embedder, paramserver",
        "trainer, joiner on Kafka, embedder, paramserver",
        ("claim", "claims", "heartbeat", "load", "plan", "release", "releases", "state"),
    ),
    TopicKind(
        "versions",
        "<model>.versions",
        1,
        None,
        "dense versions, verdicts of the gate, moves of aliases",
        "trainer, console, `freshet version`",
        "trainer, console",
        ("version", "verdict", "alias"),
    ),
    TopicKind(
        "measures",
        "<model>.measures",
        1,
        "measures",
        "windows of quality; the console's own history",
        "trainer, console",
        "console",
        ("window", "vitals", "clicks", "drift"),
    ),
)
"""Every topic of a model, in an order in which they may be created."""


@dataclass(frozen=True, slots=True)
class Topics:
    """Every topic of one model."""

    served: str
    shown: str | None
    action: str
    samples: str
    late: str
    joiner: str
    dead_letters: str  # what the joiner refuses; atomic with its commits
    refused: str  # what the gateway refuses
    rows: str
    control: str
    versions: str
    measures: str
    plans: tuple[TopicPlan, ...]


def topics_of(spec: Spec) -> Topics:
    """Names and creation plans of all topics of a model, in an order in which they may be created."""
    events = spec.events
    named = {"served": events.served.topic, "action": events.action.topic}
    if events.shown is not None:
        named["shown"] = events.shown.topic
    names: dict[str, str] = {}
    plans = []
    for kind in KINDS_OF_TOPICS:
        if kind.role == "shown" and events.shown is None:
            continue
        name = named.get(kind.role, kind.name.replace("<model>", spec.name))
        partitions = kind.partitions or spec.partitions
        group = f"{spec.name}.joined" if kind.joined else None
        may_have_more = kind.role in (*named, "joiner")
        plans.append(TopicPlan(name, partitions, _retention_ms(spec, kind), group, may_have_more))
        names[kind.role] = name
    return Topics(
        served=names["served"],
        shown=names.get("shown"),
        action=names["action"],
        samples=names["samples"],
        late=names["late"],
        joiner=names["joiner"],
        dead_letters=names["dead_letters"],
        refused=names["refused"],
        rows=names["rows"],
        control=names["control"],
        versions=names["versions"],
        measures=names["measures"],
        plans=tuple(plans),
    )


def _retention_ms(spec: Spec, kind: TopicKind) -> int | None:
    """How long the topic keeps records; None: for ever."""
    match kind.kept:
        case "events":
            return spec.retention.events_ms
        case "rows":
            return spec.retention.rows_ms
        case "measures":
            return spec.retention.measures_ms
        case None:
            return None
