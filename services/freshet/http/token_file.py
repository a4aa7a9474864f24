"""The file of tokens, read again when it changes; and the one token that a client of ours sends."""

from __future__ import annotations

import os
from pathlib import Path

import structlog

from freshet.clock import SYSTEM_CLOCK, Clock
from freshet.errors import ConfigError
from freshet.http.tokens import TokenEntry, parse_tokens

__all__ = ["TokenFile", "read_token", "read_tokens", "token_headers"]

log = structlog.get_logger(__name__)

LOOK_S = 1.0
"""How often the file is looked at, at most: so long a change may take."""

MOST_BYTES = 1 << 20


class TokenFile:
    """Entries of a file. Edited in place, replaced, or a link that is turned: by what `stat` says.

    A file that has gone, cannot be read or is wrong leaves the former tokens valid, since else a slip of a
    hand would shut everybody out; it is logged as an error, and `wrong` says so until it is mended. Used by
    one thread.
    """

    def __init__(self, path: str, clock: Clock = SYSTEM_CLOCK) -> None:
        """Read the file. Raises ConfigError if that cannot be done."""
        self._path, self._clock = Path(path), clock
        self._stamp = self._stamped()
        self._entries = read_tokens(self._path)
        self._next_look = clock.monotonic() + LOOK_S
        self.wrong = False
        log.info("tokens read", path=path, tokens_known=len(self._entries))

    def entries(self) -> tuple[TokenEntry, ...]:
        """The tokens as the file has had them within the last second."""
        now = self._clock.monotonic()
        if now >= self._next_look:
            self._next_look = now + LOOK_S
            self._look()
        return self._entries

    def _look(self) -> None:
        stamp = self._stamped()
        if stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            self._entries = read_tokens(self._path)
        except ConfigError as error:
            self.wrong = True
            if isinstance(error.__cause__, OSError):  # which may pass, without a change of the file
                self._stamp = ()
            log.error("the file of tokens cannot be used; the former tokens stay valid", reason=str(error))
            return
        self.wrong = False
        log.info("tokens read again", path=str(self._path), tokens_known=len(self._entries))

    def _stamped(self) -> tuple[int, ...]:
        """What changes with the file's content; of a link, where it leads to. Empty: no file."""
        try:
            found = os.stat(self._path)
        except OSError:
            return ()
        return (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)


def read_tokens(path: Path) -> tuple[TokenEntry, ...]:
    """What the file holds. Raises ConfigError: it cannot be read, or is wrong."""
    try:
        with path.open("rb") as file:
            content = file.read(MOST_BYTES + 1)
        if len(content) > MOST_BYTES:
            raise ConfigError("tokens_file", "", str(path), f"a file of at most {MOST_BYTES} bytes")
        text = content.decode("ascii")
    except UnicodeDecodeError as error:
        raise ConfigError("tokens_file", "", str(path), "a file in ASCII", str(error)) from None
    except OSError as error:
        raise ConfigError(
            "environment", "FRESHET_COMMON_TOKENS_FILE", str(path), "a file that can be read",
            f"{error.strerror}; `freshet token new NAME --scopes send --file FILE` makes one",
        ) from error  # fmt: skip
    return parse_tokens(text, str(path))


def read_token(path: str) -> str:
    """The token that clients of ours send, by a setting; empty without a path.

    Raises ConfigError: the file cannot be read, or holds no token.
    """
    if not path:
        return ""
    try:
        token = Path(path).read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            "environment", "FRESHET_COMMON_CLIENT_TOKEN_FILE", path, "a file that can be read", str(error)
        ) from error
    if not token or not token.isprintable() or len(token.split()) != 1:
        raise ConfigError(
            "environment", "FRESHET_COMMON_CLIENT_TOKEN_FILE", path, "a file with one token, in one line",
            "`freshet token new` prints one",
        )  # fmt: skip
    return token


def token_headers(path: str) -> dict[str, str]:
    """The header that shows the token of a file; none without a path. Raises as `read_token`."""
    return {"Authorization": f"Bearer {read_token(path)}"} if path else {}
