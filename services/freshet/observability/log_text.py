"""Log lines for people: time, level, service and message in columns, then what varies."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson

from freshet.observability.log_keys import ALWAYS

__all__ = ["text_line"]

MESSAGE_CHARS = 44
"""Shorter messages are padded, so that keys stand below each other."""

_RESET, _DIM, _BOLD = "\x1b[0m", "\x1b[2m", "\x1b[1m"
_LEVELS = {"debug": "\x1b[2m", "info": "\x1b[32m", "warning": "\x1b[33m", "error": "\x1b[31m"}


def text_line(said: Mapping[str, Any], *, colors: bool) -> str:
    """One line, or more with a traceback. Whatever a value holds cannot move the cursor or feign a line."""

    def colored(text: str, color: str) -> str:
        return f"{color}{text}{_RESET}" if colors else text

    level, service = str(said.get("level", "")), str(said.get("service", ""))
    more = {k: v for k, v in said.items() if k not in ALWAYS and k != "exception"}
    if said.get("instance") not in (None, said.get("host")):
        service = f"{service} {said['instance']}"
    message = _plain(str(said.get("event", "")))
    line = (
        f"{colored(_clock(str(said.get('timestamp', ''))), _DIM)} "
        f"{colored(f'{level:<7}', _LEVELS.get(level, ''))} {service:<11} "
    )
    pairs = " ".join(f"{colored(key, _DIM)}={_value(value)}" for key, value in more.items())
    line += f"{colored(message, _BOLD)}{' ' * max(0, MESSAGE_CHARS - len(message))} {pairs}".rstrip()
    if exception := said.get("exception"):
        line += "".join(f"\n    {_plain(one)}" for one in str(exception).splitlines())
    return line


def _clock(timestamp: str) -> str:
    """15:04:05.123 of an ISO time; the day is in the file's date and on the machine's clock."""
    return timestamp.partition("T")[2].rstrip("Z")[:12]


def _value(value: Any) -> str:
    if isinstance(value, str):
        plain = _plain(value)
        return plain if plain and not any(c in plain for c in ' "=') else f'"{plain}"'
    return orjson.dumps(value, default=str, option=orjson.OPT_NON_STR_KEYS).decode()


def _plain(text: str) -> str:
    return "".join(c if c.isprintable() else {"\n": " ⏎ ", "\t": " "}.get(c, "?") for c in text)
