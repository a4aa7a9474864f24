"""What the gateway tells of traced events: that they were sent to the log, and where they lie there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from freshet.features import TakenBodies
from freshet.gateway.codec import StreamCodec
from freshet.observability.tracing import Context, Tracer, Value, harmless, request_text
from freshet.types import I64, U64, BytesColumn

__all__ = ["Sending", "sending", "sending_one"]


@dataclass(frozen=True, slots=True)
class _Event:
    request: int  # hash of its request id
    request_id: str
    partition: int
    row: int  # of it, among what is appended; its place in the outcome's columns
    came_ns: int
    client: Context | None


@dataclass(slots=True)
class Sending:
    """Traced events of one append, under way."""

    tracer: Tracer
    role: str  # of the stream
    topic: str
    events: list[_Event] = field(default_factory=list)

    @harmless
    def done(self, offsets: Sequence[int] | I64 | Exception) -> None:
        """They are durable, at these offsets (by `row`), or not known to be."""
        failed = isinstance(offsets, Exception)
        for event in self.events:
            attributes: dict[str, Value] = {
                **self.tracer.on_topic("send", self.topic, event.partition),
                "freshet.request_id": event.request_id,
            }
            if not isinstance(offsets, Exception):
                attributes["messaging.kafka.offset"] = int(offsets[event.row])
            served = self.tracer.event(event.request, "served")
            first = self.role == "served"
            self.tracer.span(
                f"send {self.topic}",
                "gateway",
                event.came_ns,
                kind="producer",
                context=served if first else None,
                parent=None if first else served,
                attributes=attributes,
                links=[event.client] if event.client is not None else (),
                error=str(offsets).splitlines()[0] if failed else "",
            )


@harmless
def sending(
    tracer: Tracer,
    codec: StreamCodec,
    topic: str,
    taken: TakenBodies,
    came_ns: Sequence[int],
    clients: Sequence[Context | None],
) -> Sending | None:
    """The traced events of bodies that were taken together; None if there are none.

    Args:
        came_ns: when each body came.   clients: the span of each body's request, where it has one.
    """
    requests = codec.requests(taken.records)
    rows = taken.starts[:-1][taken.partitions] + taken.positions  # of each event, in the order they came
    found = Sending(tracer, codec.role, topic)
    bodies = np.repeat(np.arange(len(taken.counts)), np.maximum(taken.counts, 0))
    for at in _traced(tracer, requests[rows]):
        row, body = int(rows[at]), int(bodies[at])
        text = request_text(taken.keys[row])
        event = _Event(int(requests[row]), text, int(taken.partitions[at]), at, came_ns[body], clients[body])
        found.events.append(event)
    return found if found.events else None


@harmless
def sending_one(
    tracer: Tracer,
    codec: StreamCodec,
    topic: str,
    events: Sequence[tuple[bytes, bytes, int]],
    came_ns: int,
    client: Context | None,
) -> Sending | None:
    """As `sending`, of one request that was looked at closely: (key, record, partition) of each event."""
    requests = codec.requests(BytesColumn.of(record for _, record, _ in events))
    found = Sending(tracer, codec.role, topic)
    for at in _traced(tracer, requests):
        key, _, partition = events[at]
        found.events.append(_Event(int(requests[at]), request_text(key), partition, at, came_ns, client))
    return found if found.events else None


def _traced(tracer: Tracer, requests: U64) -> list[int]:
    return [int(at) for at in np.flatnonzero(tracer.sampled(requests))]
