"""What the trainer tells of traced batches and of the versions that it publishes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from freshet.batches.stream import TrainBatch
from freshet.observability.tracing import TracedBatch, Tracer, active, harmless, within
from freshet.types import OffsetRange
from freshet.versions import Manifest

__all__ = ["Trained", "publishing", "taken", "told", "training"]


@dataclass(frozen=True, slots=True)
class Trained:
    """A traced batch in a lane's hands."""

    batch: TracedBatch
    began_ns: int


@harmless
def taken(tracer: Tracer, batch: TrainBatch) -> Trained | None:
    """A lane has a batch; None if no event of it is traced."""
    traced = tracer.batch(batch.ranges, batch.request_ids)
    return None if traced is None else Trained(traced, tracer.now_ns())


@contextmanager
def training(trained: Trained, batch: TrainBatch, lane: int, step: int, learned: bool) -> Iterator[None]:
    """Give a batch back: the end of its training."""
    error = ""
    try:
        with within(trained.batch.context("train")):
            yield
    except Exception as failed:
        error = str(failed)
        raise
    finally:
        if (tracer := active()) is not None:
            told(tracer, trained, batch.ranges, len(batch), lane, step, learned, error)


@harmless
def told(
    tracer: Tracer,
    trained: Trained,
    ranges: Sequence[OffsetRange],
    samples: int,
    lane: int,
    step: int,
    learned: bool,
    error: str = "",
    end_ns: int | None = None,
) -> None:
    """A batch was trained on, until `end_ns`, or just now."""
    end_ns = tracer.now_ns() if end_ns is None else end_ns
    context = trained.batch.context("train")
    tracer.span(
        "train",
        "trainer",
        trained.began_ns,
        end_ns=end_ns,
        context=context,
        parent=trained.batch.context("process"),
        links=trained.batch.events,
        attributes={
            "freshet.ranges": " ".join(map(str, ranges)),
            "freshet.samples": samples,
            "freshet.lane": lane,
            "freshet.step": step,
            "freshet.learned": learned,
        },
        error=error,
    )
    if not learned or error:
        return
    tracer.batches.append(context)
    for event in trained.batch.events:  # so that who looks at an event sees when it was learned from
        tracer.span("learn", "trainer", trained.began_ns, end_ns=end_ns, parent=event, links=[context])


def publishing(spec_hash: str) -> Callable[[Manifest], None]:
    """A version is about to be written; what is returned is to be told once it is judged."""
    tracer = active()
    began_ns = 0 if tracer is None else tracer.now_ns()

    def published(manifest: Manifest) -> None:
        if tracer is not None:
            _published(tracer, spec_hash, manifest, began_ns)

    return published


@harmless
def _published(tracer: Tracer, spec_hash: str, manifest: Manifest, began_ns: int) -> None:
    links = [tracer.batches.popleft() for _ in range(len(tracer.batches))]
    tracer.span(
        "publish version",
        "trainer",
        began_ns,
        kind="producer",
        context=tracer.version(spec_hash, manifest.number),
        links=links,
        attributes={
            "freshet.version": manifest.number,
            "freshet.step": manifest.step,
            "freshet.verdict": manifest.verdict,
        },
    )
