"""The dense state of a rank, and how the ranks of a new world come to have the same (PROTOCOL 15)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import orjson
import structlog

from freshet.config.spec.identity import explain_defaults
from freshet.errors import Corrupt, Mismatch
from freshet.model import DenseModel
from freshet.trainer.quality import Quality
from freshet.trainer.rank_measures import SharedMeasures, pack_arrays, unpack_arrays
from freshet.trainer.ranks import RankGroup
from freshet.trainer.step_coordinator import DenseLedger

__all__ = ["DenseState", "Progress"]

log = structlog.get_logger("freshet.trainer")

MODEL, MEASURES, VECTOR, TIMES = "model/", "measures/", "vector", "times"


@dataclass(slots=True)
class Progress:
    """What the trainer has done since it started."""

    samples: int = 0  # trained on by this rank, replayed ones too
    steps: int = 0
    event_time_ms: int = 0  # newest event learned from
    version: int = 0  # newest written by this rank
    versions_failed: int = 0  # that could not be written
    version_error: str = ""  # why the newest could not; empty: it was written, or is being


@dataclass
class DenseState:
    """All that the ranks have in common, at rest: between two steps."""

    model: DenseModel
    ledger: DenseLedger
    quality: Quality
    shared: SharedMeasures
    progress: Progress
    spec_hash: str

    def level(self, group: RankGroup, *, apart: bool = False) -> None:
        """Have all ranks take the state of the highest step among them; the lowest of those that have it.

        Args:
            apart: the ranks have stepped on their own (mode `async`), so no vector is ahead of all others:
                each partition's offset is the largest that any of them has.

        Raises:
            RankLost: a rank was lost meanwhile; nothing has changed, or all of it.
            Mismatch: a rank trains another model.
        """
        mine = {
            "step": self.progress.steps,
            "spec": self.spec_hash,
            "vector": list(self.ledger.applied.items()),
        }
        told = [_told(part) for part in group.exchange(orjson.dumps(mine))]
        others = [other["spec"] for other in told if other["spec"] != self.spec_hash]
        if others:
            hint = explain_defaults(self.spec_hash, others[0])
            raise Mismatch(
                "the ranks of this model were started with different specs; start all with one"
                + (f"\n{hint}" if hint else "")
            )
        steps = [other["step"] for other in told]
        source = steps.index(max(steps))
        data = group.broadcast(self.pack() if source == group.rank else None, source)
        done = self.shared.done
        if source != group.rank:
            done = self.unpack(data)
            log.info(
                "state taken from another rank",
                rank=source,
                step=self.progress.steps,
                step_before=mine["step"],
            )
        if apart:
            for other in told:
                self.ledger.raise_to(other["vector"])
        self.shared.begin(group.size, done)

    def pack(self) -> bytes:
        """All of it as bytes."""
        self.shared.take_in()
        arrays: dict[str, Any] = {f"{MODEL}{name}": array for name, array in self.model.state().items()}
        arrays |= {f"{MEASURES}{name}": array for name, array in self.quality.state().items()}
        arrays[VECTOR] = np.array(sorted(self.ledger.applied.items()), np.int64).reshape(-1, 2)
        arrays[TIMES] = np.array([self.progress.steps, self.progress.event_time_ms, self.shared.done])
        return pack_arrays(arrays)

    def unpack(self, data: bytes) -> int:
        """Take over what another rank has packed; returns how many exchanges of measures are in it.

        Raises Corrupt or Mismatch.
        """
        arrays = unpack_arrays(data)
        try:
            step, event_time_ms, done = arrays[TIMES].tolist()
            vector = arrays[VECTOR].tolist()
        except (KeyError, ValueError) as error:
            raise Corrupt(f"expected the state of another rank, found arrays {sorted(arrays)[:5]}") from error
        self.model.load_state(_within(arrays, MODEL))
        self.quality.load_state(_within(arrays, MEASURES))
        self.ledger.applied = dict(vector)
        self.progress.steps, self.progress.event_time_ms = step, event_time_ms
        return int(done)


def _within(arrays: dict[str, Any], prefix: str) -> dict[str, Any]:
    return {name.removeprefix(prefix): array for name, array in arrays.items() if name.startswith(prefix)}


def _told(data: bytes) -> dict[str, Any]:
    try:
        told: dict[str, Any] = orjson.loads(data)
        told["step"], told["spec"], told["vector"] = (
            int(told["step"]),
            str(told["spec"]),
            list(told["vector"]),
        )
    except (orjson.JSONDecodeError, KeyError, TypeError, ValueError) as error:
        raise Corrupt(f"expected a rank's step and spec, found {data[:60]!r}") from error
    return told
