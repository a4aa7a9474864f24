"""Batches to a trainer over gRPC: bytes of a sample each way and microseconds of a batch, by codec.

    python -m bench.remote_batches [--quick] [--json]

26 ids and 13 numbers a sample (`bench.workload`), the default model at 256 rows. `frames`: writing and
reading a batch and its gradients, no network. `loopback`: embedder and rank in one process with a connection
between them, rows in the same process, gradients of the real model; `share` is that rate over the rate
without a connection. Bound by the interpreter that both ends share: processes of their own do better.
"""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, get_args

from bench.report import Figures, command
from bench.rounds import micros
from bench.workload import Workload, append, plain_spec
from freshet.apps.batch_sources import OwnRows
from freshet.apps.pipeline import Pipeline
from freshet.apps.trainer import TrainerOptions, TrainerProcess
from freshet.batches.frames import Names, RequestHeader, batch_frame, batch_of, gradients_frame, gradients_of
from freshet.batches.grpc_client import RankAssignment, RemoteStream
from freshet.batches.stream import BatchStream, RecentSamples, TrainBatch
from freshet.clock import SYSTEM_CLOCK
from freshet.config.settings.common import Codec
from freshet.config.spec.layout import layout_of
from freshet.config.spec.model import Spec
from freshet.embedder.block_decoder import BlockDecoders
from freshet.embedder.lane import LanePartitions
from freshet.embedder.pipeline import BatchPipeline
from freshet.embedder.service import BatchServer, LaneShape
from freshet.model import Lane, build_model
from freshet.rpc.channel import Transport
from freshet.rpc.frames import decode_frame
from freshet.rpc.server import FrameServer
from freshet.types import Fence
from freshet.wires.codecs import gradients_codec, rows_codec
from freshet.wires.link_codecs import CodecChoice
from freshet.wires.row_wire import RowWires

CODECS = [codec for codec in get_args(Codec) if codec != "auto"]  # "auto" is one of the others
BATCH = 256
STALENESS = 1024
MAX_BYTES = 1 << 26
HEADER = RequestHeader(1, Fence(1), 0, 1, 1, 0)


def spec() -> Spec:
    """Return a spec of one lane and one partition: it shows the cost of a connection."""
    train = f"staleness_rows = {STALENESS}\nbatch = {{ rows = {BATCH}, behind = {BATCH} }}"
    return replace(plain_spec("", train), partitions=1)


class Bench:
    """A log of samples, a shard with their rows, and streams over both."""

    def __init__(self, folder: Path, rows: int) -> None:
        self.spec = spec()
        self.layout = layout_of(self.spec)
        self.pipeline = Pipeline(self.spec, folder / "run", 1)
        self.samples = append(self.pipeline, Workload(rows=rows).arrays(), 1)
        rows_of = partial(OwnRows, rows=self.pipeline.rows)
        options = TrainerOptions(lanes=1)
        self.training = TrainerProcess(self.pipeline.context, self.pipeline.versions, rows_of, options)
        assert isinstance(self.training.source, OwnRows)
        self.shard = self.training.source.shard
        self.decoders = BlockDecoders(self.pipeline.context, self.pipeline.writer)
        self.lane: Lane = build_model(self.spec, training=True).lane()

    def stream(self, applied: Callable[[], Mapping[int, Sequence[int]]] = dict) -> BatchPipeline:
        """Return a new stream, from the first sample that the rows have not applied."""
        lanes = [LanePartitions((0,), Fence(1), applied)]
        return BatchPipeline(self.pipeline.context, self.shard, self.decoders, lanes, prefetch=True)

    @contextlib.contextmanager
    def remote(self, codec: str) -> Iterator[RemoteStream]:
        """Return the same stream over a connection."""

        def make(shape: LaneShape, applied: Callable[[int], Any]) -> tuple[BatchPipeline, list[int]]:
            return self.stream(partial(applied, 0)), [0]

        names = Names.of(self.spec, self.layout)
        batches, server = BatchServer(names, make), FrameServer("127.0.0.1:0", Transport())
        batches.add_to(server)
        server.start()
        stream = RemoteStream(
            self.pipeline.context,
            RankAssignment(0, 1, 1, Fence(1)),
            owners=lambda: {0: f"127.0.0.1:{server.port}"},
            dense_applied=dict,
            recent=RecentSamples(2_000, SYSTEM_CLOCK),
            transport=Transport(),
            choice=CodecChoice.of(codec, codec, self.layout.shapes),
            read_my_writes=False,
        )
        yield stream
        stream.close()
        batches.close()
        server.stop(0.0)

    def train(self, stream: BatchStream, batches: int) -> float:
        """Train on batches; returns samples a second."""
        samples, began = 0, time.perf_counter()
        for _ in range(batches):
            batch = batch_from(stream)
            gradients = self.lane.forward_backward(batch.inputs, dense_weight=1.0).gradients
            samples += len(batch)
            stream.push_gradients(0, batch, gradients)
        assert stream.flush(10.0)
        return samples / (time.perf_counter() - began)

    def close(self) -> None:
        """Close everything; what was trained is flushed."""
        self.training.stop()
        self.training.run()
        self.pipeline.close()


def batch_from(stream: BatchStream) -> TrainBatch:
    """Wait for the next batch."""
    while (batch := stream.next_batch(0, 1.0)) is None:
        pass
    return batch


def frames(bench: Bench, batch: TrainBatch, codec: str, seconds: float) -> Figures:
    """Measure bytes and times of one batch and its gradients."""
    names, scalars = Names.of(bench.spec, bench.layout), bench.layout.scalars
    wires, down, up = RowWires.of(scalars), rows_codec(codec), gradients_codec(codec)
    gradients = list(bench.lane.forward_backward(batch.inputs, dense_weight=1.0).gradients)
    sent = batch_frame(1, 1, batch, names, wires.rows, down)
    home = gradients_frame(1, HEADER, {0: 1}, 1, gradients, wires.gradients, up)
    rows = sum(len(group.rows) for group in batch.inputs.groups)
    floats = sum(group.rows.size for group in batch.inputs.groups)
    return {
        "rows_per_sample": rows / len(batch),
        "row_floats_per_sample": floats / len(batch),
        "batch_bytes_per_sample": len(sent) / len(batch),
        "gradients_bytes_per_sample": len(home) / len(batch),
        "write_batch_us": micros(lambda: batch_frame(1, 1, batch, names, wires.rows, down), seconds),
        "read_batch_us": micros(
            lambda: batch_of(decode_frame(sent, max_bytes=MAX_BYTES), names, wires.rows), seconds
        ),
        "write_gradients_us": micros(
            lambda: gradients_frame(1, HEADER, {0: 1}, 1, gradients, wires.gradients, up), seconds
        ),
        "read_gradients_us": micros(
            lambda: gradients_of(decode_frame(home, max_bytes=MAX_BYTES), batch, wires.gradients), seconds
        ),
    }


def measure(quick: bool = False) -> Figures:
    """Measure frames of each codec, then the rate with a connection beside that without."""
    batches, seconds = (60, 0.1) if quick else (300, 0.4)
    found: Figures = {}
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(Path(folder), BATCH * (len(CODECS) + 2) * (batches + 16))
        stream = bench.stream()
        batch = batch_from(stream)
        found["frames"] = {codec: frames(bench, batch, codec, seconds) for codec in CODECS}
        stream.push_gradients(0, batch, None)
        bench.train(stream, 16)
        plain = bench.train(stream, batches)
        stream.close()
        found["without_samples_per_s"] = plain
        found["loopback"] = {}
        for codec in CODECS:
            with bench.remote(codec) as remote:
                bench.train(remote, 4)
                rate = bench.train(remote, batches)
                counts = remote.counts
                found["loopback"][codec] = {
                    "samples_per_s": rate,
                    "share": rate / plain,
                    "received_bytes_per_sample": counts.received_bytes / counts.samples,
                    "sent_bytes_per_sample": counts.sent_bytes / counts.samples,
                }
        bench.close()
    return found


if __name__ == "__main__":
    command(measure, __doc__)
