"""One wrong clock, of any process or client, does not move event time for others (PROTOCOL 19).

A small system is driven second by second: inference dates what it served and clients date their actions, the
log dates records, a joiner reads. Each has a clock of its own that jumps and comes back.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from freshet.clock import SteadyClock
from freshet.joiner.commit import Ledger
from freshet.joiner.service import Intervals, JoinerService
from freshet.types import Append, BytesColumn
from tests.fixtures.join_events import Action, Event, Served, label, plan_of
from tests.fixtures.joiner import World

START_MS = 1_800_000_000_000
HOUR_S, DAY_S = 3_600, 86_400
STEP_S = 2
EXAMPLES = int(os.environ.get("FRESHET_TEST_CLOCKS", "6"))
JUMPS_S = (HOUR_S, -HOUR_S, DAY_S, -DAY_S)
PARTS = ("client", "inference", "log", "joiner")
PLAN = plan_of(label("click", 5_000), grace_ms=1_000)


class MovedClock:
    """The true time and an offset; the time since boot is always true."""

    def __init__(self, truth: Truth) -> None:
        self._truth, self.offset_s = truth, 0.0

    def now_ms(self) -> int:
        return START_MS + round((self._truth.seconds + self.offset_s) * 1_000)

    def monotonic(self) -> float:
        return 10_000 + self._truth.seconds


@dataclass
class Truth:
    seconds: float = 0.0


@dataclass
class System:
    """A joiner with clients, brokers and their clocks, in true time."""

    folder: Path
    brokers: bool  # the log's clock is a broker's wall clock, not a process's known time
    truth: Truth = field(default_factory=Truth)
    sent: int = 0
    requested: dict[str, float] = field(default_factory=dict)  # request -> true second

    def __post_init__(self) -> None:
        self.clocks = {part: MovedClock(self.truth) for part in PARTS}
        self.steady = {part: SteadyClock(self.clocks[part], boot=part) for part in PARTS}
        self.world = World(self.folder, PLAN, partitions=1)
        self.world.clock = self.clocks["joiner"]  # type: ignore[assignment]
        self.due: list[tuple[float, Action]] = []
        self.joiner = self.begun()

    def begun(self) -> JoinerService:
        joiner = self.world.joiner(
            Intervals(
                flush_interval_ms=0, commit_interval_ms=0, end_check_interval_ms=0, pin_interval_ms=10**9
            )
        )
        joiner.open()
        return joiner

    def restart_joiner(self) -> None:
        self.joiner.close()
        self.joiner = self.begun()

    def append(self, event: Event) -> None:
        topic = "served" if isinstance(event, Served) else "actions"
        now = self.clocks["log"].now_ms() if self.brokers else self.steady["log"].now_ms()
        self.world.writer.append(
            [Append(topic, 0, BytesColumn.of([event.record()]), times_ms=np.array([now], np.int64))]
        )

    def run(self, seconds: int) -> None:
        for _ in range(seconds // STEP_S):
            self.truth.seconds += STEP_S
            request = f"r{self.sent}"
            self.sent += 1
            self.requested[request] = self.truth.seconds
            self.append(Served(request, ("a",), self.steady["inference"].now_ms()))
            self.due.append((self.truth.seconds + STEP_S, Action(f"{request}/a", 0, id=request)))
            while self.due and self.due[0][0] <= self.truth.seconds:
                action = self.due.pop(0)[1]
                self.append(Action(action.impression, self.clocks["client"].now_ms(), id=action.id))
            self.joiner.step()
            self.joiner.flush()

    def jump(self, parts: Iterable[str], seconds: float) -> None:
        for part in parts:
            self.clocks[part].offset_s = seconds

    def drain(self) -> Ledger:
        for _ in range(6):
            self.truth.seconds += STEP_S
            self.joiner.step()
            self.joiner.flush()
        self.joiner.report_status()
        assert self.joiner.status is not None
        return self.joiner.status.ledger

    def values(self) -> dict[str, list[float]]:
        """Return {request: values of its samples}."""
        found: dict[str, list[float]] = {}
        for sample in self.world.samples():
            found.setdefault(sample.payload.decode().strip("<>").split("|")[0], []).append(sample.value)
        return found


def late(ledger: Ledger) -> int:
    events = ledger.events
    return events["impressions_late"] + events["actions_late"]


CASES = [
    *[(part,) for part in PARTS],
    PARTS,
    ("inference", "log"),
    ("client", "inference"),
]
"""Clocks that are wrong together. A client's and a broker's are excluded: they outvote the joiner's."""


@pytest.mark.parametrize("brokers", [False, True], ids=["embedded", "kafka"])
@pytest.mark.parametrize("jump_s", JUMPS_S)
def test_nothing_is_late_after_a_clock_was_set_right(jump_s: int, brokers: bool, tmp_path: Path) -> None:
    system = System(tmp_path, brokers)
    system.run(8)
    right: set[str] = set()
    for parts in CASES:
        if brokers and parts == PARTS and jump_s > 0:
            continue
        system.jump(parts, jump_s)
        system.run(6)
        system.jump(parts, 0)
        wrong_until = system.truth.seconds
        system.run(8)
        right |= {r for r, at in system.requested.items() if at > wrong_until}
    system.run(2)
    ledger = system.drain()
    values = system.values()

    assert {r: values.get(r) for r in right if values.get(r) not in ([1.0], [0.0])} == {}
    # A click that is sent after the next clock went wrong may be refused: its impression becomes a negative.
    clicked = [r for r in right if values[r] == [1.0]]
    assert len(clicked) >= len(right) - 2 * len(CASES)
    assert not [r for r, v in values.items() if len(v) > 1]
    assert set(ledger.unexplained().values()) == {0}
    assert ledger.refused + sum(ledger.labels["click"].values()) >= system.sent, "each is counted somewhere"


@pytest.mark.parametrize("jump_s", JUMPS_S)
def test_restart_during_a_wrong_clock_changes_nothing(jump_s: int, tmp_path: Path) -> None:
    system = System(tmp_path, brokers=False)
    system.run(8)
    system.jump(PARTS, jump_s)
    system.run(2)
    system.restart_joiner()
    system.run(4)
    system.restart_joiner()
    wrong_until = system.truth.seconds
    system.jump(PARTS, 0)
    system.run(10)
    system.drain()
    values = system.values()
    after = {r for r, at in system.requested.items() if wrong_until < at < wrong_until + 8}
    assert {r: values.get(r) for r in after if values.get(r) != [1.0]} == {}


@pytest.mark.long
@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    jumps=st.lists(
        st.tuples(
            st.sets(st.sampled_from(PARTS), min_size=1, max_size=4),
            st.integers(-100_000, 100_000),
            st.sampled_from((2, 6, 20)),
            st.booleans(),
        ),
        min_size=1,
        max_size=3,
    ),
    brokers=st.booleans(),
)
def test_jumps_of_any_clock_do_not_affect_later_events(
    tmp_path_factory: pytest.TempPathFactory,
    jumps: list[tuple[set[str], int, int, bool]],
    brokers: bool,
) -> None:
    system = System(tmp_path_factory.mktemp("clocks"), brokers)
    system.run(10)
    for parts, seconds, lasts_s, restart in jumps:
        # Two independent clocks that are wrong alike outvote the third.
        system.jump(parts - {"client"} if brokers and "log" in parts else parts, seconds)
        system.run(lasts_s)
        if restart:
            system.restart_joiner()
        system.jump(PARTS, 0)
        system.run(4)
    right_from = system.truth.seconds
    system.run(14)
    ledger = system.drain()
    values = system.values()
    assert Counter(len(v) for v in values.values()).keys() <= {1}
    after = {r for r, at in system.requested.items() if right_from < at < right_from + 12}
    assert {r: values.get(r) for r in after if values.get(r) != [1.0]} == {}
    assert set(ledger.unexplained().values()) == {0}


@pytest.mark.parametrize("back_s", [-HOUR_S, -DAY_S])
@pytest.mark.parametrize("append_time", [False, True], ids=["CreateTime", "LogAppendTime"])
def test_a_new_joiner_set_back_refuses_nothing(back_s: int, append_time: bool, tmp_path: Path) -> None:
    """It follows at once, as it may have started while its clock was ahead; events ahead then wait."""
    system = System(tmp_path, brokers=True)
    system.joiner.clocks.log_counts = append_time
    system.run(8)
    system.jump(("joiner",), back_s)
    system.run(6)
    system.jump(("joiner",), 0)
    system.run(8)
    ledger = system.drain()

    assert ledger.refused == 0
    assert late(ledger) == 0
    assert [v for v in system.values().values() if v != [1.0]] in ([], [[0.0]])


@pytest.mark.parametrize("ahead_s", [HOUR_S, DAY_S])
@pytest.mark.parametrize("append_time", [False, True], ids=["CreateTime", "LogAppendTime"])
def test_record_dated_ahead_does_not_move_the_watermark(
    ahead_s: int, append_time: bool, tmp_path: Path
) -> None:
    system = System(tmp_path, brokers=True)
    system.joiner.clocks.log_counts = append_time
    system.run(8)
    wrong = Served("wrong", ("a",), system.clocks["client"].now_ms() + ahead_s * 1_000)
    system.world.writer.append(
        [Append("served", 0, BytesColumn.of([wrong.record()]), times_ms=np.array([wrong.time], np.int64))]
    )
    system.run(10)
    ledger = system.drain()

    assert ledger.refused == 1
    assert late(ledger) == 0
    assert [v for r, v in system.values().items() if v != [1.0]] in ([], [[0.0]])


def test_first_event_with_a_wrong_time_is_reported(tmp_path: Path) -> None:
    system = System(tmp_path, brokers=False)
    system.run(4)
    for request, time in (("seconds", START_MS // 1_000), ("past", -5), ("ahead", 3 * START_MS)):
        system.append(Served(request, ("a",), time))
    system.run(4)
    system.joiner.report_status()
    assert system.joiner.status is not None
    told = system.joiner.status.bad_times["served"]

    assert told.startswith("served[0], offset 3: ") or told.startswith("served[0], offset 2: ")
    assert "1970" in told or "ahead of now" in told
    assert system.joiner.status.counts.refused["served"]["bad_time"] == 2
