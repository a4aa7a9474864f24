"""Files of the page, served from memory so that no client's path reaches the disk; headers of all answers.

Host names and origins are checked as on every HTTP port (`freshet.http.browser_checks`), and a change needs a
token that no browser sends by itself.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from freshet.http.messages import Headers, Request, Response

SITE_SETTINGS = ("FRESHET_COMMON_HOSTS", "FRESHET_CONSOLE_HOST")
"""Settings that add a host name of the console."""

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
"""Headers of every answer: the page loads, runs and frames nothing of other sites, and sends no referrer."""

PAGE = Path(__file__).parent / "page"

TYPES: Mapping[str, bytes] = {
    ".html": b"text/html; charset=utf-8",
    ".css": b"text/css; charset=utf-8",
    ".js": b"text/javascript; charset=utf-8",
    ".json": b"application/json",
    ".txt": b"text/plain; charset=utf-8",
    ".svg": b"image/svg+xml",
    ".png": b"image/png",
    ".ico": b"image/x-icon",
    ".woff2": b"font/woff2",
}
"""Suffixes of the page's files; other files are not served."""

LARGEST = 4 << 20


@dataclass(frozen=True, slots=True)
class Page:
    """A file in memory."""

    body: bytes
    content_type: bytes
    etag: bytes

    def answer(self, request: Request) -> Response:
        """Return the file, or 304 if the browser has it already."""
        headers = ((b"etag", self.etag), (b"cache-control", b"no-cache"))
        if self.etag in [tag.strip() for tag in request.headers.get(b"if-none-match", b"").split(b",")]:
            return Response(304, b"", self.content_type, headers)
        return Response(200, self.body, self.content_type, headers)


def read_pages() -> dict[str, Page]:
    """Return {path of the URL: file}: index.html is `/`, all others are below `/static/`."""
    pages: dict[str, Page] = {}
    for file in sorted(PAGE.rglob("*")):
        content_type = TYPES.get(file.suffix)
        if content_type is None or not file.is_file() or file.stat().st_size > LARGEST:
            continue
        body = file.read_bytes()
        name = file.relative_to(PAGE).as_posix()
        path = "/" if name == "index.html" else f"/static/{name}"
        pages[path] = Page(body, content_type, b'"%s"' % hashlib.sha256(body).hexdigest()[:20].encode())
    return pages
