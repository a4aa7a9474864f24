"""Structured logs by structlog: a JSON object a line for machines, or structlog's console format for people.

Each process calls `configure_logging` once, at its start. Lines of Python's `logging` and `warnings` pass the
same processors. Keys are those of `log_keys`; `RepeatLimit` limits repeated messages, `scrub` removes
credentials and bodies of events.
"""

from __future__ import annotations

import _thread
import atexit
import contextlib
import logging
import os
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any, TextIO, cast

import orjson
import structlog
from structlog.typing import EventDict, Processor

from freshet.observability.tracing import current
from freshet.release import RELEASE

_LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}

# --- Repeated messages

LINES = 10
"""Lines of one message in a window: enough to see which values vary."""

WINDOW_S = 10.0
"""A message that is repeated for ever costs one line a second."""

MOST_MESSAGES = 1_000
"""Messages with a count. Freshet has some 80; a library's that never repeat must not fill the memory."""

TEMPLATE = "_template"
"""Key of a library's message before its arguments, by which its lines count as the same message."""

Message = tuple[str, str]  # level, template
Later = Callable[[float, Callable[[], None]], None]
"""Calls a function after so many seconds."""


def _on_a_timer(seconds: float, call: Callable[[], None]) -> None:
    timer = threading.Timer(seconds, call)
    timer.daemon = True
    with contextlib.suppress(RuntimeError):  # no thread is left, or the process ends: reported then
        timer.start()


@dataclass(slots=True)
class _Window:
    since: float
    lines: int = 1
    left_out: int = 0


class RepeatLimit:
    """Drops freshet's warnings and errors, and all lines of libraries, that come too fast. The next such line
    gives their number; if none comes, a line of its own does once the window is over, or at the end."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, later: Later = _on_a_timer) -> None:
        self._clock, self._later, self._waits = clock, later, False
        self.windows: dict[Message, _Window] = {}
        self._lock = threading.Lock()

    def __call__(self, _logger: Any, _method: str, event: EventDict) -> EventDict:
        """Pass a line on, or raise DropEvent."""
        template, level = event.pop(TEMPLATE, None), event["level"]
        if template is None and level in ("debug", "info"):
            return event
        with self._lock:
            left_out = self._admit((level, template or event["event"]), self._clock())
            starts = left_out is None and not self._waits
            self._waits = self._waits or starts
        if starts:
            self._later(WINDOW_S, self._report_ended)
        if left_out is None:
            raise structlog.DropEvent
        if left_out:
            event["left_out"] = left_out
        return event

    def report(self) -> None:
        """Write how many lines were left out and not reported yet; called at the end of the process."""
        with self._lock:
            counts = self._take_counts(None)
        self._write(counts)

    def _admit(self, message: Message, now: float) -> int | None:
        """Return how many lines of the message were left out before this one; None: this one is, too."""
        window = self.windows.get(message)
        if window is None or now - window.since >= WINDOW_S:
            if window is None and len(self.windows) >= MOST_MESSAGES:
                del self.windows[next(iter(self.windows))]
            self.windows[message] = _Window(now)
            return window.left_out if window is not None else 0
        if window.lines >= LINES:
            window.left_out += 1
            return None
        window.lines += 1
        return 0

    def _take_counts(self, now: float | None) -> list[tuple[Message, int]]:
        """Return and reset the counts of windows that have ended; None: of all windows."""
        found = []
        for message, window in self.windows.items():
            if window.left_out and (now is None or now - window.since >= WINDOW_S):
                found.append((message, window.left_out))
                window.left_out = 0
        return found

    def _report_ended(self) -> None:
        with self._lock:
            counts = self._take_counts(self._clock())
            self._waits = any(window.left_out for window in self.windows.values())
            waits = self._waits  # for a window that began since
        if waits:
            self._later(WINDOW_S, self._report_ended)
        self._write(counts)

    @staticmethod
    def _write(counts: list[tuple[Message, int]]) -> None:
        for (_, message), left_out in counts:
            structlog.get_logger(__name__).info("lines were left out", message=message, left_out=left_out)


# --- Credentials and events in lines
#
# Clients choose many logged texts, so the time for a text must grow with its length and no faster: no pattern
# begins with a repetition that may start anywhere, and none can fail after a long one over and over.

HIDDEN = "***"

MOST_CHARS = 4_000
"""Characters of one text that are kept: an error fits, a body does not. A traceback keeps its end."""

MOST_CHARS_IN_ALL = 20_000
"""Characters of all texts in one value."""

MOST_ITEMS = 50

_BEYOND_THE_CUT = 200
"""Characters beyond the kept ones that are scanned too, so that a credential across the cut is found."""

_SECRET = r"(?:password|passwd|secret|token|credential|api[_-]?key|access[_-]?key|authorization)"
_SECRET_KEY = re.compile(rf"[\w.-]*{_SECRET}", re.IGNORECASE)

_IN_TEXT = (
    # scheme://user:password@host, up to the last @, as a password may contain unencoded ones
    (re.compile(r"://[^\s/'\"]*@"), f"://{HIDDEN}@"),
    # A token of freshet, 43 characters of base64, or its beginning; metrics' names have no capital letters.
    (re.compile(r"freshet_(?=[a-z0-9_-]{0,60}[A-Z])[A-Za-z0-9_-]{20,}"), f"freshet_{HIDDEN}"),
    (re.compile(r"\b(Bearer|Basic)\s+[A-Za-z0-9._~+/=-]{4,}", re.IGNORECASE), rf"\1 {HIDDEN}"),
    # sasl.password=…, "token": "…", X-Amz-Signature=…; a name alone, as in "the token is missing", stays.
    # A quoted value is hidden to its quote, or to the line's end, as the quote may have been cut off.
    (
        re.compile(
            rf"((?:{_SECRET}|x-amz-signature)\\*['\"]?\s*[=:]\s*)(?!Bearer\b|Basic\b)"
            r"(?:(?P<quote>\\{0,3}['\"])(?:(?!(?P=quote))(?:\\.|[^\\\n]))*|[^\s'\",;&]+)",
            re.IGNORECASE,
        ),
        lambda found: f"{found[1]}{found['quote'] or ''}{HIDDEN}",
    ),
)


def scrub(_logger: Any, _method: str, event: EventDict) -> EventDict:
    """Scrub every value of a line."""
    return {key: scrubbed(key, value) for key, value in event.items()}


def scrubbed(key: str, value: Any) -> Any:
    """Return a line's value without credentials and bytes of events; numbers and booleans stay."""
    return _Scrubbing().value(key, value)


class _Scrubbing:
    """Scrubs one value and the values in it."""

    def __init__(self) -> None:
        self._left = MOST_CHARS_IN_ALL

    def value(self, key: str, value: Any) -> Any:
        if value is None or isinstance(value, bool | int | float):
            return value
        if isinstance(value, bytes | bytearray | memoryview):
            return f"<{len(value)} bytes>"
        if len(key) <= MOST_CHARS and _SECRET_KEY.fullmatch(key):
            return HIDDEN
        if isinstance(value, dict | list | tuple | set | frozenset):
            return self._several(key, value)
        if getattr(value, "ndim", None) == 0:  # a number of numpy's
            return value.item()
        return self._text(str(value), keep_end=key == "exception")

    def _several(self, key: str, values: Any) -> Any:
        more = len(values) - MOST_ITEMS
        if isinstance(values, dict):
            kept = {self._text(str(k)): self.value(str(k), v) for k, v in islice(values.items(), MOST_ITEMS)}
            return kept | ({"…": f"{more} more"} if more > 0 else {})
        few = [self.value(key, value) for value in islice(values, MOST_ITEMS)]
        return few + ([f"… {more} more"] * (more > 0))

    def _text(self, text: str, *, keep_end: bool = False) -> str:
        most = min(MOST_CHARS, self._left)
        self._left -= min(len(text), most)
        cut = len(text) - most
        if cut <= 0:
            return without_secrets(text)
        left_out, seen = f"… ({cut} characters left out) …", most + _BEYOND_THE_CUT
        if keep_end:
            return left_out + without_secrets(text[-seen:])[-most:] if most else left_out
        return without_secrets(text[:seen])[:most] + left_out


def without_secrets(text: str) -> str:
    """Return the text with its credentials hidden."""
    for pattern, instead in _IN_TEXT:
        text = pattern.sub(instead, text)
    return text


# --- Configuration

repeat_limit: RepeatLimit | None = None


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
        instance: name among several; the host's name by default.
        clock: monotonic, in seconds; repeated messages are limited by it.
        later: calls the report of left-out lines; a timer by default.
    """
    global repeat_limit  # noqa: PLW0603 - one a process, as structlog's configuration
    if repeat_limit is not None:
        atexit.unregister(repeat_limit.report)
    repeat_limit = RepeatLimit(clock, later) if later else RepeatLimit(clock)
    atexit.register(repeat_limit.report)
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
            repeat_limit,
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
    """Make SIGUSR1 switch between level debug and `level`. Main thread only."""
    kept = level

    def turn() -> None:
        nonlocal kept
        kept = level if kept == "debug" else "debug"
        structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(_LEVELS[kept]))
        _take_libraries(kept)
        structlog.get_logger(__name__).warning("the log's level is another from now on", log_level=kept)

    def handle(_number: int, _frame: object) -> None:
        # On another thread: this one may be writing a line, and hold the lock that writing waits for.
        _thread.start_new_thread(turn, ())

    signal.signal(signal.SIGUSR1, handle)


def _add_span(_logger: Any, _method: str, event: EventDict) -> EventDict:
    """Add the span that the line's thread works for."""
    context = current()
    if context is not None:
        event["trace_id"], event["span_id"] = f"{context.trace_id:032x}", f"{context.span_id:016x}"
    return event


def _add_process(process: Mapping[str, Any]) -> Processor:
    """Return a processor that puts the process and the keys of every line first."""

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
        """Write a record; never raises, since a library does not expect it."""
        names = ("error", "warning", "info")
        level = next((name for name in names if record.levelno >= _LEVELS[name]), "debug")
        try:
            say = getattr(structlog.get_logger(), level)
            more = {"exc_info": record.exc_info} if record.exc_info else {}
            template = f"{record.name}: {record.msg}"
            say(record.getMessage().strip(), logger=record.name, **more, **{TEMPLATE: template})
        except Exception:  # such as arguments that do not fit the message
            with contextlib.suppress(Exception):
                self.handleError(record)


class _StandardError:
    """Writes to the current `sys.stderr`, and drops text that cannot be written.

    A message about a full disk must not end the thread that would have tried again.
    """

    def write(self, text: str) -> None:
        """Write, if possible."""
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.write(text)

    def flush(self) -> None:
        """Flush, if possible."""
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.flush()
