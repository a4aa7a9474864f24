"""Adapters by URL scheme, such as `sqlite:/path` or `file:/path`.

A distribution adds a scheme by an entry point of the group `freshet.eventlog`, `freshet.rowstore` or
`freshet.versions`. The entry point's name is the scheme; its object takes the whole URL and returns the
adapter.
"""

from __future__ import annotations

from collections.abc import Callable
from difflib import get_close_matches
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any, cast

from freshet.errors import ConfigError
from freshet.log import EventLog
from freshet.rows.store import RowStore
from freshet.versions import VersionStore

BUILT_IN = {
    "freshet.eventlog": {
        "sqlite": "freshet.log.sqlite.event_log:open_url",
        "kafka": "freshet.log.kafka.event_log:open_url",
    },
    "freshet.rowstore": {
        "sqlite": "freshet.rows.sqlite.row_store:open_url",
        "redis": "freshet.rows.redis.row_store:open_url",
        "rediss": "freshet.rows.redis.row_store:open_url",
    },
    "freshet.versions": {
        "file": "freshet.versions.folder:open_url",
        "s3": "freshet.versions.objects:open_url",
        "gs": "freshet.versions.objects:open_url",
        "az": "freshet.versions.objects:open_url",
    },
}
"""Listed here, not as entry points, so that a source tree works without installation, and without reading the
metadata of every installed distribution."""


def open_eventlog(url: str) -> EventLog:
    """Open the event log of a URL.

    Raises:
        ConfigError: the scheme is unknown, the URL is invalid, or the adapter lacks a method.
        Unavailable: the log cannot be reached.
        Mismatch: the log is of another format or model.
        Corrupt: stored bytes are damaged.
    """
    return cast(EventLog, _open("freshet.eventlog", EventLog, url))


def open_rowstore(url: str) -> RowStore:
    """Open the row store of a URL; raises as `open_eventlog`."""
    return cast(RowStore, _open("freshet.rowstore", RowStore, url))


def open_versions(url: str) -> VersionStore:
    """Open the version store of a URL; raises as `open_eventlog`."""
    return cast(VersionStore, _open("freshet.versions", VersionStore, url))


def _open(group: str, protocol: type, url: str) -> object:
    adapter: object = _opener(group, url)(url)
    kind = type(adapter)
    demanded = sorted(name for name in vars(protocol) if not name.startswith("_"))
    missing = [name for name in demanded if not (hasattr(kind, name) or hasattr(adapter, name))]
    if missing:
        raise ConfigError(
            group.removeprefix("freshet."),
            "url",
            url.partition(":")[0] + ":",
            f"an adapter with every method of {protocol.__module__}.{protocol.__name__}; "
            f"{kind.__module__}.{kind.__qualname__} lacks {', '.join(missing)}",
            "install a release of the adapter's distribution for this release of freshet",
        )
    return adapter


def _opener(group: str, url: str) -> Callable[[str], Any]:
    scheme, colon, _ = url.partition(":")
    built_in = BUILT_IN[group]
    if colon and scheme in built_in:
        module, _, function = built_in[scheme].partition(":")
        return cast(Callable[[str], Any], getattr(import_module(module), function))
    added = {point.name: point for point in entry_points(group=group)}
    if colon and scheme in added:
        return cast(Callable[[str], Any], added[scheme].load())
    known = sorted({*built_in, *added})
    close = get_close_matches(scheme, known, 1)
    raise ConfigError(
        group.removeprefix("freshet."),
        "url",
        url,
        "a URL with one of the schemes " + ", ".join(f"{name}:" for name in known),
        f"did you mean {close[0]}:?" if close else "is the distribution that provides this scheme installed?",
    )
