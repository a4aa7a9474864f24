"""The dense state of a rank, and its sync between the ranks of a new quorum (PROTOCOL 15)."""

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
from freshet.trainer.ranks import ProcessGroup
from freshet.trainer.step_coordinator import DenseLedger

__all__ = ["DenseState", "Progress"]

log = structlog.get_logger("freshet.trainer")

MODEL, MEASURES, VECTOR, TIMES = "model/", "measures/", "vector", "times"


@dataclass(slots=True)
class Progress:
    """Counts of a trainer; `steps` and `event_time_ms` continue those of its version."""

    samples: int = 0  # trained on by this rank since it started, with replayed ones
    steps: int = 0
    event_time_ms: int = 0  # newest event learned from
    version: int = 0  # newest that this rank wrote
    versions_failed: int = 0  # writes that failed
    version_error: str = ""  # of the newest write; empty unless it failed


@dataclass
class DenseState:
    """The state that all ranks share. Methods are called between two steps."""

    model: DenseModel
    ledger: DenseLedger
    quality: Quality
    shared: SharedMeasures
    progress: Progress
    spec_hash: str

    def sync(self, group: ProcessGroup, *, independent: bool = False) -> None:
        """Load the state of the highest step among the ranks; of several, that of the lowest rank.

        Args:
            group: the process group of the new quorum; all its ranks call `sync`.
            independent: the ranks stepped without each other (mode `async`), so no vector is ahead of all
                others: each partition's offset becomes the largest of any rank.

        Raises:
            RankLost: a rank was lost; the state is unchanged, or entirely that of the source.
            Mismatch: a rank has another spec.
            Corrupt: another rank's report or state cannot be decoded.
        """
        mine = {
            "step": self.progress.steps,
            "spec": self.spec_hash,
            "vector": list(self.ledger.applied.items()),
        }
        reports = [_decode_report(part) for part in group.exchange(orjson.dumps(mine))]
        others = [report["spec"] for report in reports if report["spec"] != self.spec_hash]
        if others:
            hint = explain_defaults(self.spec_hash, others[0])
            raise Mismatch(
                "the ranks of this model were started with different specs; start all with one"
                + (f"\n{hint}" if hint else "")
            )
        steps = [report["step"] for report in reports]
        source = steps.index(max(steps))
        data = group.broadcast(self.pack() if source == group.rank else None, source)
        done = self.shared.done
        if source != group.rank:
            done = self.unpack(data)
            log.info(
                "state synced from another rank",
                rank=source,
                step=self.progress.steps,
                step_before=mine["step"],
            )
        if independent:
            for report in reports:
                self.ledger.raise_to(report["vector"])
        self.shared.begin(group.size, done)

    def pack(self) -> bytes:
        """Encode the state as bytes, after merging the received measures."""
        self.shared.merge_received()
        arrays: dict[str, Any] = {f"{MODEL}{name}": array for name, array in self.model.state().items()}
        arrays |= {f"{MEASURES}{name}": array for name, array in self.quality.state().items()}
        arrays[VECTOR] = np.array(sorted(self.ledger.applied.items()), np.int64).reshape(-1, 2)
        arrays[TIMES] = np.array([self.progress.steps, self.progress.event_time_ms, self.shared.done])
        return pack_arrays(arrays)

    def unpack(self, data: bytes) -> int:
        """Load the state that another rank packed; returns the exchanges of measures that it contains.

        Raises Corrupt if it cannot be decoded, Mismatch if it is of another model.
        """
        arrays = unpack_arrays(data)
        try:
            step, event_time_ms, done = arrays[TIMES].tolist()
            vector = arrays[VECTOR].tolist()
        except (KeyError, ValueError) as error:
            raise Corrupt(f"expected the state of another rank, found arrays {sorted(arrays)[:5]}") from error
        self.model.load_state(_with_prefix(arrays, MODEL))
        self.quality.load_state(_with_prefix(arrays, MEASURES))
        self.ledger.applied = dict(vector)
        self.progress.steps, self.progress.event_time_ms = step, event_time_ms
        return int(done)


def _with_prefix(arrays: dict[str, Any], prefix: str) -> dict[str, Any]:
    return {name.removeprefix(prefix): array for name, array in arrays.items() if name.startswith(prefix)}


def _decode_report(data: bytes) -> dict[str, Any]:
    try:
        report = orjson.loads(data)
        return {"step": int(report["step"]), "spec": str(report["spec"]), "vector": list(report["vector"])}
    except (orjson.JSONDecodeError, KeyError, TypeError, ValueError) as error:
        raise Corrupt(f"expected a rank's step and spec, found {data[:60]!r}") from error
