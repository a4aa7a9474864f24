"""Records a second that one core decodes: 40 fields (13 strings, 13 longs, 13 numbers, a label).

    python -m bench.decode [--records N] [--quick] [--json]

Bound by instructions: the branches of Avro's varints and unions, and the hashing of strings; the batch stays
in the cache. Rates are per second of processor time. Budget: 3 M records/s per core.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import numpy as np

from bench.report import Figures, command
from bench.rounds import interleaved, rate
from freshet.config.avro.schema import Record, parse_schema
from freshet.config.spec.layout import layout_of
from freshet.config.spec.model import Spec, Stream, TimeField
from freshet.config.spec.parse import parse_spec
from freshet.features import (
    Column,
    ColumnEncoder,
    EventExtractor,
    SampleColumns,
    SampleDecoder,
    encode_blocks,
    read_blocks,
)
from freshet.features.encoder import EncodedRows
from freshet.types import BytesColumn

BATCH = 4096
COUNT = 13


def schema_of(nullable: bool) -> Record:
    """Return the 40 fields, and the envelope's two."""

    def of(type_: str) -> object:
        return ["null", type_] if nullable else type_

    fields: list[dict[str, object]] = [{"name": "request", "type": "string"}, {"name": "ts", "type": "long"}]
    for i in range(COUNT):
        fields += [{"name": f"s{i}", "type": of("string")}, {"name": f"l{i}", "type": of("long")}]
        fields.append({"name": f"d{i}", "type": of("float")})
    fields.append({"name": "label", "type": "int"})
    return parse_schema({"type": "record", "name": "Wide", "fields": fields})


def spec_of(log1p: bool) -> Spec:
    """Return a spec with a feature for each field."""
    dense = "log1p" if log1p else "raw"
    features = "".join(
        f's{i} = {{ field = "s{i}", table = "t" }}\nl{i} = {{ field = "l{i}", table = "t" }}\n'
        f'd{i} = {{ field = "d{i}", dense = "{dense}" }}\n'
        for i in range(COUNT)
    )
    return parse_spec(
        'name = "perf"\n[events]\n'
        'served = { topic = "s", schema = "s.avsc", key = ["request"], time = "ts:ms" }\n'
        'action = { topic = "a", schema = "a.avsc", key = ["request"], time = "ts:ms" }\n'
        '[labels]\nclick = { on = "action.type == \'click\'", window = "2m" }\n'
        f"[tables]\nt = {{ dim = 16 }}\n[features]\n{features}"
    )


def rows_of(schema: Record, rows: int, nullable: bool) -> EncodedRows:
    """Draw rows: strings of 4 to 16 bytes, longs below 2^7 to 2^40, a tenth nulls if allowed."""
    rng = np.random.default_rng(1)

    def text() -> BytesColumn:
        lengths = rng.integers(4, 17, rows)
        return BytesColumn(rng.integers(97, 123, lengths.sum()).astype(np.uint8), np.cumsum(lengths))

    def nulls() -> np.ndarray | None:
        return rng.random(rows) < 0.1 if nullable else None

    columns = {"request": Column(text()), "ts": Column(np.full(rows, 1_700_000_000_000))}
    for i in range(COUNT):
        columns[f"s{i}"] = Column(text(), nulls())
        columns[f"l{i}"] = Column(rng.integers(0, 1 << rng.integers(7, 41, rows)), nulls())
        columns[f"d{i}"] = Column(rng.integers(0, 1000, rows).astype(np.float64), nulls())
    columns["label"] = Column(rng.integers(0, 2, rows))
    return ColumnEncoder(schema, list(columns)).encode(columns, rows)


def repeated(work: Callable[[], object], calls: int) -> None:
    """Call `work` several times."""
    for _ in range(calls):
        work()


def measure(quick: bool = False, records: int | None = None) -> Figures:
    """Measure the rate of each case on one core."""
    calls = max(1, (records or (40_000 if quick else 200_000)) // BATCH)
    times = np.full(BATCH, 1_700_000_000_000)
    work: dict[str, Callable[[], object]] = {}
    for nullable in (False, True):
        schema = schema_of(nullable)
        rows = rows_of(schema, BATCH, nullable).records
        for log1p in (False, True):
            spec = spec_of(log1p)
            decoder = SampleDecoder(spec, layout_of(spec), lambda _, s=schema: s)  # type: ignore[misc]
            name = f"{'nullable' if nullable else 'plain'}{'_log1p' if log1p else ''}"
            work[name] = partial(decoder.decode, rows, 1, times)
    blocks = encode_blocks(
        1,
        SampleColumns(
            sample_ids=np.arange(BATCH),
            event_times_ms=times,
            request_ids=np.arange(BATCH, dtype=np.uint64),
            values=np.zeros(BATCH, np.float32),
            weights=np.ones(BATCH, np.float32),
            labels=np.zeros(BATCH, np.uint8),
        ),
        payloads=rows,
        block_ends=np.arange(256, BATCH + 1, 256),
    )
    work["read_blocks_of_256"] = partial(read_blocks, blocks)
    stream = Stream(
        role="served", topic="s", key=("request",), time=TimeField(path="ts", unit="ms"), explode=None
    )
    extractor = EventExtractor(stream, schema, ["s0", "d0"])
    work["extract_events"] = partial(extractor.extract, rows, framed=False)
    cases = {
        name: rate(partial(repeated, once, calls), calls * BATCH, time.thread_time)
        for name, once in work.items()
    }
    return {name: {"records_per_s": figure.median} for name, figure in interleaved(cases, 7).items()}


if __name__ == "__main__":
    command(measure, __doc__)
