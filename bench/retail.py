"""The retail stream as files of ready samples, one line an impression: csv, parquet and Vowpal Wabbit's text.

The parquet file tells which were shown together (`request_id`).
Samples stand in the order of their impressions, whose order within an invoice is shuffled; `buy` says whether
an order line of the invoice named the item, which the joiner's window of two minutes always sees (delays are
cut at 100 s). The same files each time.

    python -m bench.retail PATH FOLDER     PATH: online_retail_ii_events.csv.gz or its folder
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.parquet

from freshet.recordings.retail import Slice, read_lines, slices
from freshet.recordings.sources import EVENTS_FILE

__all__ = ["SPECS", "RetailFiles", "made"]

SPECS = Path(__file__).parent / "specs"
BANDS = (0.5, 1, 1.5, 2, 3, 4, 6, 10, 20)
"""Edges of the bucketed price, as in the specs."""
DAY_MS, HOUR_MS = 86_400_000, 3_600_000


@dataclass(frozen=True, slots=True)
class RetailFiles:
    """The same samples three times."""

    csv: Path
    parquet: Path
    vw: Path
    samples: int


def made(source: Path, folder: Path, days: int | None = None) -> RetailFiles:
    """The files in `folder`, written if they are not there; `days`: only the first ones."""
    stem = folder / ("retail" if days is None else f"retail-{days}-days")
    csv, parquet, vw = (stem.with_suffix(f".{end}") for end in ("csv", "parquet", "vw"))
    if not vw.exists():
        folder.mkdir(parents=True, exist_ok=True)
        table = _table(source, days)
        pa.parquet.write_table(table, parquet)
        pa.csv.write_csv(table.drop(["request_id"]), csv, pa.csv.WriteOptions(quoting_style="needed"))
        half = vw.with_suffix(".half")
        half.write_bytes(_vw_text(table))
        half.rename(vw)
    return RetailFiles(csv, parquet, vw, pa.parquet.ParquetFile(parquet).metadata.num_rows)


def _table(source: Path, days: int | None) -> pa.Table:
    file = source / EVENTS_FILE if source.is_dir() else source
    today = islice(slices(read_lines(file)), days)
    rows = [row for impressions, bought in _days(today) for row in _rows(impressions, bought)]
    schema = pa.schema(
        {
            "request_id": pa.string(),
            "ts": pa.int64(),
            "customer_id": pa.int64(),
            "country": pa.string(),
            "items.stock_code": pa.string(),
            "items.price": pa.float64(),
            "buy": pa.int8(),
        }
    )
    return pa.table(dict(zip(schema.names, zip(*rows, strict=True), strict=True)), schema)


def _days(stream: Iterator[Slice]) -> Iterator[tuple[bytes, set[tuple[str, str]]]]:
    """Each day's impressions and what was bought of them; actions may come with the next day."""
    before: tuple[bytes, set[tuple[str, str]]] | None = None
    for day in stream:
        actions = [orjson.loads(line) for line in day.actions.splitlines()]
        bought = {(a["request_id"], a["stock_code"]) for a in actions if a["type"] == "buy"}
        if before is not None:
            yield before[0], before[1] | bought
        before = day.impressions, bought
    if before is not None:
        yield before


def _rows(impressions: bytes, bought: set[tuple[str, str]]) -> Iterator[tuple[Any, ...]]:
    for line in impressions.splitlines():
        event = orjson.loads(line)
        request, customer = event["request_id"], event["customer_id"]
        for item in event["items"]:
            code = item["stock_code"]
            buy = int((request, code) in bought)
            yield request, event["ts"], customer, event["country"], code, item["price"], buy


def _vw_text(table: pa.Table) -> bytes:
    """A line a sample: a namespace of one letter for each feature of the linear spec, null left out."""
    ts = table["ts"].to_numpy()
    price = table["items.price"].to_numpy()
    band = pa.array(np.searchsorted(BANDS, price, side="right"), mask=np.isnan(price))
    country = pc.replace_substring(table["country"], " ", "_")
    columns = {
        "u": table["customer_id"].cast("string"),
        "i": pc.replace_substring(pc.replace_substring(table["items.stock_code"], " ", "_"), ":", "_"),
        "c": country,
        "h": pa.array(ts // HOUR_MS % 24).cast("string"),
        "w": pa.array((ts // DAY_MS + 3) % 7).cast("string"),
        "b": band.cast("string"),
    }
    label = pc.if_else(pc.equal(table["buy"], 1), "1", "-1")
    parts = [pc.fill_null(pc.binary_join_element_wise(f" |{k}", v, " "), "") for k, v in columns.items()]
    lines = pc.binary_join_element_wise(label, *parts, "\n", "")
    return "".join(lines.to_pylist()).encode()


if __name__ == "__main__":
    print(made(Path(sys.argv[1]), Path(sys.argv[2])))
