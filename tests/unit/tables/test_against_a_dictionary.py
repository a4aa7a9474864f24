"""A store equals a dictionary under the same random operations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from freshet.tables import Flushed, PushOutcome, Store, TableOptions
from freshet.types import U64, PackedRows, bucket_of
from tests.fixtures.effort import examples
from tests.fixtures.tables import counting_group, keys_of, look_up, push, store_of

BUCKETS, PARTITIONS, TTL_MS = 4, 2, 60_000
GROUPS = {0: 0, 1: 0, 2: 1}  # table -> store group
Row = tuple[int, int]  # table, key

numbers = st.lists(st.integers(1, 60), min_size=1, max_size=30, unique=True)
tables = st.sampled_from(sorted(GROUPS))


@dataclass
class Model:
    """Expected content of the store."""

    rows: dict[Row, float] = field(default_factory=dict)  # sum of what was pushed, negated
    touched: dict[Row, int] = field(default_factory=dict)  # seconds
    changed: set[Row] = field(default_factory=set)  # ever pushed or imported
    dirty: dict[str, set[Row]] = field(default_factory=lambda: {"publish": set(), "flush": set()})
    gone: dict[str, set[Row]] = field(default_factory=lambda: {"publish": set(), "flush": set()})
    clock: dict[int, int] = field(default_factory=lambda: dict.fromkeys(range(BUCKETS), 0))
    offsets: list[int] = field(default_factory=lambda: [0] * PARTITIONS)

    def forget(self, row: Row) -> None:
        for name in ("publish", "flush"):
            if row in self.changed:
                self.gone[name].add(row)
            self.dirty[name].discard(row)
        self.changed.discard(row)
        del self.rows[row], self.touched[row]

    def tombstones(self, name: str) -> set[Row]:
        taken = {row for row in self.gone[name] if row not in self.changed}
        self.gone[name] = set()
        return taken


@dataclass
class Unanswered:
    """A collected flush, and the expected content of the row store after it."""

    flushed: Flushed
    whole: bool
    expected: dict[Row, float]


class StoreMachine(RuleBasedStateMachine):
    """Random lookups, pushes, flushes, publishes, evictions, removals and imports."""

    @initialize()
    def start(self) -> None:
        options = {1: TableOptions(ttl_ms=TTL_MS)}
        self.store: Store = store_of(
            counting_group((0, 1)), counting_group((2,), index=1), buckets=BUCKETS, options=options
        )
        self.model = Model()
        self.stored: dict[Row, float] = {}  # what the row store would hold
        self.unanswered: Unanswered | None = None
        self.served: dict[Row, float] = {}
        self.now_ms = 1_000_000

    def bucket(self, key: int) -> int:
        return int(bucket_of(np.array([key], np.uint64), BUCKETS)[0])

    def keys(self, chosen: list[int]) -> U64:
        return keys_of(*chosen)

    @rule(table=tables, chosen=numbers, create=st.booleans())
    def looks_up(self, table: int, chosen: list[int], create: bool) -> None:
        keys = self.keys(chosen)
        found = look_up(self.store, keys, table, GROUPS[table], create=create)

        assert found[:, 0].tolist() == [self.model.rows.get((table, k), 0.0) for k in keys.tolist()]
        if create:
            for k in keys.tolist():
                row = (table, k)
                self.model.rows.setdefault(row, 0.0)
                seconds = self.model.clock[self.bucket(k)] // 1000
                self.model.touched[row] = max(self.model.touched.get(row, 0), seconds)

    @rule(
        table=tables,
        chosen=numbers,
        partition=st.integers(0, PARTITIONS - 1),
        shift=st.sampled_from([0, 0, 0, 0, -2, 3]),
        later_ms=st.integers(0, 20_000),
        not_finite=st.booleans(),
    )
    def pushes(
        self, table: int, chosen: list[int], partition: int, shift: int, later_ms: int, not_finite: bool
    ) -> None:
        model = self.model
        self.now_ms += later_ms
        keys = self.keys(chosen)
        gradients = np.repeat(np.arange(1, len(keys) + 1, dtype=np.float32)[:, None], 2, axis=1)
        if not_finite:
            gradients[0, 1] = np.nan
        start = max(0, model.offsets[partition] + shift)
        outcome = push(
            self.store,
            [(partition, start, start + 2)],
            keys,
            gradients,
            table=table,
            group_index=GROUPS[table],
            clock_ms=self.now_ms,
        )

        if start != model.offsets[partition]:
            skipped = start + 2 <= model.offsets[partition]
            assert outcome is (PushOutcome.SKIPPED if skipped else PushOutcome.REFUSED)
            return
        assert outcome is PushOutcome.APPLIED
        model.offsets[partition] += 2
        for b in model.clock:
            model.clock[b] = max(model.clock[b], self.now_ms)
        for k, g in zip(keys.tolist(), gradients, strict=True):
            row = (table, k)
            model.rows.setdefault(row, 0.0)
            model.touched[row] = max(model.touched.get(row, 0), self.now_ms // 1000)
            if np.isnan(g).any():
                continue
            model.rows[row] -= float(g[0])
            model.changed.add(row)
            model.dirty["publish"].add(row)
            model.dirty["flush"].add(row)

    @rule(answered=st.booleans(), whole=st.booleans())
    def flushes(self, answered: bool, whole: bool) -> None:
        """Keep an unanswered flush, and repeat it unchanged before the next is collected."""
        self.writes()
        model = self.model
        flushed = self.store.collect_whole(range(BUCKETS)) if whole else self.store.collect_flush()
        rows = {(p.table, k) for part in flushed for p in part.rows for k in p.keys.tolist()}
        removed = {(table, k) for part in flushed for table, keys in part.removed for k in keys.tolist()}
        tombstones = model.tombstones("flush")

        assert sum(len(packed.keys) for part in flushed for packed in part.rows) == len(rows)
        assert rows == (model.changed if whole else model.dirty["flush"])
        assert removed == (set() if whole else tombstones)
        for part in flushed:
            assert part.applied == dict(enumerate(model.offsets))
            assert part.clock_ms == model.clock[part.bucket]
        model.dirty["flush"] = set()
        expected = {row: model.rows[row] for row in model.changed}
        self.unanswered = Unanswered(flushed, whole, expected)
        if answered:
            self.writes()

    @rule()
    def writes(self) -> None:
        """Write the last flush to the row store, which then equals the store at that time."""
        if self.unanswered is None:
            return
        sent, self.unanswered = self.unanswered, None
        stored = {} if sent.whole else self.stored
        for part in sent.flushed:
            for table, keys in part.removed:
                for k in keys.tolist():
                    stored.pop((table, k), None)
            for packed in part.rows:
                values = packed.records[:, 8:16].copy().view(np.float32)[:, 0].tolist()
                stored |= {(packed.table, k): v for k, v in zip(packed.keys.tolist(), values, strict=True)}
        self.stored = stored
        assert sum(part.stored for part in sent.flushed) == len(stored)
        assert stored == sent.expected

    @rule(most=st.integers(1, 40), fails=st.booleans())
    def publishes(self, most: int, fails: bool) -> None:
        model = self.model
        published = self.store.collect_publish(most)
        assert len(published) == min(most, len(model.dirty["publish"]))
        for part in published.tables:
            taken = {(part.table, k) for k in part.keys.tolist()}
            assert len(taken) == len(part.keys)
            assert taken <= model.dirty["publish"]
            for k, value in zip(part.keys.tolist(), part.values[:, 0].tolist(), strict=True):
                assert value == model.rows[(part.table, k)]
            if fails:
                continue
            model.dirty["publish"] -= taken
            self.served |= {row: model.rows[row] for row in taken}
            for k in part.removed.tolist():
                self.served.pop((part.table, k), None)
        if fails:
            self.store.put_back_published(published.tables)
        assert self.store.pending_publish() == len(model.dirty["publish"])

    @rule()
    def publishes_all(self) -> None:
        self.publishes(most=1_000, fails=False)
        assert self.served == {row: self.model.rows[row] for row in self.model.changed}

    @rule(budget=st.integers(1, 200), later_ms=st.integers(0, TTL_MS))
    def evicts(self, budget: int, later_ms: int) -> None:
        self.now_ms += later_ms
        while not self.store.evict(self.now_ms, budget).finished:
            pass
        for row, seconds in list(self.model.touched.items()):
            old = (self.now_ms // 1000 - seconds) * 1000 >= TTL_MS
            if row[0] == 1 and old and row not in self.model.dirty["flush"]:
                self.model.forget(row)

    @rule(table=tables, chosen=numbers)
    def removes(self, table: int, chosen: list[int]) -> None:
        there = [k for k in self.keys(chosen).tolist() if (table, k) in self.model.rows]

        assert self.store.remove(table, self.keys(chosen)) == len(there)
        for k in there:
            self.model.forget((table, k))

    @rule(table=tables)
    def restores_rows_from_the_row_store(self, table: int) -> None:
        """Import stored rows that are here unchanged, without an effect."""
        clean = [
            k
            for (t, k) in self.stored
            if t == table and (t, k) in self.model.changed - self.model.dirty["flush"]
        ]
        if not clean:
            return
        keys = np.array(clean, np.uint64)
        found, rows = self.store.export_rows(table, keys)
        assert found.all()
        self.store.import_rows(PackedRows(table, keys, rows.records))

    @invariant()
    def counts_agree(self) -> None:
        if not hasattr(self, "store"):
            return
        rows = self.store.memory().rows
        assert rows == {t: sum(row[0] == t for row in self.model.rows) for t in GROUPS}
        assert self.store.pending_flush() == len(self.model.dirty["flush"])
        assert self.store.applied() == {p: [offset] for p, offset in enumerate(self.model.offsets)}


TestStore: Callable[[], object] = StoreMachine.TestCase
StoreMachine.TestCase.settings = settings(deadline=None, max_examples=examples(60), stateful_step_count=40)
