"""Spans of traced events: their windows, and the blocks of their first and later samples."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pytest

from freshet.config.spec.topics import BLOCK_BYTES
from freshet.features.blocks import MAX_SAMPLES
from freshet.joiner.core import Samples
from freshet.joiner.partition import joined_events
from freshet.observability.spans import SAMPLES_SENT, JoinedEvent, record_joined_samples
from freshet.observability.tracer import Tracer
from freshet.observability.tracing import install
from freshet.types import BytesColumn
from tests.fixtures.spans import Recorded, recording


@pytest.fixture(autouse=True)
def _off_again() -> Iterator[None]:
    yield
    install(None)


def start(ratio: float = 1.0) -> tuple[Tracer, list[Recorded]]:
    tracer, spans = recording(ratio=ratio, now_ns=lambda: 9_000_000_000)
    install(tracer)
    return tracer, spans


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


def joined(decided: Samples) -> list[JoinedEvent]:
    events = joined_events(decided, BLOCK_BYTES, MAX_SAMPLES)
    assert events is not None
    return events


def record(decided: Samples) -> None:
    record_joined_samples(joined(decided), "news.samples", 3, 40)


def test_a_window_is_open_from_event_time_to_the_decision() -> None:
    tracer, spans = start()
    record(samples([5, 5]))

    join, send = spans
    assert (join.name, join.start_ns, join.end_ns) == ("join", 7_000_000_000, 9_000_000_000)
    assert join.parent == tracer.ids.event(5, "served")
    assert join.attributes["freshet.samples"] == 2
    assert (send.name, send.context, send.parent) == (
        "send news.samples",
        tracer.ids.event(5, "samples"),
        join.context,
    )
    assert send.attributes["messaging.destination.partition.id"] == "3"
    assert send.attributes["messaging.kafka.offset"] == 40


def test_span_of_an_event_names_the_block_of_its_first_sample() -> None:
    _, spans = start()
    record(samples([1] * MAX_SAMPLES + [2] * MAX_SAMPLES + [3]))

    sends = [span for span in spans if span.name.startswith("send")]
    assert sorted(span.attributes["messaging.kafka.offset"] for span in sends) == [40, 41, 42]


def test_later_samples_of_an_event_have_spans_of_their_own() -> None:
    tracer, spans = start()
    for _ in range(2):  # its positives early, its negatives when the window has closed
        record(samples([5]))

    first, later = (span for span in spans if span.name.startswith("send"))
    assert first.context == tracer.ids.event(5, "samples")
    assert later.context != first.context
    assert later.context.trace_id == first.context.trace_id


def test_samples_of_untraced_events_have_no_span() -> None:
    tracer, _ = start(ratio=0.5)
    ids = np.arange(100, dtype=np.uint64)
    none, some = ids[~tracer.ids.sampled(ids)], ids[tracer.ids.sampled(ids)]

    assert joined(samples(none.tolist())) == []
    assert [event.request for event in joined(samples(ids.tolist()))] == some.tolist()


@pytest.mark.slow
def test_number_of_remembered_events_is_bounded() -> None:
    tracer, _ = start()
    for first in range(0, SAMPLES_SENT + 200, 100):
        record(samples(list(range(first, first + 100))))

    assert len(tracer.sent_samples) == SAMPLES_SENT
