"""Follows an action through the system now and then, by offsets: log, trainer, shards, inference.

It looks every 15 ms while it follows one, and rests in between: a look asks the instances of one service for
a few numbers (/progress of trainer and shards), inference for its status, which is small.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import structlog

from freshet.clock import Clock
from freshet.config.spec.model import Spec
from freshet.config.spec.topics import Topics
from freshet.console.history import parsed
from freshet.console.instances import Instance
from freshet.console.services import PATIENCE_S
from freshet.console.tracing import GIVE_UP_S, Trace, Traces, furthest, offsets_of, published_by
from freshet.coordination.assignment import slices_of
from freshet.errors import DataLost, FreshetError
from freshet.http.service_client import ask
from freshet.log import EventLog, Reader
from freshet.types import TopicPartition

__all__ = ["Tracer"]

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
            code, said = ask(at.port, path, host=at.host, timeout_s=PATIENCE_S)
        except OSError as error:
            return None, f"{name} does not answer: {error}"
        if code != 200 or not isinstance(said, Mapping):
            return None, f"{name} answers {path} with {code}"
        return said, ""
