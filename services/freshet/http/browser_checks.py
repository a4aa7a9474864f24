"""Browsers that reach our ports: any page that is open in one can send requests there.

A page of another site cannot read answers, but what it posts is done: events would teach the model, rankings
would be logged as served (cross-site request forgery). A page whose own name was made to point at a port
(DNS rebinding) can read answers, too. So every HTTP port checks three things, with and without tokens:

- the name in `Host`: rebinding needs a name in the public DNS, so a name with a dot must be known;
- the site in `Origin`, which browsers send with every POST, and which no page can change;
- `Content-Type` of bodies: what a form or a page can send without asking first (a preflight, which OPTIONS
  answers without permission) is no JSON.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Mapping, Sequence
from ipaddress import ip_address

from freshet.http.request import Request
from freshet.http.responses import HttpError

__all__ = [
    "FORM_TYPES",
    "Sites",
    "is_this_machine",
    "name_of",
    "require_identity",
    "require_json",
    "wrong_type",
]

SHOWN_CHARS = 200
MOST_REMEMBERED = 1_000
NO_DOT = re.compile(r"[a-z0-9_-]+")
FORM_TYPES = ("application/x-www-form-urlencoded", "multipart/form-data", "text/plain")
"""Content types that a page may send to other sites without asking first."""


def name_of(host: str) -> str:
    """The name in a Host header or an origin: no port, lower case; "" if it is none."""
    host = host.strip().lower()
    if host.startswith("["):
        name, bracket, rest = host[1:].partition("]")
        return name if bracket and (not rest or _is_port(rest)) else ""
    name, colon, rest = host.partition(":")
    return name.removesuffix(".") if not colon or _is_port(colon + rest) else ""


def _is_port(text: str) -> bool:
    return text[:1] == ":" and text[1:].isascii() and text[1:].isdigit()


def _is_address(name: str) -> bool:
    try:
        ip_address(name)
    except ValueError:
        return False
    return True


def is_this_machine(name: str) -> bool:
    """Whether a name is one that a machine has for itself."""
    if name == "localhost" or name.endswith(".localhost"):
        return True
    if not _is_address(name):
        return False
    address = ip_address(name)
    return address.is_loopback or address.is_unspecified  # a browser asks 127.0.0.1 for 0.0.0.0, too


class Sites:
    """The names by which HTTP ports may be asked, and the sites whose pages may ask them."""

    def __init__(self, *names: str, settings: Sequence[str] = ("FRESHET_COMMON_HOSTS",)) -> None:
        """Create the check.

        Args:
            names: names, or lists of them with commas between; one that begins with a dot stands for all
                names below it. Names of this machine itself are always known.
            settings: that add a name, for the error's hint.
        """
        found = [name.strip().lower().removesuffix(".") for part in names for name in part.split(",")]
        self._names = {socket.gethostname().lower(), *(name for name in found if name)}
        self._above = tuple(name for name in self._names if name.startswith("."))
        self._settings = " or ".join(settings)
        self._passed: set[bytes] = set()  # Host headers

    def admit(self, headers: Mapping[bytes, bytes]) -> None:
        """Refuse requests by a name that is not ours, and those of other sites' pages.

        Without a Host header (HTTP/1.0, which no browser speaks) the name is not checked.

        Args:
            headers: by name in lower case.

        Raises:
            HttpError: 403 `host` or `origin`, with the setting that adds a name.
        """
        host = headers.get(b"host")
        if host is not None and host not in self._passed:
            self._check_host(host)
        origin = headers.get(b"origin")
        if origin is not None:
            self._check_origin(origin.decode("latin-1"), host)
        elif (
            headers.get(b"sec-fetch-site") == b"cross-site" and headers.get(b"sec-fetch-mode") != b"navigate"
        ):
            raise self._refused_page("Sec-Fetch-Site: cross-site")

    def _check_host(self, host: bytes) -> None:
        text = host.decode("latin-1")
        name = name_of(text)
        # The public DNS, which rebinding needs, has neither addresses nor names without a dot.
        if not (NO_DOT.fullmatch(name) or _is_address(name) or self._knows(name)):
            raise HttpError(
                403,
                "host",
                "this port is not asked for by this name",
                expected=["localhost", "an IP address", "a name without dots", *sorted(self._names)],
                found=text[:SHOWN_CHARS],
                hint=f"add the name to {self._settings}, or have the proxy send a Host that is expected",
            )
        if len(self._passed) < MOST_REMEMBERED:
            self._passed.add(host)

    def _check_origin(self, origin: str, host: bytes | None) -> None:
        name = name_of(origin.partition("://")[2])
        asked = "" if host is None else name_of(host.decode("latin-1"))
        if not (name and (name == asked or self._knows(name))):
            raise self._refused_page(origin[:SHOWN_CHARS])

    def _knows(self, name: str) -> bool:
        return (
            name in self._names or is_this_machine(name) or (bool(self._above) and name.endswith(self._above))
        )

    def _refused_page(self, found: str) -> HttpError:
        return HttpError(
            403,
            "origin",
            "a page of another site may not ask this",
            expected=["no page", "a page of this port's own name", *sorted(self._names)],
            found=found,
            hint=f"add the page's site to {self._settings} if it may send, or send from a server",
        )


def require_json(request: Request) -> None:
    """Refuse a body that is not sent as JSON, or is compressed.

    Raises:
        HttpError: 415 `content_type` or `encoding`.
    """
    require_identity(request)
    if request.content_type != "application/json":
        raise wrong_type(request.content_type, "application/json")


def require_identity(request: Request) -> None:
    """Refuse a compressed body.

    Raises:
        HttpError: 415 `encoding`.
    """
    found = request.headers.get(b"content-encoding")
    if found is None:
        return
    coding = found.decode("latin-1")
    if coding.strip().lower() not in ("", "identity"):
        raise HttpError(
            415,
            "encoding",
            "compressed bodies are not taken",
            expected="identity",
            found=coding[:SHOWN_CHARS],
            hint="send the body as it is, without the header Content-Encoding",
        )


def wrong_type(found: str, *types: str) -> HttpError:
    """The error for a body of another content type than `types`, or of none. The first one is the usual."""
    return HttpError(
        415,
        "content_type",
        "bodies of this content type are not taken",
        expected=list(types) if len(types) > 1 else types[0],
        found=found[:SHOWN_CHARS] or "no content type",
        hint=f"send the header Content-Type: {types[0]} (curl: -H 'content-type: {types[0]}')",
    )
