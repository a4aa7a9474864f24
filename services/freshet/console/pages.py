"""The page's files: read once at the start, served from memory. No path from outside touches the disk."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from freshet.http.messages import Request, Response

__all__ = ["PAGE", "Page", "read_pages"]

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
"""Suffixes that are served; what has another one is no part of the page."""

LARGEST = 4 << 20


@dataclass(frozen=True, slots=True)
class Page:
    """One file in memory."""

    body: bytes
    content_type: bytes
    etag: bytes

    def answer(self, request: Request) -> Response:
        """The file, or 304 if the browser has it already."""
        headers = ((b"etag", self.etag), (b"cache-control", b"no-cache"))
        if self.etag in [tag.strip() for tag in request.headers.get(b"if-none-match", b"").split(b",")]:
            return Response(304, b"", self.content_type, headers)
        return Response(200, self.body, self.content_type, headers)


def read_pages(folder: Path = PAGE) -> dict[str, Page]:
    """{path as it is asked for: file}: index.html is `/`, all others stand below `/static/`."""
    pages: dict[str, Page] = {}
    for file in sorted(folder.rglob("*")):
        content_type = TYPES.get(file.suffix)
        if content_type is None or not file.is_file() or file.stat().st_size > LARGEST:
            continue
        body = file.read_bytes()
        name = file.relative_to(folder).as_posix()
        path = "/" if name == "index.html" else f"/static/{name}"
        pages[path] = Page(body, content_type, b'"%s"' % hashlib.sha256(body).hexdigest()[:20].encode())
    return pages
