"""Structured logs: a JSON object a line for machines, or text for people. One call a process, at its
start."""

from __future__ import annotations

import contextlib
import logging
import sys
from typing import Any, TextIO, cast

import structlog

__all__ = ["configure_logging"]


def configure_logging(service: str, *, level: str = "info", form: str = "json") -> None:
    """Send structlog's events to standard error, each with time, level and service.

    Args:
        level: least severe one kept: debug, info, warning or error.
        form:  json or text.
    """
    renderer: Any = structlog.processors.JSONRenderer()
    if form == "text":
        renderer = structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty())
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.StackInfoRenderer(),
            structlog.processors.format_exc_info,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(getattr(logging, level.upper())),
        logger_factory=structlog.PrintLoggerFactory(cast(TextIO, _StandardError())),
    )
    structlog.contextvars.bind_contextvars(service=service)


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
