"""Damaged state that the main work does not depend on: it is left out, counted and logged.

The rule: bytes that only advise (a heartbeat, a plan, an alias, an old version, a page of the console) end no
loop. The reader leaves out the one record or file, calls `skip`, and goes on. State that learning starts from
(rows and offsets of a trainer, claims of a later release) is not skipped.

Counts are per process. `freshet_skipped_state_total` and `skipped` in `/status` show them.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping

import structlog

__all__ = ["KINDS", "forget", "skip", "skipped", "skipped_status"]

KINDS: Mapping[str, str] = {
    "control": "records of `<model>.control`: heartbeats, plans, loads and claims that do not parse",
    "versions": "records of `<model>.versions`",
    "alias": "aliases of versions that name no number",
    "version": "stored versions that cannot be read, or that belong to another model, and entries beside "
    "them that are no versions",
    "row_delta": "records of `<model>.rows`",
    "row_page": "rows of buckets in the row store whose pages are damaged, as inference reads them",
    "row_value": "rows with a value that is not finite",
    "world": "claims of `world` that do not name ranks",
    "run_state": "files of the run folder's `state`",
    "console": "records of `<model>.measures`, of commits and of dead letters that the console cannot show",
}
"""What is skipped, by the label of the metric."""

_MOST_REMEMBERED = 1_000
"""Places whose damage is counted once. A file is read again every second, and is still the same damage."""

_log = structlog.get_logger("freshet.observability.skipped")
_lock = threading.Lock()
_counts = dict.fromkeys(KINDS, 0)
_newest: dict[str, str] = {}
_remembered: dict[tuple[str, str, str], None] = {}


def skip(kind: str, where: str, reason: str, count: int = 1) -> None:
    """Count state that was left out, and log it. Thread-safe.

    Args:
        kind: one of KINDS.
        where: the topic with partition and offset, or the path. The same place with the same reason counts
        once.
        reason: what was expected and found there.
        count: how many records, rows or files.
    """
    with _lock:
        key = (kind, where, reason)
        if key in _remembered:
            return
        _remembered[key] = None
        if len(_remembered) > _MOST_REMEMBERED:
            del _remembered[next(iter(_remembered))]
        _counts[kind] += count
        _newest[kind] = reason if where in reason else f"{where}: {reason}"
    if structlog.is_configured():  # a verb of the command line prints its result and nothing else
        _log.error("damaged state was left out", why=kind, path=where, reason=reason)


def skipped() -> Mapping[str, int]:
    """{kind: how many were left out since the process started}, every kind of KINDS."""
    with _lock:
        return dict(_counts)


def skipped_status() -> Mapping[str, Mapping[str, object]]:
    """{kind: {"count", "newest"}} of the kinds that were left out: the newest place with its reason."""
    with _lock:
        return {
            kind: {"count": count, "newest": _newest.get(kind, "")[:500]}
            for kind, count in _counts.items()
            if count
        }


def forget() -> None:
    """Count from 0 again, as a new process does: for tests."""
    with _lock:
        _counts.update(dict.fromkeys(KINDS, 0))
        _newest.clear()
        _remembered.clear()
