"""The writer of dense versions: stores snapshots, applies the gate's decision, and moves `stable`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import orjson
import structlog
from numpy.typing import NDArray

from freshet.config.spec.identity import explain_defaults
from freshet.config.spec.transforms import Outcomes, outcomes_of
from freshet.errors import Corrupt, Fenced, FreshetError, Mismatch
from freshet.evaluation.gate import Verdict, VersionPredictions, judge
from freshet.log import Writer
from freshet.log.topics import ModelContext
from freshet.model import DenseModel
from freshet.model.inputs import ModelInputs, arrays_of, inputs_of, joined
from freshet.observability.skipped_state import skip
from freshet.observability.spans import record_publication
from freshet.observability.tracing import now_ns
from freshet.types import Append, BytesColumn, Fence
from freshet.versions import Manifest, Version, VersionStore
from freshet.versions.promotions import Pin, Pins

log = structlog.get_logger("freshet.trainer")

Tensors = Mapping[str, NDArray[Any]]

JUDGING = "judging/"
"""Prefix of the tensors that hold the gate's samples."""

JUDGING_EVERY = 8
"""Every version below this number carries the gate's samples; after that every 8th, or more often if
`keep_versions` is smaller."""

_MOST_NUMBER = 10**15
"""Versions once a second for 30 million years."""

_MOST_OCCUPIED = 100
"""Numbers in a row that entries other than versions may occupy."""

_INITIAL = Verdict(True, "the initial weights")
_NOT_FINITE = Verdict(False, "not finite: a weight or a statistic is NaN or infinite")


@dataclass(frozen=True, slots=True, eq=False)
class Snapshot:
    """Dense state and applied vector, copied between two steps."""

    tensors: Tensors
    applied: Mapping[int, int]
    step: int
    event_time_ms: int
    measures: Mapping[str, Any]
    finite: bool
    fence: Fence  # of the quorum that the rank led
    first: bool = False  # to be version 0 if the store has no version


def restart_point(store: VersionStore, spec_hash: str, log_id: str) -> Manifest | None:
    """Return the newest version that training may start from: finite, of this spec and log (PROTOCOL 23).

    The search skips damaged versions, and versions of another spec or log if there are ones of this.

    Raises:
        Mismatch: all versions that can be read belong to another spec or log.
        Corrupt: the store has versions, but none can be read.
    """
    numbers = list(store.numbers())
    foreign: Mismatch | None = None
    strays: list[tuple[int, Mismatch]] = []
    for number in reversed(numbers):
        try:
            manifest = _restart_manifest(store, number, spec_hash, log_id)
        except Mismatch as error:
            foreign = foreign or error
            strays.append((number, error))
            continue
        except Corrupt as error:
            log.error("version cannot be read, trying an older one", version=number, reason=str(error))
            skip("version", f"version {number}", str(error))
            continue
        except KeyError:  # deleted meanwhile
            continue
        if manifest is None:
            continue
        for stray, mismatch in strays:
            skip("version", f"version {stray}", str(mismatch))
        return manifest
    if foreign is not None:
        raise foreign
    if numbers:
        raise Corrupt("no stored version can be read; restore the versions folder from a copy")
    return None


def _restart_manifest(store: VersionStore, number: int, spec_hash: str, log_id: str) -> Manifest | None:
    """Return the manifest of a version that training may start from; None if it is not finite.

    Raises:
        Mismatch: it is of another spec or log.
        Corrupt, KeyError: it cannot be read, or there is none.
    """
    manifest = store.manifest(number)
    _check_owner(manifest, spec_hash, log_id)
    if manifest.verdict == "held" and manifest.reason.startswith("not finite"):
        return None
    store.get(number)
    return manifest


def _check_owner(manifest: Manifest, spec_hash: str, log_id: str) -> None:
    if manifest.spec_hash == spec_hash and manifest.log_id == log_id:
        return
    kind = "spec" if manifest.spec_hash != spec_hash else "event log"
    raise Mismatch(
        f"version {manifest.number} was trained under another {kind}\n"
        + (explain_defaults(spec_hash, manifest.spec_hash) or VERSIONS_OF_ITS_OWN)
    )


VERSIONS_OF_ITS_OWN = (
    "  a model has versions of its own: another folder, prefix or volume; or go on with the former spec\n"
    "  and log; `freshet check --against` says what changed"
)


def _next_number(numbers: Sequence[int]) -> int:
    """Return the next version's number. Entries above the limit were not written by a trainer."""
    return max((n for n in numbers if n < _MOST_NUMBER), default=-1) + 1


def versions_record(kind: str, **fields: object) -> BytesColumn:
    """Encode a record of `<model>.versions`."""
    return BytesColumn.of([orjson.dumps({"v": 1, "kind": kind, **fields}, option=orjson.OPT_NON_STR_KEYS)])


@dataclass
class VersionWriter:
    """Stores snapshots as versions and promotes those that pass the gate. One thread uses it."""

    context: ModelContext
    log_id: str  # of the topic of samples
    store: VersionStore
    writer: Writer
    pins: Pins
    recent: Callable[[int], Sequence[ModelInputs]]  # at least so many of the newest samples
    scorer: Callable[[], DenseModel]  # creates a model for scoring, without optimiser state
    _fence: Fence = field(default=Fence(-1), init=False)  # of the snapshot in work
    _carried_over: ModelInputs | None = field(default=None, init=False)  # samples that a version carried
    _resumed: bool = field(default=False, init=False)
    _restarts: dict[int, bool] = field(default_factory=dict, init=False)  # see `_restart_number`

    def first(self, snapshot: Snapshot) -> Manifest:
        """Store the initial weights as version 0 and promote it."""
        start_ns, self._fence = now_ns(), snapshot.fence
        manifest = self._promote(self._put(0, snapshot), _INITIAL)
        return self._recorded(manifest, start_ns)

    def begin(self, snapshot: Snapshot) -> None:
        """Store version 0 unless the store has a version: for a rank that leads for the first time.

        Promote version 0 if an interruption came between its write and its promotion.
        """
        numbers = list(self.store.numbers())
        if not numbers:
            self.first(snapshot)
        elif numbers == [0] and "stable" not in self.store.aliases():
            self._fence = snapshot.fence
            if (manifest := self.store.manifest(0)).verdict != "held":
                self._promote(manifest, _INITIAL)

    def next(self, snapshot: Snapshot) -> Manifest:
        """Store the snapshot as the next version, then promote it, or hold it with the gate's reason.

        Raises Fenced: a later quorum has written a version, so the snapshot's rank led no more.
        """
        start_ns, self._fence = now_ns(), snapshot.fence
        return self._recorded(self._next(snapshot), start_ns)

    def _recorded(self, manifest: Manifest, start_ns: int) -> Manifest:
        record_publication(self.context.spec_hash, manifest.number, manifest.step, manifest.verdict, start_ns)
        return manifest

    def _next(self, snapshot: Snapshot) -> Manifest:
        manifest = self._put_next(snapshot)
        self._point("candidate", manifest.number, "trainer")
        verdict = self._judge(manifest, snapshot)
        pin = self.pins.pin()  # an operator may have rolled back during `_judge`
        if pin is not None:
            self._restore(pin)
            verdict = replace(verdict, promote=False, reason=pin.reason) if verdict.promote else verdict
        manifest = self._promote(manifest, verdict) if verdict.promote else self._hold(manifest, verdict)
        self._mend_stable()
        self._forget_old()
        return manifest

    def _put_next(self, snapshot: Snapshot) -> Manifest:
        numbers = self.store.numbers()
        self._check_fence(numbers)
        number, occupied = _next_number(numbers), 0
        while True:
            try:
                return self._put(number, snapshot)
            except ValueError as error:
                numbers = self.store.numbers()
                if number in numbers:
                    self._check_fence(numbers)
                    log.warning(
                        "another trainer wrote this version; the next number is taken", version=number
                    )
                    number = max(_next_number(numbers), number + 1)
                elif (occupied := occupied + 1) < _MOST_OCCUPIED:
                    skip("version", f"version {number}", f"another entry occupies its place: {error}")
                    number += 1
                else:
                    raise

    def _check_fence(self, numbers: Sequence[int]) -> None:
        """Raise Fenced if the newest version of this model and log has a higher fence than the snapshot."""
        for number in reversed(numbers):
            try:
                manifest = self.store.manifest(number)
            except (Corrupt, KeyError):
                continue
            if (manifest.spec_hash, manifest.log_id) != (self.context.spec_hash, self.log_id):
                continue
            if manifest.fence > self._fence:
                raise Fenced(f"version {number} has fence {manifest.fence}, the snapshot {self._fence}")
            return

    def _put(self, number: int, snapshot: Snapshot) -> Manifest:
        manifest = Manifest(
            number=number,
            model=self.context.spec.name,
            spec_hash=self.context.spec_hash,
            created_ms=self.context.clock.now_ms(),
            step=snapshot.step,
            applied=dict(snapshot.applied),
            log_id=self.log_id,
            event_time_ms=snapshot.event_time_ms,
            measures=snapshot.measures,
            fence=int(self._fence),
            sha256="",
            # A version that is not finite is held from the start: an interruption may come before the gate.
            verdict="pending" if snapshot.finite else "held",
            reason="" if snapshot.finite else _NOT_FINITE.reason,
            transforms=self._outcomes,
        )
        stored = self.store.put(manifest, {**snapshot.tensors, **self._carried(number)})
        self._restarts[number] = snapshot.finite
        self._announce("version", number=number, step=snapshot.step, event_time_ms=snapshot.event_time_ms)
        return stored

    def _carried(self, number: int) -> Mapping[str, NDArray[Any]]:
        """Return the gate's samples for a version that carries them: they exceed most models' weights."""
        if number >= JUDGING_EVERY and number % min(JUDGING_EVERY, self.context.spec.train.keep_versions):
            return {}
        batches = [batch for batch in self._judging() if batch.labels is not None and batch.size]
        if not batches:
            return {}
        return {f"{JUDGING}{name}": array for name, array in arrays_of(joined(batches)).items()}

    @cached_property
    def _outcomes(self) -> Outcomes:
        return outcomes_of(self.context.spec)

    def _judge(self, manifest: Manifest, snapshot: Snapshot) -> Verdict:
        if not snapshot.finite:
            return _NOT_FINITE
        pin = self.pins.pin()
        if pin is not None:
            return Verdict(False, pin.reason)
        stable = self._stable()
        inputs = self._judging()
        candidate = self._score(snapshot.tensors, inputs)
        untrained = stable is not None and stable.manifest.number == 0
        return judge(self.context.spec, candidate, self._scored_stable(stable, inputs), untrained=untrained)

    def _judging(self) -> list[ModelInputs]:
        """Return the newest samples, with those of a version while this process has too few."""
        if not self._resumed:
            self._resumed = True
            self._resume(self.store.numbers())
        wanted = self.context.spec.serve.gate.samples
        newest = list(self.recent(wanted))
        if self._carried_over is not None and sum(batch.size for batch in newest) >= wanted:
            self._carried_over = None
        return newest if self._carried_over is None else [self._carried_over, *newest]

    def _resume(self, numbers: Sequence[int]) -> None:
        """Load the samples of the newest version that carries some."""
        for number in sorted(numbers, reverse=True):
            try:
                tensors = self.store.get(number, (JUDGING,)).tensors
                mine = {k[len(JUDGING) :]: v for k, v in tensors.items() if k.startswith(JUDGING)}
                if mine:
                    self._carried_over = inputs_of(mine)
                    return
            except (FreshetError, KeyError, ValueError) as error:
                log.warning("the gate's samples cannot be read", version=number, reason=str(error))

    def _scored_stable(
        self, stable: Version | None, inputs: Sequence[ModelInputs]
    ) -> VersionPredictions | None:
        """Score the stable version; None if there is none, or its weights do not fit the model."""
        if stable is None:
            return None
        try:
            return self._score(stable.tensors, inputs)
        except (FreshetError, ArithmeticError, KeyError, TypeError, ValueError) as error:
            number = stable.manifest.number
            skip(
                "version", f"version {number}", f"stable, version {number}, cannot be scored: {error!r:.300}"
            )
            return None

    def _stable(self) -> Version | None:
        """Return the version that serves; None if there is none, or it cannot be read."""
        number = self.store.aliases().get("stable")
        if number is None:
            return None
        try:
            return self.store.get(number)
        except (Corrupt, KeyError) as error:
            log.error("stable cannot be read; the gate decides without it", version=number, reason=str(error))
            skip("version", f"version {number}", f"stable cannot be read: {error}")
            return None

    def _score(self, tensors: Tensors, inputs: Sequence[ModelInputs]) -> VersionPredictions:
        model = self.scorer()
        model.load_state(tensors, weights_only=True)
        lane = model.lane()
        predictions = [lane.score(batch).copy() for batch in inputs]
        labels = [batch.labels for batch in inputs if batch.labels is not None]
        heads = len(self.context.spec.labels)
        return VersionPredictions(
            predictions=np.concatenate(predictions) if predictions else np.empty((0, heads), np.float32),
            label=np.concatenate([x.index for x in labels]) if labels else np.empty(0, np.uint8),
            value=np.concatenate([x.value for x in labels]) if labels else np.empty(0, np.float32),
            weight=np.concatenate([x.weight for x in labels]) if labels else np.empty(0, np.float32),
        )

    def _promote(self, manifest: Manifest, verdict: Verdict) -> Manifest:
        judged = self.store.judge(manifest.number, "promoted", verdict.reason)
        log.info("version promoted", version=manifest.number, step=manifest.step, reason=verdict.reason)
        self._point("stable", manifest.number, "trainer", reason=verdict.reason)
        return judged

    def _hold(self, manifest: Manifest, verdict: Verdict) -> Manifest:
        log.warning("version held", version=manifest.number, step=manifest.step, reason=verdict.reason)
        judged = self.store.judge(manifest.number, "held", verdict.reason)
        self._announce("verdict", number=manifest.number, verdict="held", reason=verdict.reason)
        return judged

    def _point(self, alias: str, number: int, by: str, **more: object) -> None:
        self.store.point(alias, number)
        self._announce("alias", alias=alias, number=number, by=by, pins=self.pins.known(), **more)

    def _restore(self, pin: Pin) -> None:
        """Point `stable` at the pin again if a concurrent promotion moved it."""
        if self.store.aliases().get("stable") != pin.number and pin.number in self.store.numbers():
            log.warning("a promotion overtook a rollback; stable is reset to the pin", version=pin.number)
            self._point("stable", pin.number, "trainer", reason=pin.reason)

    def _mend_stable(self) -> None:
        """Repair `stable` if it cannot be read or names no stored version.

        The target is that of the newest move in the log, or else the newest promoted version.
        """
        numbers = self.store.numbers()
        if self.store.aliases().get("stable") in numbers:
            return
        number = self.pins.stable
        if number not in numbers:
            number = next((n for n in reversed(numbers) if self._is_promoted(n)), None)
        if number is None:
            return
        reason = "the alias could not be read, or named no stored version"
        log.error("the alias stable is repaired", version=number, reason=reason)
        self._point("stable", number, "trainer", reason=reason)

    def _is_promoted(self, number: int) -> bool:
        try:
            return self.store.manifest(number).verdict == "promoted"
        except (Corrupt, KeyError):
            return False

    def _announce(self, kind: str, **fields: object) -> None:
        value = versions_record(kind, fence=int(self._fence), time_ms=self.context.clock.now_ms(), **fields)
        self.writer.append([Append(self.context.topics.versions, 0, value)])

    def _forget_old(self) -> None:
        numbers = list(self.store.numbers())
        keep = {*self.store.aliases().values(), self._restart_number(numbers)}
        for number in numbers[: -self.context.spec.train.keep_versions]:
            if number not in keep and number != 0:
                try:
                    self.store.delete(number)
                except ValueError as error:  # an alias points at it since
                    log.info("an old version is kept", version=number, reason=str(error))

    def _restart_number(self, numbers: Sequence[int]) -> int | None:
        """Return the newest of these versions that training may start from; None if there is none.

        Versions that are not finite must not push it out. Each version is read once at most: `_restarts` has
        whether it may be started from, for those from the newest to the one returned.
        """
        known, self._restarts = self._restarts, {}
        for number in reversed(numbers):
            good = known[number] if number in known else self._may_restart(number)
            self._restarts[number] = good
            if good:
                return number
        return None

    def _may_restart(self, number: int) -> bool:
        try:
            return _restart_manifest(self.store, number, self.context.spec_hash, self.log_id) is not None
        except (Corrupt, KeyError, Mismatch):
            return False
