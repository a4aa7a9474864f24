"""Ranks load torch before other ranks wait for them, and never without other ranks."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from freshet.coordination.claims import Claims
from freshet.log.sqlite.event_log import SqliteEventLog
from freshet.testing.conditions import wait_until
from freshet.trainer.membership import Loading, Membership, QuorumOptions

WAIT_S = 60.0


@contextmanager
def rank(folder: Path, load: Callable[[], None], stop: threading.Event) -> Iterator[Membership]:
    """Open the membership of a rank, with its log in this folder."""
    log = SqliteEventLog(folder / "log")
    log.create_topic("control", partitions=1)
    claims = Claims(log, "control", lease_s=10.0, heartbeat_s=0.1)
    options = QuorumOptions("127.0.0.1", lanes=1, partitions=1)
    membership = Membership(claims, options, stop.is_set, loading=Loading(load))
    try:
        yield membership
    finally:
        membership.leave()
        claims.close()
        log.close()


def never() -> None:
    raise AssertionError("there is no other rank")


def test_single_rank_does_not_load_torch(tmp_path: Path) -> None:
    with rank(tmp_path, never, threading.Event()) as first:
        group = first.join()

        assert group is not None
        assert group.size == 1
        assert not first.members_waiting()


def test_fenced_rank_waits_for_the_newer_quorum(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looks = iter([False, False, True])
    with rank(tmp_path, never, threading.Event()) as first:
        monkeypatch.setattr(Membership, "is_superseded", lambda _: next(looks))
        assert first.await_superseded()
    assert list(looks) == []


def test_fenced_rank_without_newer_quorum_stops_waiting(tmp_path: Path) -> None:
    stop = threading.Event()
    with rank(tmp_path, never, stop) as first:
        assert first.join() is not None
        stop.set()
        assert not first.await_superseded()


def test_joining_rank_loads_torch_before_its_lease(tmp_path: Path) -> None:
    stop, seats = threading.Event(), list[set[int]]()

    def load() -> None:
        seats.append(set(first.snapshot().live))
        stop.set()  # it must not form a process group

    with rank(tmp_path, never, stop) as first, rank(tmp_path, load, stop) as second:
        assert first.join() is not None
        wait_until("the second sees the first", lambda: len(second.snapshot().live) == 1, within_s=WAIT_S)
        assert second.join() is None

    assert seats == [{0}], "only the first rank had a lease"


def test_single_rank_trains_until_torch_is_loaded(tmp_path: Path) -> None:
    begun, loaded, stop = threading.Event(), threading.Event(), threading.Event()

    def load() -> None:
        begun.set()
        assert loaded.wait(WAIT_S)

    with rank(tmp_path, load, stop) as first, rank(tmp_path, lambda: None, stop) as second:
        assert first.join() is not None
        joining = threading.Thread(target=second.join)
        joining.start()
        try:
            while not begun.is_set():
                assert not first.members_waiting(), "torch is not loaded yet"
            assert not first.members_waiting()
            loaded.set()
            wait_until("a rank waits", first.members_waiting, within_s=60)
        finally:
            loaded.set()
            stop.set()
            joining.join(WAIT_S)


def test_joining_rank_raises_the_import_error(tmp_path: Path) -> None:
    def broken() -> None:
        raise ModuleNotFoundError("torch")

    stop = threading.Event()
    with rank(tmp_path, never, stop) as first, rank(tmp_path, broken, stop) as second:
        assert first.join() is not None
        with pytest.raises(ModuleNotFoundError, match="torch"):
            second.join()
