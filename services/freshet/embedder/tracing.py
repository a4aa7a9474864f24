"""What the embedder tells of batches that hold samples of traced events."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from freshet.embedder.core import BatchPlan
from freshet.observability.tracing import TracedBatch, Tracer, active, harmless, within
from freshet.types import U64

__all__ = ["called", "calling", "processed"]

PARENTS = {"lookup": "process", "push": "train"}


@harmless
def processed(
    tracer: Tracer, plan: BatchPlan, request_ids: U64, topic: str, began_ns: int
) -> TracedBatch | None:
    """Blocks have become a batch of these samples; None if no event of it is traced."""
    traced = tracer.batch(plan.ranges, request_ids)
    if traced is None:
        return None
    partition = plan.ranges[0].partition if len(plan.ranges) == 1 else None
    tracer.span(
        f"process {topic}",
        "embedder",
        began_ns,
        kind="consumer",
        context=traced.context("process"),
        links=traced.events,
        attributes={
            **tracer.on_topic("process", topic, partition),
            "messaging.batch.message_count": len(plan.blocks),
            "freshet.ranges": " ".join(map(str, plan.ranges)),
            "freshet.samples": len(request_ids),
        },
    )
    return traced


@contextmanager
def calling(traced: TracedBatch, place: str, method: str) -> Iterator[None]:
    """Ask shards for something: a lookup or a push."""
    tracer = active()
    if tracer is None:
        yield
        return
    began_ns, error = tracer.now_ns(), ""
    try:
        with within(traced.context(place)):
            yield
    except Exception as failed:
        error = str(failed)
        raise
    finally:
        called(tracer, traced, place, method, began_ns, error)


@harmless
def called(
    tracer: Tracer,
    traced: TracedBatch,
    place: str,
    method: str,
    began_ns: int,
    error: str = "",
    end_ns: int | None = None,
) -> None:
    """Shards have answered a lookup, or acknowledged a push."""
    tracer.span(
        f"Rows/{method}",
        "embedder",
        began_ns,
        end_ns=end_ns,
        kind="client",
        context=traced.context(place),
        parent=traced.context(PARENTS[place]),
        attributes={"rpc.service": "Rows", "rpc.method": method},
        error=error,
    )
