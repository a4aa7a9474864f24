"""Spans: recorded with given ids, bounded in bytes, and without effect on the work that they describe."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import orjson
import pytest
import structlog
from opentelemetry.trace import use_span

from freshet.observability.logging import configure_logging
from freshet.observability.spans import MOST_REQUEST_CHARS, request_text, start_version_load
from freshet.observability.trace_ids import MOST_LINKS
from freshet.observability.tracer import MOST_CHARS, Tracer
from freshet.observability.tracing import (
    Context,
    active,
    context_of,
    current,
    install,
    now_ns,
    running,
    traced,
    within,
)
from tests.fixtures.spans import recording


@pytest.fixture(autouse=True)
def _off_again() -> Iterator[None]:
    yield
    install(None)
    structlog.reset_defaults()


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
def test_a_recorded_client_span_is_accepted(header: bytes | None, expected: bool) -> None:
    found = Tracer.client_span(header)

    assert (found is not None) is expected
    if found is not None:
        assert found == Context(0x0AF7651916CD43DD8448EB211C80319C, 0xB7AD6B7169203331)


def test_a_span_of_a_thread_ends_with_the_block() -> None:
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


def test_a_fault_in_recording_is_logged_and_harms_nothing_else(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("gateway")
    install(recording()[0])

    @traced
    def failing(_: Tracer) -> int:
        raise RuntimeError("a fault of ours")

    assert failing() is None
    line = orjson.loads(capsys.readouterr().err)
    assert line["event"] == "a span could not be recorded"
    assert "a fault of ours" in line["exception"]


def test_blocks_run_without_spans_while_tracing_is_off() -> None:
    @traced
    def failing(_: Tracer) -> int:
        raise RuntimeError("never called")

    with running(start_version_load("abc", 3)):
        assert current() is None
    assert (failing(), now_ns(), active()) == (None, 0, None)


LOADED = """
import sys
import freshet.rows.service, freshet.observability.spans
print(sorted({m.split(".")[0] for m in sys.modules} & {"opentelemetry", "structlog", "rich"}))
"""


def test_spans_load_no_slow_library() -> None:
    done = subprocess.run([sys.executable, "-c", LOADED], capture_output=True, text=True, check=True)

    assert done.stdout.strip() == "[]"


def test_a_span_has_its_blocks_error_and_log_lines() -> None:
    tracer, spans = recording()
    install(tracer)

    def fail() -> None:
        with running(start_version_load("abc", 3)):
            contexts.append(current())
            raise KeyError("gone")

    contexts: list[Context | None] = []
    with pytest.raises(KeyError):
        fail()

    (span,), (context,) = spans, contexts
    assert (span.context, span.parent, span.error) == (context, tracer.ids.version("abc", 3), "'gone'")
    assert current() is None


def test_a_span_has_the_given_ids_or_new_ones() -> None:
    tracer, spans = recording()
    given, parent = Context(5, 6), Context(5, 7)
    for context, under in ((given, None), (given, parent), (None, parent), (None, None)):
        tracer.end(tracer.start("joiner", "join", 1, context=context, parent=under, links=[parent]))

    root, child, new, apart = spans
    assert (root.context, root.parent) == (given, None)
    assert (child.context, child.parent) == (given, parent)
    assert (new.context.trace_id, new.parent) == (5, parent)
    assert new.context.span_id not in (6, 7)
    assert apart.context.trace_id != 5
    assert {span.links for span in spans} == {(parent,)}


def test_a_span_is_never_the_child_of_a_librarys_span() -> None:
    tracer, spans = recording()
    theirs = tracer.start("joiner", "theirs")

    with use_span(theirs):
        tracer.end(tracer.start("joiner", "join"))

    assert spans[0].parent is None
    assert spans[0].context.trace_id != context_of(theirs).trace_id


def test_a_span_never_ends_before_it_begins_though_clocks_jump() -> None:
    tracer, spans = recording(now_ns=lambda: 5)

    tracer.end(tracer.start("joiner", "join", 9))

    assert (spans[0].start_ns, spans[0].end_ns) == (9, 9)


def test_a_span_is_bounded_in_bytes() -> None:
    tracer, spans = recording()
    long = "é" * 100_000
    links = [Context(1, n + 1) for n in range(MOST_LINKS + 5)]

    span = tracer.start("gateway", "send", attributes={"text": long, "number": 7}, links=links)
    span.set_attribute("more", long)
    tracer.end(span, long)

    assert spans[0].attributes == {"text": "é" * MOST_CHARS, "number": 7, "more": "é" * MOST_CHARS}
    assert spans[0].error == "é" * MOST_CHARS
    assert len(spans[0].links) == MOST_LINKS
    assert request_text(long.encode()) == "é" * MOST_REQUEST_CHARS
    assert request_text(b"r-1") == "r-1"
