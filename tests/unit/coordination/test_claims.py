"""Ownership decided in the log: rules without I/O, and claims on a SQLite log and on Kafka."""

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from hypothesis import given
from hypothesis import strategies as st

from freshet.adapters import open_eventlog
from freshet.coordination import claims as claims_module
from freshet.coordination.claim_rules import (
    ClaimBook,
    LaterFormat,
    Load,
    Plan,
    SliceLoad,
    claim_record,
    claims_record,
    heartbeat_record,
    load_record,
    parse_record,
    plan_record,
    read_record,
    release_record,
    releases_record,
    state_record,
)
from freshet.coordination.claims import Claims
from freshet.errors import Corrupt, DataLost, Fenced, Unavailable
from freshet.log import EventLog
from freshet.log.records import newest
from freshet.observability.skipped_state import skipped
from freshet.paramserver.placement import BalanceRules
from freshet.testing.clock import SettableClock
from freshet.testing.conditions import wait_for
from freshet.testing.faults import Faulty
from freshet.types import Append, BytesColumn, Fence, TopicPartition

CONTROL = TopicPartition("control", 0)
LEASE_S, HEARTBEAT_S = 0.8, 0.05
WAIT_S = 60.0


def book_of(*records: bytes) -> ClaimBook:
    book = ClaimBook(lease_s=3.0, longest_gap_s=0.5)
    for offset, record in enumerate(records):
        book.apply(offset, parse_record(record, "here"))
    return book


def watch(book: ClaimBook, start_s: float, seconds: float) -> float:
    """Observe ten times a second."""
    for i in range(round(seconds * 10) + 1):
        book.observe(start_s + i / 10)
    return start_s + seconds


def test_first_of_two_competing_claims_wins() -> None:
    book = book_of(claim_record("x", "a", None), claim_record("x", "b", None))
    claim = book.claim("x")
    assert claim is not None
    assert (claim.owner, claim.fence) == ("a", 0)


def test_a_lease_names_the_claims_that_it_replaced(log: EventLog) -> None:
    with contextlib.closing(Claims(log, "control")) as claims:
        deadline = time.monotonic() + WAIT_S
        first = claims.acquire("x", "a", deadline)
        first.release()
        second = claims.acquire_all(["x", "y"], "b", deadline)

        assert (first.replaced, second.replaced) == ({"x": None}, {"x": first.fence, "y": None})


def test_a_claim_must_name_the_one_that_stands() -> None:
    book = book_of(
        claim_record("x", "a", None), claim_record("x", "b", Fence(0)), claim_record("x", "c", Fence(0))
    )
    claim = book.claim("x")
    assert claim is not None
    assert (claim.owner, claim.fence) == ("b", 1)


def test_unclaimed_and_released_things_are_claimable_at_once() -> None:
    book = book_of(claim_record("x", "a", None), release_record("x", Fence(0)))
    assert book.claimable("x")
    assert book.claimable("never seen")


def test_living_claims_follow_records_and_silence() -> None:
    book = book_of(claim_record("x", "a", None), claim_record("y", "b", None))
    seen = [list(book.living())]

    def apply(offset: int, record: bytes) -> None:
        book.apply(offset, parse_record(record, "here"))
        seen.append(list(book.living()))

    apply(2, release_record("x", Fence(0)))
    apply(3, claim_record("x", "c", Fence(0)))
    at = watch(book, 0.0, 2.9)
    assert book.living() is book.living()
    apply(4, heartbeat_record([Fence(1)]))
    watch(book, at, 0.5)
    seen.append(list(book.living()))
    book.restore(
        parse_record(state_record(5, book_of(claim_record("z", "d", None)).claims().values(), None), "here")
    )
    seen.append(list(book.living()))

    assert seen == [["x", "y"], ["y"], ["x", "y"], ["x", "y"], ["y"], ["y", "z"]]


def test_a_release_of_an_earlier_claim_releases_nothing() -> None:
    book = book_of(
        claim_record("x", "a", None), claim_record("x", "b", Fence(0)), release_record("x", Fence(0))
    )
    assert not book.claimable("x")


def test_a_claim_needs_a_full_lease_without_heartbeat() -> None:
    book = book_of(claim_record("x", "a", None))
    now = watch(book, 100.0, 2.9)
    assert not book.claimable("x")
    book.apply(1, parse_record(heartbeat_record([Fence(0)]), "here"))
    now = watch(book, now, 2.9)
    assert not book.claimable("x"), "time before the heartbeat does not count"
    watch(book, now, 0.2)
    assert book.claimable("x")


def test_heartbeats_of_other_or_replaced_claims_have_no_effect() -> None:
    book = book_of(claim_record("x", "a", None), claim_record("x", "b", Fence(0)))
    watch(book, 0.0, 3.2)
    book.apply(2, parse_record(heartbeat_record([Fence(0), Fence(77)]), "here"))
    assert book.claimable("x")


def test_nothing_expires_while_the_log_is_away() -> None:
    book = book_of(claim_record("x", "a", None))
    now = watch(book, 0.0, 2.5)
    book.suspend()
    book.observe(now + 60.0)
    assert not book.claimable("x")
    assert book.silent_s("x") < 2.6


def test_an_observer_that_was_stopped_does_not_count_the_time() -> None:
    book = book_of(claim_record("x", "a", None))
    now = watch(book, 0.0, 1.0)
    book.observe(now + 60.0)
    assert book.silent_s("x") == pytest.approx(1.4, abs=0.2)


@given(
    st.lists(st.tuples(st.sampled_from("xy"), st.sampled_from("abc"), st.integers(-1, 12)), max_size=12),
    st.data(),
)
def test_reader_starting_from_a_state_record_finds_same_owners(
    made: list[tuple[str, str, int]], data: st.DataObject
) -> None:
    records = [claim_record(what, owner, None if r < 0 else Fence(r)) for what, owner, r in made]
    cut = data.draw(st.integers(0, len(records)))
    state = parse_record(state_record(cut, book_of(*records[:cut]).claims().values(), None), "here")
    later = ClaimBook(3.0, 0.5)
    later.restore(state)
    for offset in range(cut, len(records)):
        later.apply(offset, parse_record(records[offset], "here"))
    assert later.claims() == book_of(*records).claims()


LOAD = Load("shard:a", Fence(0), 5_000, 9_000, (SliceLoad(3, 700, 41), SliceLoad(4, 0, 0)))
RECORDS = [
    claim_record("x", "a", Fence(3)),
    heartbeat_record([Fence(1)]),
    release_record("x", Fence(1)),
    state_record(4, book_of(claim_record("x", "a", None)).claims().values(), Plan("a", Fence(1), ("a", "b"))),
    load_record(LOAD),
]


@given(st.one_of(st.binary(max_size=60), st.sampled_from(RECORDS)), st.integers(0, 200), st.integers(0, 255))
def test_any_bytes_are_a_record_or_corrupt(data: bytes, at: int, byte: int) -> None:
    changed = bytearray(data or b"{}")
    changed[at % len(changed)] = byte
    with contextlib.suppress(Corrupt):
        book = ClaimBook(3.0, 0.5)
        record = parse_record(bytes(changed), "here")
        book.apply(9, record)
        if record["kind"] == "state":
            book.restore(record)


@pytest.mark.parametrize(
    "change",
    [
        {"v": 2},
        {"what": 1},
        {"replaces": "x"},
        {"replaces": True},
        {"kind": "state", "upto": 1, "claims": [["x"]]},
    ],
)
def test_a_record_of_a_wrong_shape_is_corrupt(change: dict[str, object]) -> None:
    with pytest.raises(Corrupt, match="here"):
        parse_record(json.dumps({**json.loads(RECORDS[0]), **change}).encode(), "here")


def test_kinds_and_keys_of_later_versions_are_ignored() -> None:
    book = ClaimBook(3.0, 0.5)
    book.apply(0, parse_record(b'{"v":1,"kind":"greeting"}', "here"))
    book.apply(
        1, parse_record(b'{"v":1,"kind":"claim","what":"x","owner":"a","replaces":null,"z":1}', "here")
    )
    assert list(book.claims()) == ["x"]


# With a log


class WatchedClock(SettableClock):
    """A clock that counts its reads. Claims without held things read it each time they reach the end."""

    reads = 0

    def monotonic(self) -> float:
        self.reads += 1  # before the read: a counted read returns a later time
        return super().monotonic()

    def wait_until_read(self) -> None:
        asked = self.reads
        wait_for(lambda: self.reads > asked, WAIT_S)


class Unreachable:
    """A log whose readers and writers fail while `away` is set."""

    def __init__(self, log: EventLog) -> None:
        self._log, self.away, self.refused = log, threading.Event(), 0

    def was_noticed(self) -> bool:
        """Return whether its reader has failed and polled again."""
        return self.refused > 1

    def __getattr__(self, name: str) -> Any:
        return getattr(self._log, name)

    def reader(self) -> Any:
        reader, outer = self._log.reader(), self

        class Wrapped:
            assign, close = reader.assign, reader.close

            def poll(self, max_records: int, wait_s: float) -> Any:
                if outer.away.is_set():
                    outer.refused += 1
                    raise Unavailable("the disk is away")
                return reader.poll(max_records, wait_s)

        return Wrapped()

    def writer(self) -> Any:
        writer, outer = self._log.writer(), self

        class Wrapped:
            close = writer.close

            def append(self, appends: Any) -> Any:
                if outer.away.is_set():
                    raise Unavailable("the disk is away")
                return writer.append(appends)

        return Wrapped()


@pytest.fixture(params=["sqlite", pytest.param("kafka", marks=pytest.mark.kafka)])
def log(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[EventLog]:
    if request.param == "kafka":
        bootstrap = request.getfixturevalue("kafka").bootstrap
        log = open_eventlog(f"kafka://{bootstrap}/{uuid4().hex}")
    else:
        log = open_eventlog(f"sqlite:{tmp_path}")
    log.create_topic("control", partitions=1)
    yield log
    log.close()


@pytest.fixture
def start(log: EventLog) -> Iterator[Callable[..., Claims]]:
    """Start claims as another process would, with leases short enough to wait for."""
    started: list[Claims] = []

    def make(clock: SettableClock | None = None, lease_s: float = LEASE_S, log: EventLog = log) -> Claims:
        more = {} if clock is None else {"clock": clock}
        started.append(Claims(log, "control", **more, lease_s=lease_s, heartbeat_s=HEARTBEAT_S))
        return started[-1]

    yield make
    for claims in started:
        claims.close(release=False)


def soon() -> float:
    return time.monotonic() + WAIT_S


def test_fences_rise_from_owner_to_owner(start: Callable[..., Claims], log: EventLog) -> None:
    first, second = start(), start()
    held = first.acquire("seat", "a", soon())
    assert held.fence == 0
    held.release()
    again = second.acquire("seat", "b", soon())
    assert again.fence > held.fence
    wait_for(lambda: first.owners()["seat"].owner == "b", WAIT_S)
    again.check()


def live_on(log: EventLog, owner: SettableClock, watcher: WatchedClock, seconds: float) -> None:
    """Advance time for an owner and its observer: a heartbeat and a read at each step."""
    for _ in range(round(seconds / HEARTBEAT_S)):
        _one_heartbeat(log, owner)
        watcher.advance(HEARTBEAT_S)
        watcher.wait_until_read()


def _one_heartbeat(log: EventLog, owner: SettableClock) -> None:
    end = log.bounds(CONTROL).end
    owner.advance(HEARTBEAT_S)
    wait_for(lambda: log.bounds(CONTROL).end > end, WAIT_S)


def test_a_living_owner_is_not_replaced(start: Callable[..., Claims], log: EventLog) -> None:
    alive, watching = SettableClock(), WatchedClock()
    first, second = start(alive), start(watching)
    held = first.acquire("seat", "a", alive.monotonic() + 1.0)
    live_on(log, alive, watching, 1.25 * LEASE_S)
    with pytest.raises(Unavailable, match=r"held by a \(fence 0\)"):
        second.acquire("seat", "b", watching.monotonic())
    held.check()


def test_a_log_that_comes_back_finds_the_owners_it_had(start: Callable[..., Claims], log: EventLog) -> None:
    alive, watching = SettableClock(), WatchedClock()
    of_first, of_second = Unreachable(log), Unreachable(log)
    first, second = start(alive, log=of_first), start(watching, log=of_second)
    held = first.acquire("seat", "a", alive.monotonic() + 1.0)
    live_on(log, alive, watching, HEARTBEAT_S)
    for each, clock in ((of_first, alive), (of_second, watching)):
        each.away.set()
        wait_for(each.was_noticed, WAIT_S)
        clock.advance(1.25 * LEASE_S)
    for each in (of_first, of_second):
        each.away.clear()
    live_on(log, alive, watching, 1.25 * LEASE_S)
    with pytest.raises(Unavailable, match="held by a"):
        second.acquire("seat", "b", watching.monotonic())
    held.check()


def test_silent_owner_is_replaced_and_notified(start: Callable[..., Claims]) -> None:
    stopped = SettableClock()  # its heartbeats never fall due again
    first, second = start(stopped), start()
    held = first.acquire("seat", "a", stopped.monotonic() + 1.0)
    told = threading.Event()
    held.on_lost(told.set)
    taken = second.acquire("seat", "b", soon())
    assert taken.fence > held.fence
    assert told.wait(60)
    with pytest.raises(Fenced, match="seat"):
        held.check()
    held.release()
    taken.check()
    assert not taken.lost.is_set()


class Busy:
    """A log with so many owners that a record comes while a reader waits for one."""

    def __init__(self, log: EventLog) -> None:
        self._log = log

    def __getattr__(self, name: str) -> Any:
        return getattr(self._log, name)

    def reader(self) -> Any:
        reader, writer = self._log.reader(), self._log.writer()

        class Wrapped:
            assign, close = reader.assign, reader.close

            def poll(self, max_records: int, wait_s: float) -> Any:
                if wait_s:
                    writer.append(
                        [Append("control", 0, BytesColumn.of([heartbeat_record([Fence(1 << 40)])]))]
                    )
                return reader.poll(max_records, wait_s)

        return Wrapped()


def test_a_silent_owner_among_many_is_replaced(start: Callable[..., Claims], log: EventLog) -> None:
    first, second = start(SettableClock()), start(log=Busy(log))
    held = first.acquire("seat", "a", soon())
    assert second.acquire("seat", "b", soon()).fence > held.fence


def test_of_many_that_claim_at_once_one_wins(start: Callable[..., Claims]) -> None:
    parts = [start(lease_s=1000.0) for _ in range(4)]
    results: list[object] = [None] * 4
    won = threading.Event()

    def claim(i: int) -> None:
        try:
            results[i] = parts[i].acquire("seat", f"owner-{i}", soon(), won)
            won.set()
        except Unavailable as error:
            results[i] = error

    threads = [threading.Thread(target=claim, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(isinstance(result, Unavailable) for result in results) == 3


def test_callback_added_after_a_loss_is_called_at_once(start: Callable[..., Claims]) -> None:
    stopped = SettableClock()
    held = start(stopped).acquire("seat", "a", stopped.monotonic() + 1.0)
    start().acquire("seat", "b", soon())
    assert held.lost.wait(60)
    told: list[str] = []
    held.on_lost(lambda: told.append("lost"))
    assert told == ["lost"]


def test_closing_releases_so_that_the_next_owner_need_not_wait(start: Callable[..., Claims]) -> None:
    first = start(lease_s=1000.0)
    first.acquire("seat", "a", soon())
    first.close()
    assert start(lease_s=1000.0).acquire("seat", "b", soon()).owner == "b"
    with pytest.raises(Unavailable, match="closed"):
        first.acquire("seat", "a", soon())


def test_a_stop_ends_the_wait_for_a_claim(start: Callable[..., Claims]) -> None:
    start(lease_s=1000.0).acquire("seat", "a", soon())
    second, stop = start(lease_s=1000.0), threading.Event()
    stop.set()

    with pytest.raises(Unavailable, match="stopped while seat is held by a"):
        second.acquire("seat", "b", time.monotonic() + 1000.0, stop)
    assert second.acquire("other", "b", soon(), stop).owner == "b"  # a free thing needs no wait


def test_closing_on_a_sick_log_leaves_the_claim_to_its_lease(
    log: EventLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = Faulty(log.writer())
    monkeypatch.setattr(log, "writer", lambda: writer)
    claims = Claims(log, "control")
    held = claims.acquire("seat", "a", soon())
    writer.script("append", nth=1, times=1_000, error=Unavailable("the disk is full"))
    claims.close()
    assert log.bounds(CONTROL).end > held.fence


def test_late_reader_finds_all_owners(start: Callable[..., Claims]) -> None:
    first = start()
    first.acquire("a", "one", soon())
    first.acquire("b", "one", soon())
    assert {what: claim.owner for what, claim in start().owners().items()} == {"a": "one", "b": "one"}


def test_trimming_a_long_topic_keeps_owners_and_plan(
    start: Callable[..., Claims], log: EventLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(claims_module, "STATE_EVERY", 10)
    first = start()
    held = first.acquire("seat", "a", soon())
    plan = Plan("seat", held.fence, ("seat", "seat"))
    first.advise(plan)
    wait_for(lambda: log.bounds(CONTROL).start > held.fence + 1, WAIT_S)
    later = start()
    assert later.owners()["seat"].fence == held.fence
    assert later.plan() == plan, "who starts acts by it, and it is written again only when it changes"
    held.check()


def test_a_trimmed_topic_without_state_is_data_lost(start: Callable[..., Claims], log: EventLog) -> None:
    writer = log.writer()
    writer.append([Append("control", 0, BytesColumn.of([heartbeat_record([Fence(0)])] * 3))])
    log.trim(CONTROL, 2)
    with pytest.raises(DataLost, match="state"):
        start()


class Delayed(Unreachable):
    """A log whose polls wait while `held` is set."""

    def __init__(self, log: EventLog) -> None:
        super().__init__(log)
        self.held, self.waits, self.go = threading.Event(), threading.Event(), threading.Event()

    def reader(self) -> Any:
        reader, outer = self._log.reader(), self

        class Wrapped:
            assign, close = reader.assign, reader.close

            def poll(self, max_records: int, wait_s: float) -> Any:
                if outer.held.is_set():
                    outer.waits.set()
                    assert outer.go.wait(WAIT_S)
                return reader.poll(max_records, wait_s)

        return Wrapped()


def test_a_lease_is_kept_by_a_reader_behind_a_trim(
    start: Callable[..., Claims], log: EventLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(claims_module, "STATE_EVERY", 10)
    slow, clock = Delayed(log), SettableClock()
    second = start(clock=SettableClock(), log=slow)
    kept = second.acquire("other", "b", soon())
    first = start(clock=clock)
    first.acquire("seat", "a", soon())

    def beat(done: Callable[[], bool]) -> Callable[[], bool]:
        def is_done() -> bool:
            clock.advance(0.0 if done() else HEARTBEAT_S)
            return done()

        return is_done

    wait_for(beat(lambda: any(b'"state"' in value for _, value in newest(log, CONTROL, 1000))), WAIT_S)
    wait_for(lambda: second.read_upto == log.bounds(CONTROL).end, WAIT_S)
    slow.held.set()
    assert slow.waits.wait(WAIT_S)
    before = log.bounds(CONTROL).start
    wait_for(beat(lambda: log.bounds(CONTROL).start > before), WAIT_S)
    slow.go.set()
    wait_for(lambda: second.read_upto == log.bounds(CONTROL).end or kept.lost.is_set(), WAIT_S)

    second.check()
    kept.check()
    assert first.owners()["other"].fence == kept.fence


def test_a_trim_during_a_start_makes_it_read_again(start: Callable[..., Claims], log: EventLog) -> None:
    beat, claim = heartbeat_record([Fence(0)]), claim_record("seat", "a", None)
    claims = book_of(beat, claim).claims().values()
    records = [beat, claim, beat, beat, state_record(3, claims, None), beat]
    log.writer().append([Append("control", 0, BytesColumn.of(records))])

    class Trimmed(Unreachable):
        def bounds(self, at: TopicPartition) -> Any:
            found = log.bounds(at)
            log.trim(at, 2)
            return found

    assert start(log=Trimmed(log)).owners()["seat"].fence == 1


GARBAGE = [
    b"\x00garbage",
    b"",
    b"null",
    b"[]",
    b"7",
    b"{}",
    b'{"v":1}',
    b'{"v":1,"kind":null}',
    b'{"v":"1","kind":"heartbeat","fences":[]}',
    b'{"v":1,"kind":"heartbeat"}',
    b'{"v":1,"kind":"heartbeat","fences":[[1]]}',
    b'{"v":1,"kind":"heartbeat","fences":[1.5,null]}',
    b'{"v":9,"kind":"heartbeat","fences":"later"}',
    b'{"v":1,"kind":"claim","what":"seat","owner":"b"}',
    b'{"v":1,"kind":"claim","what":"seat","owner":7,"replaces":0}',
    b'{"v":1,"kind":"claim","what":"seat","owner":"b","replaces":-7}',
    b'{"v":2,"kind":"claims","owner":"b","things":[["seat"]]}',
    b'{"v":1,"kind":"release","what":"seat","fence":18446744073709551615}',
    b'{"v":2,"kind":"plan","by":"b","fence":0,"seats":[null]}',
    b'{"v":3,"kind":"plan","seats":{}}',
    b'{"v":1,"kind":"load","by":"seat","fence":0,"bytes":1,"limit":0,"slices":[[0,1,9007199254740993]]}',
    b'{"v":1,"kind":"state","upto":5,"claims":[["seat","b",-1,false]],"plan":null}',
]
"""Records of control without effect."""


@pytest.mark.parametrize("when", ["while it runs", "before it starts"])
def test_invalid_records_in_control_end_no_claims(
    start: Callable[..., Claims], log: EventLog, when: str
) -> None:
    first = start()
    held = first.acquire("seat", "a", soon())
    claims = first if when == "while it runs" else None
    log.writer().append([Append("control", 0, BytesColumn.of(GARBAGE))])
    claims = claims or start()

    claims.acquire("other", "a", soon())
    held.check()
    assert claims.owners()["seat"].owner == "a"
    # An empty value, as of a tombstone, is not counted.
    assert skipped()["control"] >= len(GARBAGE) - 1


def test_claim_of_a_later_release_stops_new_claims_only(start: Callable[..., Claims], log: EventLog) -> None:
    claims = start()
    held = claims.acquire("seat", "a", soon())
    log.writer().append([Append("control", 0, BytesColumn.of([b'{"v":3,"kind":"claims","all":true}']))])

    def refused() -> bool:
        try:
            claims.acquire("other", "a", soon()).release()
        except Unavailable as error:
            return "later release" in str(error)
        return False

    wait_for(refused, WAIT_S)
    held.check()
    assert not held.lost.is_set()


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**64), 2**65)
    | st.floats(allow_nan=False)
    | st.sampled_from(
        ["seat", "claim", "heartbeat", "plan", "load", "state", "release", "releases", "claims"]
    )
    | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
KEYS = ("v", "kind", "what", "owner", "replaces", "fence", "fences", "things", "seats", "by", "bytes",
        "limit", "slices", "upto", "claims", "plan")  # fmt: skip


@given(st.sampled_from(RECORDS), st.dictionaries(st.sampled_from(KEYS), VALUES, max_size=4))
def test_any_json_in_control_is_applied_or_skipped(base: bytes, change: dict[str, object]) -> None:
    book = book_of(claim_record("seat", "a", None))
    record = None
    with contextlib.suppress(LaterFormat):
        record = read_record(json.dumps(json.loads(base) | change).encode(), "here")
    if record is not None:
        book.apply(1, record)
        if record["kind"] == "state":
            book.restore(record)
        book.observe(1.0)
        balance = BalanceRules(2, bound=0.1, interval_s=1.0)
        balance.record_reports(book.loads, 1.0)
        balance.decide(("seat", None), ["seat"], 5.0)


# Claims of several things


def test_a_claim_of_several_things_is_one_fence_for_all() -> None:
    book = book_of(claims_record("a", {"x": None, "y": None}))
    assert [(c.owner, c.fence) for c in book.claims().values()] == [("a", 0), ("a", 0)]


def test_claim_of_several_things_is_void_if_one_has_an_owner() -> None:
    book = book_of(claim_record("x", "a", None), claims_record("b", {"y": None, "x": None}))
    assert {what: c.owner for what, c in book.claims().items()} == {"x": "a"}


def test_things_of_one_claim_are_released_one_by_one() -> None:
    book = book_of(
        claims_record("a", {"x": None, "y": None, "z": None}), releases_record(["x", "z"], Fence(0))
    )
    assert [book.claimable(what) for what in "xyz"] == [True, False, True]


def test_changes_counts_every_change_of_owners_only() -> None:
    book = book_of(claims_record("a", {"x": None, "y": None}))
    seen = book.changes
    book.apply(1, parse_record(heartbeat_record([Fence(0)]), "here"))
    book.apply(2, parse_record(claim_record("x", "b", None), "here"))
    assert book.changes == seen
    book.apply(3, parse_record(releases_record(["y"], Fence(0)), "here"))
    assert book.changes > seen


def test_the_last_plan_counts() -> None:
    plans = [Plan("shard:a", Fence(3), ("a", "b")), Plan("shard:b", Fence(4), ("b", "b"))]
    assert book_of(*(plan_record(plan) for plan in plans)).plan == plans[1]


def test_last_load_record_of_a_shard_counts() -> None:
    later = replace(LOAD, bytes=6_000, slices=())
    seat = claim_record("shard:a", "a", None)
    assert book_of(seat, load_record(LOAD)).loads == {"shard:a": LOAD}
    assert book_of(seat, load_record(LOAD), load_record(later)).loads == {"shard:a": later}


def test_load_of_a_process_without_membership_lease_is_ignored() -> None:
    assert book_of(load_record(LOAD)).loads == {}
    seats = claim_record("shard:a", "a", None), claim_record("shard:a", "b", Fence(0))
    assert book_of(*seats, load_record(LOAD)).loads == {}, "it was replaced"


def test_earlier_readers_may_ignore_load_records() -> None:
    assert json.loads(load_record(LOAD))["v"] == 1


@given(
    st.integers(0, 2**62),
    st.integers(0, 2**40),
    st.lists(st.builds(SliceLoad, *[st.integers(0, 2**53)] * 3), max_size=70),
)
def test_load_record_reads_back(held: int, limit: int, slices: list[SliceLoad]) -> None:
    told = Load("shard:a", Fence(0), held, limit, tuple(slices))
    assert book_of(claim_record("shard:a", "a", None), load_record(told)).loads == {"shard:a": told}


@pytest.mark.parametrize(
    "change",
    [
        {"v": 2},
        {"bytes": -1},
        {"limit": 1.5},
        {"fence": None},
        {"slices": {}},
        {"slices": [[1, 2]]},
        {"slices": [[1, 2, -3]]},
        {"slices": [[1, 2, True]]},
        {"slices": [[1, 2, 3.0]]},
    ],
)
def test_load_record_of_a_wrong_shape_is_corrupt(change: dict[str, object]) -> None:
    with pytest.raises(Corrupt, match="here"):
        parse_record(json.dumps(json.loads(load_record(LOAD)) | change).encode(), "here")


def test_earlier_readers_must_not_ignore_joint_claims() -> None:
    assert json.loads(claims_record("a", {"x": None}))["v"] == 2


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        ("claims", {"things": [["x"]]}),
        ("claims", {"things": [["x", "1"]]}),
        ("claims", {"things": ["x"]}),
        ("claims", {"v": 1}),
        ("releases", {"things": [1]}),
        ("plan", {"seats": [None]}),
    ],
)
def test_a_record_of_several_things_of_a_wrong_shape_is_corrupt(kind: str, change: dict[str, object]) -> None:
    made = {
        "claims": claims_record("a", {"x": None}),
        "releases": releases_record(["x"], Fence(0)),
        "plan": plan_record(Plan("shard:a", Fence(0), ("a",))),
    }
    with pytest.raises(Corrupt, match="here"):
        parse_record(json.dumps(json.loads(made[kind]) | change).encode(), "here")


def test_release_during_an_outage_is_written_after_it(start: Callable[..., Claims], log: EventLog) -> None:
    """Heartbeats for the other things of the claim must not keep it."""
    away = Unreachable(log)
    first, second = start(log=away, lease_s=1000.0), start(lease_s=1000.0)
    held = first.acquire_all(["x", "y"], "a", soon())
    away.away.set()
    held.release(["x"])
    away.away.clear()
    assert second.acquire("x", "b", soon()).things == {"x"}
    held.check()
    assert held.things == {"y"}


def test_several_things_are_claimed_once_all_are_free(log: EventLog) -> None:
    first, second = (Claims(log, "control", lease_s=1000.0, heartbeat_s=0.05) for _ in range(2))
    held = first.acquire_all(["x", "y"], "a", soon())
    other = first.acquire("z", "a", soon())
    assert held.things == {"x", "y"}
    wait_for(lambda: {"x", "z"} <= second.owners().keys(), WAIT_S)
    with pytest.raises(Unavailable, match="x is held by a"):
        second.acquire_all(["x", "z"], "b", time.monotonic())
    held.release(["x"])
    other.release()
    taken = second.acquire_all(["x", "z"], "b", soon())
    assert (sorted(taken.things), sorted(held.things)) == (["x", "z"], ["y"])
    assert not held.lost.is_set(), "what was released is not lost"
    assert {what: c.owner for what, c in second.owners().items()} == {"x": "b", "y": "a", "z": "b"}
    for each in (first, second):
        each.close()
