"""Watch over the joined topics: the growth of their partitions, and the partitioners of their clients.

The join needs all events of a request in one partition number. So all joined topics need equal partition
counts, and clients must place a key alike in all of them. A few keys of each poll are hashed by the
partitioners of common clients; the one that explains them is named.
"""

from __future__ import annotations

import math
import zlib
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import structlog

from freshet.errors import ConfigError, Unavailable
from freshet.features import partition_of
from freshet.joiner.plan import JoinContext
from freshet.types import BytesColumn, TopicPartition

_log = structlog.get_logger("freshet.joiner")


@dataclass(frozen=True, slots=True)
class Growth:
    """Partition counts of the joined topics when they were last read."""

    began_with: int  # the spec's `partitions`: those of `samples`, constant for the model's life
    joined: int  # partitions of each input topic that the joiners read together
    counts: Mapping[str, int]  # topic -> partitions; empty before the first count, or where no topic can grow
    why: str = ""  # why partitions that all topics have cannot be joined; "": they can be

    @property
    def sizes(self) -> set[int]:
        """Partition counts that the topics have, or had."""
        return {self.began_with, self.joined, *self.counts.values()}

    @property
    def unread(self) -> Mapping[str, int]:
        """{topic: partitions that no joiner reads}, without topics that are read completely."""
        return {topic: n - self.joined for topic, n in self.counts.items() if n > self.joined}

    @property
    def trouble(self) -> str:
        """A problem that an operator must fix; "" if there is none."""
        if not self.unread:
            return ""
        found = ", ".join(f"{topic} {n}" for topic, n in sorted(self.counts.items()))
        how = self.why or (
            "joined topics need equal partition counts: add partitions to the smaller ones, and all are read"
        )
        return (
            f"partitions that no joiner reads: {self.joined} of each topic are joined, found {found}; {how}"
        )

    @property
    def note(self) -> str:
        """Information for operators; "" while topics have not grown."""
        if self.unread or self.joined <= self.began_with:
            return self.trouble
        return (
            f"the topics grew from {self.began_with} to {self.joined} partitions, and all are joined; "
            "actions on what was served before the growth are orphans where their key's partition changed"
        )

    def to_json(self) -> dict[str, Any]:
        """Return the object of `freshet status --json`."""
        return {
            "began_with": self.began_with,
            "joined": self.joined,
            "topics": dict(self.counts),
            "unread": dict(self.unread),
            "note": self.note,
        }


KEYS_A_SAMPLE = 4
SAMPLE_EVERY_S = 0.05
"""Time between two samples of a topic: at most 80 keys a second, some 70 µs each sample."""

ENOUGH = 64
"""Keys of a topic before its partitioner is named."""

MOST = 1024
"""Key count at which counts are halved, so that a corrected client is forgotten after hundreds of keys."""

EXPLAINS, STRAY = 0.98, 0.05
"""A partitioner explains a topic if it explains at least the first share of its keys; a share below the
second is chance."""

DIFFERS = 0.1
"""Difference of a partitioner's shares in two topics above which the topics use different partitioners,
unless so few keys differ as much by chance: with n partitions, one key in n lies where another partitioner
would place it."""

TWICE_S = 600.0
"""How long a key that was found in two partitions counts."""

REMEMBERED = 4096
"""Number of keys with a remembered partition, over all topics."""


def murmur2_of(key: bytes, partitions: int) -> int:
    """Return a key's partition by murmur2: freshet's, Java's default, librdkafka's `murmur2_random`."""
    return int(partition_of(BytesColumn.of([key]), partitions)[0])


def crc32_of(key: bytes, partitions: int) -> int:
    """Return a key's partition by CRC32: librdkafka's default `consistent_random`, and `consistent`."""
    return zlib.crc32(key) % partitions


def fnv1a(key: bytes) -> int:
    """Return the FNV-1a hash, 32 bits."""
    value = 0x811C9DC5
    for byte in key:
        value = ((value ^ byte) * 0x01000193) & 0xFFFFFFFF
    return value


def fnv1a_of(key: bytes, partitions: int) -> int:
    """Return a key's partition by sarama's default and librdkafka's `fnv1a`: |signed hash| modulo n."""
    value = fnv1a(key)
    signed = value - (1 << 32) if value >= 1 << 31 else value
    return abs(signed) % partitions


def fnv1a_positive_of(key: bytes, partitions: int) -> int:
    """Return a key's partition by sarama's reference partitioner: the hash without its sign bit."""
    return (fnv1a(key) & 0x7FFFFFFF) % partitions


PARTITIONERS: Mapping[str, Callable[[bytes, int], int]] = {
    "murmur2": murmur2_of,
    "crc32": crc32_of,
    "fnv1a": fnv1a_of,
    "fnv1a-positive": fnv1a_positive_of,
}
DESCRIPTIONS = {
    "murmur2": "murmur2 (Java's default, and freshet's)",
    "crc32": "CRC32 (the default of librdkafka's clients, consistent_random)",
    "fnv1a": "FNV-1a (sarama's default, librdkafka's fnv1a)",
    "fnv1a-positive": "FNV-1a without its sign bit (sarama's reference partitioner)",
    "no key": "none, as records have no key",
    "unknown": "an unknown partitioner, or chance",
}


@dataclass(slots=True)
class _Topic:
    sampled_s: float = float("-inf")
    keys: int = 0
    explained: Counter[str] = field(default_factory=Counter)  # PARTITIONERS, "no key", "unknown"

    def count(self, names: list[str]) -> None:
        self.keys += 1
        self.explained.update(names)
        if self.keys >= MOST:
            self.keys //= 2
            self.explained = Counter({name: n // 2 for name, n in self.explained.items()})

    @property
    def partitioner(self) -> str | None:
        """The partitioner that explains nearly all keys; "other" if none does; None for few keys."""
        if self.keys < ENOUGH:
            return None
        name, n = self.explained.most_common(1)[0]
        return name if n >= EXPLAINS * self.keys and name != "unknown" else "other"

    def share(self, name: str) -> float:
        """Return the share of keys that a partitioner explains."""
        return self.explained[name] / max(self.keys, 1)


class PartitionerDetector:
    """Names the topics' partitioners. Used by one thread; keeps one entry per topic and REMEMBERED keys."""

    def __init__(self) -> None:
        """Create an instance without topics."""
        self._topics: dict[str, _Topic] = {}
        self._where: OrderedDict[bytes, tuple[str, int]] = OrderedDict()
        self._twice: tuple[float, str, str] | None = None  # when a key was seen in two partitions, in words

    def sample(self, topic: str, partition: int, counts: set[int], keys: BytesColumn, now_s: float) -> None:
        """Sample some keys of records.

        Args:
            topic: of the records.
            partition: of the records.
            counts: partition counts that the topic has, and had during the model's life.
            keys: (N,) the records' keys; empty where there is none.
            now_s: monotonic.
        """
        seen = self._topics.get(topic)
        if seen is None:
            seen = self._topics[topic] = _Topic()
        if max(counts) < 2 or not len(keys) or now_s - seen.sampled_s < SAMPLE_EVERY_S:
            return
        seen.sampled_s = now_s
        for row in {i * len(keys) // KEYS_A_SAMPLE for i in range(KEYS_A_SAMPLE)}:
            key = bytes(keys[row])
            if not key:
                seen.count(["no key"])
                continue
            names = [
                name for name, of in PARTITIONERS.items() if any(of(key, n) == partition for n in counts)
            ]
            seen.count(names or ["unknown"])
            if len(counts) == 1:
                self._remember(topic, partition, key, now_s)
        if self._twice is not None and now_s - self._twice[0] > TWICE_S:
            self._twice = None

    def _remember(self, topic: str, partition: int, key: bytes, now_s: float) -> None:
        key = key[:64]
        before = self._where.pop(key, None)
        if before is not None and before[1] != partition:
            words = f"key {repr(key)[1:]} lies in {before[0]}[{before[1]}] and in {topic}[{partition}]"
            self._twice = (now_s, topic, words)
        self._where[key] = (topic, partition)
        if len(self._where) > REMEMBERED:
            self._where.popitem(last=False)

    @property
    def named(self) -> dict[str, str]:
        """{topic: its partitioner, or "other"}, for topics with enough keys."""
        return {t: seen.partitioner for t, seen in self._topics.items() if seen.partitioner is not None}

    @property
    def trouble(self) -> dict[str, str]:
        """{topic: problem}, for topics with keys placed differently from those of the other topics.

        A partitioner that PARTITIONERS does not have is no problem if all topics use it: then no key was
        found in two partitions.
        """
        known = {t: self._topics[t] for t in self.named}
        wrong = {t for t, seen in known.items() if seen.share("no key") > STRAY}
        wrong |= {one for one in known for other in known if self._differ(one, other)}
        external = {
            t for t in wrong if self.named[t] != "murmur2"
        }  # murmur2 is named only if all topics use it
        wrong = external or wrong
        if self._twice is not None and not wrong:
            wrong = {self._twice[1]}
        twice = "" if self._twice is None else f"; {self._twice[2]}"
        return {topic: self._problem(topic) + twice for topic in sorted(wrong)}

    def _differ(self, one: str, other: str) -> bool:
        """Return whether two topics with enough keys use different partitioners."""
        a, b = self._topics[one], self._topics[other]
        if a.partitioner == b.partitioner and a.partitioner in PARTITIONERS:
            return False
        chance = 2 * math.sqrt(1 / a.keys + 1 / b.keys)  # 4 standard errors of a difference of shares of 1/2
        names = (*PARTITIONERS, "unknown")
        return any(abs(a.share(name) - b.share(name)) > max(DIFFERS, chance) for name in names)

    def _problem(self, topic: str) -> str:
        beside = "".join(
            f", those of {t} by {self._description(t)}" for t in sorted(self.named) if t != topic
        )
        return (
            f"records of {topic} are placed by {self._description(topic)}{beside}; actions and impressions "
            "of a request meet only in one partition number: key all by the request's id, with one "
            "partitioner (murmur2_random in clients of librdkafka)"
        )

    def _description(self, topic: str) -> str:
        name, seen = self.named.get(topic), self._topics[topic]
        if name in DESCRIPTIONS:
            return DESCRIPTIONS[name]
        best = max(PARTITIONERS, key=seen.share)
        if seen.share(best) < 0.6:
            share = f"{seen.share(best):.0%}"
            return f"{DESCRIPTIONS['unknown']} (keys that the best known one, {best}, explains: {share})"
        return f"several partitioners ({best} explains {seen.share(best):.0%})"

    def to_json(self) -> dict[str, Any]:
        """Return the object of `freshet status --json`."""
        return {"partitioners": self.named, "trouble": self.trouble}


class InputWatch:
    """Watches the inputs of a join. Used by one thread."""

    def __init__(self, context: JoinContext) -> None:
        """Count nothing yet; `context` has the partitions at the start."""
        self._context = context
        self.growth = Growth(context.topics.samples_partitions, len(context.partitions), {})
        self._detector = PartitionerDetector()
        self._misplaced: set[str] = set()  # topics that were logged as misplaced

    def sample(self, at: TopicPartition, keys: BytesColumn) -> None:
        """Sample some keys (N,) of the records of a partition."""
        now_s = self._context.clock.monotonic()
        self._detector.sample(at.topic, at.partition, self.growth.sizes, keys, now_s)

    def count(self) -> int:
        """Count the inputs' partitions; returns the number to join: those that all inputs have.

        Each joiner detects the growth by itself. Raises Unavailable if the log cannot be read.
        """
        log, topics = self._context.log, self._context.topics
        counts = log.partition_counts(topics.inputs.values())
        before, known = self.growth, self.growth.joined
        self.growth = replace(before, counts=counts, why="")
        every = min((counts.get(topic, 0) for topic in topics.inputs.values()), default=0)
        if every > known:
            try:
                log.grow_topic(topics.joiner, every)
            except (ConfigError, Unavailable) as error:
                self.growth = replace(self.growth, why=f"{topics.joiner} cannot grow with them: {error}")
            else:
                self.growth = replace(self.growth, joined=every)
                _log.warning(
                    "topics grew, their new partitions are joined from their start",
                    topics=sorted(set(topics.inputs.values())),
                    partitions=every,
                    partitions_before=known,
                )
        now = self.growth
        if now.unread and (now.counts, now.why) != (before.counts, before.why):
            _log.error("partitions of a topic are not read", reason=now.trouble)
        return now.joined

    def partitioners(self) -> dict[str, dict[str, str]]:
        """Return the object of `freshet status --json`; log each topic that becomes misplaced."""
        found = self._detector.to_json()
        for topic, reason in found["trouble"].items():
            if topic not in self._misplaced:
                _log.error("clients place the keys of a topic elsewhere", topic=topic, reason=reason)
        self._misplaced = set(found["trouble"])
        return found
