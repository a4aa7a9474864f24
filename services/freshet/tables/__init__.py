"""The parameter table: unique keys of a batch (`Plan`); rows, optimiser state and offsets (`Store`).

A facade over the native core, without I/O; time is the event time of its arguments. Modules are imported on
first use.

    plan = Plan(tables=feature_tables, buckets=1024)
    plan.build(keys, feature_starts)
    store = Store.of(spec, layout)
    store.lookup(group, plan, out)
    store.push(ranges, clock_ms, [KeyGroup(group, plan.keys, plan.tables, plan.bucket_starts)], [gradients])
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from freshet.tables.changes import BucketChanges, Flushed, KnownPushes, Published, PublishedTable
    from freshet.tables.plan import KeyGroup, Plan, RowSteps, UniqueKeys
    from freshet.tables.store import (
        Evicted,
        Memory,
        PushOutcome,
        RowsUnread,
        Store,
        TableOptions,
        UnpackedTable,
        UnreadKeys,
    )

__all__ = [
    "BucketChanges",
    "Evicted",
    "Flushed",
    "KeyGroup",
    "KnownPushes",
    "Memory",
    "Plan",
    "Published",
    "PublishedTable",
    "PushOutcome",
    "RowSteps",
    "RowsUnread",
    "Store",
    "TableOptions",
    "UniqueKeys",
    "UnpackedTable",
    "UnreadKeys",
]

_HOME = {
    **dict.fromkeys(("BucketChanges", "Flushed", "Published", "PublishedTable"), "changes"),
    "KnownPushes": "changes",
    "Plan": "plan",
    "KeyGroup": "plan",
    "RowSteps": "plan",
    "UniqueKeys": "plan",
    **dict.fromkeys(
        (
            "Evicted",
            "Memory",
            "PushOutcome",
            "RowsUnread",
            "Store",
            "TableOptions",
            "UnpackedTable",
            "UnreadKeys",
        ),
        "store",
    ),
}


def __getattr__(name: str) -> object:
    import importlib  # noqa: PLC0415 - deferred with the native core

    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
