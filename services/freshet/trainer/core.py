"""Decisions of the dense step: which ranges count (PROTOCOL 14). No I/O, no tensors."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from freshet.types import OffsetRange

__all__ = ["Counts", "DenseLedger", "Ranges"]

Ranges = tuple[OffsetRange, ...]
"""Of one batch, at most one a partition."""


class Counts(enum.Enum):
    """What a batch does to the dense weights."""

    WHOLE = "whole"  # applied; the vector moves on
    ALREADY = "already"  # dense weight 0: applied before; its row gradients are kept
    BACK = "back"  # neither: it goes back to its embedder


@dataclass(slots=True)
class DenseLedger:
    """The dense `applied` vector: {partition of samples: next offset}; identical on all ranks."""

    applied: dict[int, int]

    def decide(self, offered: Sequence[tuple[OffsetRange, ...] | None]) -> list[Counts | None]:
        """Judge the batches of one step in rank order (lane order within a rank) and move the vector.

        Args:
            offered: per rank or lane its batch's ranges, or None where it has no batch and joins with weight
            0.

        A batch counts if every range's `start` equals the vector, has weight 0 if every `stop` is at or below
        it, and otherwise goes back. A mixture goes back too: it straddles what is applied.
        """
        verdicts: list[Counts | None] = []
        for ranges in offered:
            if ranges is None:
                verdicts.append(None)
                continue
            verdict = self._judge(ranges)
            if verdict is Counts.WHOLE:
                self.applied.update({r.partition: r.stop for r in ranges})
            verdicts.append(verdict)
        return verdicts

    def decide_runs(self, runs: Sequence[Sequence[Ranges] | None]) -> list[list[Counts]]:
        """Judge all batches of a run's steps, as `decide` would one step after the other.

        Args:
            runs: per lane the ranges of its batches, one a step, or None.

        Returns per lane a verdict for each batch up to the first that goes back: it rewinds the lane, so
        those after it are not judged.
        """
        verdicts: list[list[Counts]] = [[] for _ in runs]
        for step in range(max((len(run) for run in runs if run is not None), default=0)):
            for run, of in zip(runs, verdicts, strict=True):
                if run is None or step >= len(run) or (of and of[-1] is Counts.BACK):
                    continue
                (verdict,) = self.decide([run[step]])
                assert verdict is not None
                of.append(verdict)
        return verdicts

    def set_back(self, batches: Sequence[Ranges], verdicts: Sequence[Counts]) -> None:
        """The last batches of a lane's run were judged, and then not learned from: the vector names them no
        longer. Their partitions are the lane's own, so other lanes' verdicts stand."""
        for ranges, verdict in zip(reversed(batches), reversed(verdicts), strict=True):
            if verdict is Counts.WHOLE:
                self.applied.update({r.partition: r.start for r in ranges})

    def _judge(self, ranges: tuple[OffsetRange, ...]) -> Counts:
        if all(self.applied.get(r.partition) == r.start for r in ranges):
            return Counts.WHOLE
        if all(r.stop <= self.applied.get(r.partition, 0) for r in ranges):
            return Counts.ALREADY
        return Counts.BACK

    def raise_to(self, vector: Iterable[Sequence[int]]) -> None:
        """Take over each (partition, offset) that is larger: of ranks that step on their own, in mode
        `async`."""
        for partition, offset in vector:
            self.applied[partition] = max(offset, self.applied.get(partition, 0))

    def told(self) -> Mapping[int, Sequence[int]]:
        """The vector in the shape in which stores tell what they have applied."""
        return {p: (offset,) for p, offset in self.applied.items()}
