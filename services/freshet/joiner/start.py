"""Puts a joiner together from a spec and a log: what `freshet run joiner` and `freshet replay` call."""

from __future__ import annotations

import os
import socket
import uuid
from collections.abc import Callable, Sequence
from functools import partial
from threading import Event

import structlog

from freshet.clock import SYSTEM_CLOCK, Clock
from freshet.config.avro.schema import Record
from freshet.config.spec.model import Spec
from freshet.config.spec.schemas import load_schemas, readers_of, streams_of
from freshet.coordination.claims import Claims
from freshet.coordination.partition_assignment import Shares
from freshet.errors import ConfigError
from freshet.features import hash_text
from freshet.joiner.events import SchemasOfOthers, SpecDecoder
from freshet.joiner.partition import Topics
from freshet.joiner.plan import join_plan
from freshet.joiner.service import JoinerService, JoinerStatus, Pace
from freshet.log import EventLog
from freshet.log.schema_ids import SchemaRegistry
from freshet.log.topics import ensure_topics, limits_of

__all__ = ["make", "pace_of", "run", "shares_of"]

_log = structlog.get_logger("freshet.joiner")


def pace_of(log: EventLog, *, commit_interval_ms: int, poll_records: int) -> Pace:
    """How often a joiner writes; with an interval of 0, as often as is good for the log."""
    every_ms = commit_interval_ms or log.traits.append_every_ms
    return Pace(
        flush_interval_ms=every_ms,
        commit_interval_ms=max(every_ms, Pace().commit_interval_ms),
        poll_records=poll_records,
    )


def shares_of(
    spec: Spec, log: EventLog, name: str = "", clock: Clock = SYSTEM_CLOCK
) -> tuple[Claims, Shares] | None:
    """This process's share of the partitions, and its claims, which are to be closed after the joiner.

    None on an embedded log: one joiner has them all. Without a name it is called after host and process.

    Raises ConfigError if an embedded log's joiner was named.
    """
    if not log.traits.many_hosts:
        if name:
            raise ConfigError(
                "environment",
                "FRESHET_JOINER_NAME",
                name,
                "no name: an embedded log has one joiner, with all partitions",
                "several share the partitions on a log that several machines reach, such as kafka://",
            )
        return None
    claims = Claims(log, ensure_topics(log, spec).control, clock)
    name = name or f"{socket.gethostname()}-{os.getpid()}"
    owner = f"{name}/{uuid.uuid4().hex}"
    return claims, Shares(claims, "joiner", "join", name, owner, spec.partitions, clock)


def make(
    spec: Spec,
    log: EventLog,
    *,
    partitions: Sequence[int] | None = None,
    shares: Shares | None = None,
    theirs: SchemasOfOthers | None = None,
    clock: Clock = SYSTEM_CLOCK,
    pace: Pace | None = None,
    stop: Event | None = None,
    on_status: Callable[[JoinerStatus], None] | None = None,
) -> JoinerService:
    """A joiner of a spec's partitions (all, if none are named); creates the topics that are missing.

    A topic of events may have more partitions than the spec says, from the start or later: all that every
    joined topic has are read. With `shares`, of those of them that it shares with others. On a log of many
    hosts each partition has a writer of its own, whoever joins it, so that every later joiner fences every
    earlier one. `theirs` has the schemas of topics in the format confluent.

    Raises ConfigError if the spec asks for what the joiner cannot do, or a schema's file cannot be read,
    Mismatch if a topic has other partitions.
    """
    if theirs is None and any(stream.format == "confluent" for stream in streams_of(spec)):
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
    every = spec.partitions if partitions is not None else max(spec.partitions, min(counts.values()))
    if log.traits.many_hosts:
        log.grow_topic(names.joiner, every)
    if shares is not None:
        shares.partitions = every
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
            "records carry their writers' time: this joiner's clock alone bounds event time; set the topics' "
            "message.timestamp.type=LogAppendTime",
            topics=by_writers,
        )
    schemas = load_schemas(spec)
    frameless: dict[str, Record] = {
        s.role: schemas.of(s.role) for s in streams_of(spec) if s.format in ("json", "bare")
    }
    readers = readers_of(spec, schemas)
    decoder = partial(SpecDecoder, spec, plan, SchemaRegistry(log), frameless, theirs, readers=readers)
    decoder()  # what does not fit the spec stops the start
    return JoinerService(
        log=log,
        model=spec.name,
        plan=plan,
        topics=topics,
        decoder=decoder,
        partitions=range(every) if partitions is None else partitions,
        watches_growth=partitions is None and log.traits.many_hosts,
        all_partitions=partitions is None and not log.traits.many_hosts,
        shares=shares,
        clock=clock,
        pace=pace or Pace(),
        append_time=not by_writers,
        stop=stop or Event(),
        on_status=on_status,
    )


def run(
    spec: Spec,
    log: EventLog,
    *,
    until_end: bool = False,
    partitions: Sequence[int] | None = None,
    clock: Clock = SYSTEM_CLOCK,
    pace: Pace | None = None,
    stop: Event | None = None,
    on_status: Callable[[JoinerStatus], None] | None = None,
) -> JoinerStatus | None:
    """Join until `stop` is set; with `until_end`, up to the streams' present ends, then close every window.

    Returns what it did. Raises as `make` and `JoinerService.run` do.
    """
    joiner = make(spec, log, partitions=partitions, clock=clock, pace=pace, stop=stop, on_status=on_status)
    joiner.run(until_end=until_end)
    return joiner.status
