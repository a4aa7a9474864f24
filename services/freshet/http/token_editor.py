"""Changing the file of tokens: whole or not at all, one at a time, its comments kept."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from freshet.errors import ConfigError
from freshet.http.tokens import TokenEntry, line_of, parse_tokens

__all__ = ["edited"]

T = TypeVar("T")
Edit = Callable[[Sequence[TokenEntry]], tuple[Sequence[TokenEntry], T]]


def edited(path: Path, edit: Edit[T], *, must_exist: bool = False) -> T:
    """Change what the file holds; returns what `edit` tells besides.

    A file that is not there is made, for its owner only; one that is there keeps owner and rights, and what
    else stands in it. Who reads it meanwhile sees the old file or the new one. Of a link, the file that it
    leads to is changed.

    Args:
        path: the file.
        edit: the entries now -> the entries wanted, of which those kept are unchanged; and what it tells.
        must_exist: a file that is not there is an error.

    Raises:
        ConfigError: the file is wrong as it is; it stays so. OSError: it cannot be read or written.
    """
    path = Path(os.path.realpath(path))
    with _alone_in(path.parent):
        text = _text(path, must_exist)
        before = parse_tokens(text, str(path))
        after, told = edit(before)
        kept, had = set(after), set(before)
        lines = [line for line in text.split("\n")[:-1] if _stays(line, kept)] if text else []
        lines += [line_of(entry) for entry in after if entry not in had]
        made = "".join(f"{line}\n" for line in lines)
        parse_tokens(made, str(path))  # what would be refused by a start is refused here
        if made != text:
            _write(path, made)
    return told


def _stays(line: str, kept: set[TokenEntry]) -> bool:
    found = parse_tokens(line, "")
    return not found or found[0] in kept


def _text(path: Path, must_exist: bool) -> str:
    try:
        text = path.read_text(encoding="ascii")
    except FileNotFoundError:
        if must_exist:
            raise ConfigError(
                "token", "--file", str(path), "a file of tokens", "`freshet token new` makes one"
            ) from None
        return ""
    except UnicodeDecodeError as error:
        raise ConfigError("token", "--file", str(path), "a file in ASCII", str(error)) from None
    return text if not text or text.endswith("\n") else text + "\n"


def _write(path: Path, text: str) -> None:
    """Alone in the folder."""
    new = path.with_name(f".{path.name}.new")  # one name: whoever was killed in here leaves one file at most
    new.unlink(missing_ok=True)
    handle = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(handle, "w", encoding="ascii") as file:
            with contextlib.suppress(FileNotFoundError):
                now = path.stat()
                with contextlib.suppress(PermissionError):  # only root gives files away
                    os.chown(new, now.st_uid, now.st_gid)
                os.chmod(new, now.st_mode & 0o777)
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        new.replace(path)
    except BaseException:
        new.unlink(missing_ok=True)
        raise


@contextlib.contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)
