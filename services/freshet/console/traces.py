"""Traces of single actions from the log to the served rows, by offsets.

Stages, each in milliseconds since the log's timestamp of the action: logged (a reader sees it), joined (the
joiner's commit covers it), trained (the dense weights have applied the samples up to then), published (all
owners of rows, which together own all slices, have published the rows of those samples), served (each ready
replica of inference has read them). Samples of the action that come later, while its window is open, are not
waited for.

`Tracer` looks every 15 ms while it follows an action, and pauses in between: a look queries /progress of
trainer and shards and /status of inference, which are small.
"""

from __future__ import annotations

import re
import threading
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
from freshet.coordination.assignment import slices_of
from freshet.errors import DataLost, FreshetError
from freshet.http.service_client import ask
from freshet.log import EventLog, Reader
from freshet.types import TopicPartition

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
    """Return the progress of publishing of all owners of rows, by their answers to /progress.

    It is not known while the answering owners own fewer than `slices` together, since the others may own the
    rows in question. An owner without slices has nothing to publish and is ignored.
    """
    owners = [answer for answer in holders if answer.get("slices") != 0]
    if sum(n for answer in owners if type(n := answer.get("slices")) is int) < slices:
        return Published({}, {})
    parts = [one["published"] if isinstance(one.get("published"), Mapping) else {} for one in owners]
    applied = [offsets_of(part.get("applied")) for part in parts]
    known = set.intersection(*map(set, applied)) if applied else set()
    return Published(
        {p: min(each[p] for each in applied) for p in known},
        furthest(offsets_of(part.get("rows_next")) for part in parts),
    )


def furthest(offsets: Iterable[Mapping[int, int]]) -> dict[int, int]:
    """Return {partition: largest offset}."""
    found: dict[int, int] = {}
    for each in offsets:
        for partition, offset in each.items():
            found[partition] = max(offset, found.get(partition, offset))
    return found


def offsets_of(value: Any) -> dict[int, int]:
    """Return {partition: offset} for JSON such as {"0": 12}; malformed entries are left out."""
    if not isinstance(value, Mapping):
        return {}
    return {int(p): n for p, n in value.items() if _DIGITS.fullmatch(str(p)) and type(n) is int}


@dataclass(slots=True)
class Trace:
    """An action that is followed. Times are wall-clock milliseconds."""

    role: str  # "action"
    partition: int
    offset: int
    appended_ms: int
    stages: dict[str, float] = field(default_factory=dict)
    samples_end: int | None = None  # end of its partition of samples just after the joiner's commit
    rows_next: Mapping[int, int] | None = None  # ends of the topic of rows once they were published

    @property
    def waits_for(self) -> str | None:
        """The next stage; None once it is served."""
        return next((stage for stage in STAGES if stage not in self.stages), None)

    def logged(self, now_ms: float) -> None:
        """Note that a reader has seen the action."""
        self._reached("logged", now_ms)

    def joined(self, next_offset: int | None, samples_end: int | None, now_ms: float) -> None:
        """Note the joiner's newest commit, at `next_offset`, and the end of samples just after it."""
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
        """Note the offsets that trainer and row owners have applied and published."""
        if self.samples_end is None:
            return
        if applied.get(self.partition, -1) >= self.samples_end:
            self._reached("trained", now_ms)
        if "trained" in self.stages and rows_next and published.get(self.partition, -1) >= self.samples_end:
            self.rows_next = dict(rows_next)
            self._reached("published", now_ms)

    def served(self, rows_next: Mapping[int, int], now_ms: float) -> None:
        """Note the offsets that the only inference server has read."""
        self.served_by({"inference": rows_next}, now_ms)

    def served_by(self, followed: Mapping[str, Mapping[int, int]], now_ms: float) -> None:
        """Note the offsets that all ready replicas have read."""
        wanted = self.rows_next
        if wanted is None or not followed:
            return
        if all(mine.get(p, -1) >= n for mine in followed.values() for p, n in wanted.items()):
            self._reached("served", now_ms)

    def _reached(self, stage: str, now_ms: float) -> None:
        self.stages.setdefault(stage, max(0.0, now_ms - self.appended_ms, *self.stages.values()))


class Traces:
    """The newest traces, with quantiles of their stages. One thread adds; any may read."""

    def __init__(self) -> None:
        self._done: tuple[tuple[int, dict[str, float]], ...] = ()  # (time, stages); replaced as a whole
        self._failed: dict[str, Any] | None = None

    def add(self, trace: Trace, now_ms: int, why: str = "") -> None:
        """Add a trace that is served, or was given up for the reason `why`."""
        if trace.waits_for is None:
            self._done = (*self._done, (now_ms, dict(trace.stages)))[-KEPT:]
        else:
            reason = why or f"not {trace.waits_for} within {GIVE_UP_S:g} s"
            self._failed = {"at_ms": now_ms, "stage": trace.waits_for, "reason": reason}

    @property
    def newest(self) -> Mapping[str, float] | None:
        """Stages of the newest trace, in ms."""
        return self._done[-1][1] if self._done else None

    def to_json(self) -> dict[str, Any] | None:
        """Return {at_ms, n, stages: [{stage, ms, p90}], failed}; None before the first trace."""
        done, failed = self._done, self._failed
        if not done and failed is None:
            return None
        at_ms = done[-1][0] if done else failed["at_ms"] if failed else 0
        stages = []
        for stage in STAGES if done else ():
            times = sorted(stages[stage] for _, stages in done)
            stages_ms = {"ms": _quantile(times, 0.5), "p90": _quantile(times, 0.9)}
            stages.append({"stage": stage, **stages_ms})
        if failed and done and failed["at_ms"] < done[0][0]:
            failed = None
        return {"at_ms": at_ms, "n": len(done), "stages": stages, "failed": failed}


def _quantile(times: list[float], q: float) -> float:
    """Interpolate between two measured values."""
    place = q * (len(times) - 1)
    low = int(place)
    high = min(low + 1, len(times) - 1)
    return round(times[low] + (times[high] - times[low]) * (place - low), 1)


log = structlog.get_logger(__name__)

LOOK_S = 0.015
AWAIT_ACTION_S = 0.2
"""Longest wait for a new action before `stop` is checked."""

RETRY_S = 1.0
MOST_AT_ONCE = 8
"""Instances that are queried concurrently."""

Answers = Mapping[str, Mapping[str, Any]]
"""{instance: its answer}, without the instances that did not answer."""


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
        """Follow nothing yet. `instances` returns the ready instances of a role, or all if none is ready."""
        self._spec, self._topics, self._log, self._instances = spec, topics, event_log, instances
        self._slices = len(slices_of(spec.buckets))
        self._clock, self._pause_s = clock, pause_s
        self._pool = ThreadPoolExecutor(MOST_AT_ONCE, thread_name_prefix="trace")
        self.traces = Traces()

    def run(self, stop: threading.Event) -> None:
        """Follow one action after another until `stop` is set."""
        while not stop.is_set():
            try:
                self._follow_one(stop)
            except (FreshetError, KeyError) as error:  # the log is away, or does not exist yet
                log.debug("tracing waits", reason=str(error))
                stop.wait(RETRY_S)
            except Exception as error:  # a bug must not end the tracing
                log.error("a trace failed", exc_info=error)
                stop.wait(RETRY_S)
            stop.wait(self._pause_s)
        self.close()

    def close(self) -> None:
        """Stop querying; for callers of `follow`."""
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
        """Look until the trace is served, given up or stopped; return the problem of the last look, or "".

        `commits` reads the trace's partition from before the action was appended (see `commits_from`).
        """
        why = ""
        deadline = self._clock.monotonic() + GIVE_UP_S
        while trace.waits_for is not None and self._clock.monotonic() < deadline:
            why = self._look(trace, commits)
            if trace.waits_for is not None and stop.wait(LOOK_S):
                break
        return why

    def commit_ends(self) -> dict[int, int]:
        """Return {partition: end of the joiner's commits}, for `commits_from`, before an action is sent."""
        places = [TopicPartition(self._topics.joiner, p) for p in range(self._spec.partitions)]
        return {at.partition: bounds.end for at, bounds in self._log.all_bounds(places).items()}

    def commits_from(self, partition: int, offset: int) -> Reader:
        """Return a reader of the joiner's commits; the caller closes it."""
        commits = self._log.reader()
        commits.assign({TopicPartition(self._topics.joiner, partition): offset})
        return commits

    def _next_action(self, stop: threading.Event) -> tuple[Trace | None, Reader | None]:
        """Wait for an action; return its trace, and a reader of its partition's commits from before it."""
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
        """Check the next stage of the trace; return the problem of the check, or ""."""
        match trace.waits_for:
            case "joined":
                return self._check_commits(trace, commits)
            case "trained" | "published":
                return self._check_trainer(trace)
            case _:
                return self._check_inference(trace)

    def _check_commits(self, trace: Trace, commits: Reader) -> str:
        where = TopicPartition(self._topics.samples, trace.partition)
        try:
            found = commits.poll(1_000, 0.0)
        except DataLost:  # the joiner removes commits that no restart needs
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

    def _check_trainer(self, trace: Trace) -> str:
        trainers, problem = self._query_all("trainer", "/progress")
        applied = furthest(offsets_of(answer.get("applied")) for answer in trainers.values())
        holders: Answers = trainers
        slices = 0  # that owners must report: a trainer that owns rows owns all of them
        if self._instances("paramserver"):
            holders, unanswered = self._query_all("paramserver", "/progress")
            problem, slices = problem or unanswered, self._slices
        published = published_by(holders.values(), slices)
        trace.trained(applied, published.applied, published.rows_next, self._clock.now_ms())
        return problem

    def _check_inference(self, trace: Trace) -> str:
        replicas, problem = self._query_all("inference", "/status")  # /v1/progress requires a token
        read = {name: offsets_of(answer.get("rows_next")) for name, answer in replicas.items()}
        trace.served_by(read, self._clock.now_ms())
        return problem

    def _query_all(self, role: str, path: str) -> tuple[Answers, str]:
        """Return the answers of a role's instances, and the first problem, or ""."""
        instances = self._instances(role)
        if not instances:
            return {}, f"where the {role} answers is not known"
        many = self._pool.map if len(instances) > 1 else map
        found = list(many(lambda instance: self._ask(instance, path), instances))
        answers = {i.name: one for i, (one, _) in zip(instances, found, strict=True) if one is not None}
        return answers, next((problem for _, problem in found if problem), "")

    def _ask(self, instance: Instance, path: str) -> tuple[Mapping[str, Any] | None, str]:
        name, at = instance.name, instance.address
        try:
            code, said = ask(at.port, path, host=at.host, timeout_s=TIMEOUT_S)
        except OSError as error:
            return None, f"{name} does not answer: {error}"
        if code != 200 or not isinstance(said, Mapping):
            return None, f"{name} answers {path} with {code}"
        return said, ""
