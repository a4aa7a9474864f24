"""SQLite log beyond the contract: retention by time, several processes, kills, disk faults."""

import contextlib
import os
import random
import signal
import sqlite3
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from freshet import sqlite as shared
from freshet.errors import BadInput, Corrupt, DataLost, FreshetError, Mismatch, Unavailable
from freshet.log.sqlite import file as module
from freshet.log.sqlite.event_log import SqliteEventLog, SqliteWriter
from freshet.log.sqlite.file import Chunk, Contents, LogFile, chunk_id
from freshet.sqlite import BlobCounting
from freshet.testing.clock import SettableClock
from freshet.testing.conditions import wait_for
from freshet.testing.contracts.eventlog import T0, T1, append_to, read_all
from freshet.types import Append, BytesColumn, TopicPartition
from tests.fixtures.connections import fill_disk, kept_connections, set_all
from tests.fixtures.effort import examples


@pytest.fixture
def clock() -> SettableClock:
    return SettableClock()


@pytest.fixture
def log(tmp_path: Path, clock: SettableClock) -> Iterator[SqliteEventLog]:
    log = SqliteEventLog(tmp_path, clock)
    log.create_topic("t", partitions=2, retention_ms=60_000)
    yield log
    log.close()


def read_from_start(log: SqliteEventLog) -> None:
    reader = log.reader()
    reader.assign({T0: 0})
    reader.poll(10, 1.0)


def file_of(folder: Path) -> Path:
    return folder / "t.topics.sqlite"


# Retention


def test_records_without_times_get_the_logs_own(log: SqliteEventLog, clock: SettableClock) -> None:
    log.writer().append([append_to(T0, [b"a"])])
    reader = log.reader()
    reader.assign({T0: 0})
    ((_, records),) = reader.poll(1, 1.0)
    assert records.times_ms.tolist() == [clock.now_ms()]


def test_retention_removes_what_is_older_and_nothing_younger(
    log: SqliteEventLog, clock: SettableClock
) -> None:
    writer = log.writer()
    now = clock.now_ms()
    writer.append(
        [
            append_to(
                T0, [b"old", b"old", b"young", b"old"], times=[now - 90_000, now - 70_000, now, now - 80_000]
            )
        ]
    )
    log.enforce_retention()
    assert log.bounds(T0).start == 2
    clock.advance(61)
    log.enforce_retention()
    assert log.bounds(T0).start == 4
    assert writer.append([append_to(T0, [b"next"])]) == [4]


def test_a_record_dated_ahead_does_not_hold_up_retention(log: SqliteEventLog, clock: SettableClock) -> None:
    writer = log.writer()
    now = clock.now_ms()
    writer.append([append_to(T0, [b"x"])])
    writer.append([append_to(T0, [b"ahead"], times=[now + 365 * 86_400_000])])
    writer.append([append_to(T0, [b"x"] * 3, times=[now, now + 365 * 86_400_000, now])])
    for _ in range(60):
        clock.advance(10)
        writer.append([append_to(T0, [b"x"])])
    log.enforce_retention()
    assert (log.bounds(T0).start, log.bounds(T0).end) == (58, 65)


def test_records_dated_ahead_stay_until_a_later_one_expires(
    log: SqliteEventLog, clock: SettableClock
) -> None:
    """The clock was a day ahead and was set right: what it dated is new all the same."""
    writer = log.writer()
    clock.jump(clock.now_ms() + 86_400_000)
    for _ in range(3):
        writer.append([append_to(T0, [b"ahead"])])
    clock.jump(clock.now_ms() - 86_400_000)
    log.enforce_retention()
    writer.append([append_to(T0, [b"x"])])
    clock.advance(50)
    writer.append([append_to(T0, [b"x"])])
    log.enforce_retention()
    assert log.bounds(T0).start == 0
    clock.advance(11)
    log.enforce_retention()
    assert log.bounds(T0).start == 4
    clock.advance(50)
    log.enforce_retention()
    assert log.bounds(T0).start == 5


def test_an_appending_process_enforces_retention_now_and_then(
    log: SqliteEventLog, clock: SettableClock
) -> None:
    writer = log.writer()
    writer.append([append_to(T0, [b"a"])])
    clock.advance(61)
    writer.append([append_to(T0, [b"b"])])
    assert (log.bounds(T0).start, log.bounds(T0).end) == (1, 2)


def test_retention_keeps_pinned_offsets(log: SqliteEventLog, clock: SettableClock) -> None:
    for value in (b"a", b"b", b"c"):
        log.writer().append([append_to(T0, [value]), append_to(T1, [value])])
    log.hold("shard", {T0: 1})
    log.hold("trainer", {T0: 2})
    clock.advance(61)
    log.enforce_retention()
    assert (log.bounds(T0).start, log.bounds(T1).start) == (1, 3)
    log.hold("shard", {T0: 3})
    log.enforce_retention()
    assert log.bounds(T0).start == 2


def test_retention_removes_a_bounded_amount_per_run(
    tmp_path: Path, log: SqliteEventLog, clock: SettableClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "TRIM_CHUNKS", 3)
    writer, file = log.writer(), LogFile(file_of(tmp_path))
    for _ in range(8):
        writer.append([append_to(T0, [b"old"])])
    clock.advance(61)
    left = []
    for _ in range(4):
        writer.append([append_to(T1, [b"new"])])
        left.append(file.query("SELECT count(*) FROM chunks WHERE id < ?", chunk_id(2, 0))[0][0])
        assert log.bounds(T0).start == 8, "what is not deleted yet is not seen either"
        clock.advance(1.1)
    assert left == [5, 2, 0, 0]
    file.close()


def test_times_are_looked_up_among_records_that_are_still_there(log: SqliteEventLog) -> None:
    log.writer().append([append_to(T0, [b"x"] * 3, times=[50, 10, 20])])
    log.writer().append([append_to(T0, [b"x"], times=[60])])
    log.trim(T0, 1)
    assert [log.offset_at(T0, time_ms) for time_ms in (5, 15, 30)] == [1, 2, 3]


appends = st.tuples(
    st.just("append"),
    st.integers(0, 1),
    st.lists(st.tuples(st.binary(max_size=300), st.integers(0, 50)), max_size=8),
)
trims = st.tuples(st.just("trim"), st.integers(0, 1), st.integers(0, 60))
reads = st.tuples(st.just("read"), st.integers(0, 60), st.integers(1, 9))
times = st.tuples(st.just("time"), st.integers(0, 1), st.integers(0, 55))


@settings(max_examples=examples(40), deadline=None)
@given(st.lists(st.one_of(appends, trims, reads, times), max_size=30))
def test_log_behaves_as_a_list_under_appends_trims_and_reads(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[str, int, Any]]
) -> None:
    log = SqliteEventLog(tmp_path_factory.mktemp("log"))
    log.create_topic("t", partitions=2)
    writer = log.writer()
    kept: list[list[tuple[bytes, int]]] = [[], []]
    start = [0, 0]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("freshet.log.sqlite.file.CHUNK_BYTES", 500)
        patched.setattr("freshet.log.sqlite.reader.CHUNK_BYTES", 700)
        for what, which, how in steps:
            partition = (T0, T1)[which % 2]
            rows, first = kept[which % 2], start[which % 2]
            if what == "append":
                append = append_to(partition, [v for v, _ in how], times=[t for _, t in how])
                assert writer.append([append]) == [len(rows)]
                rows.extend(how)
            elif what == "trim":
                log.trim(partition, how)
                start[which] = max(first, min(how, len(rows)))
            elif what == "time":
                expected = (o for o in range(first, len(rows)) if rows[o][1] >= how)
                assert log.offset_at(partition, how) == next(expected, len(rows))
            else:
                at = min(max(which, first), len(rows))
                reader = log.reader()
                reader.assign({partition: at})
                while at < len(rows):
                    ((_, records),) = reader.poll(how, 1.0)
                    stop = at + len(records)
                    assert len(records) <= how
                    assert list(records.values) == [v for v, _ in rows[at:stop]]
                    assert records.times_ms.tolist() == [t for _, t in rows[at:stop]]
                    at = stop
                assert reader.poll(how, 0.0) == []
                reader.close()
    assert [(log.bounds(p).start, log.bounds(p).end) for p in (T0, T1)] == [
        (start[i], len(kept[i])) for i in (0, 1)
    ]
    log.close()


@settings(max_examples=examples(40), deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 30), min_size=1, max_size=3), max_size=12),
    st.lists(st.tuples(st.integers(5, 15), st.integers(0, 3)), min_size=1, max_size=4),
)
def test_retention_ends_with_the_last_expired_before_the_kept(
    tmp_path_factory: pytest.TempPathFactory, appended: list[list[int]], runs: list[tuple[int, int]]
) -> None:
    """Records of 5 s before now up to now are kept; those after now go with the next that expires."""
    clock = SettableClock(0)
    log = SqliteEventLog(tmp_path_factory.mktemp("log"), clock)
    log.create_topic("t", partitions=2, retention_ms=5)
    for chunk in appended:
        log.writer().append([append_to(T0, [b"x"] * len(chunk), times=chunk)])
    times = [time_ms for chunk in appended for time_ms in chunk]
    start = 0
    for now, trimmed in runs:
        log.trim(T0, start + trimmed)
        start = min(start + trimmed, len(times))
        clock.jump(now)
        log.enforce_retention()
        kept = (o for o in range(start, len(times)) if now - 5 <= times[o] <= now)
        expired = (o + 1 for o in range(start, next(kept, len(times))) if times[o] < now - 5)
        start = max(expired, default=start)
        assert log.bounds(T0).start == start
    log.close()


def test_space_of_trimmed_chunks_is_used_again(log: SqliteEventLog, tmp_path: Path) -> None:
    writer = log.writer()
    for i in range(40):
        writer.append([append_to(T0, [bytes(200_000)])])
        log.trim(T0, i)
    log.close()
    assert file_of(tmp_path).stat().st_size < 2_000_000


# Several threads and processes


def test_waiting_appends_share_a_commit(tmp_path: Path, log: SqliteEventLog, clock: SettableClock) -> None:
    file = LogFile(file_of(tmp_path))
    writer = SqliteWriter(lambda _: (file, 1), clock, lambda: None, None)
    barrier = threading.Barrier(9)
    offsets: list[int] = []

    def work() -> None:
        barrier.wait()
        offsets.extend(writer.append([append_to(T0, [b"x"])]))

    threads = [threading.Thread(target=work) for _ in range(8)]
    with file._writing:  # a commit is in progress: all eight wait for it
        for thread in threads:
            thread.start()
        barrier.wait()
        while len(file._queue) < 8:
            pass
    for thread in threads:
        thread.join()
    assert sorted(offsets) == list(range(8))
    ((chunks,),) = file.query("SELECT count(*) FROM chunks")
    assert chunks == 1
    file.close()


def test_a_fault_in_a_shared_commit_acknowledges_no_append(
    tmp_path: Path, log: SqliteEventLog, clock: SettableClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = LogFile(file_of(tmp_path))
    writer = SqliteWriter(lambda _: (file, 1), clock, lambda: None, None)
    outcomes: list[str] = []

    def pack(contents: Contents) -> Chunk:
        raise MemoryError("injected")

    def work() -> None:
        try:
            outcomes.append(str(writer.append([append_to(T0, [b"x"])])))
        except (FreshetError, MemoryError) as error:
            outcomes.append(f"{type(error).__name__}: {error}")

    with monkeypatch.context() as broken:
        broken.setattr(module, "pack", pack)
        threads = [threading.Thread(target=work) for _ in range(8)]
        with file._writing:
            for thread in threads:
                thread.start()
            wait_for(lambda: len(file._queue) == 8)
        for thread in threads:
            thread.join()
    unknown = f"Unavailable: {file.path}: not known to be written: MemoryError('injected')"
    assert Counter(outcomes) == {"MemoryError: injected": 1, unknown: 7}
    assert log.bounds(T0).end == 0
    assert writer.append([append_to(T0, [b"x"])]) == [0]
    file.close()


def child_of(folder: Path, body: str) -> "subprocess.Popen[bytes]":
    program = f"""
import sys
from freshet.log.sqlite.event_log import SqliteEventLog
from freshet.testing.contracts.eventlog import T0, append_to
log = SqliteEventLog(__import__("pathlib").Path({str(folder)!r}))
log.create_topic("t", partitions=2)
{body}"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, env=environment)


@pytest.mark.slow
def test_processes_that_start_together_append_to_one_topic(tmp_path: Path) -> None:
    body = """
writer = log.writer()
for i in range(50):
    writer.append([append_to(T0, [b"%d:%d" % (int(sys.argv[0] != ""), i)] * 2)])
"""
    children = [child_of(tmp_path / "log", body) for _ in range(3)]
    for child in children:
        child.communicate(timeout=120)
        assert child.returncode == 0
    log = SqliteEventLog(tmp_path / "log")
    reader = log.reader()
    reader.assign({T0: 0})
    assert [offset for offset, _ in read_all(reader, 300)[T0]] == list(range(300))
    log.close()


@pytest.mark.slow
def test_acknowledged_appends_survive_a_kill_as_a_whole(tmp_path: Path) -> None:
    body = """
writer = log.writer("w")
i = 0
while True:
    offset, = writer.append([append_to(T0, [b"%d" % i] * 5)])
    print(i, offset, flush=True)
    i += 1
"""
    chance = random.Random(3)
    expected: dict[int, bytes] = {}
    for _ in range(4):
        child = child_of(tmp_path / "log", body)
        assert child.stdout is not None
        for _ in range(chance.randint(1, 60)):
            i, offset = map(int, child.stdout.readline().split())
            expected |= {offset + j: b"%d" % i for j in range(5)}
        child.send_signal(signal.SIGKILL)
        child.communicate()
    log = SqliteEventLog(tmp_path / "log")
    end = log.bounds(T0).end
    reader = log.reader()
    reader.assign({T0: 0})
    found = dict(read_all(reader, end)[T0])
    log.close()
    assert end % 5 == 0
    assert {offset: found[offset] for offset in expected} == expected


# Disk faults and invalid files


@pytest.fixture
def connections(monkeypatch: pytest.MonkeyPatch) -> list[BlobCounting]:
    return kept_connections(monkeypatch, module)


def test_full_disk_is_unavailable_until_there_is_space(
    connections: list[BlobCounting], log: SqliteEventLog
) -> None:
    writer = log.writer()
    writer.append([append_to(T0, [b"before"])])
    fill_disk(connections)
    with pytest.raises(Unavailable, match=r"(?s)t\.topics\.sqlite.*nothing was written.*disk is full"):
        writer.append([append_to(T0, [bytes(500_000)])])
    set_all(connections, "max_page_count=1000000")
    assert writer.append([append_to(T0, [b"after"])]) == [1]


def test_a_read_only_file_is_unavailable_and_says_so(
    connections: list[BlobCounting], log: SqliteEventLog
) -> None:
    writer = log.writer()
    writer.append([append_to(T0, [b"before"])])
    set_all(connections, "query_only=1")
    with pytest.raises(Unavailable, match="read-only"):
        writer.append([append_to(T0, [b"x"])])


def test_a_file_that_another_process_keeps_locked_is_unavailable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared, "LOCK_WAIT_S", 0.05)
    log = SqliteEventLog(tmp_path)
    log.create_topic("t", partitions=1)
    other = sqlite3.connect(file_of(tmp_path), isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(Unavailable, match="another process held its lock"):
        log.writer().append([append_to(T0, [b"x"])])
    other.close()
    assert log.writer().append([append_to(T0, [b"x"])]) == [0]
    log.close()


def test_an_append_that_one_of_two_files_took_is_not_unwritten(
    tmp_path: Path, log: SqliteEventLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared, "LOCK_WAIT_S", 0.05)
    log.create_topic("other", partitions=1)
    both = [append_to(T0, [b"x"]), append_to(TopicPartition("other", 0), [b"y"])]
    lock = sqlite3.connect(tmp_path / "other.topics.sqlite", isolation_level=None)
    lock.execute("BEGIN IMMEDIATE")
    with pytest.raises(Unavailable, match=r"^not known to be written: t\.topics.*other\.topics.* to it"):
        log.writer().append(both)
    assert log.bounds(T0).end == 1
    with pytest.raises(Unavailable, match=r"other\.topics.*nothing was written \("):
        log.writer().append(both[::-1])
    assert log.bounds(T0).end == 1
    lock.close()


def test_changed_bytes_of_an_event_are_corrupt_with_offset(log: SqliteEventLog, tmp_path: Path) -> None:
    log.writer().append([append_to(T0, [b"payload-of-the-event"] * 3)])
    db = sqlite3.connect(file_of(tmp_path))
    with db:
        ((body,),) = db.execute("SELECT body FROM chunks").fetchall()
        db.execute("UPDATE chunks SET body = ?", (body.replace(b"event", b"evenT", 1),))
    db.close()
    reader = log.reader()
    reader.assign({T0: 0})
    with pytest.raises(Corrupt, match=r"t\.topics\.sqlite: t\[0\] at offset 0"):
        reader.poll(10, 1.0)


def test_a_file_of_garbage_is_corrupt(tmp_path: Path) -> None:
    log = SqliteEventLog(tmp_path)
    log.create_topic("t", partitions=1)
    log.close()
    file_of(tmp_path).write_bytes(b"garbage " * 10_000)
    log = SqliteEventLog(tmp_path)
    with pytest.raises(Corrupt, match=r"t\.topics\.sqlite"):
        log.bounds(T0)
    log.close()


def test_a_truncated_file_is_corrupt(tmp_path: Path) -> None:
    log = SqliteEventLog(tmp_path)
    log.create_topic("t", partitions=1)
    log.writer().append([append_to(T0, [bytes(300_000)])])
    log.close()
    path = file_of(tmp_path)
    path.write_bytes(path.read_bytes()[:50_000])
    log = SqliteEventLog(tmp_path)
    with pytest.raises((Corrupt, DataLost)):
        read_from_start(log)
    log.close()


def test_a_lost_file_is_data_lost_not_an_empty_topic(tmp_path: Path) -> None:
    log = SqliteEventLog(tmp_path)
    log.create_topic("t", partitions=1)
    log.close()
    file_of(tmp_path).unlink()
    log = SqliteEventLog(tmp_path)
    with pytest.raises(DataLost, match=r"t\.topics\.sqlite"):
        log.bounds(T0)
    with pytest.raises(DataLost):
        log.create_topic("t", partitions=1)
    log.close()


def test_a_log_of_a_later_format_is_a_mismatch(tmp_path: Path) -> None:
    SqliteEventLog(tmp_path).close()
    db = sqlite3.connect(tmp_path / "catalog.sqlite")
    db.execute("PRAGMA user_version=99")
    db.close()
    with pytest.raises(Mismatch, match="format 1, found format 99"):
        SqliteEventLog(tmp_path)


def test_a_path_that_is_a_file_is_unavailable(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("")
    with pytest.raises(Unavailable, match="log"):
        SqliteEventLog(tmp_path / "log")


def test_a_folder_without_hard_links_will_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(made: Path, path: Path) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    log = SqliteEventLog(tmp_path)
    log.create_topic("t", partitions=1)
    assert log.writer().append([append_to(T0, [b"x"])]) == [0]
    log.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["catalog.sqlite", "t.topics.sqlite"]


def test_a_copy_made_while_the_log_is_in_use_is_a_log(log: SqliteEventLog, tmp_path: Path) -> None:
    log.writer().append([append_to(T0, [b"a", b"b"])])
    for name in ("catalog.sqlite", "t.topics.sqlite"):
        (tmp_path / "copy").mkdir(exist_ok=True)
        db = sqlite3.connect(tmp_path / name)
        db.execute("VACUUM INTO ?", (str(tmp_path / "copy" / name),))
        db.close()
    copy = SqliteEventLog(tmp_path / "copy")
    assert copy.topics() == log.topics()
    reader = copy.reader()
    reader.assign({T0: 0})
    assert read_all(reader, 2) == {T0: [(0, b"a"), (1, b"b")]}
    copy.close()
    with contextlib.closing(sqlite3.connect(tmp_path / "copy" / "t.topics.sqlite")) as db:
        assert db.execute("PRAGMA journal_mode").fetchall() == [("wal",)]


def test_two_lives_of_a_log_have_two_ids(tmp_path: Path) -> None:
    ids = set()
    for name in "ab":
        log = SqliteEventLog(tmp_path / name)
        ids.add(log.create_topic("t", partitions=1).log_id)
        log.close()
    assert len(ids) == 2


# Callers' mistakes


def test_named_writer_over_two_files_is_refused_unwritten(log: SqliteEventLog) -> None:
    log.create_topic("other", partitions=1)
    with pytest.raises(ValueError, match="group"):
        log.writer("w").append([append_to(T0, [b"x"]), append_to(TopicPartition("other", 0), [b"y"])])
    assert log.bounds(T0).end == 0


def test_columns_of_different_lengths_are_refused(log: SqliteEventLog) -> None:
    append = Append("t", 0, BytesColumn.of([b"a", b"b"]), keys=BytesColumn.of([b"k"]))
    with pytest.raises(ValueError, match="2 values has 1 keys"):
        log.writer().append([append])


def test_a_huge_record_is_bad_input_and_spoils_no_other_append(
    log: SqliteEventLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("freshet.log.sqlite.event_log.MAX_RECORD_BYTES", 1000)
    with pytest.raises(BadInput):
        log.writer().append([append_to(T0, [b"fine"]), append_to(T1, [bytes(1001)])])
    assert log.bounds(T0).end == 0


def test_everything_of_a_closed_log_is_unavailable(log: SqliteEventLog) -> None:
    reader, writer = log.reader(), log.writer()
    reader.assign({T0: 0})
    log.close()
    for use in (
        lambda: writer.append([append_to(T0, [b"x"])]),
        lambda: reader.poll(1, 1.0),
        lambda: log.bounds(T0),
        log.reader,
        log.topics,
    ):
        with pytest.raises(FreshetError, match="closed"):
            use()
