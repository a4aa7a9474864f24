"""Records and files that readers skip: damaged state, and records without a value; counts of this process.

Bytes that only advise (a heartbeat, a plan, an alias, an old version, a page of the console) end no loop: the
reader leaves out the one record or file, calls `skip` and continues. State that learning starts from (rows
and offsets of a trainer, claims of a later release) is not skipped. `freshet_skipped_state_total` and
`skipped` in `/status` show the counts.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping

import structlog

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
"""{label of the metric: the state that is skipped}"""

_MOST_REMEMBERED = 1_000
"""Places of which the damage is counted once: a damaged file is read again every second."""

_log = structlog.get_logger("freshet.observability.skipped")
_lock = threading.Lock()
_counts = dict.fromkeys(KINDS, 0)
_tombstones: Counter[str] = Counter()
_newest: dict[str, str] = {}
_remembered: dict[tuple[str, str, str], None] = {}


def skip(kind: str, where: str, reason: str, count: int = 1) -> None:
    """Count state that was left out, and log it. Thread-safe.

    Args:
        kind: one of KINDS.
        where: the topic with partition and offset, or the path. The same place with the same reason counts
            once.
        reason: the expected and the found value.
        count: number of records, rows or files.
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
    """Return {kind: number left out since the process started} for every kind of KINDS."""
    with _lock:
        return dict(_counts)


def skipped_status() -> Mapping[str, Mapping[str, object]]:
    """Return {kind: {count, newest place with its reason}} of the kinds that were left out."""
    with _lock:
        return {
            kind: {"count": count, "newest": _newest.get(kind, "")[:500]}
            for kind, count in _counts.items()
            if count
        }


def forget() -> None:
    """Reset the counts of skipped state, for tests."""
    with _lock:
        _counts.update(dict.fromkeys(KINDS, 0))
        _newest.clear()
        _remembered.clear()


def count_tombstones(topic: str, records: int) -> None:
    """Count records without a value, such as Kafka's tombstones, that a reader skipped. Thread-safe."""
    with _lock:
        _tombstones[topic] += records


def tombstones() -> Mapping[str, int]:
    """Return {topic: records without a value that were skipped since the process started}."""
    with _lock:
        return dict(_tombstones)
