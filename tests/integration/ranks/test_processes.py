"""Ranks as processes that come, go, die and stand still: every sample counts once, on all of them the
same."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest

from freshet.log.sqlite.event_log import open_url
from tests.integration.ranks.shared_rows import SharedRows, expected
from tests.servers.processes import Process

WITHIN_S = 90.0
FURTHER = 60  # samples of each partition from the moment in which a test has seen enough


class Rank:
    """A rank's process, and what it has said."""

    def __init__(self, folder: Path, name: str, *args: str) -> None:
        command = [sys.executable, "-m", "tests.integration.ranks.process", str(folder), *args]
        self.process = Process(command, folder / f"{name}.log")

    def said(self, key: str) -> list[dict[str, Any]]:
        """What it said of one kind, in order."""
        lines = [line for line in self.process.said().splitlines() if line.startswith("{")]
        told = [orjson.loads(line) for line in lines if line.endswith("}")]
        return [what for what in told if key in what]

    def wait(self, what: Callable[[Rank], bool]) -> None:
        """Until that is so."""
        deadline, pause = time.monotonic() + WITHIN_S, threading.Event()
        while not what(self):
            assert self.process.alive, self.process.said()[-4000:]
            assert time.monotonic() < deadline, self.process.said()[-4000:]
            pause.wait(0.02)

    def steps_among(self, ranks: int) -> None:
        """Wait until it has made a step in a quorum of so many ranks, its newest."""
        self.wait(lambda rank: rank.in_world_of() == ranks)

    def in_world_of(self) -> int:
        """Ranks of the newest quorum in which it has stepped; 0 if it has not."""
        worlds, steps = self.said("world"), self.said("stepped")
        return worlds[-1]["ranks"] if worlds and steps and steps[-1]["at"] >= worlds[-1]["at"] else 0


class Ranks:
    """All ranks of one test."""

    def __init__(self, folder: Path, clean: ExitStack) -> None:
        self.folder, self._clean, self._count = folder, clean, 0
        self.rows = SharedRows(folder / "rows.db", make=True)
        clean.callback(self.rows.close)
        open_url(f"sqlite:{folder / 'log'}").close()

    def start(self, *args: str) -> Rank:
        """Another rank, as soon as it is in a quorum."""
        rank = Rank(self.folder, f"rank-{self._count}", *args)
        self._count += 1
        self._clean.callback(rank.process.kill)
        rank.process.start(lambda _: bool(rank.said("world")), within_s=WITHIN_S)
        return rank

    def finish(self, *ranks: Rank) -> list[dict[str, Any]]:
        """Let the log end, have the ranks train on all of it, and end them; what each says of its state."""
        stop = self.rows.end_the_log(FURTHER)
        for rank in ranks:
            rank.wait(lambda r: bool(r.said("done")))
        deadline, pause = time.monotonic() + WITHIN_S, threading.Event()
        while set(self.rows.applied().values()) != {stop}:
            assert time.monotonic() < deadline, self.rows.applied()
            pause.wait(0.02)
        for rank in ranks:
            rank.process.stop()
        return [rank.said("end")[-1] for rank in ranks]

    def check(self, ends: list[dict[str, Any]], *, rounds: bool = False) -> None:
        """Every sample once in the rows and once in the dense state, which all ranks have alike.

        A lossy reducer rounds residuals, as floats do.
        """
        count, hashes = expected(self.rows.stop())
        assert self.rows.totals() == (count, hashes)
        for end in ends:
            np.testing.assert_allclose(end["dense"], [count, hashes], rtol=0, atol=0.02 if rounds else 0)
        assert len({end["bits"] for end in ends}) == 1


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[Ranks]:
    with ExitStack() as clean:
        yield Ranks(tmp_path, clean)


def test_a_joining_rank_heals_and_steps_with_the_others(ranks: Ranks) -> None:
    first = ranks.start("--lanes", "2")
    first.steps_among(1)
    second = ranks.start()
    first.steps_among(2)
    second.steps_among(2)

    ends = ranks.finish(first, second)

    ranks.check(ends)
    assert second.said("world")[-1]["step"] > 0
    assert [rank.said("end")[-1]["lost"] for rank in (first, second)] == [0, 0]


def test_a_killed_rank_is_left_behind_and_another_may_join(ranks: Ranks) -> None:
    first, second, third = (ranks.start() for _ in range(3))
    for rank in (first, second, third):
        rank.steps_among(3)

    first.process.kill()  # the one that led, and held the place where they meet
    second.steps_among(2)
    third.steps_among(2)
    fourth = ranks.start()
    for rank in (second, third, fourth):
        rank.steps_among(3)

    ranks.check(ranks.finish(second, third, fourth))


def test_a_rank_that_stood_still_is_left_behind_and_comes_back(ranks: Ranks) -> None:
    first, second = (ranks.start("--answer-s", "1.0") for _ in range(2))
    first.steps_among(2)

    os.kill(second.process.pid, signal.SIGUSR1)  # it stops itself, where it holds no lock of a file
    first.steps_among(1)
    second.process.resume()
    first.steps_among(2)
    second.steps_among(2)

    ranks.check(ranks.finish(first, second))


def test_a_stopped_rank_leaves_between_steps_and_loses_nothing(ranks: Ranks) -> None:
    first, second = (ranks.start() for _ in range(2))
    first.steps_among(2)

    first.process.stop()
    second.steps_among(1)

    ranks.check(ranks.finish(second))
    assert second.said("end")[-1]["lost"] == 0
    assert first.said("end")[-1]["lost"] == 0


@pytest.mark.parametrize(
    "how",
    [("--mode", "async"), *(("--reducer", name) for name in ("half", "auto", "int8", "sign", "dct"))],
    ids=" ".join,
)
def test_killed_and_joining_ranks_keep_dense_weights_exact(ranks: Ranks, how: tuple[str, str]) -> None:
    first, second = (ranks.start(*how) for _ in range(2))
    first.steps_among(2)
    second.steps_among(2)

    first.process.kill()  # with steps that no flush point contains
    second.steps_among(1)
    third = ranks.start(*how)
    second.steps_among(2)
    third.steps_among(2)

    ranks.check(ranks.finish(second, third), rounds=how[1] in ("auto", "int8", "sign", "dct"))
    assert second.said("end")[-1]["lost"] == 1


def test_ranks_of_a_site_are_killed_and_join_as_others_do(ranks: Ranks) -> None:
    here, there = ("--mode", "async", "--site", "here"), ("--mode", "async", "--site", "there")
    first, second, third = ranks.start(*here), ranks.start(*here), ranks.start(*there)
    for rank in (first, second, third):
        rank.steps_among(3)

    first.process.kill()  # the one that stood for its site
    second.steps_among(2)
    fourth = ranks.start(*here)
    for rank in (second, third, fourth):
        rank.steps_among(3)

    ranks.check(ranks.finish(second, third, fourth))
