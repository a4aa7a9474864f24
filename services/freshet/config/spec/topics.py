"""Names, kinds and limits of a model's topics."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import isqrt
from typing import Any, Literal

from freshet.config.spec.model import Spec
from freshet.config.spec.schemas import streams_of
from freshet.errors import ConfigError

# --- Limits of records.
#
# An event is copied: its context into each of its samples, a sample into a block, a refused record into a
# dead letter. Services that accept events check them against these limits, so that all derived records fit
# their topics.

BLOCK_BYTES = 1 << 20
"""Largest block of several samples; a larger sample has a block of its own."""

MAX_EXPANDED_BYTES = 512 << 20
"""Limit on all samples of one event, which copies its context for each element and label. They are decided at
once and appended in one transaction, so this bounds the joiner's memory."""

LEAST_TOPIC_BYTES = 1_000_000
"""Least value of a topic's record limit. The largest records that do not depend on an event's size are deltas
of rows (768 KiB) and the joiner's commits. Kafka's default is 1,048,588."""

COMMIT_SKIPS = 8_192
"""Replay exclusions, about 20 bytes each, at which the joiner writes a commit; it can hold more by those of
the last 256 KiB of records, or of one event, which has at most 32,768 elements."""

_BLOCK_HEAD_BYTES, _SAMPLE_BYTES = 16, 37
"""Bytes of a block's header, and of a sample without payload (schemas/README.md, "Samples: blocks")."""

_FRAME_BYTES = 5


def block_bytes(samples: int, payload_bytes: int) -> int:
    """Return the length of a block of samples with `payload_bytes` of payloads in all."""
    return _BLOCK_HEAD_BYTES + -(-_SAMPLE_BYTES * samples // 8) * 8 + payload_bytes


@dataclass(frozen=True, slots=True)
class RecordLimits:
    """Limits on the records of a model's topics and on its events."""

    event_bytes: Mapping[str, int]  # stream's role -> largest record with its key
    sample_bytes: int  # largest payload of one sample
    expanded_bytes: int  # largest sum of the payloads of one event's samples
    dead_letter_bytes: int  # largest record of `<model>.dead-letters`
    refused_bytes: int  # largest record of `<model>.refused`
    block_bytes: int  # largest block of several samples

    def safe_event_bytes(self, labels: int) -> int:
        """Return a length up to which no event exceeds `expanded_bytes`.

        For each label, c bytes of context and n - c elements of one byte make at most c (n - c) + (n - c)
        bytes.
        """
        return max(0, 2 * isqrt(self.expanded_bytes // labels) - 2)

    @classmethod
    def of(cls, spec: Spec, limits: Mapping[str, int]) -> RecordLimits:
        """Derive the limits from the largest record of each topic (topic -> bytes).

        Raises ConfigError for a topic with a limit below LEAST_TOPIC_BYTES.
        """
        topics = topics_of(spec)
        for plan in topics.plans:
            if not plan.external and limits[plan.name] < LEAST_TOPIC_BYTES:
                raise ConfigError(
                    "event log",
                    f"largest record of topic {plan.name}",
                    limits[plan.name],
                    f"at least {LEAST_TOPIC_BYTES:,} bytes, for changed rows and commits of the joiner",
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
"""Partitions of `<model>.rows`, fixed for a model's life; at most so many readers can share them."""

SCHEMAS_TOPIC = "schemas"
"""The topic of all models of a log; a schema's id is the offset of its first record, plus 1."""


@dataclass(frozen=True, slots=True)
class TopicPlan:
    """Plan of a topic. One atomic append may span the topics of a `group`."""

    name: str
    partitions: int
    retention_ms: int | None
    group: str | None = None
    may_have_more: bool = False  # read all partitions even if more than planned: events, commits
    external: bool = False  # of another system, which creates it and sets its retention


@dataclass(frozen=True, slots=True)
class TopicKind:
    """Purpose of one of a model's topics; plans and the reference derive from it."""

    role: str  # attribute of `Topics`
    name: str  # `<model>` stands for the spec's name; default of event topics
    partitions: int | None  # None: `partitions` of the spec
    kept: Literal["events", "rows", "measures"] | None  # key of [retention]; None: for ever
    holds: str
    written_by: str
    read_by: str
    kinds: tuple[str, ...] = ()  # kinds of its JSON records; empty for other formats
    joined: bool = False  # one atomic append spans all joined topics (PROTOCOL 18)


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
        "served impressions, framed Avro or JSON; with `freshet_served` if inference logged them",
        "inference, gateway, or external writers",
        "joiner, console, `freshet late`",
    ),
    TopicKind(
        "shown",
        "shown",
        None,
        "events",
        "items that a person has seen",
        "gateway, or external writers",
        "joiner, `freshet late`",
    ),
    TopicKind(
        "action",
        "actions",
        None,
        "events",
        "actions",
        "gateway, or external writers",
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
        "impressions too late to be joined, as samples without a value; learned only after `freshet late "
        "join`",
        "joiner",
        "`freshet late join`, operators",
        joined=True,
    ),
    TopicKind(
        "joiner",
        "<model>.joiner",
        None,
        None,  # without its last commit, a partition's events would be joined again; the joiner trims it
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
        "console, operators",
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
        "console, operators",
        ("refused", "sample", "block"),
    ),
    TopicKind(
        "rows",
        "<model>.rows",
        ROWS_PARTITIONS,
        "rows",
        "changed rows without optimiser state, for serving; the row store has whole rows",
        "trainer, paramserver",
        "inference",
    ),
    TopicKind(
        "control",
        "<model>.control",
        1,
        None,
        "claims of slices and partitions with their fences, membership leases, assignments, and the load of "
        "each shard",
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
"""All topics of a model, in order of creation."""


@dataclass(frozen=True, slots=True)
class Topics:
    """Names of a model's topics, with the plans to create them."""

    served: str
    shown: str | None
    action: str
    samples: str
    late: str
    joiner: str
    dead_letters: str  # records that the joiner refuses; atomic with its commits
    refused: str  # events and samples that other services refuse
    rows: str
    control: str
    versions: str
    measures: str
    plans: tuple[TopicPlan, ...]


def topics_of(spec: Spec) -> Topics:
    """Return the names of a model's topics, with their plans in order of creation."""
    events = spec.events
    named = {"served": events.served.topic, "action": events.action.topic}
    if events.shown is not None:
        named["shown"] = events.shown.topic
    external = {stream.topic for stream in streams_of(spec) if stream.external}
    names: dict[str, Any] = {"shown": None}
    plans = []
    for kind in KINDS_OF_TOPICS:
        if kind.role == "shown" and events.shown is None:
            continue
        name = named.get(kind.role, kind.name.replace("<model>", spec.name))
        partitions = kind.partitions or spec.partitions
        group = f"{spec.name}.joined" if kind.joined else None
        may_have_more = kind.role in (*named, "joiner")
        kept_ms = _retention_ms(spec, kind)
        plans.append(TopicPlan(name, partitions, kept_ms, group, may_have_more, name in external))
        names[kind.role] = name
    del names["schemas"]  # of all models
    return Topics(**names, plans=tuple(plans))


def _retention_ms(spec: Spec, kind: TopicKind) -> int | None:
    """Return the retention of a topic; None: for ever."""
    kept = spec.retention
    ages = {"events": kept.events_ms, "rows": kept.rows_ms, "measures": kept.measures_ms}
    return None if kind.kept is None else ages[kind.kept]
