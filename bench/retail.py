"""The retail stream as tables and files of ready samples: csv, parquet and Vowpal Wabbit's text.

Samples stand in the order of their impressions, whose order within an invoice is shuffled; `buy` says whether
an order line of the invoice named the item. The joiner's window of two minutes covers every purchase, as
delays are at most 100 s. The parquet file has the samples' requests (`request_id`). The files are the same
each time.

    python -m bench.retail PATH FOLDER     PATH: online_retail_ii_events.csv.gz or its folder
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.parquet

SPEC = Path(__file__).parents[1] / "examples" / "online-retail" / "freshet.toml"


def _example() -> ModuleType:
    """Load the example's program, which belongs to no package."""
    place = importlib.util.spec_from_file_location("retail_events", SPEC.with_name("retail_events.py"))
    assert place is not None
    assert place.loader is not None
    module = sys.modules[place.name] = importlib.util.module_from_spec(place)
    place.loader.exec_module(module)
    return module


_events = _example()
EVENTS_FILE: str = _events.EVENTS_FILE
read_lines, slices = _events.read_lines, _events.slices

SPECS = Path(__file__).parent / "specs"
BANDS = (0.5, 1, 1.5, 2, 3, 4, 6, 10, 20)
"""Edges of the bucketed price, as in the specs."""
DAY_MS, HOUR_MS = 86_400_000, 3_600_000
SCHEMA = pa.schema(
    {
        "request_id": pa.string(),
        "ts": pa.int64(),
        "customer_id": pa.int64(),
        "country": pa.string(),
        "items.stock_code": pa.string(),
        "items.price": pa.float64(),
        "buy": pa.int8(),
        "decided_ms": pa.int64(),
    }
)
Bought = dict[tuple[str, str], int]
"""When an item was bought, in ms, by request and item."""


@dataclass(frozen=True, slots=True)
class RetailFiles:
    """The same samples in three formats."""

    csv: Path
    parquet: Path
    vw: Path
    samples: int


def retail_files(source: Path, folder: Path, days: int | None = None) -> RetailFiles:
    """Return the files in `folder` of the first days, or of all; writes them if they are not there."""
    stem = folder / ("retail" if days is None else f"retail-{days}-days")
    csv, parquet, vw = (stem.with_suffix(f".{end}") for end in ("csv", "parquet", "vw"))
    if not vw.exists():
        folder.mkdir(parents=True, exist_ok=True)
        table = retail_table(source, days).drop(["decided_ms"])
        pa.parquet.write_table(table, parquet)
        pa.csv.write_csv(table.drop(["request_id"]), csv, pa.csv.WriteOptions(quoting_style="needed"))
        half = vw.with_suffix(".half")
        half.write_bytes(_vw_text(table))
        half.rename(vw)
    return RetailFiles(csv, parquet, vw, pa.parquet.ParquetFile(parquet).metadata.num_rows)


def retail_table(source: Path, days: int | None, wait_ms: int = 0) -> pa.Table:
    """Return the samples of the first days, or of all.

    `decided_ms` is when early emission decides a sample: with the purchase, or `wait_ms` after the
    impression.
    """
    file = source / EVENTS_FILE if source.is_dir() else source
    rows = [
        row
        for impressions, bought in _days(islice(slices(read_lines(file)), days))
        for row in _rows(impressions, bought, wait_ms)
    ]
    return pa.table(dict(zip(SCHEMA.names, zip(*rows, strict=True), strict=True)), SCHEMA)


def _days(stream: Iterator[Any]) -> Iterator[tuple[bytes, Bought]]:
    """Yield each day's impressions and the purchases of them, some of which come with the next day."""
    before: tuple[bytes, Bought] | None = None
    for day in stream:
        bought: Bought = {}
        for action in map(orjson.loads, day.actions.splitlines()):
            if action["type"] == "buy":
                bought.setdefault((action["request_id"], action["stock_code"]), action["ts"])
        if before is not None:
            yield before[0], bought | before[1]
        before = day.impressions, bought
    if before is not None:
        yield before


def _rows(impressions: bytes, bought: Bought, wait_ms: int) -> Iterator[tuple[Any, ...]]:
    for event in map(orjson.loads, impressions.splitlines()):
        request, customer, shown_ms = event["request_id"], event["customer_id"], event["ts"]
        for item in event["items"]:
            code = item["stock_code"]
            bought_ms = bought.get((request, code))
            yield (
                request,
                shown_ms,
                customer,
                event["country"],
                code,
                item["price"],
                int(bought_ms is not None),
                shown_ms + wait_ms if bought_ms is None else bought_ms,
            )


def _vw_text(table: pa.Table) -> bytes:
    """Return a line for each sample. A feature of the linear spec is a namespace; nulls are left out."""
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
    print(retail_files(Path(sys.argv[1]), Path(sys.argv[2])))
