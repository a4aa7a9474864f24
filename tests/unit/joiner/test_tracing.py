"""Spans of traced events: their windows, and the blocks of their first and later samples."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pytest

from freshet.features.blocks import MAX_SAMPLES
from freshet.joiner import tracing
from freshet.joiner.core import Samples
from freshet.joiner.tracing import KNOWN, trace_appended, trace_joined
from freshet.observability.tracing import Span, Tracer
from freshet.types import BytesColumn


@pytest.fixture
def spans() -> list[Span]:
    return []


@pytest.fixture(autouse=True)
def _no_traced_events() -> Iterator[None]:
    tracing._traced.clear()
    yield
    tracing._traced.clear()


def tracer(spans: list[Span], ratio: float = 1.0) -> Tracer:
    return Tracer("news", ratio, spans.append, system="kafka", now_ns=lambda: 9_000_000_000)


def samples(requests: Sequence[int], time_ms: int = 7_000) -> Samples:
    n = len(requests)
    return Samples(
        np.arange(n),
        time_ms + np.arange(n),
        np.array(requests, np.uint64),
        np.ones(n, np.float32),
        np.ones(n, np.float32),
        np.zeros(n, np.uint8),
        np.ones(n, np.uint32),
        BytesColumn.of([b"x"] * n),
    )


def trace(made: Tracer, decided: Samples, offset: int = 40) -> None:
    joined = trace_joined(made, decided)
    assert joined is not None
    trace_appended(made, joined, "news.samples", 3, offset)


def test_a_window_is_open_from_event_time_to_the_decision(spans: list[Span]) -> None:
    made = tracer(spans)
    trace(made, samples([5, 5]))

    join, send = spans
    assert (join.name, join.start_ns, join.end_ns) == ("join", 7_000_000_000, 9_000_000_000)
    assert join.parent == made.event(5, "served")
    assert join.attributes["freshet.samples"] == 2
    assert (send.name, send.context, send.parent) == (
        "send news.samples",
        made.event(5, "samples"),
        join.context,
    )
    assert send.attributes["messaging.destination.partition.id"] == "3"
    assert send.attributes["messaging.kafka.offset"] == 40


def test_span_of_an_event_names_the_block_of_its_first_sample(spans: list[Span]) -> None:
    trace(tracer(spans), samples([1] * MAX_SAMPLES + [2] * MAX_SAMPLES + [3]))

    sends = [span for span in spans if span.name.startswith("send")]
    assert sorted(span.attributes["messaging.kafka.offset"] for span in sends) == [40, 41, 42]


def test_later_samples_of_an_event_have_spans_of_their_own(spans: list[Span]) -> None:
    made = tracer(spans)
    for _ in range(2):  # its positives early, its negatives when the window has closed
        trace(made, samples([5]))

    first, later = (span for span in spans if span.name.startswith("send"))
    assert first.context == made.event(5, "samples")
    assert later.context != first.context
    assert later.context.trace_id == first.context.trace_id


def test_samples_of_untraced_events_have_no_span(spans: list[Span]) -> None:
    made = tracer(spans, ratio=0.5)
    ids = np.arange(100, dtype=np.uint64)
    none, some = ids[~made.sampled(ids)], ids[made.sampled(ids)]

    assert trace_joined(made, samples(none.tolist())) is None
    joined = trace_joined(made, samples(ids.tolist()))
    assert joined is not None
    assert [event.request for event in joined.events] == some.tolist()


def test_number_of_remembered_events_is_bounded(spans: list[Span]) -> None:
    made = tracer(spans)
    for start in range(0, KNOWN + 200, 100):
        trace(made, samples(list(range(start, start + 100))))

    assert len(tracing._traced) == KNOWN
