"""The wall clock that tests move under a running process: what it shows, and who waits by it."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.servers.jumping_clock import JumpingClock, build_clock, compiled

ASKED = """
import sys, threading, time
from datetime import datetime
for line in sys.stdin:
    began = time.monotonic()
    threading.Event().wait(0.05)
    time.sleep(0.05)
    waited = time.monotonic() - began
    print(time.time(), datetime.now().timestamp(), began, waited, flush=True)
"""
UNTIL_A_TIME_OF_DAY = """
#include <stdio.h>
#include <stdlib.h>
#include <threads.h>
#include <time.h>
int main(int argc, char **argv) {
  (void)argc;
  mtx_t m; cnd_t c; struct timespec until, now;
  mtx_init(&m, mtx_plain); cnd_init(&c); mtx_lock(&m);
  timespec_get(&until, TIME_UTC);
  until.tv_sec += atoi(argv[1]);
  puts("waiting"); fflush(stdout);
  while (cnd_timedwait(&c, &m, &until) != thrd_timedout) {}
  clock_gettime(CLOCK_REALTIME, &now);
  return now.tv_sec < until.tv_sec;
}
"""
HOUR = 3_600.0


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_clock(tmp_path_factory.mktemp("clock"))


@contextmanager
def started(clock: JumpingClock, *command: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        command, env=clock.environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with process:
        try:
            yield process
        finally:
            process.kill()


def asked(process: subprocess.Popen[str]) -> list[float]:
    assert process.stdin is not None
    assert process.stdout is not None
    print(file=process.stdin, flush=True)
    return [float(word) for word in process.stdout.readline().split()]


def test_a_process_s_clock_jumps_and_its_monotonic_one_goes_on(library: Path, tmp_path: Path) -> None:
    clock = JumpingClock(library, tmp_path / "offset")
    with started(clock, sys.executable, "-c", ASKED) as process:
        for offset in (0.0, HOUR, -HOUR, 0.0):
            clock.jump(offset)
            wall, date, monotonic, waited = asked(process)

            assert abs(wall - offset - time.time()) < HOUR / 2
            assert abs(date - wall) < HOUR / 2
            assert abs(monotonic - time.monotonic()) < HOUR / 2
            assert 0.1 <= waited < HOUR / 2


@pytest.fixture(scope="module")
def waiter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A program that waits for the time of day that is so many seconds ahead."""
    folder = tmp_path_factory.mktemp("waiter")
    (folder / "wait.c").write_text(UNTIL_A_TIME_OF_DAY)
    return compiled(folder / "wait.c", folder / "wait")


def waits(process: subprocess.Popen[str]) -> bool:
    return process.stdout is not None and process.stdout.readline() == "waiting\n"


def test_a_wait_for_a_time_of_day_ends_when_the_clock_jumps(
    library: Path, waiter: Path, tmp_path: Path
) -> None:
    clock = JumpingClock(library, tmp_path / "offset")
    with started(clock, str(waiter), "1800") as process:
        assert waits(process)
        clock.jump(HOUR)

        assert process.wait(60) == 0


def test_a_wait_for_a_time_of_day_lasts_if_the_clock_goes_back(
    library: Path, waiter: Path, tmp_path: Path
) -> None:
    clock = JumpingClock(library, tmp_path / "offset")
    with started(clock, str(waiter), "5") as process:
        assert waits(process)
        clock.jump(-HOUR)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(7)
        clock.jump(0.0)

        assert process.wait(60) == 0
