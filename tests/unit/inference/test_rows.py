"""Following rows: bootstrap from the row store, deltas from the log, fences, and outages."""

from __future__ import annotations

import contextlib
import sqlite3
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from freshet.config.spec.topics import ROWS_PARTITIONS
from freshet.errors import Corrupt, DataLost, FreshetError, Unavailable
from freshet.inference.rows import BucketView, FollowedTable, RowFollower, ServingTable
from freshet.log import EventLog
from freshet.log.sqlite.event_log import open_url as open_log
from freshet.observability.skipped_state import skipped
from freshet.rows.deltas import RowDelta, encode_rows
from freshet.rows.sqlite.row_store import open_url as open_store
from freshet.rows.store import RowStore, StoreIdentity
from freshet.tables.runs import runs_of
from freshet.testing.conditions import wait_for
from freshet.types import (
    F32,
    Append,
    Bucket,
    BytesColumn,
    Fence,
    Records,
    TimeMs,
    TopicPartition,
    bucket_of,
)
from tests.fixtures.tables import batch_of, keys_of
from tests.unit.inference.row_source import BUCKETS, KEY_0, TOPIC, Shard, serving_table


@pytest.fixture
def log(tmp_path: Path) -> Iterator[EventLog]:
    log = open_log(f"sqlite:{tmp_path}/log")
    yield log
    log.close()


@pytest.fixture
def store(tmp_path: Path) -> Iterator[RowStore]:
    store = open_store(f"sqlite:{tmp_path}/rows")
    yield store
    store.close()


@pytest.fixture
def shard(log: EventLog, store: RowStore) -> Shard:
    return Shard(log, store)


@pytest.fixture
def follow(log: EventLog, store: RowStore) -> Iterator[Callable[[], RowFollower]]:
    stop = threading.Event()
    threads: list[threading.Thread] = []

    def start() -> RowFollower:
        follower = RowFollower(log, store, TOPIC, serving_table, spec_hash="hash", wait_s=0.01)
        threads.append(threading.Thread(target=follower.run, args=(stop,)))
        threads[-1].start()
        return follower

    yield start
    stop.set()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()


def served(follower: RowFollower, *numbers: int) -> F32:
    sink = follower.state.sink
    assert isinstance(sink, ServingTable)
    batch = batch_of(keys_of(*numbers), buckets=BUCKETS)
    out = np.empty((len(numbers), 2), np.float32)
    sink.lookup(0, batch, out)
    in_order = np.empty(len(numbers), np.float32)
    in_order[batch.order] = out[:, 0]
    return in_order


def test_a_reader_that_starts_late_has_every_row_of_the_store(
    shard: Shard, follow: Callable[[], RowFollower]
) -> None:
    shard.train([1, 2, 3], 1.0, clock_ms=70)
    shard.publish()
    shard.flush()

    follower = follow()
    wait_for(lambda: follower.state.sink is not None)

    assert served(follower, 1, 2, 3, 4).tolist() == [1, 1, 1, 0]
    assert follower.state.event_time_ms == 70
    assert follower.state.reason == ""


def touched_s(follower: RowFollower, *numbers: int) -> list[int]:
    sink = follower.state.sink
    assert isinstance(sink, ServingTable)
    batch = batch_of(keys_of(*numbers), buckets=BUCKETS)
    out, touched = np.empty((len(numbers), 2), np.float32), np.empty(len(numbers), np.uint32)
    sink.lookup(0, batch, out, touched=touched)
    in_order = np.empty(len(numbers), np.uint32)
    in_order[batch.order] = touched
    return in_order.tolist()


def test_a_row_has_its_touch_time_from_store_and_log(shard: Shard, follow: Callable[[], RowFollower]) -> None:
    shard.train([1], 1.0, clock_ms=70_000)
    shard.train([2], 1.0, clock_ms=80_000)
    shard.flush()
    shard.train([3, 1], 1.0, clock_ms=90_999)

    follower = follow()
    wait_for(lambda: follower.state.sink is not None)
    assert touched_s(follower, 1, 2, 3, 4) == [70, 80, 0, 0]

    shard.publish()
    wait_for(lambda: served(follower, 3).tolist() == [1])
    for _ in range(2):  # looking is no learning
        assert touched_s(follower, 1, 3, 4) == [90, 90, 0]


def test_rows_published_and_not_yet_flushed_are_served(
    shard: Shard, follow: Callable[[], RowFollower]
) -> None:
    shard.train([1], 1.0)
    shard.publish()

    follower = follow()
    wait_for(lambda: follower.state.sink is not None)

    assert served(follower, 1).tolist() == [1]


def test_rows_change_as_deltas_come(shard: Shard, follow: Callable[[], RowFollower]) -> None:
    follower = follow()
    wait_for(lambda: follower.state.sink is not None)
    for n in range(1, 6):
        shard.train([7, 8], 1.0, clock_ms=100 + n)
        shard.publish()

    wait_for(lambda: served(follower, 7, 8).tolist() == [5, 5] and follower.state.event_time_ms == 105)


def test_an_evicted_row_is_served_no_longer(shard: Shard, follow: Callable[[], RowFollower]) -> None:
    shard.train([1, 2], 1.0)
    shard.publish()
    follower = follow()
    wait_for(lambda: follower.state.sink is not None)

    shard.table.remove(0, keys_of(1))
    shard.publish()

    wait_for(lambda: served(follower, 1).tolist() == [0])
    assert served(follower, 2).tolist() == [1]


def test_a_delta_of_a_lower_fence_changes_nothing(shard: Shard, follow: Callable[[], RowFollower]) -> None:
    shard.train([1], 1.0)
    shard.publish()
    shard.flush()
    follower = follow()
    wait_for(lambda: follower.state.sink is not None)

    stale = RowDelta(
        0, Fence(4), TimeMs(1), keys_of(1), np.full((1, 2), 99, np.float32), np.empty(0, np.uint64)
    )
    shard.send(stale)
    shard.train([2], 1.0, clock_ms=500)
    shard.publish()

    wait_for(lambda: follower.state.event_time_ms == 500)
    partition = int(bucket_of(keys_of(1), BUCKETS)[0]) * ROWS_PARTITIONS // BUCKETS
    end = shard.log.bounds(TopicPartition(TOPIC, partition)).end
    wait_for(lambda: follower.state.next[partition] == end)
    assert served(follower, 1).tolist() == [1]


def test_a_claim_without_a_flush_hides_no_delta(shard: Shard, log: EventLog, store: RowStore) -> None:
    """A failover may lose the claim, and the owner before goes on."""

    class Claimed:
        """The store, of which every bucket is claimed under fence 9 and was written under fence 5."""

        def metas(self, buckets: Sequence[Bucket]) -> object:
            metas = store.metas(buckets)
            return {b: replace(meta, fence=Fence(9), writer=Fence(5)) for b, meta in metas.items()}

        def __getattr__(self, name: str) -> object:
            return getattr(store, name)

    shard.train([1], 1.0)
    shard.publish()
    shard.flush()
    follower = RowFollower(log, Claimed(), TOPIC, serving_table, spec_hash="hash", wait_s=0.01)  # type: ignore[arg-type]
    stop = threading.Event()
    thread = threading.Thread(target=follower.run, args=(stop,))
    thread.start()
    try:
        wait_for(lambda: follower.state.sink is not None)
        shard.train([1], 1.0)
        shard.publish()
        wait_for(lambda: served(follower, 1).tolist() == [2])
    finally:
        stop.set()
        thread.join(60)


def test_a_corrupt_delta_is_left_out_and_counted(shard: Shard, follow: Callable[[], RowFollower]) -> None:
    follower = follow()
    wait_for(lambda: follower.state.sink is not None)
    for bad in (b"\xb2\x01 garbage", KEY_0):
        shard.raw(0, bad)
    shard.train([1], 1.0, clock_ms=9)
    shard.publish()

    wait_for(lambda: (follower.state.corrupt, follower.state.event_time_ms) == (2, 9))


def test_without_a_model_no_row_is_served_with_the_reason(
    log: EventLog, store: RowStore, follow: Callable[[], RowFollower]
) -> None:
    follower = follow()
    wait_for(lambda: "start its trainer" in follower.state.reason)
    assert follower.state.sink is None

    shard = Shard(log, store)
    shard.train([1], 1.0)
    shard.publish()
    wait_for(lambda: follower.state.sink is not None)


def test_a_store_of_another_spec_is_not_served(shard: Shard, log: EventLog, store: RowStore) -> None:
    follower = RowFollower(log, store, TOPIC, serving_table, spec_hash="other", wait_s=0.01)
    stop = threading.Event()
    thread = threading.Thread(target=follower.run, args=(stop,))
    thread.start()
    try:
        wait_for(lambda: "start it with the spec of the store" in follower.state.reason)
        assert follower.state.sink is None
    finally:
        stop.set()
        thread.join(60)


def test_an_unforeseen_error_is_reported_and_following_goes_on(
    shard: Shard, log: EventLog, store: RowStore
) -> None:
    tables: list[ServingTable] = []

    def make() -> ServingTable:
        if not tables:
            tables.append(serving_table())
            raise RuntimeError("odd")
        return serving_table()

    shard.train([1], 1.0)
    shard.publish()
    follower = RowFollower(log, store, TOPIC, make, spec_hash="hash", wait_s=0.01)
    stop = threading.Event()
    thread = threading.Thread(target=follower.run, args=(stop,))
    thread.start()
    try:
        wait_for(lambda: "RuntimeError: odd" in follower.state.reason)
        wait_for(lambda: follower.state.sink is not None)
    finally:
        stop.set()
        thread.join(60)


def test_row_store_is_not_read_again_after_a_pause_of_the_log(
    shard: Shard, log: EventLog, store: RowStore
) -> None:
    """A broker that is silent for a second would else have every server read all rows anew."""
    away, scans = threading.Event(), [0]

    class Counted:
        """The store, whose scans are counted."""

        def scan(self, buckets: Sequence[Bucket]) -> object:
            scans[0] += 1
            return store.scan(buckets)

        def __getattr__(self, name: str) -> object:
            return getattr(store, name)

    class Flaky:
        """The log, whose readers are away while the event is set."""

        def reader(self) -> object:
            inner = log.reader()

            class Reading:
                def poll(self, most: int, wait_s: float) -> object:
                    if away.is_set():
                        raise Unavailable("the brokers gave no answer")
                    return inner.poll(most, wait_s)

                def __getattr__(self, name: str) -> object:
                    return getattr(inner, name)

            return Reading()

        def __getattr__(self, name: str) -> object:
            return getattr(log, name)

    shard.train([1], 1.0)
    shard.publish()
    follower = RowFollower(Flaky(), Counted(), TOPIC, serving_table, spec_hash="hash", wait_s=0.01)  # type: ignore[arg-type]
    stop = threading.Event()
    thread = threading.Thread(target=follower.run, args=(stop,))
    thread.start()
    try:
        wait_for(lambda: follower.state.sink is not None)
        before, sink = scans[0], follower.state.sink
        away.set()
        wait_for(lambda: "gave no answer" in follower.state.reason)
        assert served(follower, 1).tolist() == [1]
        shard.train([1, 2], 1.0)
        shard.publish()
        away.clear()
        wait_for(lambda: follower.state.reason == "")
        wait_for(lambda: served(follower, 1, 2).tolist() == [2, 1])
        assert follower.state.sink is sink
        assert scans[0] == before
    finally:
        stop.set()
        thread.join(60)


def test_rows_stay_served_while_the_log_is_unavailable(shard: Shard, log: EventLog, store: RowStore) -> None:
    away = threading.Event()

    class Flaky:
        """The store, away while the event is set."""

        def identity(self) -> StoreIdentity | None:
            if away.is_set():
                raise Unavailable("disk away")
            return store.identity()

        def __getattr__(self, name: str) -> object:
            return getattr(store, name)

    shard.train([1], 1.0)
    shard.publish()
    follower = RowFollower(log, Flaky(), TOPIC, serving_table, spec_hash="hash", wait_s=0.01)  # type: ignore[arg-type]
    stop = threading.Event()
    away.set()
    thread = threading.Thread(target=follower.run, args=(stop,))
    thread.start()
    try:
        wait_for(lambda: "disk away" in follower.state.reason)
        away.clear()
        wait_for(lambda: follower.state.sink is not None)
        assert served(follower, 1).tolist() == [1]
    finally:
        stop.set()
        thread.join(60)


# Damage


def damage_blob(tmp_path: Path, column: str, change: str, where: str = "1") -> None:
    """Change segments of the store by SQL, as a failing disk or another program may."""
    with contextlib.closing(sqlite3.connect(tmp_path / "rows")) as db, db:
        db.execute(f"UPDATE segments SET {column} = {change} WHERE {where}")


NUMBERS = [*range(1, 41)]
LAST_BYTE = "CAST(substr(body, 1, length(body) - 1) || x'5a' AS BLOB)"
CHANGES = {
    "a byte of the rows": ("body", LAST_BYTE),
    "rows that are cut": ("body", "substr(body, 1, 20)"),
    "no rows": ("body", "x''"),
    "a byte of the directory": ("directory", "CAST(x'7f' || substr(directory, 2) AS BLOB)"),
    "a directory that is cut": ("directory", "substr(directory, 1, 7)"),
    "no directory": ("directory", "x''"),
    "other bytes": ("directory", "randomblob(400)"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_damaged_page_costs_its_rows_and_is_reported(
    shard: Shard, follow: Callable[[], RowFollower], tmp_path: Path, change: str
) -> None:
    shard.train(NUMBERS, 1.0)
    shard.publish()
    shard.flush()
    for partition in range(ROWS_PARTITIONS):  # retention has taken the deltas
        at = TopicPartition(TOPIC, partition)
        shard.log.trim(at, shard.log.bounds(at).end)
    column, to = CHANGES[change]
    damage_blob(tmp_path, column, to, "id = 3")

    follower = follow()
    wait_for(lambda: follower.state.sink is not None)

    lost = int((served(follower, *NUMBERS) == 0).sum())
    reported = sum(damage.rows for damage in follower.state.damaged.values())
    assert 0 < lost < 20
    assert reported == lost
    assert f"{lost} rows of {len(follower.state.damaged)} damaged buckets" in follower.state.reason
    assert skipped()["row_page"] == lost

    shard.train(NUMBERS, 1.0)  # who is trained on again comes back by the log
    shard.publish()
    wait_for(lambda: served(follower, *NUMBERS).tolist() == [2.0] * 40)


def test_damaged_page_costs_nothing_if_the_log_has_its_rows(
    shard: Shard, follow: Callable[[], RowFollower], tmp_path: Path
) -> None:
    shard.train(NUMBERS, 1.0)
    shard.publish()
    shard.flush()
    damage_blob(tmp_path, "body", LAST_BYTE, "id = 3")

    follower = follow()
    wait_for(lambda: follower.state.sink is not None)

    assert served(follower, *NUMBERS).tolist() == [1.0] * 40
    assert follower.state.damaged


def test_a_store_of_which_most_is_damaged_serves_nothing(
    shard: Shard, follow: Callable[[], RowFollower], tmp_path: Path
) -> None:
    shard.train([*range(1, 81)], 1.0)
    shard.flush()
    damage_blob(tmp_path, "directory", "x'00'")

    follower = follow()
    wait_for(lambda: "of the row store cannot be read" in follower.state.reason)

    assert follower.state.sink is None


def test_reading_all_rows_ends_once_the_disk_has_failed(
    shard: Shard, follow: Callable[[], RowFollower], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows that cannot leave memory would fill it."""
    held = list[int]()

    def fail(table: ServingTable) -> None:
        held.append(sum(table.rows().values()))
        if held[-1]:
            raise DataLost("rows on the local disk are lost: a broken disk")

    monkeypatch.setattr("freshet.inference.rows.BUCKETS_AT_ONCE", 1)
    monkeypatch.setattr(ServingTable, "check_disk", fail)
    shard.train(NUMBERS, 1.0)
    shard.flush()

    follower = follow()
    wait_for(lambda: "a broken disk" in follower.state.reason)

    assert follower.state.sink is None
    assert 0 < max(held) < len(NUMBERS)


def test_a_bucket_that_its_owner_writes_anew_is_read_again(
    shard: Shard, log: EventLog, store: RowStore, tmp_path: Path
) -> None:
    shard.train(NUMBERS, 1.0)
    shard.flush()
    with contextlib.closing(sqlite3.connect(tmp_path / "rows")) as db, db:
        ((body,),) = db.execute("SELECT body FROM segments WHERE id = 3").fetchall()
    damage_blob(tmp_path, "body", "x''", "id = 3")
    follower = RowFollower(log, store, TOPIC, serving_table, spec_hash="hash", wait_s=0.01, recheck_s=0.0)
    stop = threading.Event()
    thread = threading.Thread(target=follower.run, args=(stop,))
    thread.start()
    try:
        wait_for(lambda: bool(follower.state.damaged))
        assert (served(follower, *NUMBERS) == 0).any()
        with contextlib.closing(sqlite3.connect(tmp_path / "rows")) as db, db:
            db.execute("UPDATE segments SET body = ? WHERE id = 3", (body,))
        wait_for(lambda: not follower.state.damaged)

        assert served(follower, *NUMBERS).tolist() == [1.0] * 40
        assert follower.state.reason == ""
    finally:
        stop.set()
        thread.join(60)


@pytest.mark.parametrize("text", ["", "null", "[]", '{"a": 1}', "{", '{"0": null}'])
def test_a_meta_that_cannot_be_read_costs_its_bucket(
    shard: Shard, follow: Callable[[], RowFollower], tmp_path: Path, text: str
) -> None:
    shard.train(NUMBERS, 1.0)
    shard.publish()
    shard.flush()
    with contextlib.closing(sqlite3.connect(tmp_path / "rows")) as db, db:
        db.execute("UPDATE metas SET applied = ? WHERE bucket = 3", (text,))

    follower = follow()
    wait_for(lambda: follower.state.sink is not None)

    assert served(follower, *NUMBERS).tolist() == [1.0] * 40, "its rows are sound, and the log has them"


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_rows_that_are_not_finite_never_serve(
    shard: Shard, follow: Callable[[], RowFollower], value: float
) -> None:
    shard.train([1, 2], 1.0)
    shard.publish()
    follower = follow()
    wait_for(lambda: follower.state.sink is not None and served(follower, 1, 2).tolist() == [1, 1])

    values = np.array([[value, 5.0], [6.0, 6.0]], np.float32)
    shard.send(RowDelta(0, shard.fence, TimeMs(0), keys_of(1, 2), values, keys_of()))
    wait_for(lambda: served(follower, 2).tolist() == [6] and follower.state.not_finite == 1)

    assert served(follower, 1).tolist() == [1], "it serves as it was before"
    assert skipped()["row_value"] == 1


def test_large_rows_that_are_finite_serve(shard: Shard, follow: Callable[[], RowFollower]) -> None:
    follower = follow()
    values = np.full((2, 2), 3e38, np.float32)  # their sum is infinite
    shard.send(RowDelta(0, shard.fence, TimeMs(0), keys_of(1, 2), values, keys_of()))
    wait_for(lambda: follower.state.sink is not None)
    wait_for(lambda: bool((served(follower, 1, 2) > 1e38).all()))

    assert follower.state.not_finite == 0


def test_a_row_of_the_store_that_is_not_finite_never_serves(
    shard: Shard, follow: Callable[[], RowFollower], store: RowStore
) -> None:
    shard.train([1, 2, 3], 1.0)
    flush = shard.book.next_flush(shard.table.collect_flush(), np.zeros(ROWS_PARTITIONS, np.int64))
    runs = list(flush.runs)
    bad = runs[0].records.copy()
    bad[0, -4:] = np.frombuffer(np.float32(np.nan).tobytes(), np.uint8)
    changed = runs_of([replace(runs[0], records=bad), *runs[1:]], flush.runs.widths)
    store.flush(replace(flush, runs=changed))

    follower = follow()
    wait_for(lambda: follower.state.sink is not None)

    assert sorted(served(follower, 1, 2, 3).tolist()) == [0, 1, 1]
    assert follower.state.not_finite == 1


def test_a_fence_beyond_control_is_damage(shard: Shard, log: EventLog, store: RowStore) -> None:
    log.create_topic("shop.control", partitions=1)
    log.writer().append([Append("shop.control", 0, BytesColumn.of([b"{}"] * 9))])
    follower = RowFollower(
        log, store, TOPIC, serving_table, spec_hash="hash", wait_s=0.01, control="shop.control"
    )
    stop = threading.Event()
    thread = threading.Thread(target=follower.run, args=(stop,))
    thread.start()
    try:
        shard.train([1], 1.0)
        shard.publish(fence=1 << 40)
        wait_for(lambda: follower.state.corrupt == 1)
        shard.train([1], 1.0)
        shard.publish()
        wait_for(lambda: follower.state.sink is not None and served(follower, 1).tolist() == [2])
    finally:
        stop.set()
        thread.join(60)


@given(st.binary(max_size=120), st.integers(0, 200), st.integers(0, 255))
def test_any_bytes_are_a_delta_or_left_out(data: bytes, at: int, byte: int) -> None:
    values = np.ones((2, 2), np.float32)
    whole = encode_rows(RowDelta(0, Fence(5), TimeMs(7), keys_of(1, 2), values, keys_of(3)))
    changed = bytearray(whole)
    changed[at % len(changed)] = byte
    table = FollowedTable(serving_table(), BucketView(BUCKETS), 0, 0, lambda: 1 << 63)
    for record in (data, bytes(changed), whole[: at % len(whole)], whole + data):
        one = np.array([4])
        records = Records(one, one, BytesColumn.of([b""]), BytesColumn.of([record]), 5)
        table.apply(TopicPartition(TOPIC, 0), records)


class Pauses(threading.Event):
    """The pauses of a follower, which end at once; set after a few."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[float] = []

    def wait(self, timeout: float | None = None) -> bool:
        self.found.append(timeout or 0.0)
        if len(self.found) == 4:
            self.set()
        return self.is_set()


@pytest.mark.parametrize("error", [Corrupt, DataLost])
def test_a_log_that_stays_damaged_is_tried_less_often(
    shard: Shard, log: EventLog, store: RowStore, monkeypatch: pytest.MonkeyPatch, error: type[FreshetError]
) -> None:
    """Each try reads all rows of the row store."""

    def fail(*_: object) -> None:
        raise error("damaged")

    follower = RowFollower(log, store, TOPIC, serving_table, spec_hash="hash", wait_s=0.01)
    monkeypatch.setattr(type(log.reader()), "poll", fail)
    pauses = Pauses()
    follower.run(pauses)

    assert pauses.found == [1.0, 2.0, 4.0, 8.0]
    assert "damaged" in follower.state.reason
