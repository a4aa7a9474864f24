"""The cost of passing changed rows on: codecs of rows, publishing and flushing, through the shard's code.

    python -m bench.codecs [--rows 200000] [--folder FOLDER] [--quick] [--json]

Rows are those of the default model with one label: two scalars and a vector of 16, in two tables of 1,024
buckets; `wide` has as many rows in 26 tables, so 26,624 runs of a few rows each. Codecs are bound by memory:
they copy each row once or twice, and the row deltas pass a CRC-32 over it besides. Publishing and flushing
write what they copied durably: an append to the log and a transaction of the row store, each with an fsync of
the disk under FOLDER (default: that of temporary files). Codecs are measured per second of processor time;
publish and flush by the clock, with the processor time of the shard's thread beside it, which training loses:
of the median flush, and of the mean one, which has its share of the rare checkpoints and compactions (a quick
run has none). `flush_of_none` is a flush after no row has changed: it still writes the offsets of all
buckets. `wires_gb_per_s`: the integer codecs of rows and gradients, by the floats of a row; gradients are
rounded at random. `load` is the reading of all rows at a restart.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np

from bench.report import Figures, command
from bench.rounds import Figure, interleaved, rate
from freshet.config.spec.layout import layout_of
from freshet.config.spec.model import Spec
from freshet.config.spec.parse import parse_spec
from freshet.config.spec.topics import ROWS_PARTITIONS
from freshet.log.sqlite.event_log import SqliteEventLog
from freshet.log.topics import ModelContext
from freshet.paramserver.flusher import FlushBook
from freshet.paramserver.shard import Shard
from freshet.rows.deltas import RowCodec, RowDelta, decode_rows, encode_rows, records_of
from freshet.rows.service import KeyGroup, Push
from freshet.rows.sqlite.row_store import SqliteRowStore
from freshet.tables import Plan, Published, Store
from freshet.types import F32, U8, Fence, OffsetRange, TimeMs
from freshet.wires.codecs import RowFormat, gradients_codec, pack_rows, rows_codec, unpack_rows
from freshet.wires.row_wire import RowWire

SPEC = """
name = "perf"
[events]
served = { schema = "s.avsc", key = ["request"], time = "ts:ms" }
action = { schema = "a.avsc", key = ["request"], time = "ts:ms" }
[labels]
click = { on = "action.type == 'click'", window = "2m" }
[model]
crosses = []
"""
GOLDEN = np.uint64(0x9E3779B97F4A7C15)
QUICK_ROUNDS = 3
SCALARS = 2
DELTA_ROWS = 50_000 // ROWS_PARTITIONS
WIRE_FLOATS, WIRE_CALLS = 1 << 16, 64
"""Rows of a record of `rows` when a shard copies out as much as it does at once."""


def spec_of(precision: str = "fp32", *, tables: int = 2) -> Spec:
    """Return a model of tables t0, t1, …; the last has that precision."""
    names = [f"t{i}" for i in range(tables)]
    lines = [f"{name} = {{ dim = 16 }}" for name in names[:-1]]
    lines += [f'{names[-1]} = {{ dim = 16, precision = "{precision}" }}', "[features]"]
    lines += [f'{name} = {{ field = "{name}", table = "{name}" }}' for name in names]
    return parse_spec("\n".join([SPEC, "[tables]", *lines]))


class Batches:
    """Pushes of all rows of all tables: each makes every row dirty."""

    def __init__(self, spec: Spec, rows: int) -> None:
        per_table = rows // len(spec.tables)
        self.rows, self._at = per_table * len(spec.tables), 0
        self._groups: list[KeyGroup] = []
        self._gradients: list[F32] = []
        keys = self.keys = np.arange(1, per_table + 1, dtype=np.uint64) * GOLDEN
        for group in layout_of(spec).groups:
            tables = np.array(group.tables, np.uint8)
            plan = Plan(tables=tables, buckets=spec.buckets)
            column = np.concatenate([keys] * len(tables))
            starts = np.arange(len(tables) + 1, dtype=np.uint32) * len(keys)
            plan.build(column, starts.astype(np.uint32))
            arrays = (plan.keys.copy(), plan.tables.copy(), plan.bucket_starts.copy())
            self._groups.append(KeyGroup(group.index, *arrays))
            self._gradients.append(np.full((len(arrays[0]), group.width), 1e-3, np.float32))

    def next(self) -> Push:
        """Return the next push; its range follows the last one's."""
        self._at += 1
        span = (OffsetRange(0, self._at - 1, self._at),)
        return Push(span, Fence(1), TimeMs(self._at), self._groups, self._gradients)


@contextmanager
def shard_in(folder: Path, spec: Spec, fence: Fence) -> Iterator[Shard]:
    """Open a shard on the stores in a folder; it is neither loaded nor started."""
    log, rows = SqliteEventLog(folder / "log"), SqliteRowStore(folder / "rows.sqlite")
    shard = Shard(ModelContext.open(spec, "hash", log), rows, fence=fence)
    yield shard
    rows.close()
    log.close()


def writes(folder: Path, tables: int, rows: int, rounds: int) -> Figures:
    """Measure publish and flush of all rows and of none through the shard, then the load of a restart."""
    spec = spec_of(tables=tables)
    found: dict[str, list[tuple[float, float]]] = {"publish": [], "flush": [], "flush_of_none": []}

    def timed(name: str, work: Callable[[], object]) -> None:
        wall, cpu = time.perf_counter(), time.thread_time()
        work()
        found.setdefault(name, []).append((time.perf_counter() - wall, time.thread_time() - cpu))

    batches = Batches(spec, rows)
    with shard_in(folder, spec, Fence(1)) as shard:
        shard.load()
        for turn in range(rounds + 1):
            shard.push(batches.next())
            timed("publish", shard.publish)
            timed("flush", shard.flush)
            if turn < QUICK_ROUNDS:
                timed("flush_of_none", shard.flush)
            if turn == 0:  # the first makes the files and maps the memory
                for times in found.values():
                    times.clear()
    with shard_in(folder, spec, Fence(2)) as shard:
        timed("load", shard.load)
    figures: Figures = {}
    for name in ("publish", "flush", "load"):
        wall, cpu = (statistics.median(times) for times in zip(*found[name], strict=True))
        figures[name] = {
            "rows": batches.rows,
            "rows_per_s": batches.rows / wall,
            "us_per_row": wall / batches.rows * 1e6,
            "cpu_us_per_row": cpu / batches.rows * 1e6,
        }
    mean = statistics.mean(cpu for _, cpu in found["flush"])
    figures["flush"]["mean_cpu_us_per_row"] = mean / batches.rows * 1e6
    figures["flush_of_none"] = {"ms": statistics.median(wall for wall, _ in found["flush_of_none"]) * 1e3}
    return figures


def collected(rows: int, rounds: int) -> Figures:
    """Measure both without I/O: from the table to records of `rows`, and to the columns of a flush."""
    spec = spec_of()
    store, batches = Store.of(spec, layout_of(spec)), Batches(spec, rows)
    book = FlushBook(buckets=spec.buckets, partitions=spec.partitions)
    spent: dict[str, list[float]] = {}
    fences, wire = np.ones(spec.buckets, np.int64), RowWire()

    def timed(name: str, work: Callable[[], object]) -> None:
        began = time.thread_time()
        work()
        spent.setdefault(name, []).append((time.thread_time() - began) / batches.rows * 1e6)

    for _ in range(rounds):
        push = batches.next()
        store.push(push.ranges, push.clock_ms, push.groups, push.gradients)
        published: list[Published] = []
        timed("collect_publish", lambda: published.append(store.collect_publish(rows)))  # noqa: B023
        timed("records_of", lambda: records_of(published[0], "rows", fences, wire))  # noqa: B023
        offsets = np.zeros(ROWS_PARTITIONS, np.int64)
        timed("collect_flush", lambda: book.next_flush(store.collect_flush(), offsets))  # noqa: B023
    return {name: {"cpu_us_per_row": Figure.of(times).median} for name, times in spent.items()}


def deltas(rounds: int, quick: bool) -> Figures:
    """Measure writing and reading row deltas, the records of `rows`, in each codec."""
    rng = np.random.default_rng(0)
    keys = rng.integers(0, 1 << 63, DELTA_ROWS, np.uint64)
    values = rng.normal(0, 0.01, (DELTA_ROWS, 18)).astype(np.float32)
    delta = RowDelta(0, Fence(1), TimeMs(0), keys, values, np.empty(0, np.uint64))
    calls = 4 if quick else 16
    cases: dict[str, Callable[[], float]] = {}
    sizes: dict[str, float] = {}
    for codec in (RowCodec.FP32, RowCodec.BF16, RowCodec.INT8, RowCodec.UINT4):
        record = encode_rows(delta, codec, SCALARS)
        sizes[codec.name.lower()] = len(record) / DELTA_ROWS

        def write(codec: RowCodec = codec) -> None:
            for _ in range(calls):
                encode_rows(delta, codec, SCALARS)

        def read(record: bytes = record) -> None:
            for _ in range(calls):
                decode_rows(record)

        for name, work in (("encode", write), ("decode", read)):
            cases[f"{name}_{codec.name.lower()}"] = rate(work, DELTA_ROWS * calls, time.thread_time)
    rates = interleaved(cases, rounds, unit="rows/s")
    figures: Figures = {name: {"rows_per_s": figure.median} for name, figure in rates.items()}
    for codec_name, size in sizes.items():
        figures[f"encode_{codec_name}"]["bytes_per_row"] = size
    return figures


def packed(rows: int, rounds: int) -> Figures:
    """Measure packed rows, as the row store keeps them, out of a table and into one, in fp32 and bf16."""
    cases: dict[str, Callable[[], float]] = {}
    figures: Figures = {}
    for precision in ("fp32", "bf16"):
        spec = spec_of(precision)
        table = spec.tables[-1].id
        store, batches = Store.of(spec, layout_of(spec)), Batches(spec, rows)
        push = batches.next()
        store.push(push.ranges, push.clock_ms, push.groups, push.gradients)
        keys = batches.keys
        found, exported = store.export_rows(table, keys)
        if not found.all():
            raise RuntimeError("rows that were pushed are not in the table")
        other = Store.of(spec, layout_of(spec))
        other.import_rows(exported)
        export, take = partial(store.export_rows, table, keys), partial(other.import_rows, exported)
        cases[f"export_{precision}"] = rate(export, len(keys), time.thread_time)
        cases[f"import_{precision}"] = rate(take, len(keys), time.thread_time)
        figures[f"export_{precision}"] = {"bytes_per_row": store.record_bytes(table)}
    for name, figure in interleaved(cases, rounds, unit="rows/s").items():
        figures.setdefault(name, {})["rows_per_s"] = figure.median
    return figures


def wires(rounds: int) -> Figures:
    """Measure the integer codecs by the floats of a row; GB of fp32 a second of a core."""
    cases: dict[str, Callable[[], float]] = {}
    for width in (16, 64, 256):
        values = np.random.default_rng(0).normal(0, 0.05, (WIRE_FLOATS // width, width)).astype(np.float32)
        out = np.empty_like(values)
        for name in ("int8", "int4"):
            for kind, codec in (("rows", rows_codec(name)), ("gradients", gradients_codec(name))):
                form, seed = RowFormat(codec, width), int(kind == "gradients")
                sent = pack_rows(values, form, seed)

                def write(values: F32 = values, form: RowFormat = form, seed: int = seed) -> None:
                    for _ in range(WIRE_CALLS):
                        pack_rows(values, form, seed)

                def read(sent: U8 = sent, form: RowFormat = form, out: F32 = out) -> None:
                    for _ in range(WIRE_CALLS):
                        unpack_rows(sent, form, out)

                for way, work in (("encode", write), ("decode", read)):
                    per_call = values.nbytes * WIRE_CALLS / 1e9
                    cases[f"{way}_{name}_{kind}_{width}"] = rate(work, per_call, time.thread_time)
    return {name: figure.median for name, figure in interleaved(cases, rounds, unit="GB/s").items()}


def measure(quick: bool = False, rows: int | None = None, folder: Path | None = None) -> Figures:
    """Measure codecs of deltas and of packed rows, publish and flush."""
    rows = rows or (50_000 if quick else 200_000)
    rounds = QUICK_ROUNDS if quick else 7
    writing = QUICK_ROUNDS if quick else 28
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        return {
            **writes(Path(temporary) / "few", 2, rows, writing),
            "wide": writes(Path(temporary) / "wide", 26, rows, writing),
            "stages": collected(rows, rounds),
            "deltas": deltas(rounds, quick),
            "packed": packed(rows, rounds),
            "wires_gb_per_s": wires(rounds),
        }


if __name__ == "__main__":
    command(measure, __doc__)
