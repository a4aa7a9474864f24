"""Construction of a joiner from a spec and a log, for `freshet run joiner` and `freshet replay`."""

from __future__ import annotations

import os
import socket
import uuid
from functools import partial
from threading import Event

import structlog

from freshet.clock import SYSTEM_CLOCK, Clock
from freshet.config.avro.schema import Record
from freshet.config.spec.model import Spec
from freshet.config.spec.schemas import load_schemas, readers_of, streams_of
from freshet.coordination.assignment import PartitionAssignment
from freshet.coordination.claims import Claims
from freshet.errors import ConfigError
from freshet.features import hash_text
from freshet.joiner.decoder import ExternalSchemas, SpecDecoder
from freshet.joiner.plan import JoinContext, Topics, join_plan
from freshet.joiner.service import Intervals, JoinerService
from freshet.log import EventLog
from freshet.log.schema_ids import SchemaRegistry
from freshet.log.topics import ensure_topics, limits_of

_log = structlog.get_logger("freshet.joiner")


OUTAGE_MS = 600_000
"""Shortest outage of a joiner after which the log is to hold the events that its restart needs."""


def intervals_of(log: EventLog, *, commit_interval_ms: int, poll_records: int) -> Intervals:
    """Return the intervals for a log; a `commit_interval_ms` of 0 takes the interval that suits the log."""
    every_ms = commit_interval_ms or log.traits.append_every_ms
    return Intervals(
        flush_interval_ms=every_ms,
        commit_interval_ms=max(every_ms, Intervals().commit_interval_ms),
        poll_records=poll_records,
    )


def assignment_of(spec: Spec, log: EventLog, name: str = "") -> tuple[Claims, PartitionAssignment] | None:
    """Return this process's partition assignment, and its claims, which must be closed after the joiner.

    None on an embedded log, where one joiner has all partitions. The default name is host and process id.

    Raises ConfigError if a joiner on an embedded log has a name.
    """
    if not log.traits.many_hosts:
        if name:
            raise ConfigError(
                "environment",
                "FRESHET_JOINER_NAME",
                name,
                "no name: an embedded log has one joiner, which has all partitions",
                "joiners share partitions on a log that several machines reach, such as kafka://",
            )
        return None
    claims = Claims(log, ensure_topics(log, spec).control, SYSTEM_CLOCK)
    name = name or f"{socket.gethostname()}-{os.getpid()}"
    owner = f"{name}/{uuid.uuid4().hex}"
    return claims, PartitionAssignment(claims, "joiner", "join", name, owner, spec.partitions, SYSTEM_CLOCK)


def make(
    spec: Spec,
    log: EventLog,
    *,
    assignment: PartitionAssignment | None = None,
    external_schemas: ExternalSchemas | None = None,
    clock: Clock = SYSTEM_CLOCK,
    intervals: Intervals | None = None,
    stop: Event | None = None,
) -> JoinerService:
    """Make the joiner of a spec's partitions; creates missing topics.

    Input topics may have more partitions than the spec, from the start or later: the joiner reads those that
    all of them have. On a log of many hosts each partition has a writer of its own, so that every later
    joiner fences earlier ones.

    Args:
        spec: the model's.
        log: that holds its topics.
        assignment: the partition assignment among joiners; None: this joiner has all partitions.
        external_schemas: schemas of topics in the format confluent.
        clock: wall-clock and monotonic time.
        intervals: intervals of the loop.
        stop: ends `run` when set.

    Raises:
        ConfigError: the joiner does not support the spec, or the file of a schema cannot be read.
        Mismatch: a topic has other partitions than the spec.
    """
    if external_schemas is None and any(stream.format == "confluent" for stream in streams_of(spec)):
        raise ConfigError(
            "environment",
            "FRESHET_REGISTRY_URL",
            "",
            "the URL of the schema registry, as a stream of the spec has the format confluent",
        )
    names = ensure_topics(log, spec)
    plan = join_plan(spec, hash_text)
    inputs = {"served": names.served, "action": names.action}
    if names.shown is not None:
        inputs["shown"] = names.shown
    known = log.topics()
    counts = {topic: known[topic].partitions for topic in inputs.values()}
    partitions = max(spec.partitions, min(counts.values()))
    if log.traits.many_hosts:
        log.grow_topic(names.joiner, partitions)
    if assignment is not None:
        assignment.partitions = partitions
    topics = Topics(
        inputs=inputs,
        samples=names.samples,
        late=names.late,
        joiner=names.joiner,
        dead_letters=names.dead_letters,
        log_ids={topic: str(known[topic].log_id) for topic in inputs.values()},
        limits=limits_of(log, spec),
        samples_partitions=spec.partitions,
    )
    by_writers = [topic for topic in inputs.values() if not known[topic].append_time]
    if by_writers:
        _log.warning(
            "records carry their writers' time: only this joiner's clock bounds event time; set the topics' "
            "message.timestamp.type=LogAppendTime",
            topics=by_writers,
        )
    needed_ms = plan.remembered_ms + OUTAGE_MS
    for topic in inputs.values() if log.traits.many_hosts else ():  # an embedded log has retention pins
        kept_ms = known[topic].retention_ms
        if kept_ms is not None and kept_ms < needed_ms:
            _log.warning(
                "the log removes events that a restart of the joiner needs, and then the joiner ends with "
                "DataLost: set the topic's retention (`retention.events`, or its owner's) above "
                "2 * (longest window + grace) and the longest outage besides",
                topic=topic,
                retention_ms=kept_ms,
                expected_ms=needed_ms,
            )
    schemas = load_schemas(spec)
    frameless: dict[str, Record] = {
        s.role: schemas.of(s.role) for s in streams_of(spec) if s.format in ("json", "bare")
    }
    readers = readers_of(spec, schemas)
    decoder = partial(
        SpecDecoder, spec, plan, SchemaRegistry(log), frameless, external_schemas, readers=readers
    )
    decoder()  # raises now if a schema does not fit the spec
    context = JoinContext(
        log=log,
        model=spec.name,
        plan=plan,
        topics=topics,
        decoder=decoder,
        partitions=range(partitions),
        all_partitions=not log.traits.many_hosts,
        clock=clock,
    )
    return JoinerService(
        context,
        watches_growth=log.traits.many_hosts,
        assignment=assignment,
        intervals=intervals or Intervals(),
        log_time_counts=not by_writers,
        stop=stop or Event(),
    )
