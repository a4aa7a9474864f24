"""One action on its way from the log to the served rows, and what many of them took. Pure.

Stages, each in milliseconds since the log took the action:
logged (a reader sees it), joined (the joiner's commit covers it), trained (the dense weights have applied the
samples there were then), published (the rows of those samples are in the topic of rows: where shards hold
them, of all shards, which together own all slices), served (inference has followed it so far: each replica
that is ready, so that any reader is answered by it). An action whose window is open may lead to more samples
later: not waited for.
"""

from __future__ import annotations

import re
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import structlog

from freshet.clock import Clock
from freshet.config.spec.model import Spec
from freshet.config.spec.topics import Topics
from freshet.console.history import parsed
from freshet.console.instances import Instance
from freshet.console.services import TIMEOUT_S
from freshet.coordination.slices import slices_of
from freshet.errors import DataLost, FreshetError
from freshet.http.service_client import ask
from freshet.log import EventLog, Reader
from freshet.types import TopicPartition

__all__ = [
    "GIVE_UP_S",
    "STAGES",
    "Published",
    "Trace",
    "Tracer",
    "Traces",
    "furthest",
    "offsets_of",
    "published_by",
]

STAGES = ("logged", "joined", "trained", "published", "served")
GIVE_UP_S = 30.0
KEPT = 20
_DIGITS = re.compile("[0-9]{1,9}")


@dataclass(frozen=True, slots=True)
class Published:
    """Rows have learned from every sample below `applied` in the records below `rows_next`."""

    applied: Mapping[int, int]  # {partition of samples: next offset}
    rows_next: Mapping[int, int]  # {partition of rows: next offset}


def published_by(holders: Iterable[Mapping[str, Any]], slices: int) -> Published:
    """How far all who hold rows have published, by their answers to /progress.

    Nothing is known while those that answer own fewer than `slices` together: the rest may hold the rows in
    question. Who owns none has nothing to publish, and holds nobody up.
    """
    told = [said for said in holders if said.get("slices") != 0]
    if sum(n for said in told if type(n := said.get("slices")) is int) < slices:
        return Published({}, {})
    parts = [said["published"] if isinstance(said.get("published"), Mapping) else {} for said in told]
    applied = [offsets_of(part.get("applied")) for part in parts]
    known = set.intersection(*map(set, applied)) if applied else set()
    return Published(
        {p: min(each[p] for each in applied) for p in known},
        furthest(offsets_of(part.get("rows_next")) for part in parts),
    )


def furthest(offsets: Iterable[Mapping[int, int]]) -> dict[int, int]:
    """{partition: the largest of several offsets}."""
    found: dict[int, int] = {}
    for each in offsets:
        for partition, offset in each.items():
            found[partition] = max(offset, found.get(partition, offset))
    return found


def offsets_of(value: Any) -> dict[int, int]:
    """{partition: offset} of what JSON has as {"0": 12}; what is no such thing is left out."""
    if not isinstance(value, Mapping):
        return {}
    return {int(p): n for p, n in value.items() if _DIGITS.fullmatch(str(p)) and type(n) is int}


@dataclass(slots=True)
class Trace:
    """One action, followed. Times are wall-clock milliseconds; partitions are numbers."""

    role: str  # "action"
    partition: int
    offset: int
    appended_ms: int
    stages: dict[str, float] = field(default_factory=dict)
    samples_end: int | None = None  # of its partition, right after the joiner's commit
    rows_next: Mapping[int, int] | None = None  # where rows ended once they were published

    @property
    def waits_for(self) -> str | None:
        """The next stage; None once it is served."""
        return next((stage for stage in STAGES if stage not in self.stages), None)

    def logged(self, now_ms: float) -> None:
        """A reader has seen it."""
        self._reached("logged", now_ms)

    def joined(self, next_offset: int | None, samples_end: int | None, now_ms: float) -> None:
        """The joiner's newest commit is at `next_offset`; samples of the partition ended there after that."""
        if next_offset is not None and samples_end is not None and next_offset > self.offset:
            self.samples_end = samples_end
            self._reached("joined", now_ms)

    def trained(
        self,
        applied: Mapping[int, int],
        published: Mapping[int, int],
        rows_next: Mapping[int, int],
        now_ms: float,
    ) -> None:
        """The trainer has applied and published so far."""
        if self.samples_end is None:
            return
        if applied.get(self.partition, -1) >= self.samples_end:
            self._reached("trained", now_ms)
        if "trained" in self.stages and rows_next and published.get(self.partition, -1) >= self.samples_end:
            self.rows_next = dict(rows_next)
            self._reached("published", now_ms)

    def served(self, rows_next: Mapping[int, int], now_ms: float) -> None:
        """Inference, the only one there is, has followed the rows so far."""
        self.served_by({"inference": rows_next}, now_ms)

    def served_by(self, followed: Mapping[str, Mapping[int, int]], now_ms: float) -> None:
        """These replicas, all that are ready and answer, have followed the rows so far."""
        wanted = self.rows_next
        if wanted is None or not followed:
            return
        if all(mine.get(p, -1) >= n for mine in followed.values() for p, n in wanted.items()):
            self._reached("served", now_ms)

    def _reached(self, stage: str, now_ms: float) -> None:
        self.stages.setdefault(stage, max(0.0, now_ms - self.appended_ms, *self.stages.values()))


class Traces:
    """The newest traces, and what they took."""

    def __init__(self) -> None:
        self._done: deque[tuple[int, dict[str, float]]] = deque(maxlen=KEPT)  # (time, stages)
        self._failed: dict[str, Any] | None = None

    def add(self, trace: Trace, now_ms: int, why: str = "") -> None:
        """Take a trace that is served, or was given up; `why`: what was in the way."""
        if trace.waits_for is None:
            self._done.append((now_ms, dict(trace.stages)))
        else:
            reason = why or f"not {trace.waits_for} within {GIVE_UP_S:g} s"
            self._failed = {"at_ms": now_ms, "stage": trace.waits_for, "reason": reason}

    @property
    def newest(self) -> Mapping[str, float] | None:
        """Stages of the newest trace, ms."""
        return self._done[-1][1] if self._done else None

    def to_json(self) -> dict[str, Any] | None:
        """{at_ms, n, stages: [{stage, ms, p90}], failed}; None before the first."""
        if not self._done and self._failed is None:
            return None
        at_ms = self._done[-1][0] if self._done else self._failed["at_ms"] if self._failed else 0
        stages = []
        for stage in STAGES if self._done else ():
            times = sorted(stages[stage] for _, stages in self._done)
            stages_ms = {"ms": _quantile(times, 0.5), "p90": _quantile(times, 0.9)}
            stages.append({"stage": stage, **stages_ms})
        failed = (
            self._failed
            if self._failed and self._failed["at_ms"] >= (self._done[0][0] if self._done else 0)
            else None
        )
        return {"at_ms": at_ms, "n": len(self._done), "stages": stages, "failed": failed}


def _quantile(times: list[float], q: float) -> float:
    """Between two values that were seen, in proportion."""
    place = q * (len(times) - 1)
    low = int(place)
    high = min(low + 1, len(times) - 1)
    return round(times[low] + (times[high] - times[low]) * (place - low), 1)


log = structlog.get_logger(__name__)

LOOK_S = 0.015
AWAIT_ACTION_S = 0.2
"""How long one wait for a new action is; then it looks whether it is to stop."""

RETRY_S = 1.0
MOST_AT_ONCE = 8
"""Instances that are asked at the same time."""

Answers = Mapping[str, Mapping[str, Any]]
"""{instance: what it answered}; who did not is not in it."""


class Tracer:
    """A thread that follows actions. `traces` may be read by any thread."""

    def __init__(
        self,
        spec: Spec,
        topics: Topics,
        event_log: EventLog,
        instances: Callable[[str], Sequence[Instance]],
        clock: Clock,
        pause_s: float,
    ) -> None:
        """`instances`: those of a role that are ready now, or all of them if none is."""
        self._spec, self._topics, self._log, self._instances = spec, topics, event_log, instances
        self._slices = len(slices_of(spec.buckets))
        self._clock, self._pause_s = clock, pause_s
        self._pool = ThreadPoolExecutor(MOST_AT_ONCE, thread_name_prefix="trace")
        self.traces = Traces()

    def run(self, stop: threading.Event) -> None:
        """Follow one action after the other until told to stop."""
        while not stop.is_set():
            try:
                self._follow_one(stop)
            except (FreshetError, KeyError) as error:  # the log is away, or not there yet
                log.debug("tracing waits", reason=str(error))
                stop.wait(RETRY_S)
            except Exception as error:  # a fault of ours must not end the tracing
                log.error("a trace failed", exc_info=error)
                stop.wait(RETRY_S)
            stop.wait(self._pause_s)
        self.close()

    def close(self) -> None:
        """Ask no more; for who calls `follow` itself."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _follow_one(self, stop: threading.Event) -> None:
        trace, commits = self._next_action(stop)
        if trace is None or commits is None:
            return
        try:
            why = self.follow(trace, commits, stop)
        finally:
            commits.close()
        if not stop.is_set():
            self.traces.add(trace, self._clock.now_ms(), why)

    def follow(self, trace: Trace, commits: Reader, stop: threading.Event) -> str:
        """Look again and again until the trace is served, given up or stopped.

        `commits`: of the trace's partition, from before the action was appended (`commits_from`). Returns
        what was in the way of the last look, if anything was.
        """
        why = ""
        deadline = self._clock.monotonic() + GIVE_UP_S
        while trace.waits_for is not None and self._clock.monotonic() < deadline:
            why = self._look(trace, commits)
            if trace.waits_for is not None and stop.wait(LOOK_S):
                break
        return why

    def commit_ends(self) -> dict[int, int]:
        """{partition: where the joiner's commits end now}: for `commits_from`, before an action is sent."""
        places = [TopicPartition(self._topics.joiner, p) for p in range(self._spec.partitions)]
        return {at.partition: bounds.end for at, bounds in self._log.all_bounds(places).items()}

    def commits_from(self, partition: int, offset: int) -> Reader:
        """A reader of the joiner's commits; the caller closes it."""
        commits = self._log.reader()
        commits.assign({TopicPartition(self._topics.joiner, partition): offset})
        return commits

    def _next_action(self, stop: threading.Event) -> tuple[Trace | None, Reader | None]:
        """The next action that is appended, and a reader of its partition's commits from before it was."""
        partitions = range(self._spec.partitions)
        actions = self._log.reader()
        try:
            ends = self.commit_ends()
            places = [TopicPartition(self._topics.action, p) for p in partitions]
            actions.assign({at: bounds.end for at, bounds in self._log.all_bounds(places).items()})
            while not stop.is_set():
                for at, records in actions.poll(1, AWAIT_ACTION_S):
                    trace = Trace("action", at.partition, int(records.offsets[0]), int(records.times_ms[0]))
                    trace.logged(self._clock.now_ms())
                    return trace, self.commits_from(at.partition, ends[at.partition])
                ends = self.commit_ends()
            return None, None
        finally:
            actions.close()

    def _look(self, trace: Trace, commits: Reader) -> str:
        """One look at what the trace waits for; returns what is in the way of looking, if anything is."""
        match trace.waits_for:
            case "joined":
                return self._look_at_commits(trace, commits)
            case "trained" | "published":
                return self._look_at_trainer(trace)
            case _:
                return self._look_at_inference(trace)

    def _look_at_commits(self, trace: Trace, commits: Reader) -> str:
        where = TopicPartition(self._topics.samples, trace.partition)
        try:
            found = commits.poll(1_000, 0.0)
        except DataLost:  # the joiner drops the commits that no restart needs
            at = TopicPartition(self._topics.joiner, trace.partition)
            commits.assign({at: self._log.bounds(at).start})
            return ""
        for _, records in found:
            for value in records.values:
                commit = parsed(value)
                following = commit.get("next") if commit is not None else None
                reached = following.get(trace.role) if isinstance(following, dict) else None
                if type(reached) is int:
                    trace.joined(reached, self._log.bounds(where).end, self._clock.now_ms())
                if trace.waits_for != "joined":
                    return ""
        return ""

    def _look_at_trainer(self, trace: Trace) -> str:
        trainers, problem = self._asked("trainer", "/progress")
        applied = furthest(offsets_of(said.get("applied")) for said in trainers.values())
        holders: Answers = trainers
        slices = 0  # that must be told of: a trainer that holds rows itself holds all of them
        if self._instances("paramserver"):
            holders, in_the_way = self._asked("paramserver", "/progress")
            problem, slices = problem or in_the_way, self._slices
        published = published_by(holders.values(), slices)
        trace.trained(applied, published.applied, published.rows_next, self._clock.now_ms())
        return problem

    def _look_at_inference(self, trace: Trace) -> str:
        replicas, problem = self._asked("inference", "/status")  # /v1/progress asks for a token
        followed = {name: offsets_of(said.get("rows_next")) for name, said in replicas.items()}
        trace.served_by(followed, self._clock.now_ms())
        return problem

    def _asked(self, role: str, path: str) -> tuple[Answers, str]:
        """What the instances of a role answer, and what is in the way of asking one of them."""
        instances = self._instances(role)
        if not instances:
            return {}, f"where the {role} answers is not known"
        many = self._pool.map if len(instances) > 1 else map
        found = list(many(lambda instance: self._ask(instance, path), instances))
        said = {i.name: answer for i, (answer, _) in zip(instances, found, strict=True) if answer is not None}
        return said, next((problem for _, problem in found if problem), "")

    def _ask(self, instance: Instance, path: str) -> tuple[Mapping[str, Any] | None, str]:
        name, at = instance.name, instance.address
        try:
            code, said = ask(at.port, path, host=at.host, timeout_s=TIMEOUT_S)
        except OSError as error:
            return None, f"{name} does not answer: {error}"
        if code != 200 or not isinstance(said, Mapping):
            return None, f"{name} answers {path} with {code}"
        return said, ""
