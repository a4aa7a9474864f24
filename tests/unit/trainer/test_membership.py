"""When ranks load what they meet by: before others wait for them, and never where nobody is."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from freshet.coordination.claims import Claims
from freshet.log.sqlite.event_log import SqliteEventLog
from freshet.trainer.membership import Membership, QuorumOptions
from freshet.trainer.torch_import import Loading
from tests.system.waiting import wait_until

WAIT_S = 20.0


@contextmanager
def rank(folder: Path, load: Callable[[], None], stop: threading.Event) -> Iterator[Membership]:
    """A rank of the model whose log is in this folder."""
    log = SqliteEventLog(folder / "log")
    log.create_topic("control", partitions=1)
    claims = Claims(log, "control", lease_s=10.0, heartbeat_s=0.1)
    terms = QuorumOptions("127.0.0.1", lanes=1, partitions=1)
    membership = Membership(claims, terms, stop.is_set, loading=Loading(load))
    try:
        yield membership
    finally:
        membership.leave()
        claims.close()
        log.close()


def never() -> None:
    raise AssertionError("nobody else is there")


def test_a_rank_that_is_alone_loads_nothing(tmp_path: Path) -> None:
    with rank(tmp_path, never, threading.Event()) as first:
        group = first.join()

        assert group is not None
        assert group.size == 1
        assert not first.members_waiting()


def test_who_is_refused_waits_for_the_log_to_say_that_it_was_left_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = iter([False, False, True])
    with rank(tmp_path, never, threading.Event()) as first:
        monkeypatch.setattr(Membership, "is_superseded", lambda _: next(looks))
        assert first.await_superseded()
    assert list(looks) == []


def test_who_is_refused_for_another_reason_waits_no_longer_than_for_a_rank(tmp_path: Path) -> None:
    stop = threading.Event()
    with rank(tmp_path, never, stop) as first:
        assert first.join() is not None
        stop.set()
        assert not first.await_superseded()


def test_who_joins_others_loads_before_it_takes_a_seat(tmp_path: Path) -> None:
    stop, seats = threading.Event(), list[set[int]]()

    def load() -> None:
        seats.append(set(first.snapshot().live))
        stop.set()  # it is not to go on to meet

    with rank(tmp_path, never, stop) as first, rank(tmp_path, load, stop) as second:
        assert first.join() is not None
        assert second.join() is None

    assert seats == [{0}], "only the first had one"


def test_who_trains_alone_goes_on_until_it_has_loaded(tmp_path: Path) -> None:
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
                assert not first.members_waiting(), "what it would meet by is not there"
            assert not first.members_waiting()
            loaded.set()
            wait_until("somebody waits", first.members_waiting, within_s=20)
        finally:
            loaded.set()
            stop.set()
            joining.join(WAIT_S)


def test_what_cannot_be_loaded_is_told_to_who_needs_it(tmp_path: Path) -> None:
    def broken() -> None:
        raise ModuleNotFoundError("torch")

    stop = threading.Event()
    with rank(tmp_path, never, stop) as first, rank(tmp_path, broken, stop) as second:
        assert first.join() is not None
        with pytest.raises(ModuleNotFoundError, match="torch"):
            second.join()
