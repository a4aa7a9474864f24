"""Whether this process traces, and the span that the current thread or task works for.

Services import this module and `spans`, which load without OpenTelemetry. `freshet.process.telemetry` imports
`tracer`, and OpenTelemetry with it, only if the settings turn tracing on. Where tracing is off, the functions
of `spans` return None after one check of a variable.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from typing import TYPE_CHECKING, Concatenate, NamedTuple, ParamSpec, TypeVar

if TYPE_CHECKING:
    from opentelemetry.trace import Span

    from freshet.observability.tracer import Tracer


class Context(NamedTuple):
    """The ids of a span."""

    trace_id: int  # 128 bits, not 0
    span_id: int  # 64 bits, not 0


class ClientContext(Context):
    """The ids of a client's span, from a `traceparent` header."""


_active: Tracer | None = None
_current: ContextVar[Context | None] = ContextVar("freshet-span", default=None)

_P = ParamSpec("_P")
_R = TypeVar("_R")


def active() -> Tracer | None:
    """Return the process's tracer; None where tracing is off."""
    return _active


def install(tracer: Tracer | None) -> None:
    """Use this tracer from now on; None turns tracing off."""
    global _active  # noqa: PLW0603 - one a process, set at its start
    _active = tracer


def now_ns() -> int:
    """Return the wall clock for the start of a span; 0 where tracing is off."""
    return 0 if _active is None else _active.now_ns()


def traced(record: Callable[Concatenate[Tracer, _P], _R]) -> Callable[_P, _R | None]:
    """Call `record` with the process's tracer, or return None where tracing is off.

    An exception is logged and not raised: tracing must not fail the work that it describes.
    """

    @wraps(record)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R | None:
        if _active is None:
            return None
        try:
            return record(_active, *args, **kwargs)
        except Exception as error:
            import structlog  # noqa: PLC0415 - a tenth of a second, which the command line need not wait for

            structlog.get_logger(__name__).error("a span could not be recorded", exc_info=error)
            return None

    return call


def current() -> Context | None:
    """Return the span that this thread or task works for; log lines name it, calls to services carry it."""
    return _current.get()


@contextmanager
def within(context: Context | None) -> Iterator[None]:
    """Run the block for a span."""
    token = _current.set(context)
    try:
        yield
    finally:
        _current.reset(token)


@traced
def end_span(tracer: Tracer, span: Span, error: str = "", end_ns: int | None = None) -> None:
    """End a span, now or at a time that was noted; `error`: why its work failed, if it did."""
    tracer.end(span, error, end_ns)


@contextmanager
def running(span: Span | None, end: Callable[[Span, str], object] = end_span) -> Iterator[None]:
    """Run the block for a span, then call `end` with the span and the error, if any; None: run the block."""
    if span is None:
        yield
        return
    error = ""
    try:
        with within(context_of(span)):
            yield
    except Exception as failed:
        error = str(failed)
        raise
    finally:
        end(span, error)


def context_of(span: Span) -> Context:
    """Return a span's ids."""
    found = span.get_span_context()
    return Context(found.trace_id, found.span_id)
