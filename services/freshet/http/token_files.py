"""Files of tokens: the file that listeners read and `freshet token` edits, a client's token, the console's.

A watched file is read again when it changes; `freshet.rpc.channel` watches its tokens, too. An edit replaces
the file as a whole, and one edit runs at a time.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import pwd
import secrets
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Generic, TypeVar

import structlog

from freshet.clock import SYSTEM_CLOCK, Clock
from freshet.errors import ConfigError
from freshet.http.tls import file_stamp
from freshet.http.tokens import TokenEntry, digest_of, line_of, parse_tokens

log = structlog.get_logger(__name__)

CHECK_S = 1.0
"""Seconds between two checks of the file: a change takes at most so long."""

MAX_BYTES = 1 << 20

CONSOLE_TOKEN_FILE = "console.token"
CONSOLE_TOKEN_CHARS = 16
"""Shortest token of a console."""

CONSOLE_HINT = (
    f"the link that `freshet up` prints holds it; it stands in state/{CONSOLE_TOKEN_FILE} of the run folder, "
    "or in the file of FRESHET_CONSOLE_TOKEN_FILE; or take one with the scope operate from the file of tokens"
)

T = TypeVar("T")
Edit = Callable[[Sequence[TokenEntry]], tuple[Sequence[TokenEntry], T]]


# --- the file of tokens


class WatchedFile(Generic[T]):
    """Tokens of a file, read again when the file changes, is replaced, or its link is turned. Thread-safe.

    If the file is gone, unreadable or wrong, the former tokens stay valid, since an operator's slip would
    otherwise lock all clients out; the error is logged, and `wrong` is true until the file is mended.
    """

    def __init__(self, path: str, read: Callable[[Path], tuple[T, ...]], clock: Clock) -> None:
        """Read the file with `read`. Raises ConfigError if it cannot be read or is wrong."""
        self._path, self._read, self._clock = Path(path), read, clock
        self._lock = threading.Lock()
        self._stamp = file_stamp(self._path)
        self._tokens = read(self._path)
        self._next_check = clock.monotonic() + CHECK_S
        self.wrong = False

    def now(self) -> tuple[T, ...]:
        """Return the tokens as the file had them within the last second."""
        with self._lock:
            now = self._clock.monotonic()
            if now >= self._next_check:
                self._next_check = now + CHECK_S
                self._read_again()
            return self._tokens

    def _read_again(self) -> None:
        stamp = file_stamp(self._path)
        if stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            self._tokens = self._read(self._path)
        except ConfigError as error:
            self.wrong = True
            if isinstance(error.__cause__, OSError):  # may pass without a change of the file
                self._stamp = ()
            log.error("the file of tokens cannot be used; the former tokens stay valid", reason=str(error))
            return
        self.wrong = False
        log.info("tokens read again", path=str(self._path), tokens_known=len(self._tokens))


class TokenFile(WatchedFile[TokenEntry]):
    """The entries of the file that `freshet token` edits."""

    def __init__(self, path: str, clock: Clock = SYSTEM_CLOCK) -> None:
        """Read the file. Raises ConfigError if it cannot be read or is wrong."""
        super().__init__(path, read_tokens, clock)
        log.info("tokens read", path=path, tokens_known=len(self._tokens))


def read_tokens(path: Path) -> tuple[TokenEntry, ...]:
    """Read a file of tokens. Raises ConfigError if it cannot be read or is wrong."""
    try:
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
        if len(content) > MAX_BYTES:
            raise ConfigError("tokens_file", "", str(path), f"a file of at most {MAX_BYTES} bytes")
        text = content.decode("ascii")
    except UnicodeDecodeError as error:
        raise ConfigError("tokens_file", "", str(path), "a file in ASCII", str(error)) from None
    except OSError as error:
        raise ConfigError(
            "environment", "FRESHET_COMMON_TOKENS_FILE", str(path), "a file that can be read",
            f"{error.strerror}; `freshet token new NAME --scopes send --file FILE` makes one",
        ) from error  # fmt: skip
    return parse_tokens(text, str(path))


def edit_tokens(path: Path, edit: Edit[T], *, must_exist: bool = False) -> T:
    """Change the entries of a file; returns the second value of `edit`.

    A missing file is created, readable by its owner only; an existing one keeps readers, rights, comments and
    other lines. Readers see the old file or the new one. If the path is a link, its target is changed.

    Args:
        edit: maps the present entries to the wanted ones, in which kept entries are unchanged, and a result.
        must_exist: whether a missing file is an error.

    Raises:
        ConfigError: the present file is wrong; it stays as it is.
        OSError: the file cannot be read or written, or its present readers might not read the new one.
    """
    path = Path(os.path.realpath(path))
    with _folder_lock(path.parent):
        text = _text_of(path, must_exist)
        before = parse_tokens(text, str(path))
        after, result = edit(before)
        kept, had = set(after), set(before)
        lines = [line for line in text.split("\n")[:-1] if _is_kept(line, kept)] if text else []
        lines += [line_of(entry) for entry in after if entry not in had]
        edited = "".join(f"{line}\n" for line in lines)
        parse_tokens(edited, str(path))  # a file that a start would refuse is refused here
        if edited != text:
            _replace(path, edited)
    return result


def _is_kept(line: str, kept: set[TokenEntry]) -> bool:
    found = parse_tokens(line, "")
    return not found or found[0] in kept


def _text_of(path: Path, must_exist: bool) -> str:
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


def _replace(path: Path, text: str) -> None:
    """Replace a file's text, with the folder's lock held. Raises OSError as `edit_tokens`."""
    new = path.with_name(f".{path.name}.new")  # one name, so that kills in here leave one file at most
    new.unlink(missing_ok=True)
    handle = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(handle, "w", encoding="ascii") as file:
            with contextlib.suppress(FileNotFoundError):
                _keep_readers(new, path)
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        new.replace(path)
    except BaseException:  # interrupted as well: no half-written copy stays behind
        new.unlink(missing_ok=True)
        raise


def _keep_readers(new: Path, path: Path) -> None:
    """Give a file the rights, group and owner of the one that it replaces.

    Only root may change the owner, and only members may set the group. Raises OSError if a reader may lose
    the file by that: a service that cannot read it keeps the former tokens.
    """
    was = path.stat()
    for owner in (was.st_uid, -1):
        with contextlib.suppress(PermissionError):
            os.chown(new, owner, was.st_gid)
            break
    os.chmod(new, was.st_mode & 0o777)
    made = new.stat()
    by_owner, by_group, by_all = (bool(was.st_mode & bit) for bit in (0o400, 0o040, 0o004))
    group_kept = made.st_gid == was.st_gid or not by_group or by_all
    owner_reads = by_group and (by_all or (made.st_gid == was.st_gid and _is_member(was.st_uid, was.st_gid)))
    owner_kept = was.st_uid in (made.st_uid, 0) or not by_owner or owner_reads
    if not (group_kept and owner_kept):
        raise OSError(
            errno.EPERM,
            f"expected that the new file has owner {was.st_uid} and group {was.st_gid}, as its readers need "
            f"them; found owner {made.st_uid} and group {made.st_gid}. Nothing was changed: run the command "
            "as the file's owner, or as root",
            str(path),
        )


def _is_member(user: int, group: int) -> bool:
    """Return whether a user is known to belong to a group."""
    try:
        entry = pwd.getpwuid(user)
    except KeyError:
        return False
    return group in os.getgrouplist(entry.pw_name, entry.pw_gid)


@contextlib.contextmanager
def _folder_lock(folder: Path) -> Iterator[None]:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


# --- the token of a client


def read_token(path: str) -> str:
    """Read the token that our clients send; empty without a path.

    Raises ConfigError if the file cannot be read or holds no token.
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
    """Return the header with the token of a file; none without a path. Raises as `read_token`."""
    return {"Authorization": f"Bearer {read_token(path)}"} if path else {}


# --- the token of a console


def console_entry(token: str) -> TokenEntry:
    """Return the entry of the console's token."""
    return TokenEntry("console", frozenset({"operate"}), digest_of(token.encode()))


def console_token(given: str, state: Path, file: str = "") -> str:
    """Return the given token, else that of `file`, else that of the run folder, which is created if missing.

    The run folder's file is made readable by its owner only; `file` is only read.

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
        return _console_token_in(Path(file), "write one there: 16 or more letters, digits, - and _")
    path = state / CONSOLE_TOKEN_FILE
    try:
        with contextlib.suppress(FileExistsError):
            new = path.with_name(f".{CONSOLE_TOKEN_FILE}.{os.getpid()}")
            handle = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            try:
                with os.fdopen(handle, "w") as writer:
                    writer.write(secrets.token_urlsafe(24) + "\n")
                os.link(new, path)  # whole or not at all, and never over another process's file
            finally:
                new.unlink()
        path.chmod(0o600)
    except OSError as error:
        raise _unreadable(path, error) from error
    return _console_token_in(path, "delete the file: the next start makes a new one")


def _console_token_in(path: Path, hint: str) -> str:
    try:
        token = path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise _unreadable(path, error) from error
    if len(token) < CONSOLE_TOKEN_CHARS or not token.replace("-", "").replace("_", "").isalnum():
        expected = f"a token of at least {CONSOLE_TOKEN_CHARS} letters, digits, - and _"
        raise ConfigError("console", "token", str(path), expected, hint)
    return token


def _unreadable(path: Path, error: Exception) -> ConfigError:
    return ConfigError("console", "token", str(path), "a file that can be read and written", str(error))
