"""Whether the uvicorn that is installed is one that our connections fit."""

from __future__ import annotations

from freshet.errors import ConfigError

__all__ = ["INSTALL", "OF_CONNECTIONS", "OF_SERVERS", "refuse_other_uvicorn"]

INSTALL = "uvicorn>=0.53,<0.55"
"""What our tests pass with, as pyproject.toml says it. Before 0.45 uvicorn has no `_start_asgi_task`: a 408
or 400 would be written into the middle of an answer; before 0.53 it tells no client that it closes."""

OF_CONNECTIONS = (
    "_start_asgi_task",
    "_unset_keepalive_if_required",
    "on_response_complete",
    "pause_writing",
    "resume_writing",
    "send_400_response",
    "shutdown",
    "timeout_keep_alive_handler",
)
"""Methods that our connections take over or call: one that uvicorn had under another name would not be
called, and nobody would be told."""

OF_SERVERS = ("_serve", "on_tick", "shutdown", "startup")


def refuse_other_uvicorn(connection: type, server: type, release: str) -> None:
    """Raise ConfigError for a uvicorn that lacks what we build on. Called once, before anything listens."""
    lacks = [name for name in OF_CONNECTIONS if not hasattr(connection, name)]
    lacks += [name for name in OF_SERVERS if not hasattr(server, name)]
    if lacks:
        raise ConfigError(
            "uvicorn",
            "release",
            release,
            f"one that has {', '.join(lacks)}, which freshet's connections build on",
            f"install another: pip install '{INSTALL}'",
        )
