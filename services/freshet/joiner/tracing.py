"""Spans of traced events: how long their windows were open, and where their samples were written."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

import numpy as np

from freshet.config.spec.topics import BLOCK_BYTES
from freshet.features.blocks import MAX_SAMPLES
from freshet.joiner import blocks
from freshet.joiner.core import Samples
from freshet.observability.tracing import MOST_LINKS, Tracer, harmless

__all__ = ["Joined", "trace_appended", "trace_joined"]

KNOWN = 10_000
"""Number of events remembered as traced. An event whose later samples come after so many others gets a second
span of the same id, of which viewers show one."""

_traced: OrderedDict[int, None] = OrderedDict()


@dataclass(frozen=True, slots=True)
class _Event:
    request: int
    time_ms: int  # event time of its first impression
    samples: int  # number of its samples
    block: int  # index of the block with its first sample, in the append


@dataclass(frozen=True, slots=True)
class Joined:
    """Traced events among decided samples."""

    decided_ns: int
    events: list[_Event]


@harmless
def trace_joined(
    tracer: Tracer, decided: Samples, max_bytes: int = BLOCK_BYTES, max_samples: int = MAX_SAMPLES
) -> Joined | None:
    """Return the traced events among samples to be appended in such blocks; None if there are none."""
    requests = tracer.traced(decided.requests)
    if not requests:
        return None
    ends = np.array([stop for _, stop in blocks.cuts(decided, max_bytes, max_samples)], np.int64)
    events = []
    for request in requests:
        rows = np.flatnonzero(decided.requests == np.uint64(request))
        block = int(np.searchsorted(ends, rows[0], side="right"))
        events.append(_Event(request, int(decided.times_ms[rows].min()), len(rows), block))
    return Joined(tracer.now_ns(), events)


@harmless
def trace_appended(tracer: Tracer, joined: Joined, topic: str, partition: int, offset: int) -> None:
    """Send the spans of samples that are written, with the first block at this offset."""
    for event in joined.events[:MOST_LINKS]:
        served = tracer.event(event.request, "served")
        join = tracer.span(
            "join",
            "joiner",
            event.time_ms * 1_000_000,
            end_ns=joined.decided_ns,
            parent=served,
            links=[served],
            attributes={"freshet.samples": event.samples},
        )
        tracer.span(
            f"send {topic}",
            "joiner",
            joined.decided_ns,
            kind="producer",
            context=tracer.event(event.request, "samples") if _first(event.request) else None,
            parent=join,
            attributes={
                **tracer.on_topic("send", topic, partition),
                "messaging.kafka.offset": int(offset) + event.block,
            },
        )


def _first(request: int) -> bool:
    """Return whether an event's samples are its first; later ones (of other labels) get other spans."""
    if request in _traced:
        return False
    _traced[request] = None
    if len(_traced) > KNOWN:
        _traced.popitem(last=False)
    return True
