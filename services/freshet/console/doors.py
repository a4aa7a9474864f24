"""By which names the console may be asked, and from which pages; its guard asks for tokens besides.

A page that the browser has open from elsewhere can send requests to this machine. It cannot read answers, but
by a name of its own that is made to point here (DNS rebinding) it could; so names are checked. It can post
forms; so posts must be JSON, and whatever changes something needs a token that no browser sends by itself.
"""

from __future__ import annotations

from collections.abc import Mapping

from freshet.runtime.answers import HttpError
from freshet.runtime.browsers import name_of
from freshet.runtime.requests import Request
from freshet.runtime.streaming import Headers

__all__ = ["HEADERS", "Doors", "json_only", "names_by"]

HEADERS: Headers = (
    (
        b"content-security-policy",
        b"default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; font-src 'self'; "
        b"connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    ),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"cross-origin-opener-policy", b"same-origin"),
)
"""With every answer: nothing from elsewhere is loaded, run, framed or told where one came from."""


def names_by(bind_address: str, hosts: str) -> frozenset[str]:
    """Names that browsers may use: the address that is listened on, and those of a list with commas."""
    return frozenset(name.lower() for name in (bind_address, *hosts.split(",")) if name)


class Doors:
    """What every request must show. Raises HttpError, which says what is missing."""

    def __init__(self, names: frozenset[str]) -> None:
        """`names`: what browsers may ask for this server by, besides the names of this machine itself."""
        self._names = names | {"localhost", "127.0.0.1", "::1"}

    def admit(self, headers: Mapping[bytes, bytes]) -> None:
        """Refuse names that are not ours, and requests of pages from elsewhere (403)."""
        host = headers.get(b"host", b"").decode("latin-1")
        if name_of(host) not in self._names:
            raise HttpError(
                403, "host", "the console is not asked for by this name", expected=sorted(self._names),
                found=host[:200], hint="FRESHET_CONSOLE_HOST adds a name",
            )  # fmt: skip
        origin = headers.get(b"origin")
        if origin is not None and name_of(origin.decode("latin-1").partition("://")[2]) not in self._names:
            raise HttpError(
                403, "origin", "a page from elsewhere may not ask this", expected=sorted(self._names),
                found=origin.decode("latin-1")[:200],
            )  # fmt: skip


def json_only(request: Request) -> None:
    """Refuse bodies that a form of another site could post (415)."""
    if request.content_type != "application/json":
        raise HttpError(
            415,
            "content_type",
            "this takes JSON",
            expected="application/json",
            found=request.content_type[:100],
        )
