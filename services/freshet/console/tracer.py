"""Follows an action through the system now and then, by offsets: log, trainer, inference.

It looks every 15 ms while it follows one, and rests in between: a look asks one service for a few numbers
(/progress of the trainer, /v1/progress of inference), never for its whole status.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Mapping
from typing import Any

import structlog

from freshet.clock import Clock
from freshet.console.history import parsed
from freshet.console.services import PATIENCE_S
from freshet.console.tracing import GIVE_UP_S, Trace, Traces
from freshet.errors import DataLost, FreshetError
from freshet.runtime.asking import ask
from freshet.seams.eventlog import EventLog, Reader
from freshet.spec.model import Spec
from freshet.spec.topics import Topics
from freshet.types import TopicPartition

__all__ = ["Tracer"]

log = structlog.get_logger(__name__)

LOOK_S = 0.015
AWAIT_ACTION_S = 0.2
"""How long one wait for a new action is; then it looks whether it is to stop."""

RETRY_S = 1.0
_DIGITS = re.compile("[0-9]{1,9}")


class Tracer:
    """A thread that follows actions. `traces` may be read by any thread."""

    def __init__(
        self,
        spec: Spec,
        topics: Topics,
        event_log: EventLog,
        port: Callable[[str], int | None],
        clock: Clock,
        pause_s: float,
    ) -> None:
        """`port`: where a service answers now."""
        self._spec, self._topics, self._log, self._port = spec, topics, event_log, port
        self._clock, self._pause_s = clock, pause_s
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
        partitions = range(self._spec.partitions)
        return {p: self._log.bounds(TopicPartition(self._topics.joiner, p)).end for p in partitions}

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
            actions.assign(
                {
                    at: self._log.bounds(at).end
                    for at in (TopicPartition(self._topics.action, p) for p in partitions)
                }
            )
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
        said, problem = self._asked("trainer", "/progress")
        published = said.get("published")
        published = published if isinstance(published, Mapping) else {}
        trace.trained(
            offsets_of(said.get("applied")),
            offsets_of(published.get("applied")),
            offsets_of(published.get("rows_next")),
            self._clock.now_ms(),
        )
        return problem

    def _look_at_inference(self, trace: Trace) -> str:
        said, problem = self._asked("inference", "/v1/progress")
        trace.served(offsets_of(said.get("rows_next")), self._clock.now_ms())
        return problem

    def _asked(self, service: str, path: str) -> tuple[Mapping[str, Any], str]:
        port = self._port(service)
        if port is None:
            return {}, f"the {service}'s port is not known"
        try:
            code, said = ask(port, path, timeout_s=PATIENCE_S)
        except OSError as error:
            return {}, f"the {service} does not answer: {error}"
        if code != 200 or not isinstance(said, Mapping):
            return {}, f"the {service} answers {path} with {code}"
        return said, ""


def offsets_of(value: Any) -> dict[int, int]:
    """{partition: offset} of what JSON has as {"0": 12}; what is no such thing is left out."""
    if not isinstance(value, Mapping):
        return {}
    return {int(p): n for p, n in value.items() if _DIGITS.fullmatch(str(p)) and type(n) is int}
