"""Structured logs: a JSON object a line for machines, or text for people. One call a process, at its
start; what libraries say through Python's `logging` and `warnings` goes the same way.

Keys are those of `log_keys`. Lines that come too fast are counted instead of written (`log_repeats`), and no
credential or body of an event gets through (`log_secrets`).
"""

from __future__ import annotations

import _thread
import atexit
import contextlib
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Hashable, Mapping, MutableMapping, Sequence
from typing import Any, TextIO, cast

import orjson
import structlog

from freshet.observability.log_repeats import WINDOW_S, Repeats
from freshet.observability.log_secrets import scrubbed
from freshet.observability.log_text import text_line
from freshet.observability.tracing import current
from freshet.release import RELEASE

__all__ = ["configure_logging", "debug_on_signal"]

Said = MutableMapping[str, Any]

_LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}
_TEMPLATE = "_template"  # of a library's message, before its arguments: what is counted as the same


def configure_logging(
    service: str,
    *,
    level: str = "info",
    form: str = "json",
    instance: str = "",
    clock: Callable[[], float] = time.monotonic,
    later: Later | None = None,
) -> None:
    """Send everything that is logged to standard error, with time, level and who says it.

    Args:
        level: least severe one kept: debug, info, warning or error. Of libraries warnings are kept, with
            debug also what they say at info.
        form:  json or text.
        instance: which of several it is; without it the host's name.
        clock: tells which lines come too fast.
        later: calls what tells of those when no more come; a timer unless given.
    """
    host = socket.gethostname()
    who = {
        "service": service,
        "instance": instance or host,
        "host": host,
        "pid": os.getpid(),
        "release": RELEASE,
    }
    limit = _Limit(clock, later or _on_a_timer)
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            limit,
            _traced,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.StackInfoRenderer(),
            structlog.processors.format_exc_info,
            _ordered(who),
            _scrub,
            _as_text if form == "text" else _as_json,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(_LEVELS[level]),
        logger_factory=structlog.PrintLoggerFactory(cast(TextIO, _StandardError())),
    )
    _take_libraries(level)
    atexit.unregister(_LAST.tell)
    _LAST.limit = limit
    atexit.register(_LAST.tell)


def debug_on_signal(level: str) -> None:
    """From now on SIGUSR1 turns level debug on, and the next one `level` again. Main thread only."""
    kept = level

    def turn() -> None:
        nonlocal kept
        kept = level if kept == "debug" else "debug"
        structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(_LEVELS[kept]))
        _take_libraries(kept)
        structlog.get_logger(__name__).warning("the log's level is another from now on", log_level=kept)

    def handle(_number: int, _frame: object) -> None:
        # Not here: this thread may be within a line, with the lock that writing waits for.
        _thread.start_new_thread(turn, ())

    signal.signal(signal.SIGUSR1, handle)


Later = Callable[[float, Callable[[], None]], None]
"""Calls something so many seconds from now."""


def _on_a_timer(seconds: float, call: Callable[[], None]) -> None:
    timer = threading.Timer(seconds, call)
    timer.daemon = True
    with contextlib.suppress(RuntimeError):  # the process ends, or has no thread left: told at the end, then
        timer.start()


class _Limit:
    """The processor that leaves out warnings and errors of ours, and all of libraries, that come too fast.
    How many is told by the next such line or, if none comes, when the window is over, or at the process's
    end."""

    def __init__(self, clock: Callable[[], float], later: Later = _on_a_timer) -> None:
        self._clock, self._repeats, self._lock = clock, Repeats(), threading.Lock()
        self._later, self._waits = later, False

    def __call__(self, _logger: Any, method: str, said: Said) -> Said:
        template = said.pop(_TEMPLATE, None)
        level = said["level"]
        if template is None and level in ("debug", "info"):
            return said
        with self._lock:
            left_out = self._repeats.admit((level, template or said["event"]), self._clock())
            begins = left_out is None and not self._waits
            self._waits = self._waits or begins
        if begins:
            self._later(WINDOW_S, self._tell_over)
        if left_out is None:
            raise structlog.DropEvent
        if left_out:
            said["left_out"] = left_out
        return said

    def tell(self) -> None:
        """At the end: of what was left out and not told of yet."""
        with self._lock:
            over = self._repeats.over(None)
        self._say(over)

    def _tell_over(self) -> None:
        with self._lock:
            over = self._repeats.over(self._clock())
            self._waits = self._repeats.untold  # in a window that has begun since
            waits = self._waits
        if waits:
            self._later(WINDOW_S, self._tell_over)
        self._say(over)

    @staticmethod
    def _say(over: Sequence[tuple[Hashable, int]]) -> None:
        for message, left_out in over:
            _, text = cast(tuple[str, str], message)
            structlog.get_logger(__name__).info("lines were left out", message=text, left_out=left_out)


class _Last:
    """What is said when the process ends."""

    limit: _Limit | None = None

    def tell(self) -> None:
        if self.limit is not None:
            self.limit.tell()


_LAST = _Last()


def _traced(_logger: Any, _method: str, said: Said) -> Said:
    """Names the trace that the line belongs to."""
    context = current()
    if context is not None:
        said["trace_id"], said["span_id"] = f"{context.trace_id:032x}", f"{context.span_id:016x}"
    return said


def _ordered(who: Mapping[str, Any]) -> Callable[[Any, str, Said], Said]:
    """Puts first what every line has."""

    def order(_logger: Any, _method: str, said: Said) -> Said:
        head = {"timestamp": said.pop("timestamp"), "level": said.pop("level"), **who}
        return {**head, "event": said.pop("event", ""), **{k: v for k, v in said.items() if k not in who}}

    return order


def _scrub(_logger: Any, _method: str, said: Said) -> Said:
    return {key: scrubbed(key, value) for key, value in said.items()}


def _as_json(_logger: Any, _method: str, said: Said) -> str:
    return orjson.dumps(said, default=str, option=orjson.OPT_NON_STR_KEYS).decode()


def _as_text(_logger: Any, _method: str, said: Said) -> str:
    return text_line(said, colors=sys.stderr.isatty() and not os.environ.get("NO_COLOR"))


def _take_libraries(level: str) -> None:
    """Have Python's `logging` and `warnings` speak through us."""
    root = logging.getLogger()
    for handler in [h for h in root.handlers if isinstance(h, _FromLibraries)]:
        root.removeHandler(handler)
    root.addHandler(_FromLibraries())
    root.setLevel(logging.INFO if level == "debug" else max(logging.WARNING, _LEVELS[level]))
    logging.captureWarnings(True)


class _FromLibraries(logging.Handler):
    """Hands a library's record to our own writer."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write it; never raises, as the library knows nothing of us."""
        names = ("error", "warning", "info")
        level = next((name for name in names if record.levelno >= _LEVELS[name]), "debug")
        try:
            say = getattr(structlog.get_logger(), level)
            more = {"exc_info": record.exc_info} if record.exc_info else {}
            template = f"{record.name}: {record.msg}"
            say(record.getMessage().strip(), logger=record.name, **more, **{_TEMPLATE: template})
        except Exception:  # a message whose arguments do not fit it, say
            with contextlib.suppress(Exception):
                self.handleError(record)


class _StandardError:
    """Standard error, as it is at the time; what cannot be written (its disk is full, say) is dropped.

    A message about a full disk must not end the thread that was about to try again.
    """

    def write(self, text: str) -> None:
        """Write, if that is possible."""
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.write(text)

    def flush(self) -> None:
        """Flush, if that is possible."""
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.flush()
