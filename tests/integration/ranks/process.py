"""One trainer rank as a process, for tests that kill it: `python -m tests.integration.ranks.process FOLDER`.

Prints events as a JSON object a line: quorums that it is in, its first step in each, when the whole log is in
its dense state, and at the end that state.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import orjson

from freshet.batches.stream import TrainBatch
from freshet.config.spec import load_spec
from freshet.config.spec.layout import layout_of
from freshet.config.spec.topics import topics_of
from freshet.coordination.claims import Claims
from freshet.log import EventLog, Writer
from freshet.log.sqlite.event_log import open_url
from freshet.log.topics import ModelContext
from freshet.model import build_model
from freshet.testing.ledger import LedgerModel
from freshet.trainer.gradient_sums import GradientSums
from freshet.trainer.membership import Membership, QuorumOptions
from freshet.trainer.process_group import ProcessGroup
from freshet.trainer.quality import Quality
from freshet.trainer.reducers import PlainReducer, Reducer
from freshet.trainer.reducers.group_codecs import IntegerCodec, SignCodec
from freshet.trainer.reducers.ladder import LadderReducer
from freshet.trainer.reducers.levels import AdaptiveLevels
from freshet.trainer.reducers.two_phase import TwoPhase
from freshet.trainer.service import TrainingLoop
from freshet.trainer.state_sync import DenseState, Progress, SharedMeasures
from freshet.trainer.step_coordinator import DenseLedger
from freshet.types import F32, Append
from tests.fixtures.local_ranks import HalfReducer, SteppedDct
from tests.integration.ranks.shared_rows import PARTITIONS, SharedRows, SharedStream

REDUCERS: Mapping[str, Callable[[], Reducer]] = {
    "plain": PlainReducer,
    "half": HalfReducer,
    "auto": lambda: LadderReducer(2),
    "int8": lambda: TwoPhase(IntegerCodec(8), 2),
    "adaquantfl": lambda: AdaptiveLevels(2),
    "dct": lambda: SteppedDct(2),
    "sign": lambda: TwoPhase(SignCodec(), 2),
}
"""Reducers of the ledger's gradient, which is two floats."""

FLUSH_EVERY = 20  # steps between two flushes of a lossy reducer
SPEC = Path(__file__).parents[2] / "system" / "ledger" / "freshet.toml"


def say(**what: Any) -> None:
    print(orjson.dumps({**what, "at": time.time()}).decode() + "\n", end="", flush=True)


class Pausable:
    """An event log whose process stops itself (SIGSTOP) on SIGUSR1, and then holds no
    lock of the log: in a file, unlike in a broker, a lock would keep all others from writing."""

    def __init__(self, log: EventLog) -> None:
        self._log, self._writing, self.told = log, threading.Lock(), threading.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._log, name)

    def writer(self, name: str | None = None) -> Any:
        return PausableWriter(self._log.writer(name), self._writing)

    def pause_if_told(self) -> None:
        if self.told.is_set():
            self.told.clear()
            with self._writing:
                os.kill(os.getpid(), signal.SIGSTOP)


class PausableWriter:
    def __init__(self, writer: Writer, writing: threading.Lock) -> None:
        self._writer, self._writing = writer, writing

    def append(self, appends: Sequence[Append]) -> Sequence[int]:
        with self._writing:
            return self._writer.append(appends)

    def close(self) -> None:
        self._writer.close()


class Told:
    """`RankObserver` that prints each call."""

    def __init__(self, state: DenseState, rows: SharedRows) -> None:
        self._state, self._rows = state, rows
        self._fresh = self._done = False
        self._flushed = 0

    def on_state_synced(self, group: ProcessGroup) -> None:
        say(world=group.fence, rank=group.rank, ranks=group.size, step=self._state.progress.steps)
        self._fresh = True

    def on_trained(self, batch: TrainBatch, predictions: F32) -> None:
        self._state.progress.samples += len(batch)
        if not batch.replayed:
            self._state.quality.add(batch, predictions)

    def on_stepped(self, step: int, rows: int) -> None:
        if self._fresh and step > self._state.progress.steps:
            self._fresh = False
            say(stepped=step)
        self._state.progress.steps = step

    def flush_due(self) -> bool:
        due = self._state.progress.steps >= self._flushed + FLUSH_EVERY
        return due or (not self._done and self._at_the_end())

    def on_flush_point(self) -> None:
        self._flushed = self._state.progress.steps
        if not self._done and self._at_the_end():
            self._done = True
            say(done=self._rows.stop())

    def _at_the_end(self) -> bool:
        stop = self._rows.stop()
        return all(offset == stop for offset in self._state.ledger.applied.values())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--lanes", type=int, default=1)
    parser.add_argument("--mode", default="hybrid")
    parser.add_argument("--reducer", choices=tuple(REDUCERS), default="plain")
    parser.add_argument("--site", default="")
    parser.add_argument("--answer-s", type=float, default=10.0)
    given = parser.parse_args()
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    spec = load_spec(SPEC)
    log = Pausable(open_url(f"sqlite:{given.folder / 'log'}"))
    signal.signal(signal.SIGUSR1, lambda *_: log.told.set())
    log.create_topic("control", partitions=1)
    rows = SharedRows(given.folder / "rows.db")
    model = build_model(spec, training=True)
    assert isinstance(model, LedgerModel)
    quality = Quality(spec)
    state = DenseState(
        model,
        DenseLedger(dict.fromkeys(range(PARTITIONS), 0)),
        quality,
        SharedMeasures(quality),
        Progress(),
        "ledger",
        GradientSums(REDUCERS[given.reducer]()),
    )
    claims = Claims(cast(EventLog, log), "control")
    terms = QuorumOptions("127.0.0.1", given.lanes, PARTITIONS, form_s=10.0, answer_s=given.answer_s)

    def open_stream(group: ProcessGroup, lanes: int) -> SharedStream:
        every = group.size * lanes
        mine = [list(range(PARTITIONS))[group.rank * lanes + i :: every] for i in range(lanes)]
        return SharedStream(rows, state.ledger.applied_offsets, group.fence, mine, log.pause_if_told)

    spec = replace(spec, train=replace(spec.train, mode=given.mode, batch_wait_ms=20))
    context = ModelContext(spec, "ledger", layout_of(spec), cast(EventLog, log), topics_of(spec))
    membership = Membership(claims, terms, stop.is_set)
    training_loop = TrainingLoop(context, membership, state, open_stream, site=given.site)
    training_loop.run(Told(state, rows), stop)
    state.shared.merge_received()
    summary = quality.summary()
    carry = np.zeros(2) if state.sums.carry is None else state.sums.carry
    arrays = sorted((name, array.tobytes()) for name, array in model.state().items())
    say(
        end=state.progress.steps,
        applied=list(state.ledger.applied.items()),
        dense=(model.totals + carry).tolist(),
        bits=hashlib.sha256(repr([*arrays, carry.tolist()]).encode()).hexdigest(),
        measured=summary["training"]["click"]["n"] if "click" in summary["training"] else 0,
        lost=training_loop.lost,
    )
    claims.close()
    log.close()
    rows.close()


if __name__ == "__main__":
    main()
