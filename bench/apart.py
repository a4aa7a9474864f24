"""A trainer rank with shards and embedders as processes of their own: its speed, and how well it predicts.

    python -m bench.apart --spec spec.toml --log FOLDER [--embedders 1] [--codec int8] [--far NAMESPACE]

The shards are `freshet run paramserver`, the embedders `freshet run embedder`; the rank runs in the process
that measures, as `freshet run trainer` would run it. All share the machine's cores. `--far`: shards and
embedders run in that network namespace (`bench.two_hosts`).
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from bench.machine import cpu_s
from bench.report import Figures, command
from bench.two_hosts import FAR_HOST, device_bytes, enter
from freshet.adapters import open_eventlog, open_rowstore, open_versions
from freshet.apps.batch_sources import OwnRows
from freshet.apps.local import with_absolute_paths
from freshet.apps.remote_sources import FromEmbedders, FromShards, Wire
from freshet.apps.trainer import TrainerProcess
from freshet.config.settings import load_settings
from freshet.config.spec import load_spec
from freshet.config.spec.identity import identity_hash, render
from freshet.config.spec.model import Spec
from freshet.config.spec.schemas import load_schemas
from freshet.config.spec.topics import topics_of
from freshet.coordination.assignment import SLICES, ShardMap
from freshet.coordination.claims import Claims
from freshet.embedder.core import embedders_of, rows_of_blocks
from freshet.log import EventLog
from freshet.log.topics import ModelContext
from freshet.process.ports import lease_ports
from freshet.testing.conditions import wait_until
from freshet.types import TopicPartition
from tests.servers.processes import Process

START_S = 60.0
FAR = "127.0.0.2"
"""The address that a shard behind a link advertises: the link's. The shard listens at 127.0.0.1."""
LOOK_S = 0.005
FIRST, LAST = 0.1, 0.97
"""The rate is taken between these shares of the samples: after the start, before the last batches."""


@dataclass(frozen=True, slots=True)
class Apart:
    """The processes beside the rank, and their codecs."""

    shards: int = 1  # 0: rows, embedder and trainer in one process, as `freshet up` has them
    embedders: int = 0  # 0: the rank looks rows up itself
    delay_ms: float | None = None  # one way, in a link before each shard; None: no link
    codec: str = "fp32"  # of rows, on every wire, and of gradients
    gradients: str | None = None  # of those, if another
    far: str | None = None  # the network namespace of shards and embedders; None: this one

    def train(self, spec: Spec, log: Path, folder: Path) -> Passed:
        """Train on all of a copy of the log, in a new folder. The spec's schemas have absolute paths."""
        shutil.copytree(log, folder / "log")
        file = folder / "spec.toml"
        file.write_text(render(spec), encoding="utf-8")
        settings = load_settings({}, run_folder=folder).common
        settings.run.create()
        with contextlib.ExitStack() as stack:
            events = open_eventlog(settings.log_url)
            stack.callback(events.close)
            context = ModelContext.open(spec, identity_hash(spec, load_schemas(spec)), events)
            versions = open_versions(settings.versions_url)
            stack.callback(versions.close)
            if not self.shards:
                rows = open_rowstore(settings.rows_url)
                stack.callback(rows.close)
                trainer = TrainerProcess(context, versions, partial(OwnRows, rows=rows))
                return _observed(trainer, samples_in(events, spec), [])
            shards = [stack.enter_context(self._shard(i, file, folder)) for i in range(self.shards)]
            embedders = [stack.enter_context(self._embedder(i, file, folder)) for i in range(self.embedders)]
            self._wait_for_owners(spec, events)
            wire = Wire(rows=self.codec, gradients=self._gradients)
            source = FromEmbedders if self.embedders else FromShards
            rank = TrainerProcess(context, versions, partial(source, wire=wire))
            return _observed(rank, samples_in(events, spec), [p.pid for p in (*shards, *embedders)])

    @property
    def _gradients(self) -> str:
        return self.gradients or self.codec

    def _wait_for_owners(self, spec: Spec, log: EventLog) -> None:
        """Wait until shards own all buckets and embedders all partitions, each its share."""
        claims = Claims(log, topics_of(spec).control)
        owners = ShardMap(claims, spec.buckets)
        least = spec.buckets // self.shards - spec.buckets // SLICES

        def shared() -> bool:
            addresses = set(embedders_of(claims.living()).values())
            counts = np.bincount(owners().of_bucket + 1, minlength=1 + self.shards)
            return bool(not counts[0] and counts[1:].min() >= least and len(addresses) == self.embedders)

        try:
            wait_until("shards and embedders have their shares", shared, within_s=START_S)
        finally:
            claims.close()

    @contextlib.contextmanager
    def _shard(self, number: int, file: Path, folder: Path) -> Iterator[Process]:
        (port,) = lease_ports(1)
        near, far = f"127.0.0.1:{port}", f"{FAR}:{port}"
        own = {"NAME": f"shard-{number}", "PORT": str(port), "ADMIN_PORT": "0"}
        if self.delay_ms is not None:
            own["ADVERTISED_HOST"] = FAR
            words = [
                sys.executable,
                "-m",
                "tests.servers.slow_link",
                far,
                near,
                "--delay-ms",
                str(self.delay_ms),
            ]
            link = Process(words, folder / f"link-{number}.log", os.environ)
            link.start(lambda said: "ready" in said, within_s=START_S)
        shard = self._service("paramserver", number, file, folder, own)
        try:
            yield shard
        finally:
            shard.stop()
            if self.delay_ms is not None:
                link.kill()

    @contextlib.contextmanager
    def _embedder(self, number: int, file: Path, folder: Path) -> Iterator[Process]:
        own = {"NAME": f"embedder-{number}", "PORT": "0", "ADMIN_PORT": "0"}
        own |= {"ROWS": self.codec, "GRADIENTS": self._gradients}
        embedder = self._service("embedder", number, file, folder, own)
        try:
            yield embedder
        finally:
            embedder.stop()

    def _service(self, role: str, number: int, file: Path, folder: Path, own: Mapping[str, str]) -> Process:
        """Start `freshet run ROLE`."""
        words = [sys.executable, "-m", "freshet", "run", role, str(file), "--folder", str(folder)]
        env = os.environ | {f"FRESHET_{role.upper()}_{name}": value for name, value in own.items()}
        if self.far is not None:
            words, env = [*enter(self.far), *words], env | {"FRESHET_COMMON_BIND_ADDRESS": FAR_HOST}
        process = Process(words, folder / f"{role}-{number}.log", env)
        process.start(lambda _: True, within_s=START_S)
        return process


@dataclass(frozen=True, slots=True)
class Passed:
    """The figures of training on a log. Rates are of its middle, see FIRST and LAST."""

    samples: int
    samples_per_s: float
    rank_cpu_us: float  # of the rank's process, a sample
    others_cpu_us: float  # of shards and embedders together, a sample; not the link's
    sent_bytes: float  # by the rank, a sample
    received_bytes: float
    stages_us: dict[str, float]  # of a batch; those that overlap others too
    auc: float
    logloss: float
    device_sent_bytes: float | None  # a sample, by the device of a near host; None on a usual one
    device_received_bytes: float | None
    device_packets: float | None  # of both directions, a sample
    codecs: Mapping[str, Any]  # of each link, at the end


@dataclass(slots=True)
class _Seen:
    """The progress at one moment."""

    samples: int
    at: float
    cpu_s: float
    others_cpu_s: float
    status: Mapping[str, Any]
    device: tuple[int, int, int, int] | None


def _observed(rank: TrainerProcess, total: int, others: list[int]) -> Passed:
    """Run a rank to the end of the log."""
    seen: list[_Seen] = []

    def now() -> _Seen:
        status = rank.status()
        cpu = time.process_time(), sum(cpu_s(pid) for pid in others)
        return _Seen(rank.trainer.progress.samples, time.perf_counter(), *cpu, status, device_bytes())

    def look() -> None:
        for share in (FIRST, LAST, 1.0):
            while rank.trainer.progress.samples < share * total and not rank.trainer.stop.wait(LOOK_S):
                pass
            seen.append(now())
        rank.stop()

    watcher = threading.Thread(target=look, name="watcher")
    watcher.start()
    try:
        rank.run()
    finally:
        rank.stop()
        watcher.join()
    if rank.trainer.progress.samples < total:
        raise RuntimeError(f"it has stopped after {rank.trainer.progress.samples} of {total} samples")
    first, last, _ = seen
    samples, batches = last.samples - first.samples, last.status["batches"] - first.status["batches"]

    def moved(name: str) -> float:
        """Bytes a sample; in one process there is no wire."""
        return int(last.status.get(name, 0) - first.status.get(name, 0)) / samples

    device: list[float | None] = [None, None, None]
    if first.device is not None and last.device is not None:
        received, in_packets, sent, out_packets = (
            (b - a) / samples for a, b in zip(first.device, last.device, strict=True)
        )
        device = [sent, received, in_packets + out_packets]
    (measured,) = rank.quality.summary()["training"].values()
    stages = first.status["stage_seconds"], last.status["stage_seconds"]
    return Passed(
        samples=rank.trainer.progress.samples,
        samples_per_s=samples / (last.at - first.at),
        rank_cpu_us=1e6 * (last.cpu_s - first.cpu_s) / samples,
        others_cpu_us=1e6 * (last.others_cpu_s - first.others_cpu_s) / samples,
        sent_bytes=moved("sent_bytes"),
        received_bytes=moved("received_bytes"),
        stages_us={name: 1e6 * (s - stages[0].get(name, 0.0)) / batches for name, s in stages[1].items()},
        auc=measured["auc"],
        logloss=measured["logloss"],
        device_sent_bytes=device[0],
        device_received_bytes=device[1],
        device_packets=device[2],
        codecs=last.status.get("codecs", {}),
    )


def samples_in(log: EventLog, spec: Spec) -> int:
    """Count the samples in all partitions of a log."""
    reader, total = log.reader(), 0
    for p in range(spec.partitions):
        at = TopicPartition(topics_of(spec).samples, p)
        position, end = log.bounds(at).start, log.bounds(at).end
        reader.assign({at: position})
        while position < end:
            for _, records in reader.poll(10_000, 1.0):
                total += int(rows_of_blocks(records.values).sum())
                position = records.next_offset
    reader.close()
    return total


def measure(
    quick: bool = False,
    spec: Path = Path("spec.toml"),
    log: Path = Path("log"),
    shards: int = 1,
    embedders: int = 0,
    codec: str = "fp32",
    far: str | None = None,
) -> Figures:
    """Train once on a copy of a log; `quick` changes nothing."""
    with tempfile.TemporaryDirectory() as folder:
        apart = Apart(shards=shards, embedders=embedders, codec=codec, far=far)
        passed = asdict(apart.train(with_absolute_paths(load_spec(spec)), log, Path(folder)))
    return {f"{name}_1e_5": round(1e5 * passed.pop(name)) for name in ("auc", "logloss")} | passed


if __name__ == "__main__":
    command(measure, __doc__)
