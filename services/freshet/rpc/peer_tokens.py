"""The tokens that services show each other, read again when their file changes; and patience while they do.

A file may hold several, one a line: the first is shown by who calls, each is taken by who listens. So a token
is changed without an interruption: the new one second everywhere, then first everywhere, then alone.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path

import structlog

from freshet.clock import SYSTEM_CLOCK, Clock
from freshet.errors import ConfigError, FreshetError, Unavailable

__all__ = ["Patience", "PeerTokens"]

log = structlog.get_logger("freshet.tokens")

LOOK_S = 1.0
"""How often the file is looked at, at most: so long a change may take."""

MOST = 8
"""Tokens of one file: each call is compared with all of them."""

MOST_BYTES = 64 << 10

PATIENCE_S = 10.0
"""A listener that does not take our token may be told of it a little later than we: for so long the call is
tried again, before it is an error that ends us."""

FORGOTTEN_S = 5.0
"""After so long without a refusal a listener's next one is its first: calls are tried again more often."""


class PeerTokens:
    """The tokens of a file. A file that has gone or is wrong leaves the former valid. Thread-safe."""

    def __init__(self, path: str, clock: Clock = SYSTEM_CLOCK) -> None:
        """Read the file. Raises ConfigError if that cannot be done, or it holds no token."""
        self._path, self._clock = path, clock
        self._lock = threading.Lock()
        self._stamp = self._stamped()
        self._tokens = _read(path)
        self._next_look = clock.monotonic() + LOOK_S

    def now(self) -> tuple[str, ...]:
        """The tokens as the file has had them within the last second; the first is the one to show."""
        with self._lock:
            now = self._clock.monotonic()
            if now >= self._next_look:
                self._next_look = now + LOOK_S
                self._look()
            return self._tokens

    def _look(self) -> None:
        stamp = self._stamped()
        if stamp == self._stamp:
            return
        try:
            self._tokens = _read(self._path)
        except ConfigError as error:  # looked at again, whether it changes or not: it may be half written
            log.error("the file of tokens cannot be used; the former tokens stay valid", reason=str(error))
            return
        self._stamp = stamp
        log.info("tokens read again", path=self._path, tokens_known=len(self._tokens))

    def _stamped(self) -> tuple[int, ...]:
        try:
            found = os.stat(self._path)
        except OSError:
            return ()
        return (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)


def _read(path: str) -> tuple[str, ...]:
    try:
        with Path(path).open("rb") as file:
            content = file.read(MOST_BYTES + 1)
    except OSError as error:
        raise ConfigError("grpc", "token_file", path, "a file that can be read", str(error)) from error
    text = content.decode("ascii", "replace") if len(content) <= MOST_BYTES else ""
    tokens = tuple(dict.fromkeys(line.strip() for line in text.splitlines() if line.strip()))
    usable = all(token.isascii() and token.isprintable() and " " not in token for token in tokens)
    if not usable or not 1 <= len(tokens) <= MOST:
        raise ConfigError(
            "grpc", "token_file", path, f"a file with one token of letters and digits a line, at most {MOST}",
            "the first is shown to others, each is taken from them",
        )  # fmt: skip
    return tokens


class Patience:
    """What it means that a listener does not take our token: at first that it will soon. Thread-safe."""

    def __init__(self, clock: Clock = SYSTEM_CLOCK) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._refused: dict[str, tuple[float, float]] = {}  # address -> first and last refusal

    def refused(self, where: str, details: str) -> FreshetError:
        """The error of a refusal: Unavailable for `PATIENCE_S` from the first on, then ConfigError."""
        now = self._clock.monotonic()
        with self._lock:
            first, last = self._refused.get(where, (now, now))
            if now - last > FORGOTTEN_S:
                first = now
            self._refused = {at: t for at, t in self._refused.items() if now - t[1] <= FORGOTTEN_S}
            self._refused[where] = (first, now)
        if now - first < PATIENCE_S:
            return Unavailable(f"{where}: {details}; for {PATIENCE_S:g} s it may just be changed")
        hint = f"{details}, for {now - first:.0f} s; FRESHET_GRPC_TOKEN_FILE has none that is taken there"
        return ConfigError("grpc", "token_file", where, "the token that this listener asks for", hint)
