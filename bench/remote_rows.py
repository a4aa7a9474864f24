"""Lookups and pushes of a shard over gRPC on the loopback, beside the same shard called in its process.

    python -m bench.remote_rows [--rows 200000] [--folder FOLDER] [--quick] [--json]

A batch is 256 samples of 26 ids: 6,656 unique rows here, the most that it can have, of two scalars and a
vector of 16. Client and shard share one process and the machine's cores, so the figures are the work of both
without planning: encoding, gRPC twice, decoding. One request is under way at a time; `ahead` has four.
Bytes are those of both directions, of a batch and of its rows each. Bound by copies of the rows and by gRPC's
and Python's work for each message.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import get_args

import numpy as np

from bench.codecs import GOLDEN, shard_in, spec_of
from bench.report import Figures, command
from freshet.config.settings.common import Codec
from freshet.config.spec.layout import layout_of
from freshet.coordination.assignment import Owners
from freshet.paramserver.server import RowSizes, identity_of, serve_rows
from freshet.rows.grpc.client import RemoteRows, Served
from freshet.rows.service import KeyGroup, Push
from freshet.rpc.channel import MIB, Transport
from freshet.rpc.server import FrameServer
from freshet.tables import Plan
from freshet.types import F32, Fence, OffsetRange, TimeMs
from freshet.wires.link_codecs import CodecChoice

SAMPLES, IDS = 256, 26
AHEAD = 4
TRANSPORT = Transport(max_message_bytes=64 * MIB)


def batches_of(rows: int, buckets: int) -> list[KeyGroup]:
    """Return batches of unique keys that cover `rows` rows."""
    size = SAMPLES * IDS
    batches = []
    for first in range(0, rows - size + 1, size):
        keys = np.arange(first + 1, first + size + 1, dtype=np.uint64) * GOLDEN
        plan = Plan(tables=np.zeros(1, np.uint8), buckets=buckets)
        plan.build(keys, np.array([0, size], np.uint32))
        batches.append(KeyGroup(0, plan.keys.copy(), plan.tables.copy(), plan.bucket_starts.copy()))
    return batches


def timed(work: Callable[[], object], rounds: int) -> float:
    """Return the seconds of the median round."""
    found = []
    for _ in range(rounds):
        began = time.perf_counter()
        work()
        found.append(time.perf_counter() - began)
    return statistics.median(found)


def measure(quick: bool = False, rows: int = 200_000, folder: Path | None = None) -> Figures:
    """Measure lookups and pushes, in the process and by each codec."""
    rounds = 60 if quick else 400
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        return _measure(rows, rounds, Path(temporary))


def _measure(rows: int, rounds: int, folder: Path) -> Figures:
    spec = spec_of(tables=1)
    layout = layout_of(spec)
    group = layout.groups[0]
    batches = batches_of(rows, spec.buckets)
    per_batch = SAMPLES * IDS
    figures: Figures = {}
    out: F32 = np.empty((per_batch, group.width), np.float32)
    gradients = np.full((per_batch, group.width), 1e-4, np.float32)
    at, turn = count(), count()

    def next_batch() -> KeyGroup:
        return batches[next(turn) % len(batches)]

    def next_push() -> Push:
        start = next(at)
        span = (OffsetRange(0, start, start + 1),)
        return Push(span, Fence(1), TimeMs(start), [next_batch()], [gradients])

    def note(name: str, seconds: float, sent: int = 0) -> None:
        figures[name] = {"us_per_batch": seconds * 1e6, "rows_per_s": per_batch / seconds}
        if sent:
            figures[name] |= {"bytes_per_batch": float(sent), "mb_per_s": sent / seconds / 1e6}

    with shard_in(folder, spec, Fence(1)) as shard:
        shard.load()
        server = FrameServer("127.0.0.1:0", TRANSPORT, identity=identity_of(spec.name, "hash"))
        serve_rows(server, shard, RowSizes(spec.buckets, (group.width,), (group.state_floats,)))
        server.start()
        owners = Owners.of({f"127.0.0.1:{server.port}": range(spec.buckets)}, buckets=spec.buckets)
        for batch in batches:
            shard.lookup([batch], [out])
        note("lookup_in_process", timed(lambda: shard.lookup([next_batch()], [out]), rounds))
        note("push_in_process", timed(lambda: shard.push(next_push()), rounds))
        for codec in get_args(Codec):
            remote = RemoteRows(
                Served(spec.name, "hash"),
                lambda: owners,
                TRANSPORT,
                choice=CodecChoice(codec, codec),
            )

            def measured(name: str, work: Callable[[], object], times: int, per_call: int = 1) -> None:
                work()
                before = remote.total()  # noqa: B023
                seconds = timed(work, times) / per_call
                after = remote.total()  # noqa: B023
                sent = after.sent_bytes - before.sent_bytes
                received = after.received_bytes - before.received_bytes
                note(name, seconds, (sent + received) // (times * per_call))

            def ahead() -> None:
                for future in [remote.push_soon(next_push()) for _ in range(AHEAD)]:  # noqa: B023
                    future.result()

            measured(f"lookup_{codec}", lambda: remote.lookup([next_batch()], [out]), rounds)  # noqa: B023
            measured(f"push_{codec}", lambda: remote.push(next_push()), rounds)  # noqa: B023
            measured(f"push_ahead_{codec}", ahead, rounds // AHEAD, AHEAD)
            remote.close()
        server.stop(0.0)
    return figures


if __name__ == "__main__":
    command(measure, __doc__)
