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
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["GIVE_UP_S", "STAGES", "Published", "Trace", "Traces", "furthest", "offsets_of", "published_by"]

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
