"""The parameter table: unique keys of a batch (`Plan`); rows, optimiser state and offsets (`Store`).

A facade over the native core, without I/O; time is the event time of its arguments.

    plan = Plan(tables=feature_tables, buckets=1024)
    plan.build(keys, feature_starts)
    store = Store.of(spec, layout)
    store.lookup(group, plan, out)
    store.push(ranges, clock_ms, [KeyGroup(group, plan.keys, plan.tables, plan.bucket_starts)], [gradients])
"""

from freshet.tables.bounds import NO_BOUND, PERHAPS_ON_DISK, Evicted, RowsBound, SsdRows, TableOptions
from freshet.tables.changes import BucketChanges, Flushed, KnownPushes, Published, PublishedTable
from freshet.tables.plan import KeyGroup, Plan, RowSteps, UniqueKeys
from freshet.tables.store import (
    Memory,
    PushOutcome,
    RowsUnread,
    Store,
    UnpackedTable,
    UnreadKeys,
)

__all__ = [
    "NO_BOUND",
    "PERHAPS_ON_DISK",
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
    "RowsBound",
    "RowsUnread",
    "SsdRows",
    "Store",
    "TableOptions",
    "UniqueKeys",
    "UnpackedTable",
    "UnreadKeys",
]
