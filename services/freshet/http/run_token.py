"""The token of a run: who holds it may change what the run serves. Made once, readable by its owner only."""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path

from freshet.errors import ConfigError
from freshet.http.tokens import TokenEntry, digest_of

__all__ = ["CONSOLE_HINT", "TOKEN_FILE", "console_entry", "token_of"]

TOKEN_FILE = "console.token"  # nosec B105  # a file's name
LEAST_TOKEN = 16


def console_entry(token: str) -> TokenEntry:
    """The token as the console's guard knows it."""
    return TokenEntry("console", frozenset({"operate"}), digest_of(token.encode()))


CONSOLE_HINT = (
    f"the link that `freshet up` prints holds it; it stands in state/{TOKEN_FILE} of the run folder, or in "
    "the file of FRESHET_CONSOLE_TOKEN_FILE; or take one with the scope operate from the file of tokens"
)


def token_of(given: str, state: Path, file: str = "") -> str:
    """The token in use: the one given, else that of the file, else that of the run folder, which is made if
    it is not there.

    The run folder's is readable by its owner only, whoever has made it; `file` is another's, and only read.

    Raises:
        ConfigError: both are given, or a file cannot be read or written, or holds no token.
    """
    if given and file:
        raise ConfigError(
            "environment", "FRESHET_CONSOLE_TOKEN_FILE", file, "a token or a file that holds it, not both",
            "take FRESHET_CONSOLE_TOKEN away",
        )  # fmt: skip
    if given:
        return given
    if file:
        return _token_in(Path(file), "write one there: 16 or more letters, digits, - and _")
    path = state / TOKEN_FILE
    try:
        with contextlib.suppress(FileExistsError):
            made = path.with_name(f".{TOKEN_FILE}.{os.getpid()}")
            handle = os.open(made, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            try:
                with os.fdopen(handle, "w") as written:
                    written.write(secrets.token_urlsafe(24) + "\n")
                os.link(made, path)  # whole or not at all, and never over another's
            finally:
                made.unlink()
        path.chmod(0o600)
    except OSError as error:
        raise _unreadable(path, error) from error
    return _token_in(path, "delete the file: the next start makes a new one")


def _token_in(path: Path, hint: str) -> str:
    try:
        token = path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise _unreadable(path, error) from error
    if len(token) < LEAST_TOKEN or not token.replace("-", "").replace("_", "").isalnum():
        raise ConfigError(
            "console",
            "token",
            str(path),
            f"a token of at least {LEAST_TOKEN} letters, digits, - and _",
            hint,
        )
    return token


def _unreadable(path: Path, error: Exception) -> ConfigError:
    return ConfigError("console", "token", str(path), "a file that can be read and written", str(error))
