"""The token of a run: who holds it may change what the run serves. Made once, readable by its owner only."""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path

from freshet.errors import ConfigError

__all__ = ["TOKEN_FILE", "token_of"]

TOKEN_FILE = "console.token"
LEAST_TOKEN = 16


def token_of(given: str, state: Path) -> str:
    """The token in use: the one given, else that of the run folder, which is made if it is not there.

    Its file is readable by its owner only, whoever has made it.

    Raises:
        ConfigError: the file cannot be read or written, or holds no token.
    """
    if given:
        return given
    path = state / TOKEN_FILE
    try:
        with contextlib.suppress(FileExistsError):
            made = path.with_name(f".{TOKEN_FILE}.{os.getpid()}")
            handle = os.open(made, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            try:
                with os.fdopen(handle, "w") as file:
                    file.write(secrets.token_urlsafe(24) + "\n")
                os.link(made, path)  # whole or not at all, and never over another's
            finally:
                made.unlink()
        path.chmod(0o600)
        token = path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            "console", "token", str(path), "a file that can be read and written", str(error)
        ) from error
    if len(token) < LEAST_TOKEN or not token.replace("-", "").replace("_", "").isalnum():
        raise ConfigError(
            "console", "token", str(path), f"a token of at least {LEAST_TOKEN} letters, digits, - and _",
            "delete the file: the next start makes a new one",
        )  # fmt: skip
    return token
