"""Several threads on one store."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable

import numpy as np

from freshet import _native
from freshet.tables import PushOutcome, TableOptions
from freshet.tables.plan import native_slots
from freshet.types import OffsetRange
from tests.fixtures.tables import batch_of, counting_group, keys_of, look_up, store_of


def in_threads(*work: Callable[[], None]) -> None:
    failures: list[BaseException] = []

    def guarded(run: Callable[[], None]) -> None:
        try:
            run()
        except BaseException as failure:  # raised again below, in the test's thread
            failures.append(failure)

    threads = [threading.Thread(target=guarded, args=(run,)) for run in work]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


def test_concurrent_pushes_of_two_partitions_all_apply() -> None:
    threads, pushes = 4, 150
    store = store_of(counting_group(), buckets=64, partitions=threads)
    batch = batch_of(keys_of(*range(1, 301)), buckets=64)
    gradient = np.ones((300, 2), np.float32)

    def lane(partition: int) -> None:
        for at in range(pushes):
            outcome = store.push([OffsetRange(partition, at, at + 1)], at, [batch], [gradient])
            assert outcome is PushOutcome.APPLIED

    in_threads(*(lambda p=p: lane(p) for p in range(threads)))

    assert (look_up(store, keys_of(*range(1, 301))) == -threads * pushes).all()
    assert store.applied() == {p: [pushes] for p in range(threads)}


def test_the_same_push_from_two_threads_is_applied_once() -> None:
    store = store_of(counting_group(), buckets=64, partitions=2)
    batch = batch_of(keys_of(*range(1, 301)), buckets=64)
    gradient = np.ones((300, 2), np.float32)
    outcomes: list[PushOutcome] = []

    def lane() -> None:
        for at in range(150):
            ranges = [OffsetRange(0, at, at + 1), OffsetRange(1, at, at + 1)]
            while (outcome := store.push(ranges, at, [batch], [gradient])) is PushOutcome.REFUSED:
                pass
            outcomes.append(outcome)

    in_threads(lane, lane)

    assert outcomes.count(PushOutcome.APPLIED) == 150
    assert (look_up(store, keys_of(*range(1, 301))) == -150).all()


def test_concurrent_flushes_and_evictions_lose_nothing() -> None:
    pushes, rows = 200, 400
    options = {0: TableOptions(ttl_ms=3_600_000, max_rows=10 * rows)}
    store = store_of(counting_group(), buckets=64, partitions=2, options=options)
    gradient = np.ones((rows, 2), np.float32)
    batch = batch_of(keys_of(*range(1, rows + 1)), buckets=64)
    done = threading.Event()
    stored: dict[int, float] = {}
    torn: list[str] = []

    def lane(partition: int) -> None:
        for at in range(pushes):
            store.push([OffsetRange(partition, at, at + 1)], at, [batch], [gradient])

    def owner() -> None:
        last = False
        while not last:
            last = done.is_set()
            for part in store.collect_flush():
                total = sum(part.applied.values())
                for packed in part.rows:
                    values = packed.records[:, 8:16].copy().view(np.float32)[:, 0]
                    stored.update(zip(packed.keys.tolist(), values.tolist(), strict=True))
                    if not (values == -total).all():
                        torn.append(f"bucket {part.bucket}: offsets {part.applied}, rows {values}")
            store.collect_publish(100)
            store.evict(1_000, 500)

    def lanes() -> None:
        try:
            in_threads(lambda: lane(0), lambda: lane(1))
        finally:
            done.set()

    in_threads(lanes, owner)

    assert torn == []
    assert stored == dict.fromkeys(keys_of(*range(1, rows + 1)).tolist(), -2.0 * pushes)


def test_lookups_during_growth_read_whole_rows() -> None:
    store = store_of(counting_group(), buckets=16, partitions=1)
    done = threading.Event()

    def grower() -> None:
        try:
            for at in range(60):
                keys = keys_of(*range(1 + 500 * at, 501 + 500 * at))
                batch = batch_of(keys)
                store.push([OffsetRange(0, at, at + 1)], 0, [batch], [np.ones((500, 2), np.float32)])
        finally:
            done.set()

    def reader() -> None:
        while not done.is_set():
            rows = look_up(store, keys_of(*range(1, 30_001, 7)), create=False)
            assert (rows[:, 0] == rows[:, 1]).all()
            assert set(np.unique(rows)) <= {0.0, -1.0}

    in_threads(grower, reader)

    assert store.memory().rows == {0: 30_000}


def test_other_threads_run_while_a_store_is_destroyed() -> None:
    """To free a large store's memory takes the system up to seconds."""
    groups = [([0], native_slots(counting_group()), False)]
    turn, ran = threading.Lock(), threading.Event()

    def take_turn() -> None:
        turn.acquire()
        ran.set()

    thread = threading.Thread(target=take_turn)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1000)  # a thread gives up the GIL only where its code says so
    try:
        turn.acquire()
        thread.start()
        turn.release()
        until = time.monotonic() + 60
        while not ran.is_set() and time.monotonic() < until:
            _native.Store(groups, [(0, 0, 0, 1)], 16, 1, 7, False, True, True, True)
        assert ran.is_set()
    finally:
        sys.setswitchinterval(interval)
        thread.join()
