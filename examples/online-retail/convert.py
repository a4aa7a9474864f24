"""Convert the Excel file of Online Retail II to the csv that retail_events.py reads.

    python convert.py online_retail_II.xlsx FOLDER

Needs openpyxl. Lines without a stock code or a time, and lines that both sheets contain, are omitted and
counted.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import sys
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from retail_events import COLUMNS, EVENTS_FILE

NAMES = ("Invoice", "StockCode", "Quantity", "InvoiceDate", "Price", "Customer ID", "Country")


Row = Mapping[str, Any]
Line = tuple[Any, ...]


def sheets(path: Path) -> list[list[Row]]:
    """Return the rows of each sheet, by column name."""
    from openpyxl import load_workbook  # noqa: PLC0415 - only needed here

    return [_rows(path, sheet) for sheet in load_workbook(path, read_only=True).worksheets]


def _rows(path: Path, sheet: Any) -> list[Row]:
    rows = sheet.iter_rows(values_only=True)
    names = [str(name) for name in next(rows)]
    missing = [name for name in NAMES if name not in names]
    if missing:
        sys.exit(f"{path}, sheet {sheet.title}: no column {missing[0]!r}; it has {', '.join(names)}")
    return [dict(zip(names, row, strict=True)) for row in rows]


def lines(book: Iterable[Sequence[Row]]) -> list[Line]:
    """Return the order lines of all sheets with the columns `COLUMNS`, by time, as UTC.

    The sheets of the two years overlap by some days: an invoice is read from the first sheet that has it.
    """
    found: list[Line] = []
    known: set[str] = set()
    for sheet in book:
        new = [_line(row) for row in sheet if _whole(row) and str(row["Invoice"]) not in known]
        known |= {line[1] for line in new}
        found += new
    return sorted(found, key=lambda line: int(line[0]))


def _whole(row: Row) -> bool:
    return isinstance(row["InvoiceDate"], datetime) and row["StockCode"] not in (None, "")


def _line(row: Row) -> Line:
    return (
        int(row["InvoiceDate"].replace(tzinfo=UTC).timestamp()),
        str(row["Invoice"]),
        str(row["StockCode"]),
        int(row["Quantity"]),
        float(row["Price"]),
        "" if row["Customer ID"] is None else int(row["Customer ID"]),
        row["Country"],
    )


def write(found: Iterable[Line], folder: Path) -> Path:
    """Write the csv into a folder, and return its path."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / EVENTS_FILE
    with gzip.open(path, "wt", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        writer.writerows(found)
    return path


def main() -> None:
    """Run the program."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("excel", type=Path)
    parser.add_argument("folder", type=Path)
    options = parser.parse_args()
    book = sheets(options.excel)
    found = lines(book)
    left_out = sum(map(len, book)) - len(found)
    print(f"{len(found):,} order lines in {write(found, options.folder)}; {left_out:,} omitted")


if __name__ == "__main__":
    main()
