"""The dense state of a rank: its sync with the ranks of a new quorum, and the exchange of measures.

All ranks of a quorum start from one state (PROTOCOL 15). If not every step is a flush point, they keep that
of the last one, to go back to it when a rank is lost. Each rank sends its increments of measures to all
others every EXCHANGE_S, so that the leader's figures cover all of them. The last increments of a lost rank
are lost with it; only measures depend on them.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import orjson
import safetensors
import safetensors.numpy
import structlog
from numpy.typing import NDArray

from freshet.config.options import duration_text
from freshet.config.spec.identity import explain_defaults
from freshet.config.spec.model import Spec
from freshet.errors import Corrupt, Mismatch
from freshet.model import DenseModel
from freshet.trainer.gradient_sums import GradientSums
from freshet.trainer.process_group import ProcessGroup, RankLost
from freshet.trainer.quality import Quality
from freshet.trainer.step_coordinator import DenseLedger
from freshet.versions.weights import contiguous

log = structlog.get_logger("freshet.trainer")

MODEL, MEASURES, VECTOR, TIMES = "model/", "measures/", "vector", "times"

IDENTITY = "identity hash"
"""The term by which ranks find out that they train different models."""


@dataclass(slots=True)
class Progress:
    """Counts of a trainer; `steps` and `event_time_ms` continue those of its version."""

    samples: int = 0  # trained on by this rank since it started, with replayed ones
    steps: int = 0
    event_time_ms: int = 0  # newest event learned from
    begun: bool = False  # the store has a version, as far as this process knows
    version: int = 0  # newest that this rank wrote
    versions_failed: int = 0  # writes that failed
    version_error: str = ""  # of the newest write; empty unless it failed


def pack_arrays(arrays: Mapping[str, NDArray[Any]]) -> bytes:
    """Encode named arrays of any shape as safetensors; no bytes for no array."""
    return safetensors.numpy.save(contiguous(arrays)) if arrays else b""


def unpack_arrays(data: bytes) -> dict[str, NDArray[Any]]:
    """Decode the bytes of `pack_arrays`. Raises Corrupt if they are not safetensors."""
    if not data:
        return {}
    try:
        return safetensors.numpy.load(data)
    except (safetensors.SafetensorError, KeyError, ValueError) as error:
        raise Corrupt(f"expected arrays of another rank, found {len(data)} bytes: {error}") from error


LENGTH_BYTES = 8


class SharedMeasures:
    """Increments of measures between a rank's measuring thread and its lanes.

    The measuring thread prepares and merges increments; the lanes exchange them. Thread-safe.
    """

    def __init__(self, quality: Quality) -> None:
        self._quality = quality
        self._lock = threading.Lock()  # guards the fields below
        self._ready = b""  # increments to send, each after its length
        self._received: list[Sequence[bytes]] = []
        self._attempt: tuple[int, bytes] = (0, b"")  # number and sent bytes of the last exchange
        self.done = 0  # completed exchanges that the figures contain

    def begin(self, ranks: int, done: int) -> None:
        """Start a group of `ranks` ranks with figures that contain `done` exchanges.

        If they do not contain this rank's last exchange, its increments are sent again.
        """
        with self._lock:
            number, sent = self._attempt
            if number > done:
                self._ready = sent + self._ready
            self._attempt, self.done, self._received = (done, b""), done, []
            if ranks == 1:
                self._received, self._ready = [[self._ready]], b""
        self._quality.share(ranks > 1)
        self.merge_received()

    def prepare(self, *, more: bool = False) -> None:
        """Prepare an increment, unless one is waiting to be sent and `more` is False."""
        with self._lock:
            if (more or not self._ready) and (packed := pack_arrays(self._quality.increment())):
                self._ready += len(packed).to_bytes(LENGTH_BYTES, "little") + packed

    def exchange(self, group: ProcessGroup, last: bool) -> None:
        """Send the prepared increments and receive those of the others; `last` prepares one first.

        Raises RankLost: some ranks may have received the increments; the next `begin` resolves that.
        """
        if last:
            self.prepare(more=True)
        with self._lock:
            mine, self._ready = self._ready, b""
            self._attempt = self.done + 1, mine
        received = group.exchange(mine)
        with self._lock:
            self._received.append(received)
            self.done += 1

    def merge_received(self) -> None:
        """Merge the received increments into the figures."""
        with self._lock:
            received, self._received = self._received, []
            for parts in received:
                self._quality.merge([unpack_arrays(one) for part in parts for one in _split(part)])


def _split(data: bytes) -> list[bytes]:
    found, at = [], 0
    while at < len(data):
        start = at + LENGTH_BYTES
        at = start + int.from_bytes(data[at:start], "little")
        if at > len(data):
            raise Corrupt(
                f"expected {at - start} bytes of measures of another rank, found {len(data) - start}"
            )
        found.append(data[start:at])
    return found


@dataclass(frozen=True, slots=True)
class FlushPoint:
    """A copy of the dense state at a moment when no rank held a residual, or progress of its own."""

    model: Mapping[str, NDArray[Any]]
    sums: Mapping[str, NDArray[Any]]
    applied: Mapping[int, int]
    step: int


def terms_of(spec: Spec) -> dict[str, Any]:
    """Return the tunable keys of a spec, with their values, that all ranks of a quorum must share.

    With others the states of ranks would differ, or their collectives would not match.
    """
    model, train = spec.model, spec.train
    terms = {
        "model.bias_lr": model.bias_lr,
        "model.dense_lr": model.dense_lr,
        "model.dense_momentum": model.dense_momentum,
        "model.dense_optimizer": model.dense_optimizer,
        "model.dense_warmup_steps": model.dense_warmup_steps,
        "model.hedge_discount": model.hedge_discount,
        "train.batch.rows": train.batch_rows,
        "train.measure_window": duration_text(train.measure_window_ms),
        "train.mode": train.mode,
        "train.reduce": train.reduce,
        "train.segments": list(train.segments),
    }
    return terms | ({"train.average_every": train.average_every} if train.mode == "async" else {})


def _check_terms(reports: Sequence[Mapping[str, Any]], rank: int, spec_hash: str) -> None:
    """Compare the terms of all ranks with those of a rank that was in a quorum before, if there is one.

    If there are several such ranks, or none, the highest step decides, then the lowest rank. So a newcomer
    with other terms, or the spec of another model, ends, and the others go on. Keys that only one rank
    reports are not compared.

    Raises:
        Mismatch: this rank has other terms.
        RankLost: another rank has, and ends.
    """
    source = max(range(len(reports)), key=lambda i: (reports[i]["synced"], reports[i]["step"], -i))
    wanted = reports[source]["terms"]

    def differences(i: int) -> list[str]:
        found = reports[i]["terms"]
        keys = sorted(key for key in wanted.keys() & found.keys() if wanted[key] != found[key])
        return [f"{key} = {found[key]!r}, expected {wanted[key]!r} as at rank {source}" for key in keys]

    if own := differences(rank):
        hint = explain_defaults(spec_hash, wanted[IDENTITY])
        raise Mismatch(
            "this trainer was started with another spec than the ranks of its model\n  "
            + "\n  ".join(own)
            + "\n  restart all trainers with one spec"
            + (f"\n{hint}" if hint else "")
        )
    for i in range(len(reports)):
        if others := differences(i):
            raise RankLost(
                f"rank {i} was started with {'; '.join(others)}: it ends; restart all trainers with one spec"
            )


@dataclass
class DenseState:
    """The state that all ranks share. Methods are called between two steps."""

    model: DenseModel
    ledger: DenseLedger
    quality: Quality
    shared: SharedMeasures
    progress: Progress
    spec_hash: str
    sums: GradientSums = field(default_factory=GradientSums)
    flush_point: FlushPoint | None = None  # to go back to; None: the present state is one
    terms: Mapping[str, Any] = field(default_factory=dict)  # `terms_of` the spec; empty: not compared
    synced: bool = False  # this rank was in a quorum

    def keep(self) -> None:
        """Keep a copy of the state: the ranks are at a flush point."""
        self.flush_point = FlushPoint(
            self.model.state(), self.sums.state(), dict(self.ledger.applied), self.progress.steps
        )

    def roll_back(self) -> int:
        """Go back to the flush point after a rank was lost; returns the steps that are made again.

        Measures stay: they contain the samples, and skip those that a shard has applied (PROTOCOL 15).
        """
        kept, self.flush_point = self.flush_point, None
        if kept is None:
            return 0
        steps = self.progress.steps - kept.step
        self.model.load_state(kept.model)
        self.sums.load_state(kept.sums)
        self.ledger.applied = dict(kept.applied)
        self.progress.steps = kept.step
        return steps

    def sync(self, group: ProcessGroup) -> None:
        """Load the state of the highest step among the ranks; of several, that of the lowest rank.

        Args:
            group: the process group of the new quorum; all its ranks call `sync`.

        Raises:
            RankLost: a rank was lost, or ends because of its terms; the state is unchanged, or entirely that
                of the source.
            Mismatch: this rank has another identity hash, or other terms, than the ranks that train.
            Corrupt: another rank's report or state cannot be decoded.
        """
        if group.size == 1:
            self.shared.begin(1, self.shared.done)
            self.synced = True
            return
        mine = {
            "step": self.progress.steps,
            "spec": self.spec_hash,
            "terms": self.terms,
            "synced": self.synced,
        }
        reports = [_decode_report(part) for part in group.exchange(orjson.dumps(mine))]
        _check_terms(reports, group.rank, self.spec_hash)
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
        self.shared.begin(group.size, done)
        self.synced = True

    def pack(self) -> bytes:
        """Encode the state as bytes, after merging the received measures."""
        self.shared.merge_received()
        arrays: dict[str, Any] = {f"{MODEL}{name}": array for name, array in self.model.state().items()}
        arrays |= {f"{MEASURES}{name}": array for name, array in self.quality.state().items()}
        arrays[VECTOR] = self.ledger.to_array()
        arrays |= self.sums.state()
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
        self.sums.load_state(arrays)
        self.ledger.applied = dict(vector)
        self.progress.steps, self.progress.event_time_ms = step, event_time_ms
        return int(done)


def _with_prefix(arrays: dict[str, Any], prefix: str) -> dict[str, Any]:
    return {name.removeprefix(prefix): array for name, array in arrays.items() if name.startswith(prefix)}


def _decode_report(data: bytes) -> dict[str, Any]:
    try:
        report = orjson.loads(data)
        return {
            "step": int(report["step"]),
            # Reports of earlier releases have no further terms.
            "terms": {**report.get("terms", {}), IDENTITY: str(report["spec"])},
            "synced": bool(report.get("synced")),
        }
    except (orjson.JSONDecodeError, KeyError, TypeError, ValueError) as error:
        raise Corrupt(f"expected a rank's step and spec, found {data[:60]!r}") from error
