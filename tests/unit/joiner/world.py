"""A log with random events, a joiner on it that can be killed, and its samples."""

from __future__ import annotations

import random
import struct
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np

from freshet.config.spec.topics import BLOCK_BYTES, MAX_EXPANDED_BYTES, RecordLimits, block_bytes
from freshet.errors import Unavailable
from freshet.joiner.plan import JoinContext, JoinPlan, Topics
from freshet.joiner.service import JoinerService, Pace
from freshet.log import EventLog, Writer
from freshet.log.sqlite.event_log import SqliteEventLog
from freshet.testing.contracts.eventlog import answered
from freshet.types import Append, BytesColumn, TopicPartition

from .support import Action, Event, JsonDecoder, Served, Shown

INPUTS = {"served": "served", "shown": "shown", "action": "actions"}


def limits_for(record_bytes: int, block: int = BLOCK_BYTES) -> RecordLimits:
    """Return the limits of topics that all accept records of so many bytes."""
    sample = record_bytes - block_bytes(1, 0)
    events = dict.fromkeys(("served", "shown", "action"), record_bytes)
    return RecordLimits(events, sample, MAX_EXPANDED_BYTES, record_bytes, record_bytes, block)


class SetClock:
    """A clock that the test sets."""

    def __init__(self) -> None:
        self.wall_ms = 1_000_000
        self.seconds = 0.0

    def now_ms(self) -> int:
        return self.wall_ms

    def monotonic(self) -> float:
        return self.seconds


@dataclass(frozen=True, order=True)
class Sample:
    partition: int
    id: int
    time: int
    request: int
    value: float
    weight: float
    label: int
    schema: int
    payload: bytes


class LostAnswer:
    """A writer of which a share of the appends fail, before or after they are written."""

    def __init__(self, inner: Writer, chance: random.Random, share: float) -> None:
        self._inner, self._chance, self.share = inner, chance, share

    def append(self, appends: Sequence[Append]) -> Sequence[int]:
        fails = self._chance.random() < self.share
        done = self._chance.random() < 0.5
        if fails and not done:
            raise Unavailable("not written")
        offsets = self._inner.append(appends)
        if fails:
            raise Unavailable("written, but the response was lost")
        return offsets

    def close(self) -> None:
        self._inner.close()


@dataclass
class World:
    """Topics of one model, on a SQLite log by default."""

    folder: Path
    plan: JoinPlan
    partitions: int = 2
    clock: SetClock = field(default_factory=SetClock)
    other_log: EventLog | None = None
    limits: RecordLimits = field(default_factory=lambda: limits_for(16 << 20))

    def __post_init__(self) -> None:
        self.log: EventLog = self.other_log or SqliteEventLog(self.folder)
        self.inputs = (
            dict(INPUTS) if self.plan.require_shown else {k: v for k, v in INPUTS.items() if k != "shown"}
        )
        for topic in self.inputs.values():
            self.log.create_topic(topic, partitions=self.partitions)
        for topic in ("m.samples", "m.samples.late", "m.joiner"):
            self.log.create_topic(topic, partitions=self.partitions, group="m.joined")
        self.log.create_topic("m.dead-letters", partitions=1, group="m.joined")
        self.log.create_topic("m.control", partitions=1)
        self._writer = self.log.writer()

    def topics(self) -> Topics:
        known = self.log.topics()
        ids = {topic: str(known[topic].log_id) for topic in self.inputs.values()}
        return Topics(
            self.inputs,
            "m.samples",
            "m.samples.late",
            "m.joiner",
            "m.dead-letters",
            ids,
            self.limits,
            self.partitions,
        )

    def context(self, open_writer: Callable[[str], Writer] | None = None) -> JoinContext:
        return JoinContext(
            self.log,
            "m",
            self.plan,
            self.topics(),
            partial(JsonDecoder, self.plan),
            range(self.partitions),
            all_partitions=not self.log.traits.many_hosts,
            clock=self.clock,
            open_writer=open_writer,
        )

    def joiner(self, pace: Pace | None = None, context: JoinContext | None = None) -> JoinerService:
        pace = pace or Pace(flush_interval_ms=0, end_check_interval_ms=10**9, pin_interval_ms=0)
        return JoinerService(context or self.context(), pace=pace)

    def send(self, events: Sequence[Event | bytes], time_ms: int | None = None) -> None:
        """Append events to the partition of their request, and bytes that are no event to the first."""
        grouped: dict[tuple[str, int], list[tuple[bytes, int]]] = {}
        for event in events:
            topic, request = _where(event)
            value = event if isinstance(event, bytes) else event.record()
            when = time_ms if time_ms is not None else 0 if isinstance(event, bytes) else event.time
            at = topic, zlib.crc32(request.encode()) % self.partitions
            grouped.setdefault(at, []).append((value, when))
        appends = [
            Append(
                topic,
                partition,
                BytesColumn.of([value for value, _ in values]),
                times_ms=np.array([when for _, when in values], np.int64),
            )
            for (topic, partition), values in grouped.items()
        ]
        for append in appends:
            self._writer.append([append])

    def values(self, topic: str) -> list[tuple[int, bytes]]:
        """Return (partition, value) of all records of a topic."""
        out = []
        for partition in range(self.log.topics()[topic].partitions):
            at = TopicPartition(topic, partition)
            bounds = self.log.bounds(at)
            reader = self.log.reader()
            reader.assign({at: bounds.start})
            position = bounds.start
            while position < bounds.end:
                for _, records in answered(reader, 10_000, 1.0):
                    out += [(partition, value) for value in records.values]
                    position = records.next_offset
            reader.close()
        return out

    def samples(self, topic: str = "m.samples") -> list[Sample]:
        return [
            sample for partition, value in self.values(topic) for sample in decode_block(partition, value)
        ]

    def close(self) -> None:
        self.log.close()


def _where(event: Event | bytes) -> tuple[str, str]:
    if isinstance(event, Served):
        return "served", event.request
    if isinstance(event, Shown):
        return "shown", event.impression.split("/")[0]
    if isinstance(event, Action):
        return "actions", event.impression.split("/")[0]
    return "served", ""


def decode_block(partition: int, block: bytes) -> list[Sample]:
    """Decode a block by the format of schemas/README.md."""
    magic, version, flags, schema, n, crc = struct.unpack_from("<BBHIII", block)
    assert (magic, version, flags) == (0xB1, 1, 0)
    assert zlib.crc32(block[16:]) == crc
    at = 16
    columns = []
    for kind, width in (("q", 8), ("q", 8), ("Q", 8), ("f", 4), ("f", 4), ("I", 4), ("B", 1)):
        columns.append(struct.unpack_from(f"<{n}{kind}", block, at))
        at += n * width
    at += -at % 8
    ids, times, requests, values, weights, ends, labels = columns
    starts = (0, *ends[:-1])
    assert at + ends[-1] == len(block)
    return [
        Sample(
            partition,
            ids[i],
            times[i],
            requests[i],
            values[i],
            weights[i],
            labels[i],
            schema,
            block[at + starts[i] : at + ends[i]],
        )
        for i in range(n)
    ]


def random_events(
    chance: random.Random, plan: JoinPlan, *, requests: int, disorder_ms: int, resend: float = 0.1
) -> list[Event]:
    """Make events in a possible order of arrival: shuffled within `disorder_ms`, some sent twice."""
    events: list[Event] = []
    names = ["click", "watch", "buy"]
    window = max(label.window_ms for label in plan.labels)
    for r in range(requests):
        time = 1_000 + r * 40 + chance.randrange(40)
        items = tuple(f"i{n}" for n in range(chance.randrange(1, 4)))
        request = f"r{r}"
        events.append(Served(request, items, time, schema=1 + r // 40))
        for item in items:
            impression = f"{request}/{item}"
            if chance.random() < 0.7:
                events.append(Shown(impression, time + chance.randrange(50)))
            while chance.random() < 0.4:
                at = time + chance.randrange(int(window * 1.2))
                amount = None if chance.random() < 0.2 else float(chance.randrange(8))
                events.append(
                    Action(impression, at, chance.choice(names), f"{chance.getrandbits(60)}", amount)
                )
        if chance.random() < 0.1:
            events.append(Action(f"nobody{r}/x", time, "click", f"{r}"))
        if chance.random() < 0.1:  # a faulty client uses an id again later
            events.append(Served(request, items, time + chance.randrange(window), schema=9))
    events += [e for e in events if chance.random() < resend]
    if not plan.require_shown:
        events = [e for e in events if not isinstance(e, Shown)]
    return sorted(events, key=lambda e: e.time + chance.random() * disorder_ms)
