"""Structured logs by structlog: a JSON object a line for machines, or structlog's console format for people.

Each process calls `configure_logging` once, at its start. Lines of Python's `logging` and `warnings` pass the
same processors. Keys are those of `log_keys`; `log_repeats` limits repeated messages, `log_secrets` takes out
credentials and bodies of events.
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
import time
from collections.abc import Callable, Mapping
from typing import Any, TextIO, cast

import orjson
import structlog
from structlog.typing import EventDict, Processor

from freshet.observability.log_repeats import TEMPLATE, Later, RepeatLimit
from freshet.observability.log_secrets import scrub
from freshet.observability.tracing import current
from freshet.release import RELEASE

__all__ = ["configure_logging", "debug_on_signal"]

_LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}

_limit: RepeatLimit | None = None


def configure_logging(
    service: str,
    *,
    level: str = "info",
    form: str = "json",
    instance: str = "",
    clock: Callable[[], float] = time.monotonic,
    later: Later | None = None,
) -> None:
    """Write log lines to standard error, with time, level and the process that wrote them.

    Args:
        level: least severe level kept: debug, info, warning or error. Lines of libraries are kept from
            warning on, at level debug from info on.
        form:  json or text.
        instance: which of several it is; without it the host's name.
        clock: monotonic, in seconds; repeated messages are limited by it.
        later: calls the report of left-out lines; a timer by default.
    """
    global _limit  # noqa: PLW0603 - one a process, as structlog's configuration
    if _limit is not None:
        atexit.unregister(_limit.report)
    _limit = RepeatLimit(clock, later) if later else RepeatLimit(clock)
    atexit.register(_limit.report)
    host = socket.gethostname()
    process = {
        "service": service,
        "instance": instance or host,
        "host": host,
        "pid": os.getpid(),
        "release": RELEASE,
    }
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            _limit,
            _add_span,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.StackInfoRenderer(),
            structlog.processors.format_exc_info,
            _add_process(process),
            scrub,
            *(_text_renderers() if form == "text" else [_JSON]),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(_LEVELS[level]),
        logger_factory=structlog.PrintLoggerFactory(cast(TextIO, _StandardError())),
    )
    _take_libraries(level)


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


def _add_span(_logger: Any, _method: str, event: EventDict) -> EventDict:
    """Add the span that the line's thread works for."""
    context = current()
    if context is not None:
        event["trace_id"], event["span_id"] = f"{context.trace_id:032x}", f"{context.span_id:016x}"
    return event


def _add_process(process: Mapping[str, Any]) -> Processor:
    """Add the process, and put the keys of every line first."""

    def add(_logger: Any, _method: str, event: EventDict) -> EventDict:
        head = {"timestamp": event.pop("timestamp"), "level": event.pop("level"), **process}
        return {
            **head,
            "event": event.pop("event", ""),
            **{k: v for k, v in event.items() if k not in process},
        }

    return add


def _dumps(event: EventDict, **options: Any) -> str:
    return orjson.dumps(event, **options).decode()


_JSON = structlog.processors.JSONRenderer(_dumps, default=str, option=orjson.OPT_NON_STR_KEYS)


def _text_renderers() -> list[Processor]:
    console = structlog.dev.ConsoleRenderer(
        colors=sys.stderr.isatty() and not os.environ.get("NO_COLOR"),
        exception_formatter=structlog.dev.plain_traceback,
        sort_keys=False,
    )
    return [_for_people, console]


def _for_people(_logger: Any, _method: str, event: EventDict) -> EventDict:
    """Name the process by its role and, if it has a name, that; replace characters in texts that would move
    the cursor or begin a line, and indent tracebacks."""
    service, instance, host, _, _ = (
        event.pop(key) for key in ("service", "instance", "host", "pid", "release")
    )
    names = [service, instance if instance != host else "", event.pop("logger", "")]
    exception = event.pop("exception", None)
    shown = {k: _printable(v) if isinstance(v, str) else v for k, v in event.items()}
    shown["logger"] = " ".join(_printable(name) for name in names if name)
    if exception:
        shown["exception"] = "\n".join(f"    {_printable(line)}" for line in exception.splitlines())
    return shown


def _printable(text: str) -> str:
    return "".join(c if c.isprintable() else {"\n": " ⏎ ", "\t": " "}.get(c, "?") for c in text)


def _take_libraries(level: str) -> None:
    """Pass lines of Python's `logging` and `warnings` through the same processors."""
    root = logging.getLogger()
    for handler in [h for h in root.handlers if isinstance(h, _FromLibraries)]:
        root.removeHandler(handler)
    root.addHandler(_FromLibraries())
    root.setLevel(logging.INFO if level == "debug" else max(logging.WARNING, _LEVELS[level]))
    logging.captureWarnings(True)


class _FromLibraries(logging.Handler):
    """Passes a library's record to structlog."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write it; never raises, as a library does not expect it."""
        names = ("error", "warning", "info")
        level = next((name for name in names if record.levelno >= _LEVELS[name]), "debug")
        try:
            say = getattr(structlog.get_logger(), level)
            more = {"exc_info": record.exc_info} if record.exc_info else {}
            template = f"{record.name}: {record.msg}"
            say(record.getMessage().strip(), logger=record.name, **more, **{TEMPLATE: template})
        except Exception:  # a message whose arguments do not fit it, say
            with contextlib.suppress(Exception):
                self.handleError(record)


class _StandardError:
    """Writes to the current `sys.stderr`, and drops text that cannot be written, as on a full disk: a message
    about a full disk must not end the thread that was about to try again."""

    def write(self, text: str) -> None:
        """Write, if that is possible."""
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.write(text)

    def flush(self) -> None:
        """Flush, if that is possible."""
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.flush()
