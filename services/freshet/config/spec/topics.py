"""Names and shapes of a model's topics; the one place that spells them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from freshet.config.spec.model import Spec

__all__ = [
    "KINDS_OF_TOPICS",
    "ROWS_PARTITIONS",
    "SCHEMAS_TOPIC",
    "TopicKind",
    "TopicPlan",
    "Topics",
    "topics_of",
]

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
