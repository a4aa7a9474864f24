"""Which events are traced and what their traces are called: the same in every process, carried by none."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from freshet.observability.tracing import (
    MOST_CHARS,
    MOST_LINKS,
    MOST_REQUEST_CHARS,
    Context,
    Span,
    Tracer,
    current,
    harmless,
    parsed_traceparent,
    request_text,
    within,
)
from freshet.types import OffsetRange

REQUESTS = np.random.default_rng(1).integers(0, 2**64, 20_000, dtype=np.uint64)
RANGES = (OffsetRange(0, 3, 7), OffsetRange(2, 0, 4))


def tracer(ratio: float = 1.0, model: str = "news") -> Tracer:
    return Tracer(model, ratio, lambda span: None)


def ids_elsewhere(code: str) -> str:
    """What another process derives, with another seed of Python's hashes."""
    command = f"import numpy as np\nfrom tests.unit.test_tracing import *\nprint({code})"
    done = subprocess.run([sys.executable, "-c", command], capture_output=True, text=True, check=True)
    return done.stdout.strip()


@pytest.mark.parametrize(
    "code",
    [
        "tracer().event(7, 'served')",
        "tracer().batch(RANGES, np.array([7], np.uint64)).context('push')",
        "tracer().version('abc', 3)",
        "tracer().rows(1, np.array([5]))[0]",
    ],
)
def test_every_process_derives_the_same_names(code: str) -> None:
    assert ids_elsewhere(code) == str(eval(code))


@pytest.mark.parametrize("ratio", [0.001, 0.1, 0.5, 1.0])
def test_about_the_ratio_of_events_is_traced(ratio: float) -> None:
    hits = int(tracer(ratio).sampled(REQUESTS).sum())

    expected = ratio * len(REQUESTS)
    assert abs(hits - expected) <= 5 * (expected * (1 - ratio)) ** 0.5


def test_a_higher_ratio_traces_what_a_lower_one_does_and_more() -> None:
    few, more = tracer(0.01).sampled(REQUESTS), tracer(0.1).sampled(REQUESTS)

    assert more[few].all()
    assert more.sum() > few.sum()


@given(st.integers(0, 2**64 - 1))
def test_an_events_name_agrees_with_what_decides_for_it(request_hash: int) -> None:
    """A sampler by ratio elsewhere, which looks at the lower half of a trace's id, decides alike."""
    made = tracer(0.3)

    low = made.event(request_hash, "served").trace_id & (2**64 - 1)

    assert bool(made.sampled(np.array([request_hash], np.uint64))[0]) == (low < int(0.3 * 2**64))


def test_places_of_an_event_share_its_trace_and_models_share_none() -> None:
    served, samples = tracer().event(7, "served"), tracer().event(7, "samples")

    assert served.trace_id == samples.trace_id
    assert served.span_id != samples.span_id
    assert tracer(model="shop").event(7, "served").trace_id != served.trace_id


def test_traces_of_many_events_are_many() -> None:
    made = tracer()

    names = {made.event(int(one), "served").trace_id for one in REQUESTS[:5_000]}

    assert len(names) == 5_000
    assert all(0 < name < 2**128 for name in names)


def test_a_batch_is_traced_if_an_event_of_it_is() -> None:
    made = tracer(0.5)
    hits = made.sampled(REQUESTS)

    batch = made.batch(RANGES, REQUESTS[:10])
    assert batch is not None
    assert sorted(batch.requests) == sorted(REQUESTS[:10][hits[:10]].tolist())
    assert list(batch.events) == [made.event(one, "samples") for one in batch.requests]
    assert made.batch(RANGES, REQUESTS[~hits][:50]) is None


def test_batches_of_other_ranges_are_other_traces() -> None:
    ids = np.array([7], np.uint64)
    batches = [tracer().batch((OffsetRange(p, a, b),), ids) for p, a, b in ((0, 1, 2), (1, 1, 2), (0, 1, 3))]

    assert len({batch.trace_id for batch in batches if batch is not None}) == 3


def test_a_batch_names_so_many_events_as_a_span_may_link_to() -> None:
    batch = tracer().batch(RANGES, REQUESTS)

    assert batch is not None
    assert len(batch.events) == MOST_LINKS


def test_records_of_rows_are_chosen_by_their_offset() -> None:
    made, offsets = tracer(0.1), np.arange(1_000, dtype=np.int64)

    chosen = made.rows(3, offsets)

    assert 50 < len(chosen) <= MOST_LINKS
    assert made.rows(3, np.array([chosen[0][0]])) == [chosen[0]], "whatever it is read with"
    assert {offset for offset, _ in made.rows(2, offsets)} != {offset for offset, _ in chosen}


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        (b"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", True),
        (b"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-00", False),  # the client records nothing
        (b"cc-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01-more", True),  # of a later version
        (b"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01-more", False),
        (b"ff-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", False),
        (b"00-00000000000000000000000000000000-b7ad6b7169203331-01", False),
        (b"00-0af7651916cd43dd8448eb211c80319c-0000000000000000-01", False),
        (b"00-0AF7651916CD43DD8448EB211C80319C-b7ad6b7169203331-01", False),
        (b"00-0af7651916cd43dd8448eb211c80319c-b7ad6b716920333-01", False),
        (b"\xff\xfe", False),
        (b"", False),
        (None, False),
    ],
)
def test_a_clients_span_is_taken_if_its_header_is_one_and_it_records(
    header: bytes | None, expected: bool
) -> None:
    found = parsed_traceparent(header)

    assert (found is not None) is expected
    if found is not None:
        assert found == Context(0x0AF7651916CD43DD8448EB211C80319C, 0xB7AD6B7169203331)


def test_what_a_thread_does_for_a_span_is_over_with_the_block() -> None:
    outer, inner = Context(1, 1), Context(1, 2)
    seen = []

    def fail() -> None:
        with within(inner):
            seen.append(current())
            raise KeyError

    with within(outer):
        with pytest.raises(KeyError):
            fail()
        seen.append(current())

    assert [*seen, current()] == [inner, outer, None]


def test_a_span_that_cannot_be_told_of_harms_nobody() -> None:
    def broken(_: Span) -> None:
        raise RuntimeError("no room")

    assert Tracer("news", 1.0, broken).span("x", "gateway", 0).trace_id

    @harmless
    def failing() -> int:
        raise RuntimeError("a fault of ours")

    assert failing() is None


def test_a_span_never_ends_before_it_begins_though_clocks_jump() -> None:
    told: list[Span] = []

    Tracer("news", 1.0, told.append, now_ns=lambda: 5).span("join", "joiner", 9)

    assert (told[0].start_ns, told[0].end_ns) == (5, 5)


def test_a_span_is_bounded_in_bytes_whatever_clients_choose() -> None:
    told: list[Span] = []
    long = "é" * 100_000
    tracer_of = Tracer("news", 1.0, told.append)

    tracer_of.span("send", "gateway", 0, attributes={"text": long, "number": 7}, error=long)

    assert told[0].attributes == {"text": "é" * MOST_CHARS, "number": 7}
    assert told[0].error == "é" * MOST_CHARS
    assert request_text(long.encode()) == "é" * MOST_REQUEST_CHARS
    assert request_text(b"r-1") == "r-1"
