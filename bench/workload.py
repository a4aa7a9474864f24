"""The workload of the comparison: 26 ids, 13 numbers and a label, as arrays for peers and as a log for us.

Ids of each field are Zipf distributed: P(rank r) ∝ r^-skew over `cardinality` ranks. Labels are drawn from a
logistic model of hidden weights, so that there is something to learn. Peers read the arrays (`ids.npy`,
`dense.npy`, `labels.npy`, `meta.json`) from memory; we read Avro records of 40 fields (13 strings, 13 longs,
13 floats, and the envelope) from blocks of the log, which hold the same rows in the same order.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from freshet.apps.pipeline import Pipeline
from freshet.config.avro.schema import Record, parse_schema
from freshet.config.spec.model import Spec
from freshet.config.spec.parse import parse_spec
from freshet.features import Column, ColumnEncoder, SampleColumns, encode_blocks, take
from freshet.features.blocks import block_samples
from freshet.types import F32, I64, U64, Append, BytesColumn

FIELDS, NUMBERS = 26, 13
EFFECTS = 2003
"""Distinct effects of a field's ids; ids share them."""
RENEWALS = 16
"""How often, in all rows of a stream that drifts, each id is replaced by one with another effect."""
JUMP_AT, RARE, COMMON = 0.6, -3.5, -1.0
"""The share of rows after which such a stream's labels become common, and the logits before and since."""
ROUND = 1 << 16  # rows that are made and appended at once

GOLDEN_SHARE = 0.6180339887
START_MS = 1_750_000_000_000
DIGITS = 8  # of the number in a string id: `item00001234`


@dataclass(frozen=True, slots=True)
class Workload:
    """The parameters of the data."""

    rows: int = 1 << 19
    cardinality: int = 100_000  # of each field
    skew: float = 1.05
    seed: int = 0
    drifts: bool = False  # ids are replaced all the time, and the rate of labels jumps

    def arrays(self) -> Arrays:
        """Draw all rows; 248 bytes each."""
        rng = np.random.default_rng(self.seed)
        mass = np.arange(1, self.cardinality + 1, dtype=np.float64) ** -self.skew
        cumulated = np.cumsum(mass / mass.sum())
        hidden = np.random.default_rng(self.seed + 1).normal(size=(FIELDS, EFFECTS)).astype(np.float32) * 0.3
        ids = np.empty((self.rows, FIELDS), np.uint64)
        done = np.arange(self.rows) / self.rows
        logits = np.full(self.rows, COMMON, np.float32)
        if self.drifts:
            logits[done < JUMP_AT] = RARE
        for field in range(FIELDS):
            rank = np.minimum(np.searchsorted(cumulated, rng.random(self.rows)), self.cardinality - 1)
            if self.drifts:  # each id at a moment of its own
                rank += self.cardinality * np.floor(done * RENEWALS + rank * GOLDEN_SHARE % 1).astype(
                    np.int64
                )
            ids[:, field] = rank
            logits += hidden[field, rank % EFFECTS]
        dense = rng.random((self.rows, NUMBERS), np.float32)
        labels = (rng.random(self.rows) < 1 / (1 + np.exp(-logits))).astype(np.float32)
        return Arrays(ids, dense, labels)

    def write(self, folder: Path) -> None:
        """Write the arrays and their parameters, unless the folder has them already."""
        meta = folder / "meta.json"
        if meta.exists() and json.loads(meta.read_text()) == asdict(self):
            return
        folder.mkdir(parents=True, exist_ok=True)
        meta.unlink(missing_ok=True)
        arrays = self.arrays()
        np.save(folder / "ids.npy", arrays.ids)
        np.save(folder / "dense.npy", arrays.dense)
        np.save(folder / "labels.npy", arrays.labels)
        meta.write_text(json.dumps(asdict(self)))


@dataclass(frozen=True, slots=True, eq=False)
class Arrays:
    """The rows of a workload, N of them."""

    ids: U64  # (N, 26) ranks from 0
    dense: F32  # (N, 13)
    labels: F32  # (N,) 0 or 1

    @classmethod
    def read(cls, folder: Path) -> Arrays:
        """Map the arrays that `Workload.write` wrote."""
        return cls(*(np.load(folder / f"{name}.npy", mmap_mode="r") for name in ("ids", "dense", "labels")))

    def __len__(self) -> int:
        return len(self.labels)


def schema() -> Record:
    """Return the schema of a sample; ids are strings and longs in turn."""
    fields: list[dict[str, object]] = [{"name": "request", "type": "long"}, {"name": "ts", "type": "long"}]
    for i in range(NUMBERS):
        fields += [{"name": f"s{i}", "type": "string"}, {"name": f"l{i}", "type": "long"}]
        fields.append({"name": f"d{i}", "type": "float"})
    return parse_schema({"type": "record", "name": "Sample", "fields": fields})


def plain_spec(model: str, train: str = "", table: str = "", ids: int = FIELDS) -> Spec:
    """Return a spec of the 26 ids, each with a table of dim 16, and the 13 numbers as they are.

    model, train: lines of these sections; table: further keys of every table; ids: how many of them.
    """
    names = [f"{kind}{i}" for i in range(NUMBERS) for kind in "sl"][:ids]
    tables = "\n".join(f"{name} = {{ dim = 16{', ' + table if table else ''} }}" for name in names)
    features = "\n".join(f'{name} = {{ field = "{name}", table = "{name}" }}' for name in names)
    numbers = "\n".join(f'd{i} = {{ field = "d{i}", dense = "raw" }}' for i in range(NUMBERS))
    stream = 'schema = "none.avsc", key = ["request"], time = "ts:ms"'
    return parse_spec(
        f'name = "plain"\n[events]\nserved = {{ topic = "s", {stream} }}\n'
        f'action = {{ topic = "a", {stream} }}\n'
        f'[labels]\nclick = {{ on = "action.type == \'click\'", window = "2m" }}\n'
        f"[tables]\n{tables}\n[features]\n{features}\n{numbers}\n[model]\n{model}\n[train]\n{train}\n"
    )


def encoded(arrays: Arrays) -> Iterator[tuple[int, BytesColumn]]:
    """Yield (first row, Avro records) of ROUND rows at a time."""
    encoder: ColumnEncoder | None = None
    for first in range(0, len(arrays), ROUND):
        part = slice(first, min(first + ROUND, len(arrays)))
        rows = part.stop - first
        columns = {
            "request": Column(np.arange(first, part.stop, dtype=np.int64)),
            "ts": Column(START_MS + np.arange(first, part.stop, dtype=np.int64)),
        }
        for i in range(NUMBERS):
            columns[f"s{i}"] = Column(_texts(arrays.ids[part, 2 * i]))
            columns[f"l{i}"] = Column(arrays.ids[part, 2 * i + 1].astype(np.int64))
            columns[f"d{i}"] = Column(arrays.dense[part, i].astype(np.float64))
        encoder = encoder or ColumnEncoder(schema(), list(columns))
        yield first, encoder.encode(columns, rows).records


def append(pipeline: Pipeline, arrays: Arrays, passes: int = 1) -> int:
    """Append the rows `passes` times as blocks of samples, to all partitions in turn; returns samples."""
    schema_id = pipeline.registry.register(schema())
    partitions = pipeline.spec.partitions
    parts = list(encoded(arrays))
    for turn in range(passes):
        for first, payloads in parts:
            rows = len(payloads)
            at = np.arange(turn * len(arrays) + first, turn * len(arrays) + first + rows, dtype=np.int64)
            blocks = encode_blocks(
                schema_id,
                SampleColumns(
                    sample_ids=at,
                    event_times_ms=START_MS + at,
                    request_ids=at.astype(np.uint64),
                    values=np.ascontiguousarray(arrays.labels[first : first + rows]),
                    weights=np.ones(rows, np.float32),
                    labels=np.zeros(rows, np.uint8),
                ),
                payloads=payloads,
                block_ends=_ends(rows, block_samples(pipeline.spec.train.batch_rows)),
            )
            places = np.arange(len(blocks)) % partitions
            pipeline.writer.append(
                [
                    Append(pipeline.topics.samples, p, take(blocks, np.flatnonzero(places == p)))
                    for p in range(partitions)
                    if (places == p).any()
                ]
            )
    return passes * len(arrays)


def _ends(rows: int, most: int) -> I64:
    return np.append(np.arange(most, rows, most), rows).astype(np.int64)


def _texts(ids: U64) -> BytesColumn:
    """Return `item` and the number with leading zeros, for each id."""
    text = np.empty((len(ids), 4 + DIGITS), np.uint8)
    text[:, :4] = np.frombuffer(b"item", np.uint8)
    left = ids.astype(np.int64)
    for place in range(DIGITS):
        text[:, 3 + DIGITS - place] = left % 10 + ord("0")
        left = left // 10
    return BytesColumn(text.reshape(-1), np.arange(1, len(ids) + 1, dtype=np.int64) * (4 + DIGITS))


def main() -> None:
    """Write a workload for a peer."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("folder", type=Path)
    for name, value in asdict(Workload()).items():
        parser.add_argument(f"--{name}", type=type(value), default=value)
    options = vars(parser.parse_args())
    folder = options.pop("folder")
    Workload(**options).write(folder)


if __name__ == "__main__":
    main()
