"""Checks against pages in browsers that can reach our ports: any open page can send requests there.

A page of another site cannot read responses, but its requests take effect: events would train the model,
rankings would be logged as served (cross-site request forgery). A page with a host name that was made to
resolve to a port's address (DNS rebinding) can read responses, too. So every HTTP port checks three headers,
with and without tokens:

- the name in `Host`: rebinding needs a name in the public DNS, so a name with a dot must be known;
- the site in `Origin`, which browsers send with every POST, and which no page can change;
- `Content-Type` of bodies (`messages.require_json`): without a preflight, which OPTIONS answers without
  permission, a form or a page cannot send JSON.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Mapping, Sequence
from ipaddress import ip_address

from freshet.http.messages import SHOWN_CHARS, HttpError

MAX_REMEMBERED = 1_000
"""Accepted Host headers that are remembered."""

NO_DOT = re.compile(r"[a-z0-9_-]+")


def host_name(host: str) -> str:
    """Return the name in a Host header or an origin, without port, in lower case; "" if it is malformed."""
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
    """Return whether a name stands for the machine itself: localhost and loopback addresses."""
    if name == "localhost" or name.endswith(".localhost"):
        return True
    if not _is_address(name):
        return False
    address = ip_address(name)
    return address.is_loopback or address.is_unspecified  # browsers connect to 127.0.0.1 for 0.0.0.0


class AllowedSites:
    """Host names by which HTTP ports may be addressed, and sites with pages that may send requests."""

    def __init__(self, *names: str, settings: Sequence[str] = ("FRESHET_COMMON_HOSTS",)) -> None:
        """Args:
        names: names, or lists of names separated by commas; a leading dot stands for all names below.
            Names of this machine are always allowed.
        settings: names of settings that add a name, for errors.
        """
        found = [name.strip().lower().removesuffix(".") for part in names for name in part.split(",")]
        self._names = {socket.gethostname().lower(), *(name for name in found if name)}
        self._above = tuple(name for name in self._names if name.startswith("."))
        self._settings = " or ".join(settings)
        self._passed: set[bytes] = set()  # Host headers

    def check(self, headers: Mapping[bytes, bytes]) -> None:
        """Check Host and Origin of a request. Without a Host header (HTTP/1.0) the name is not checked.

        Args:
            headers: headers by name in lower case.

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
        name = host_name(text)
        # The public DNS, which rebinding needs, has neither addresses nor names without a dot.
        if not (NO_DOT.fullmatch(name) or _is_address(name) or self._knows(name)):
            raise HttpError(
                403,
                "host",
                "this port does not have this name",
                expected=["localhost", "an IP address", "a name without dots", *sorted(self._names)],
                found=text[:SHOWN_CHARS],
                hint=f"add the name to {self._settings}, or have the proxy send a Host that is expected",
            )
        if len(self._passed) < MAX_REMEMBERED:
            self._passed.add(host)

    def _check_origin(self, origin: str, host: bytes | None) -> None:
        name = host_name(origin.partition("://")[2])
        asked = "" if host is None else host_name(host.decode("latin-1"))
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
