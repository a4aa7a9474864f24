"""The largest records that an accepted event leads to, topic by topic, and from them the largest event.

An event is copied on its way: its context into each of its samples, a sample into a block, a refused record
into a letter. Whatever accepts an event checks it against these bounds first, so that every record derived
from an accepted event fits its topic.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import isqrt

from freshet.config.spec.model import Spec
from freshet.config.spec.schemas import streams_of
from freshet.config.spec.topics import topics_of
from freshet.errors import ConfigError

__all__ = [
    "BLOCK_BYTES",
    "COMMIT_SKIPS",
    "LEAST_TOPIC_BYTES",
    "MAX_ELEMENTS",
    "MAX_EXPANDED_BYTES",
    "RecordLimits",
    "block_bytes",
    "largest_records",
]

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
