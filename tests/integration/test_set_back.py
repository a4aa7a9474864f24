"""Event time is set back after clocks were wrong, and what was late meanwhile is joined: each sample once."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from uuid import uuid4

import pytest

from freshet.adapters import open_eventlog
from freshet.clock import CONFIRMED_S
from freshet.errors import DataLost, Unavailable
from freshet.joiner.commit import Commit, Ledger
from freshet.joiner.late import LateJoin, LateJoined, SetBackPartition, set_back
from freshet.joiner.plan import JoinPlan
from freshet.joiner.service import Intervals, JoinerService
from freshet.log import EventLog, Writer
from freshet.types import Append, BytesColumn, TopicPartition
from tests.fixtures.join_events import Action, Event, Served, Shown, label, plan_of
from tests.fixtures.joiner import World, random_events
from tests.servers.kafka import Kafka

START_MS = 1_800_000_000_000
HOUR_MS = 3_600_000
PLAN = plan_of(label("click", 5_000), grace_ms=1_000)
PLANS = {
    "early": plan_of(label("click", 300), label("buy", 900, given=0), grace_ms=120),
    "shown, a number, down-sampled": plan_of(
        label("click", 400),
        label("watch", 300, value="sum(action.amount) + last(action.amount)"),
        grace_ms=120,
        require_shown=True,
        negatives=0.5,
    ),
}
CALM = Intervals(flush_interval_ms=0, commit_interval_ms=0, end_check_interval_ms=10**9, pin_interval_ms=0)


class Scene:
    """A joiner whose machine's clock a test sets, and which can be killed."""

    def __init__(
        self, folder: Path, plan: JoinPlan = PLAN, partitions: int = 1, log: EventLog | None = None
    ) -> None:
        self.world = World(folder, plan, partitions, other_log=log)
        self.world.clock.wall_ms, self.world.clock.seconds = START_MS, 1_000.0
        self.joiner: JoinerService | None = None

    def begin(self) -> JoinerService:
        if self.joiner is None:
            self.joiner = self.world.joiner(CALM)
            self.joiner.open()
        return self.joiner

    def kill(self) -> None:
        if self.joiner is not None:
            self.joiner.close()
        self.joiner = None

    def pass_s(self, seconds: float) -> None:
        self.world.clock.seconds += seconds
        self.world.clock.wall_ms += round(seconds * 1_000)

    def step(self) -> None:
        """Read all there is, and commit."""
        joiner = self.begin()
        deadline = time.monotonic() + 60.0
        joiner.step()
        while not joiner.has_reached(joiner.ends()):
            assert time.monotonic() < deadline, "not read to the end"
            joiner.step()
        joiner.flush(only_due=False)

    def lead(self, events: Sequence[Event] = ()) -> None:
        """Set the clock an hour ahead, until the joiner believes it and event time has followed."""
        self.step()
        self.world.clock.wall_ms += HOUR_MS
        assert self.begin().clocks.steady.step_ms == HOUR_MS
        self.pass_s(CONFIRMED_S + 1)
        self.world.send([*events, *self.marks("ahead")])
        self.step()
        self.kill()

    def lead_back(self) -> None:
        self.world.clock.wall_ms -= HOUR_MS

    def marks(self, name: str) -> list[Event]:
        """Impressions of each partition, seen and clicked at once, dated now."""
        now = self.world.clock.wall_ms
        events: list[Event] = []
        for request in (f"{name}{n}" for n in range(8 * self.world.partitions)):
            events += [Served(request, ("a",), now), Action(f"{request}/a", now, id=request)]
            if self.world.plan.require_shown:
                events.append(Shown(f"{request}/a", now))
        return events

    def set_back(self, *, dry_run: bool = False, faults: Faults | None = None) -> list[SetBackPartition]:
        open_writer = (lambda name: faults.of(self.world.log.writer(name))) if faults else None
        return set_back(self.world.context(open_writer), dry_run=dry_run)

    def commits(self) -> list[tuple[int, Commit]]:
        return [(p, Commit.decode(value, "test")) for p, value in self.world.values("m.joiner")]

    def ledger(self) -> Ledger:
        return Ledger.total([commit.ledger for commit in dict(self.commits()).values()])

    def once(self) -> Counter[tuple[int, int]]:
        """(id, label) of `samples` and how often; each must be there once."""
        found = Counter((s.id, s.label) for s in self.world.samples())
        assert max(found.values(), default=1) == 1
        return found

    def requests(self, topic: str = "m.samples") -> set[str]:
        return {s.payload.decode().strip("<>").split("|")[0] for s in self.world.samples(topic)}

    def close(self) -> None:
        self.kill()
        self.world.close()


class Faults:
    """Cuts a command at one of its appends, before or after it is written."""

    def __init__(self, at: int, *, written: bool) -> None:
        self.at, self.written, self.seen = at, written, 0

    def of(self, writer: Writer) -> Writer:
        return _Cut(self, writer)


class _Cut:
    def __init__(self, faults: Faults, inner: Writer) -> None:
        self._faults, self._inner = faults, inner

    def append(self, appends: Sequence[Append]) -> Sequence[int]:
        cut = self._faults.seen == self._faults.at
        self._faults.seen += 1
        if cut and not self._faults.written:
            raise Unavailable("cut before it was written")
        offsets = self._inner.append(appends)
        if cut:
            raise Unavailable("cut after it was written")
        return offsets

    def close(self) -> None:
        self._inner.close()


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    scene = Scene(tmp_path / "log")
    yield scene
    scene.close()


def led_ahead(scene: Scene) -> None:
    """Event time is an hour ahead, clocks are right again, and some events were late since."""
    scene.world.send(scene.marks("before"))
    scene.pass_s(1)
    scene.lead()
    scene.lead_back()
    scene.pass_s(5)
    scene.world.send(scene.marks("late"))
    scene.step()
    scene.kill()


def test_after_event_time_is_set_back_events_join_at_once(scene: Scene) -> None:
    led_ahead(scene)
    assert not any(r.startswith("late") for r in scene.requests())
    assert scene.requests("m.samples.late") == {f"late{n}" for n in range(8)}
    [done] = scene.set_back()
    scene.pass_s(1)
    scene.world.send(scene.marks("after"))
    scene.step()

    assert done.was_ms is not None
    assert done.was_ms > START_MS + HOUR_MS
    assert done.watermark_ms == scene.world.clock.wall_ms - 1_000
    assert {f"after{n}" for n in range(8)} <= scene.requests()
    assert set(scene.once().values()) == {1}
    assert set(scene.ledger().unexplained().values()) == {0}


def test_a_repeat_of_an_event_read_before_the_set_back_is_known(scene: Scene) -> None:
    led_ahead(scene)
    before = scene.marks("late") + scene.marks("ahead")
    late = scene.world.values("served")
    scene.set_back()
    samples = scene.once()
    for _, value in late:  # every served event again, as it was sent
        scene.world.writer.append([Append("served", 0, BytesColumn.of([value]))])
    scene.step()
    scene.kill()
    scene.world.send(before)
    scene.pass_s(2 * HOUR_MS / 1_000)
    scene.world.send(scene.marks("end"))
    scene.step()

    assert not any(r.startswith("late") for r in scene.requests())
    assert samples <= scene.once()


@pytest.mark.parametrize("time_ms", [-5, 2**53 + 1, 2**62])
def test_a_time_that_was_refused_ends_no_set_back(scene: Scene, time_ms: int) -> None:
    scene.world.send(
        [Served("odd", ("a",), time_ms), Action("odd/a", time_ms, id="odd")], scene.world.clock.wall_ms
    )
    led_ahead(scene)
    scene.set_back()
    scene.pass_s(1)
    scene.world.send(scene.marks("after"))
    scene.step()

    assert {f"after{n}" for n in range(8)} <= scene.requests()
    assert "odd" not in scene.requests() | scene.requests("m.samples.late")
    assert set(scene.ledger().unexplained().values()) == {0}


def test_twice_or_without_need_it_changes_nothing(scene: Scene) -> None:
    assert [one.changed for one in scene.set_back()] == [False]
    scene.world.send(scene.marks("before"))
    scene.step()
    scene.kill()
    assert [one.changed for one in scene.set_back()] == [False]
    led_ahead(scene)
    n = len(scene.commits())
    assert [one.changed for one in scene.set_back(dry_run=True)] == [True]
    assert len(scene.commits()) == n
    assert [one.changed for one in scene.set_back()] == [True]
    assert [one.changed for one in scene.set_back()] == [False]
    assert len(scene.commits()) == n + 1


def test_a_joiner_that_runs_is_fenced_by_it(scene: Scene) -> None:
    led_ahead(scene)
    running = scene.begin()
    scene.set_back()
    scene.world.send(scene.marks("after"))
    with pytest.raises(Exception, match="writer"):
        running.step()
    scene.kill()
    scene.step()

    assert {f"after{n}" for n in range(8)} <= scene.requests()


def test_if_ids_of_the_time_before_are_gone_it_refuses(scene: Scene) -> None:
    led_ahead(scene)
    at = TopicPartition("served", 0)
    scene.world.log.trim(at, scene.world.log.bounds(at).end - 1)

    with pytest.raises(DataLost, match="joined again"):
        scene.set_back()


def test_events_not_read_yet_are_not_late_after_it(scene: Scene) -> None:
    led_ahead(scene)
    scene.world.send(scene.marks("waiting"))
    scene.pass_s(600)
    [done] = scene.set_back()
    scene.step()

    assert done.watermark_ms == scene.world.clock.wall_ms - 600_000
    assert {f"waiting{n}" for n in range(8)} <= scene.requests()


def test_a_restart_needs_no_events_that_a_set_back_recalled(scene: Scene) -> None:
    led_ahead(scene)
    [done] = scene.set_back()
    assert done.was_ms is not None
    while scene.world.clock.wall_ms < done.was_ms + 8_000:
        scene.pass_s(60 if scene.world.clock.wall_ms < done.was_ms - 60_000 else 1)
        scene.world.send(scene.marks(f"after{scene.world.clock.wall_ms}"))
        scene.step()
    scene.kill()
    _, last = scene.commits()[-1]
    assert any(commit.set_back for _, commit in scene.commits()), "it is replayed"
    for role, topic in scene.world.inputs.items():
        scene.world.log.trim(TopicPartition(topic, 0), last.low[role])
    samples = scene.once()
    scene.world.send(scene.marks("end"))
    scene.step()

    assert {f"end{n}" for n in range(8)} <= scene.requests()
    assert samples <= scene.once()


def shifted(events: Sequence[Event], by_ms: int, prefix: str) -> list[Event]:
    """The same events at another time, of other requests."""
    moved: list[Event] = []
    for event in events:
        if isinstance(event, Served):
            moved.append(replace(event, request=prefix + event.request, time=event.time + by_ms))
        elif isinstance(event, Action):
            id_ = None if event.id is None else prefix + event.id
            moved.append(
                replace(event, impression=prefix + event.impression, time=event.time + by_ms, id=id_)
            )
        else:
            moved.append(replace(event, impression=prefix + event.impression, time=event.time + by_ms))
    return moved


def send_in_pieces(scene: Scene, events: list[Event], chance: random.Random) -> None:
    """Events as they come, with a joiner that is killed now and then."""
    at = 0
    while at < len(events):
        n = chance.randrange(1, 30)
        piece = events[at : at + n]
        at += n
        ahead = max(e.time for e in piece) - scene.world.clock.wall_ms
        if ahead > 0:
            scene.pass_s(ahead / 1_000)
        scene.world.send(piece)
        scene.step()
        if chance.random() < 0.25:
            scene.kill()


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("seed", range(2))
def test_killed_at_any_moment_around_a_set_back_nothing_doubles(tmp_path: Path, name: str, seed: int) -> None:
    plan, chance = PLANS[name], random.Random(f"set back {name} {seed}")
    scene = Scene(tmp_path / "log", plan, partitions=2)
    before = random_events(chance, plan, requests=30, disorder_ms=100)
    send_in_pieces(scene, shifted(before, START_MS, "b"), chance)
    scene.lead(shifted(before[:20], scene.world.clock.wall_ms + HOUR_MS - START_MS, "x"))
    scene.lead_back()
    late = shifted(before, scene.world.clock.wall_ms, "l")
    send_in_pieces(scene, late, chance)
    scene.kill()
    assert any(one.changed for one in scene.set_back())
    again = [e for e in late if chance.random() < 0.3]
    later = shifted(before, scene.world.clock.wall_ms, "a")
    send_in_pieces(scene, [*again, *later], chance)
    scene.kill()
    scene.world.joiner().run(until_end=True)

    scene.once()
    ledger = scene.ledger()
    assert set(ledger.unexplained().values()) == {0}
    assert ledger.events["impressions_late"] > 10
    assert joined_of(scene.world, "a") == joined_alone(tmp_path / "alone", plan, later)
    scene.close()


def joined_of(world: World, prefix: str) -> set[tuple[int, float, float]]:
    """(id, value, weight) of the samples of requests whose names begin so."""
    of_these = [s for s in world.samples() if s.payload.startswith(f"<{prefix}r".encode())]
    return {(s.id, s.value, s.weight) for s in of_these}


def joined_alone(folder: Path, plan: JoinPlan, events: list[Event]) -> set[tuple[int, float, float]]:
    """What the events give in a log of their own, in one go."""
    alone = World(folder, plan, partitions=2)
    alone.send(events)
    alone.joiner().run(until_end=True)
    found = {(s.id, s.value, s.weight) for s in alone.samples()}
    alone.close()
    return found


def join_late(scene: Scene, faults: Faults | None = None, *, dry_run: bool = False) -> list[LateJoined]:
    log = scene.world.log
    open_writer = (lambda name: faults.of(log.writer(name))) if faults else None
    # a round for each read
    return list(LateJoin(scene.world.context(open_writer), dry_run=dry_run, round_bytes=1).run())


def total(found: Sequence[LateJoined], name: str) -> int:
    return sum(getattr(one, name) for one in found)


@pytest.mark.parametrize("name", PLANS)
def test_late_ones_are_joined_once_wherever_the_batch_is_cut(tmp_path: Path, name: str) -> None:
    plan, chance = PLANS[name], random.Random(f"late {name}")
    scene = Scene(tmp_path / "log", plan, partitions=2)
    events = random_events(chance, plan, requests=30, disorder_ms=100, resend=0.2)
    send_in_pieces(scene, shifted(events, START_MS, "b"), chance)
    scene.lead()
    scene.lead_back()
    late = shifted(events, scene.world.clock.wall_ms, "l")
    send_in_pieces(scene, late, chance)
    scene.kill()
    for written in (False, True):
        with pytest.raises(Unavailable):
            scene.set_back(faults=Faults(0, written=written))
    scene.set_back()
    scene.pass_s(10)
    scene.world.send(scene.marks("after"))
    scene.step()
    late_ids = {s.id for s in scene.world.samples("m.samples.late")}
    assert not late_ids & {s.id for s in scene.world.samples()}, "marked as known"
    dry = join_late(scene, dry_run=True)
    for at in range(20):
        faults = Faults(0, written=at % 2 == 1)
        try:
            join_late(scene, faults)
        except Unavailable:
            continue
        break
    scene.world.send([e for e in late if chance.random() < 0.3])  # again, beside the batch
    scene.step()
    found = join_late(scene)
    scene.kill()
    scene.world.joiner().run(until_end=True)

    scene.once()
    assert joined_of(scene.world, "l") == joined_alone(tmp_path / "alone", plan, late)
    assert total(found, "positive") + total(found, "negative") == 0
    assert total(found, "read") == len(late_ids)
    assert total(dry, "positive") + total(dry, "negative") == total(found, "already") > 10
    assert all(n == 0 for one in found for n in one.left.values())
    scene.close()


def test_late_ones_with_open_windows_wait_for_the_next_batch(scene: Scene) -> None:
    led_ahead(scene)
    scene.set_back()
    first = join_late(scene)
    scene.pass_s(20)
    scene.world.send(scene.marks("after"))
    scene.step()
    second = join_late(scene)

    assert [one.left["windows_open"] for one in (*first, *second)] == [8, 0]
    assert [one.positive for one in (*first, *second)] == [0, 8]
    assert set(scene.once().values()) == {1}


def test_late_ones_whose_events_are_gone_are_left(scene: Scene) -> None:
    led_ahead(scene)
    scene.set_back()
    scene.pass_s(20)
    scene.world.send(scene.marks("after"))
    scene.step()
    scene.kill()
    at = TopicPartition("served", 0)
    scene.world.log.trim(at, scene.world.log.bounds(at).end - 1)

    [found] = join_late(scene)
    assert found.left["event_gone"] == found.read == 8


def test_on_kafka_both_commands_can_be_cut_and_repeated(kafka: Kafka, tmp_path: Path) -> None:
    log = open_eventlog(f"kafka://{kafka.bootstrap}/{uuid4().hex}")
    scene = Scene(tmp_path / "log", log=log)
    # The broker dates records by the real time: it and the joiner are an hour ahead, then only the broker.
    scene.world.clock.wall_ms = int(time.time() * 1_000) - HOUR_MS - 600_000
    led_ahead(scene)
    late = scene.requests("m.samples.late")
    for written in (False, True):
        with pytest.raises(Unavailable):
            scene.set_back(faults=Faults(0, written=written))
    assert not any(one.changed for one in scene.set_back()), "the one that was cut is written"
    scene.pass_s(10)
    scene.world.send(scene.marks("after"))
    scene.step()
    for at in range(6):
        try:
            join_late(scene, Faults(0, written=at % 2 == 1))
        except Unavailable:
            continue
        break
    scene.world.send(scene.marks("later"))
    scene.step()
    found = join_late(scene)
    scene.kill()

    assert set(scene.once().values()) == {1}
    names = ("before", "ahead", "late", "after", "later")
    assert {f"{name}{n}" for name in names for n in range(8)} <= scene.requests()
    assert late == {f"late{n}" for n in range(8)}
    assert total(found, "already") == 8
    assert all(n == 0 for one in found for n in one.left.values())
    assert set(scene.ledger().unexplained().values()) == {0}
    scene.close()
