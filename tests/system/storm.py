"""Faults at random times in a fleet: whom, how, when, and how long until samples were applied again."""

from __future__ import annotations

import random
import statistics
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from tests.fixtures.fleet import Fleet
from tests.fixtures.members import role_of
from tests.fixtures.traffic import Asker, Traffic
from tests.servers.kafka import Kafka
from tests.servers.redis_cluster import RedisCluster
from tests.system.faults import LINKS, ROUND, WAYS, Clocked, Strike, Victim, Way, strike_on
from tests.system.watching import Watch

LOOK_S = 0.05
AT_ONCE = 0.25  # share of faults that do not wait until the one before is over
STAYS_AWAY = 0.4  # share of killed processes that come back only after a lease: others take over
AWAY_S = (3.5, 6.0)  # longer than a lease (3 s), and than HASTY_NODE_TIMEOUT_MS (2 s)
FULL_S = (10.0, 14.0)  # several versions, for which there is no space, on a slow machine too
WAIT_S = 180.0  # who has not gone on by then is a failure; on a busy machine a broker needs a minute to start


@dataclass(slots=True, eq=False)
class Fault:
    """One fault: of whom, when (monotonic), and when the work was seen to go on."""

    name: str
    role: str
    member: str  # the process that it is about; empty: a server, or all of them
    way: Way
    at: float
    strike: Strike
    back_at: float  # when it is started again, or resumed, or mended
    alone: bool  # nothing else was away
    struck_at: float  # what began before this may have been answered before the strike
    returned: bool = False
    position: Mapping[int, int] | None = None  # where the samples ended, as seen first after the fault
    trained_s: float | None = None  # until the dense weights went on
    resumed_s: float | None = None  # None: not yet


@dataclass(frozen=True, slots=True)
class Progress:
    """How far the fleet has come: where the log of samples ends, offsets that the dense weights, the newest
    version, and all rows in the store, have applied; and what gateways and inference have answered.

    Training goes on when of each partition a sample is applied that was not in the log at the fault: what was
    then on its way does not count.
    """

    ends: Watch
    dense: Watch
    versions: Watch
    stored: Watch
    traffic: Traffic
    askers: Mapping[str, Asker]

    def note(self, fault: Fault, url: str, now: float) -> None:
        """See whether the work goes on that the fault held up."""
        role = role_of(fault.member) if fault.role == "clock" else fault.role
        if role == "gateway":
            gone_on = self.traffic.acked_begin[url] > fault.struck_at
        elif role == "inference":
            gone_on = self.askers[fault.member].last_ok_begin > fault.struck_at
        elif fault.position is None:
            if self.ends.began > fault.struck_at:
                fault.position = self.ends.highest
            gone_on = False
        else:
            gone_on = _behind(self._watch(role), fault.position)
            if fault.trained_s is None and _behind(self.dense, fault.position):
                fault.trained_s = now - fault.at
        if gone_on:
            fault.resumed_s = now - fault.at

    def _watch(self, role: str) -> Watch:
        """What shows that the work goes on."""
        if role == "disk":
            return self.versions
        return self.stored if role in ("paramserver", "paramserver-link", "redis") else self.dense


@dataclass
class Storm:
    """Strikes the members of a fleet and the servers that it stands on."""

    fleet: Fleet
    kafka: Kafka
    redis: RedisCluster
    progress: Progress
    rng: random.Random
    gap_s: float
    kinds: Sequence[tuple[str, Way]] = ROUND  # dealt in rounds
    faults: list[Fault] = field(default_factory=list)
    ended: list[str] = field(default_factory=list)
    """Processes that ended by themselves, with the end of their logs."""

    def run(self, count: int) -> None:
        """Strike so often, then wait until all processes are back and go on."""
        left: list[tuple[str, Way]] = []
        for struck in range(count):
            if not left:
                left = self._deal(count - struck)
            if self.rng.random() >= AT_ONCE:
                self._wait("all", lambda: not self.open())
                self._pass(self.rng.uniform(0.3, 1.7) * self.gap_s)
            else:
                self._pass(self.rng.uniform(0.0, 1.5))
            self._strike(*left.pop())
        self._wait("all", lambda: not self.open())

    def _deal(self, count: int) -> list[tuple[str, Way]]:
        """A round in random order, struck from its end: one of each role first if `count` ends it early."""
        dealt = list(self.kinds)
        self.rng.shuffle(dealt)
        if count < len(dealt):
            one_of_each = list(dict(dealt).items())
            for kind in one_of_each:
                dealt.remove(kind)
            dealt += one_of_each
        return dealt

    def open(self) -> list[Fault]:
        """Faults that are not over: who was struck is away, or the work has not gone on."""
        return [f for f in self.faults if not f.returned or f.resumed_s is None]

    def away(self, name: str) -> list[tuple[float, float]]:
        """From each fault of a process until it was back and answered (monotonic)."""
        mine = [f for f in self.faults if f.name == name]
        return [(f.at, max(f.back_at, f.at + (f.resumed_s or float("inf")))) for f in mine]

    def report(self) -> str:
        """Faults and times to resume, role by role; bracketed where something else was away as well."""
        lines = [f"{len(self.faults)} faults; seconds until the work went on; [n]: another was away as well"]
        for role in dict.fromkeys(role for role, _ in ROUND):
            for way in WAYS:
                mine = [f for f in self.faults if (f.role, f.way) == (role, way)]
                if mine:
                    lines.append(f"  {role:16} {way:5} {len(mine):3}: {_times(mine)}")
        lines += [f"  {len(self.ended)} processes ended by themselves:", *self.ended]
        return "\n".join(lines)

    # --- strikes

    def _strike(self, role: str, way: Way) -> None:
        self._wait(f"a {role} to strike", lambda: bool(self._fit(role, way)))
        name, member, victim = self.rng.choice(self._fit(role, way))
        strike = strike_on(victim, way, self.rng)
        late = way != "kill" or self.rng.random() < STAYS_AWAY
        alone = not self.open()
        for other in self.open():
            other.alone = False
        now = time.monotonic()
        strike.begin()
        struck_at = time.monotonic()
        away_s = self.rng.uniform(*(FULL_S if role == "disk" else AWAY_S)) if late else 0.0
        back_at = now + away_s
        self.faults.append(Fault(name, role, member, way, now, strike, back_at, alone, struck_at))

    def _fit(self, role: str, way: Way) -> Sequence[tuple[str, str, Victim]]:
        """(name of the fault, of the process that it is about, who is struck) of those that can be now."""
        away = {f.name for f in self.open() if not f.returned}
        busy = any(f.role == role for f in self.open())
        if role == "redis":
            whole = not busy and self.redis.is_whole()
            return [(n.address, "", n) for n in self.redis.masters()] if whole else []
        if role == "kafka":
            return [] if busy else [("kafka", "", self.kafka)]
        if role == "disk":
            return [] if busy else [("disk", "", self.fleet.disk)]
        if role in LINKS:
            found: list[tuple[str, str, Victim]] = [
                (f"{name}'s link", name, self.fleet.links[name]) for name in self.fleet.of(LINKS[role])
            ]
        elif role == "clock":
            found = [(f"{name}'s clock", name, self._clocked(name)) for name in self._keep_time(way)]
        else:
            found = [(name, name, self.fleet.processes[name]) for name in self.fleet.of(role)]
        well = (one for one in found if one[0] not in away)
        return [one for one in well if one[0] != one[1] or self.fleet.processes[one[1]].alive]

    def _clocked(self, name: str) -> Clocked:
        answers = role_of(name) in ("gateway", "inference")  # a client waits for an answer of a living one
        return Clocked(self.fleet.processes[name], self.fleet.clocks[name], may_be_killed=not answers)

    def _keep_time(self, way: Way) -> list[str]:
        """Whose clock may jump. A gateway that is an hour behind refuses events as an hour ahead, with the
        reason: no traffic that is to be acknowledged."""
        away = {f.name for f in self.open() if not f.returned}
        there = [name for name in self.fleet.names if name not in away and self.fleet.processes[name].alive]
        return [name for name in there if way != "back" or role_of(name) != "gateway"]

    # --- while time passes

    def _look(self) -> None:
        now = time.monotonic()
        for fault in self.open():
            if not fault.returned and now >= fault.back_at:
                fault.strike.end()
                fault.back_at, fault.returned = time.monotonic(), True
            if fault.resumed_s is None:
                url = self.fleet.url(fault.member) if fault.member else ""
                self.progress.note(fault, url, now)
        self.fleet.disk.keep_full()
        away = {f.name for f in self.open() if not f.returned}
        for name, process in self.fleet.processes.items():
            if name not in away and not process.alive:
                said = "\n".join(process.said().splitlines()[-3:])
                self.ended.append(f"{name} with {process.returncode} at {now:.1f}: {said[-600:]}")
                process.launch()

    def _wait(self, what: str, holds: Callable[[], bool]) -> None:
        deadline = time.monotonic() + WAIT_S
        while not holds():
            waiting = [
                (f.name, f.way, f.position, self.progress.dense.highest, self.progress.stored.highest)
                for f in self.open()
            ]
            assert time.monotonic() < deadline, f"{what}: not after {WAIT_S:g} s; open: {waiting}"
            self._pass(LOOK_S)

    def _pass(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        pause = threading.Event()
        while True:
            self._look()
            left = until - time.monotonic()
            if left <= 0:
                return
            pause.wait(min(LOOK_S, left))


def _behind(watch: Watch, position: Mapping[int, int]) -> bool:
    found = watch.highest
    return all(found.get(p, 0) > offset for p, offset in position.items())


def _times(faults: Sequence[Fault]) -> str:
    resumed = sorted((f.resumed_s, f.alone) for f in faults if f.resumed_s is not None)
    if not resumed:
        return "none resumed"
    told = " ".join(f"{s:.1f}" if alone else f"[{s:.1f}]" for s, alone in resumed)
    return f"median {statistics.median(s for s, _ in resumed):.1f}: {told}"
