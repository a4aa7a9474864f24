"""Tokens with scopes: the lines of their file, and the entry of a given token. No I/O.

A line holds the SHA-256 of one token, never the token itself; the words after it are optional:

    web-shop  send,rank  sha256:9f86d081…  expires=2027-02-20T00:00:00Z  requests_per_s=500  events_per_s=5000

Several lines may have the same name, so that a new token is valid before the old one is removed. A token has
256 random bits (`new_token`), so that a plain hash suffices: it cannot be guessed.
"""

from __future__ import annotations

import hmac
import re
import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from hashlib import sha256
from typing import Literal, get_args

from freshet.errors import ConfigError

Scope = Literal["send", "rank", "operate"]
"""Rights of a token: to send events to the gateway; to rank, score and explain at inference; to change the
served version at the console."""

SCOPES: tuple[Scope, ...] = get_args(Scope)

MAX_TOKENS = 1_000
"""Tokens of a file: each request is compared with all of them, at about 0.2 µs each."""

MAX_TOKEN_BYTES = 1_000
"""A longer token is unknown, and is not hashed."""

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,59}")
NAME_TEXT = "1 to 60 letters, digits, . - and _, the first of them a letter or digit"
DIGEST = re.compile(r"sha256:([0-9a-f]{64})")
TOKEN = re.compile(r"freshet_[A-Za-z0-9_-]{43}")
"""Tokens of `new_token`."""

RATE = re.compile(r"[0-9]{1,9}(\.[0-9]{1,3})?")
TIME = "%Y-%m-%dT%H:%M:%SZ"


@dataclass(frozen=True, slots=True)
class TokenEntry:
    """One valid token."""

    name: str  # of its holder; several tokens may have the same
    scopes: frozenset[Scope]
    digest: bytes  # SHA-256
    expires_ms: int | None = None  # since the Unix epoch; None: never
    requests_per_s: float | None = None  # None: the listener's setting; 0: no limit
    events_per_s: float | None = None

    @property
    def id(self) -> str:
        """Distinguishes tokens of one name."""
        return self.digest.hex()[:8]


def new_token() -> str:
    """Make a token of 256 random bits. Scanners of repositories find it by its prefix."""
    return "freshet_" + secrets.token_urlsafe(32)


def digest_of(token: bytes) -> bytes:
    """Return the hash that is stored for a token."""
    return sha256(token).digest()


def bearer(authorization: bytes | None) -> bytes:
    """Return the token of an `Authorization` header; empty if it has none."""
    scheme, _, token = (authorization or b"").strip().partition(b" ")
    return token.strip() if scheme.lower() == b"bearer" else b""


def matching_entry(token: bytes, entries: Iterable[TokenEntry]) -> TokenEntry | None:
    """Return the entry of a token, or None if it is unknown, in a time that does not depend on the entry."""
    if len(token) > MAX_TOKEN_BYTES:
        return None
    digest, found = sha256(token).digest(), None
    for entry in entries:
        if hmac.compare_digest(digest, entry.digest):
            found = entry
    return found


def parse_tokens(text: str, where: str) -> tuple[TokenEntry, ...]:
    """Parse a file of tokens; empty lines and those that begin with # are skipped.

    Raises ConfigError, with file and line, for a wrong line or a repeated token.
    """
    entries: list[TokenEntry] = []
    lines: dict[bytes, int] = {}
    for number, line in enumerate(text.split("\n"), 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        entry = _entry(words, f"{where}:{number}")
        before = lines.setdefault(entry.digest, number)
        if before != number:
            raise ConfigError(
                f"{where}:{number}", "token", entry.name, f"a token that is not in line {before}, too",
                "take one of the two lines away",
            )  # fmt: skip
        entries.append(entry)
        if len(entries) > MAX_TOKENS:
            raise ConfigError(
                where, "", f"more than {MAX_TOKENS} tokens", f"at most {MAX_TOKENS}",
                "drop those that have expired: `freshet token list` shows them",
            )  # fmt: skip
    return tuple(entries)


def _entry(words: Sequence[str], where: str) -> TokenEntry:
    """Parse a line. Any word may be a token by mistake, so errors give its position instead of the word."""
    if len(words) < 3:
        raise ConfigError(
            where, "", f"{len(words)} words", "NAME SCOPES sha256:HASH and what else is said of the token",
            "`freshet token new` writes such lines",
        )  # fmt: skip
    name, scopes_text, digest_text, *more = words
    digest = DIGEST.fullmatch(digest_text)
    if TOKEN.fullmatch(name):
        raise ConfigError(
            where, "", "the first word is a token itself", f"a name: {NAME_TEXT}",
            "all readers of the file know that token: make another, and drop it",
        )  # fmt: skip
    if not NAME.fullmatch(name):
        raise ConfigError(where, "", "the first word is no name", NAME_TEXT)
    scopes = frozenset(scope for scope in SCOPES if scope in scopes_text.split(","))
    if not scopes or len(scopes) != len(scopes_text.split(",")):
        raise ConfigError(
            where, "", "the second word is no scopes", f"some of {', '.join(SCOPES)}, commas between"
        )
    if digest is None:
        raise ConfigError(
            where, "", "the third word is no hash", "sha256: and 64 hexadecimal digits in lower case",
            "of the token, without a line's end; never the token itself",
        )  # fmt: skip
    options: dict[str, float | int] = {}
    for number, word in enumerate(more, 4):
        key, equals, value = word.partition("=")
        if not equals or key not in _READERS or key in options:
            raise ConfigError(
                where, "", f"word {number} is none of these, or is there twice",
                f"{', '.join(f'{k}=…' for k in _READERS)}, each once at most",
            )  # fmt: skip
        options[key] = _READERS[key](value, where, f"word {number}, {key}=…,")
    expires = options.get("expires")
    return TokenEntry(
        name,
        scopes,
        bytes.fromhex(digest[1]),
        None if expires is None else int(expires),
        options.get("requests_per_s"),
        options.get("events_per_s"),
    )


def _time(text: str, where: str, word: str) -> int:
    try:
        moment = datetime.strptime(text, TIME).replace(tzinfo=UTC)
    except ValueError:
        raise ConfigError(where, "", f"{word} is no time", "a time such as 2027-02-20T00:00:00Z") from None
    return round(moment.timestamp() * 1000)


def _rate(text: str, where: str, word: str) -> float:
    if not (text.isascii() and RATE.fullmatch(text)):
        raise ConfigError(
            where, "", f"{word} is no rate", "a number from 0 (no limit) to 999999999, such as 500"
        )
    return float(text)


_READERS = {"expires": _time, "requests_per_s": _rate, "events_per_s": _rate}


def line_of(entry: TokenEntry) -> str:
    """Return the line of an entry."""
    scopes = ",".join(scope for scope in SCOPES if scope in entry.scopes)
    words = [entry.name, scopes, f"sha256:{entry.digest.hex()}"]
    if entry.expires_ms is not None:
        words.append(f"expires={time_text(entry.expires_ms)}")
    for key in ("requests_per_s", "events_per_s"):
        rate = getattr(entry, key)
        if rate is not None:
            words.append(f"{key}={rate:.3f}".rstrip("0").rstrip("."))
    return " ".join(words)


def time_text(ms: int) -> str:
    """Return a time as files write it, in seconds."""
    return datetime.fromtimestamp(ms // 1000, UTC).strftime(TIME)
