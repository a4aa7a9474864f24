"""Files of samples: each column is read as the type of its field, for all types of files."""

from __future__ import annotations

import datetime as dt
import gzip
import json
import os
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from freshet.config.spec.model import Spec
from freshet.config.spec.parse import load_spec
from freshet.errors import BadInput, ConfigError
from freshet.recordings import tables
from freshet.recordings.event_times import EventTimes
from freshet.recordings.sample_files import read_samples
from freshet.recordings.sources import json_events

T0 = 1_700_000_000_000
SPEC = """
name = "shop"
[events]
served = { SCHEMA key = ["request_id", "items.sku"], time = "ts:ms", explode = "items" }
action = { key = ["request_id", "sku"], time = "ts:ms" }
[labels]
click = { on = "action.type == 'click'" }
spent = { on = "action.type == 'buy'", value = "sum(action.amount)" }
[tables]
t = { dim = 4 }
[features]
user = { field = "user.id", table = "t" }
country = { field = "user.country", table = "t" }
member = { field = "user.member", table = "t" }
kind = { field = "items.kind", table = "t" }
sku = { field = "items.sku", table = "t" }
price = { field = "items.price", dense = "log1p" }
born = { field = "user.born", dense = "log1p" }
seen = { field = "user.seen", table = "t", max = 5 }
[model]
experts = ["wide"]
"""


def field(name: str, type_: Any) -> dict[str, Any]:
    return {"name": name, "type": type_}


SCHEMA = {
    "type": "record",
    "name": "Slate",
    "fields": [
        field("request_id", "string"),
        field("ts", {"type": "long", "logicalType": "timestamp-millis"}),
        field(
            "user",
            {
                "type": "record",
                "name": "User",
                "fields": [
                    field("id", "long"),
                    field("country", ["null", "string"]),
                    field("member", "boolean"),
                    field("born", {"type": "int", "logicalType": "date"}),
                    field("seen", {"type": "array", "items": "long"}),
                ],
            },
        ),
        field(
            "items",
            {
                "type": "array",
                "items": {
                    "type": "record",
                    "name": "Item",
                    "fields": [
                        field("sku", "string"),
                        field("kind", {"type": "enum", "name": "Kind", "symbols": ["BOOK", "TOY"]}),
                        field("price", "double"),
                    ],
                },
            },
        ),
    ],
}
ROW: dict[str, Any] = {
    "user.id": "7",
    "user.country": "DE",
    "user.member": "true",
    "user.born": "1990-05-01",
    "user.seen": "1|2",
    "items.sku": "s1",
    "items.kind": "BOOK",
    "items.price": "1.5",
    "ts": str(T0),
    "click": "1",
    "spent": "2.5",
}
FILES = '\n[files]\nlist_separator = "|"\n'


def spec_in(folder: Path, more: str = FILES, schema: Any = SCHEMA) -> Spec:
    (folder / "served.avsc").write_text(json.dumps(schema))
    named = 'schema = "served.avsc",' if schema else ""
    (folder / "freshet.toml").write_text(SPEC.replace("SCHEMA", named) + more)
    return load_spec(folder / "freshet.toml")


def csv_of(folder: Path, rows: Sequence[Mapping[str, str]], name: str = "samples.csv") -> Path:
    path = folder / name
    text = ",".join(ROW) + "\n" + "".join(",".join({**ROW, **row}.values()) + "\n" for row in rows)
    path.write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())
    return path


def read(spec: Spec, *paths: Path) -> list[dict[str, Any]]:
    """Read all rows, as JSON."""
    return [
        json.loads(event)
        for rows in read_samples(spec, paths)
        for event in json_events(rows.payloads, rows.schema)
    ]


def values(spec: Spec, path: Path, column: str) -> list[Any]:
    head, _, leaf = column.partition(".")
    return [row[head][leaf] if leaf else row[head] for row in read(spec, path)]


def test_a_cell_is_read_as_the_type_of_its_field(tmp_path: Path) -> None:
    (row,) = read(spec_in(tmp_path), csv_of(tmp_path, [{}]))

    assert row == {
        "user": {"id": 7, "country": "DE", "member": True, "born": 7425, "seen": [1, 2]},
        "items": {"sku": "s1", "kind": "BOOK", "price": 1.5},
    }


@pytest.mark.parametrize(
    "text", ["00017", "1e5", "NA", "null", "NaN", "true", "1.0", "-", "2026-01-01", " x "]
)
def test_a_text_stays_as_it_is_written(tmp_path: Path, text: str) -> None:
    path = csv_of(tmp_path, [{"items.sku": text}, {"items.sku": f'"{text}"'}])

    assert values(spec_in(tmp_path), path, "items.sku") == [text, text]


def test_an_empty_cell_is_no_value_and_quotes_are_the_empty_text(tmp_path: Path) -> None:
    path = csv_of(tmp_path, [{"user.country": c, "user.id": c} for c in ("", '""')])

    assert values(spec_in(tmp_path), path, "user.country") == [None, ""]
    assert values(spec_in(tmp_path), path, "user.id") == [None, None]


def test_null_words_are_of_numbers_unless_the_spec_says_so(tmp_path: Path) -> None:
    path = csv_of(tmp_path, [{"user.country": r"\N", "items.price": r"\N"}])
    stated = FILES + r"""nulls = ['\N']"""

    assert values(spec_in(tmp_path, stated), path, "items.price") == [None]
    assert values(spec_in(tmp_path, stated), path, "user.country") == [r"\N"]
    assert values(spec_in(tmp_path, stated + "\n" + r"text_nulls = ['\N']"), path, "user.country") == [None]


@pytest.mark.parametrize(
    ("text", "whole"),
    [
        ("9223372036854775807", 2**63 - 1),
        ("-9223372036854775808", -(2**63)),
        ("9007199254740993", 2**53 + 1),
        ("123.0", 123),
        ("1e3", 1000),
        ("+5", 5),
        ("007", 7),
        (" 7 ", 7),
        ("-0", 0),
        ("9007199254740993.000", 2**53 + 1),
    ],
)
def test_whole_numbers_are_read_exactly(tmp_path: Path, text: str, whole: int) -> None:
    path = csv_of(tmp_path, [{"user.id": "1"}, {"user.id": text}])

    assert values(spec_in(tmp_path), path, "user.id") == [1, whole]


MISFITS = [
    ("user.id", "9223372036854775808", "a whole number", '"string" in the schema'),
    ("user.id", "-9223372036854775809", "a whole number", ""),
    ("user.id", "1.5", "a whole number", "without a fraction"),
    ("user.id", "0x1F", "a whole number", "hexadecimal"),
    ("user.id", "1e400", "a whole number", ""),
    ("user.id", "1_000", "a whole number", ""),
    ("user.id", "abc", "a whole number", ""),
    ("items.price", r"\N", "a finite number", r'nulls = ["NA", "NaN", "nan", "null", "\\N"]'),
    ("items.price", '"12,50"', "a finite number", 'decimal = ","'),
    ("user.id", "1.23457E+15", "a whole number", "Excel rounds"),
    ("user.id", "2E+11", "a whole number", "Excel rounds"),
    ("ts", "1.7E+12", "a time", "Excel rounds"),
    ("items.price", "inf", "a finite number", ""),
    ("items.price", "1e400", "a finite number", ""),
    ("items.price", '"1,000.5"', "a finite number", "between thousands"),
    ("user.member", "yes", "true or false", ""),
    ("items.kind", "GAME", "one of BOOK, TOY", ""),
    ("user.born", "1990-13-01", "days since 1970, or a date as ISO 8601 text", ""),
    ("user.seen", "x|1", "a whole number", ""),
    ("ts", "", "a time", ""),
    ("ts", "soon", "a time", ""),
    ("click", "2", "0 or 1", "loss"),
    ("click", "-1", "0 or 1", "write 0 for -1"),
    ("click", "0.5", "0 or 1", ""),
    ("click", "click", "0 or 1", "write 1 where"),
    ("spent", "inf", "a finite number", ""),
    ("spent", "much", "a finite number", ""),
    ("spent", "1e39", "a finite number", ""),
]


@pytest.mark.parametrize(("column", "text", "expected", "hint"), MISFITS)
def test_a_cell_that_does_not_fit_is_refused_with_its_place(
    tmp_path: Path, column: str, text: str, expected: str, hint: str
) -> None:
    path = csv_of(tmp_path, [{"items.sku": '"two\nlines"'}, {column: text}])

    with pytest.raises(BadInput) as refused:
        read(spec_in(tmp_path), path)

    said = str(refused.value)
    assert said.startswith(f"{path}, line 4 (row 2): {column}: expected {expected}"), said
    assert f"found '{text.strip(chr(34)).partition('|')[0][:9]}" in said or "found nothing" in said, said
    assert hint in said


@pytest.mark.parametrize("text", ["\u22125", "\u0661\u0662", "\uff11", "7L", "-inf", "0x1p3", "true", "$9"])
def test_value_is_never_called_a_null_word(tmp_path: Path, text: str) -> None:
    path = csv_of(tmp_path, [{"items.price": text}])

    with pytest.raises(BadInput, match="a finite number") as refused:
        read(spec_in(tmp_path), path)

    assert "nulls" not in str(refused.value)
    assert "hexadecimal" not in str(refused.value)


@pytest.mark.parametrize(("text", "truth"), [("1.000e+00", 1), ("0.00", 0), ("01", 1), ("+1", 1), ("1e0", 1)])
def test_a_label_is_0_or_1_however_the_number_is_written(tmp_path: Path, text: str, truth: int) -> None:
    (rows,) = read_samples(spec_in(tmp_path), [csv_of(tmp_path, [{"click": text}])])

    assert rows.labels["click"][0].tolist() == [truth]


@pytest.mark.parametrize("mark", ["|", ","])
@pytest.mark.parametrize("text", ["[1, 2]", "['1']", '["1"]', "[1 2]", "[]", "{1,2}", "[7]"])
def test_a_list_as_a_program_prints_it_is_refused(tmp_path: Path, text: str, mark: str) -> None:
    cell = '"' + text.replace('"', '""') + '"'
    path = csv_of(tmp_path, [{"user.seen": "1"}, {"user.seen": cell}])

    with pytest.raises(BadInput, match=r"row 2\): user.seen: expected a list[\s\S]*without brackets"):
        read(spec_in(tmp_path, f'[files]\nlist_separator = "{mark}"\n'), path)


@pytest.mark.parametrize("delimiter", [",", "::"])
@given(texts=st.lists(st.text(st.sampled_from('\\"a,:\n ')), min_size=1, max_size=4))
def test_quotes_and_backslashes_are_read_as_csv_has_them(
    tmp_path_factory: pytest.TempPathFactory, delimiter: str, texts: list[str]
) -> None:
    folder = tmp_path_factory.mktemp("quotes")
    spec = spec_in(folder, f'[files]\ndelimiter = "{delimiter}"\nlist_separator = "|"\n')
    head, *_ = csv_of(folder, [{}]).read_text().split("\n")
    cells = {"user.id": "7", "items.price": "1.5", "items.kind": "TOY", "ts": str(T0), "click": "1"}
    rows = [
        delimiter.join(
            '"' + text.replace('"', '""') + '"' if name == "items.sku" else cells.get(name, "")
            for name in head.split(",")
        )
        for text in texts
    ]
    path = folder / "quotes.csv"
    path.write_bytes("\n".join([head.replace(",", delimiter), *rows]).encode())

    assert values(spec, path, "items.sku") == texts


@pytest.mark.parametrize("block", [1 << 20, 1, 2, 3])
@pytest.mark.parametrize("cell", [r'"say \"hi\""', r'"\"hi"', r'"\\\"x"'])
def test_a_quote_after_a_backslash_is_refused_with_its_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cell: str, block: int
) -> None:
    monkeypatch.setattr(tables, "READ_BYTES", block)
    path = csv_of(tmp_path, [{"items.sku": '"two\nlines"'}, {"items.sku": cell}])
    path.write_text(path.read_text().replace(",", "::"))

    with pytest.raises(
        BadInput, match=r"line 4: expected a quote in a quoted cell as two[\s\S]*quotes = false"
    ):
        read(spec_in(tmp_path, '[files]\ndelimiter = "::"\nlist_separator = "|"\n'), path)


@pytest.mark.parametrize("text", ["1e18", "-0.5", "100.001"])
def test_a_label_out_of_bounds_is_refused_with_its_place(tmp_path: Path, text: str) -> None:
    spec = spec_in(tmp_path)
    spent = replace(spec.label("spent"), bounds=(0.0, 100.0))
    spec = replace(spec, labels=(spec.label("click"), spent))
    path = csv_of(tmp_path, [{"spent": "0"}, {"spent": "100"}, {"spent": ""}, {"spent": text}])

    with pytest.raises(BadInput) as refused:
        read(spec, path)
    said = str(refused.value)
    assert said.startswith(f"{path}, line 5 (row 4): spent: expected a number from 0 to 100"), said
    assert "labels.spent.bounds" in said
    assert f"found {float(text):g}" in said


def test_text_of_another_encoding_is_refused_with_its_place(tmp_path: Path) -> None:
    path = csv_of(tmp_path, [{}, {"items.sku": "café"}])
    path.write_bytes(path.read_text().encode("latin-1"))

    with pytest.raises(BadInput, match=r"line 3 \(row 2\): items.sku: expected text in UTF-8[\s\S]*latin-1"):
        read(spec_in(tmp_path), path)
    assert values(spec_in(tmp_path, FILES + 'encoding = "latin-1"'), path, "items.sku") == ["s1", "café"]


def test_line_ends_in_quotes_are_read_across_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("freshet.recordings.tables.CSV_BLOCK_BYTES", 1000)
    skus = [f"blue\nshirt {i}\r\n{'x' * (i % 50)}" for i in range(300)]
    path = csv_of(tmp_path, [{"items.sku": f'"{sku}"'} for sku in skus])

    assert values(spec_in(tmp_path), path, "items.sku") == skus


COLUMNS: list[tuple[str, Any, list[Any]]] = [
    ("user.id", pa.array([1, None, 2**63 - 1], pa.uint64()), [1, None, 2**63 - 1]),
    ("user.id", pa.array([123.0, None, 5.0], pa.float64()), [123, None, 5]),
    ("user.id", pa.array([Decimal(2**62 + 1), None, Decimal(0)], pa.decimal128(20, 0)), [2**62 + 1, None, 0]),
    ("user.id", pa.array([Decimal("7.00")] * 3, pa.decimal128(9, 2)), [7, 7, 7]),
    ("user.id", pa.array(["7", None, "8"]), [7, None, 8]),
    ("user.id", pa.array([7, 8, 7], pa.int16()).dictionary_encode(), [7, 8, 7]),
    ("items.sku", pa.array(["a", "b", "a"]).dictionary_encode(), ["a", "b", "a"]),
    ("items.sku", pa.array(["00017", "NA", ""], pa.large_string()), ["00017", "NA", ""]),
    ("items.sku", pa.array([b"a", None, b""], pa.binary()), ["a", None, ""]),
    ("items.sku", pa.array([17, 2**64 - 1, 0], pa.uint64()), ["17", "18446744073709551615", "0"]),
    ("items.sku", pa.array([Decimal("12.50")] * 3), ["12.50"] * 3),
    ("items.sku", pa.array(["a"] * 3, pa.string_view()), ["a"] * 3),
    ("items.sku", pa.array([None] * 3), [None] * 3),
    ("items.price", pa.array([1.5, float("nan"), None], pa.float32()), [1.5, None, None]),
    ("items.price", pa.array([Decimal("0.1"), None, Decimal("2")], pa.decimal128(20, 3)), [0.1, None, 2.0]),
    ("user.member", pa.array([True, None, False]), [True, None, False]),
    ("user.member", pa.array([1, None, 0]), [True, None, False]),
    ("user.born", pa.array([dt.date(1970, 1, 2), None, dt.date(1969, 12, 31)]), [1, None, -1]),
    ("user.born", pa.array([dt.datetime(1970, 1, 3)] * 3, pa.timestamp("ns")), [2, 2, 2]),
    ("user.seen", pa.array([[1, 2], None, []], pa.large_list(pa.int32())), [[1, 2], None, []]),
    ("user.seen", pa.array([[1, 2], None, [3, 4]], pa.list_(pa.int64(), 2)), [[1, 2], None, [3, 4]]),
    ("user.seen", pa.array([["1"], [], ["2"]]), [[1], [], [2]]),
    ("user.seen", pa.array([[1.0], [], [2.0]]), [[1], [], [2]]),
]


def table_of(**over: Any) -> pa.Table:
    rows = {
        "user.id": pa.array([7] * 3),
        "user.country": pa.array(["DE"] * 3),
        "user.member": pa.array([True] * 3),
        "user.born": pa.array([dt.date(1990, 5, 1)] * 3),
        "user.seen": pa.array([[1]] * 3),
        "items.sku": pa.array(["s"] * 3),
        "items.kind": pa.array(["TOY"] * 3),
        "items.price": pa.array([1.5] * 3),
        "ts": pa.array([T0] * 3),
        "click": pa.array([1, 0, 1]),
        "spent": pa.array([1.0, None, 2.5]),
    }
    return pa.table({**rows, **over})


@pytest.mark.parametrize(("column", "array", "wanted"), COLUMNS, ids=lambda x: str(getattr(x, "type", "")))
def test_a_column_of_parquet_is_read_as_its_field(
    tmp_path: Path, column: str, array: Any, wanted: list[Any]
) -> None:
    arrow = tmp_path / "samples.arrow"
    pyarrow.feather.write_feather(table_of(**{column: array}), arrow, "uncompressed")
    spec = spec_in(tmp_path)

    assert values(spec, arrow, column) == wanted
    if array.type != pa.string_view():
        write_parquet(table_of(**{column: array}), tmp_path / "samples.parquet")
        assert values(spec, tmp_path / "samples.parquet", column) == wanted


WRONG_COLUMNS: list[tuple[str, Any, int]] = [
    ("user.id", pa.array([1, 2**63, 2**64 - 1], pa.uint64()), 2),
    ("user.id", pa.array([1.0, 2.0, 0.5]), 3),
    ("user.id", pa.array([1.0, 2.0**53, 3.0]), 2),
    ("user.id", pa.array([1.0, 2.0**24, 3.0], pa.float32()), 2),
    ("user.id", pa.array([Decimal(2**63), Decimal(1), None], pa.decimal128(20, 0)), 1),
    ("user.id", pa.array([None, Decimal("1.5"), None]), 2),
    ("user.id", pa.array([None, dt.datetime(2026, 1, 1), None]), 2),
    ("user.id", pa.array([b"x", b"y", b"z"]), 1),
    ("items.sku", pa.array([1.0, 2.0, 3.0]), 1),
    ("items.sku", pa.array([None, True, None]), 2),
    ("items.sku", pa.array([b"ok", b"\xff", b""]), 2),
    ("items.price", pa.array([1.0, float("inf"), None]), 2),
    ("items.price", pa.array([dt.timedelta(1)] * 3), 1),
    ("user.born", pa.array([dt.datetime(1970, 1, 3), dt.datetime(1970, 1, 3, 1), None]), 2),
    ("user.seen", pa.array([[1], [1, None], []]), 2),
    ("user.seen", pa.array([[1], [1, 2], [2**63]], pa.list_(pa.uint64())), 3),
    ("user.id", pa.array([None, 1_790_000_000_123_456_789, None], pa.timestamp("ns")), 2),
    ("user.born", pa.array([0, 1_790_000_000_123_456_789, None], pa.timestamp("ns")), 2),
    ("user.born", pa.array([0, 2**62 + 1, None], pa.timestamp("us")), 2),
    ("user.id", pa.array([2**30, 0, 0], pa.date32()), 1),
    ("items.sku", pa.array([0, 2**30, None], pa.date32()), 2),
    ("ts", pa.array([T0, None, T0]), 2),
    ("ts", pa.array([T0, 2**64 - 1, T0], pa.uint64()), 2),
    ("click", pa.array([0, 2**64 - 1, 1], pa.uint64()), 2),
    ("click", pa.array([0, 2**53 + 1, 1]), 2),
    ("click", pa.array([0, 1, 2]), 3),
    ("click", pa.array(["false", "true", "maybe"]), 3),
    ("click", pa.array([0.0, 1.0, float("inf")]), 3),
    ("spent", pa.array([0.0, 1.0, float("inf")]), 3),
]


@pytest.mark.parametrize(("column", "array", "row"), WRONG_COLUMNS, ids=lambda x: str(getattr(x, "type", "")))
def test_a_value_of_parquet_that_does_not_fit_is_refused(
    tmp_path: Path, column: str, array: Any, row: int
) -> None:
    path = tmp_path / "samples.parquet"
    pq.write_table(table_of(**{column: array}), path)

    with pytest.raises(BadInput) as refused:
        read(spec_in(tmp_path), path)

    assert str(refused.value).startswith(f"{path}, row {row}: {column}: expected "), refused.value


@pytest.mark.parametrize("unit", ["s", "ms", "us", "ns"])
@pytest.mark.parametrize("zone", [None, "UTC", "Europe/Berlin", "+05:30"])
def test_times_of_every_unit_and_zone_are_the_same_moment(
    tmp_path: Path, unit: str, zone: str | None
) -> None:
    moments = pa.array([T0 + i * 1000 for i in range(3)]).cast(pa.timestamp("ms", "UTC"))
    path = tmp_path / "samples.parquet"
    pq.write_table(table_of(ts=moments.cast(pa.timestamp(unit, zone))), path)

    (rows,) = read_samples(spec_in(tmp_path), [path])

    assert rows.times_ms.tolist() == [T0, T0 + 1000, T0 + 2000]


@pytest.mark.parametrize(
    "text",
    [
        "1700000000000",
        "1700000000000.0",
        "2023-11-14T22:13:20Z",
        "2023-11-14 23:13:20+01:00",
        "2023-11-14T22:13:20.000",
        "2023-11-14 22:13:20 UTC",
        "2023-11-14 22:13:20.000001 UTC",
        "2023-11-14T22:13:20.000999999Z",
    ],
)
def test_a_time_in_a_cell_is_a_number_or_iso(tmp_path: Path, text: str) -> None:
    (rows,) = read_samples(spec_in(tmp_path), [csv_of(tmp_path, [{"ts": text}])])

    assert rows.times_ms.tolist() == [T0]


def test_96_bit_times_outside_nanosecond_range_are_exact(tmp_path: Path) -> None:
    days = [dt.datetime(9999, 12, 31), dt.datetime(1, 1, 1), dt.datetime(2023, 11, 14)]
    path = tmp_path / "spark.parquet"
    table = table_of(ts=pa.array(days, pa.timestamp("us")))
    pq.write_table(table, path, use_deprecated_int96_timestamps=True)

    (rows,) = read_samples(spec_in(tmp_path), [path])

    assert rows.times_ms.tolist() == [253_402_214_400_000, -62_135_596_800_000, 1_699_920_000_000]


def test_an_arrow_file_with_damaged_offsets_is_refused(tmp_path: Path) -> None:
    offsets = pa.py_buffer(np.array([0, 1, 851_968, 1], np.int32).tobytes())
    ids = pa.array([7], pa.int64())
    damaged = pa.Array.from_buffers(pa.list_(pa.int64()), 3, [None, offsets], children=[ids])
    table = table_of(**{"user.seen": damaged})
    path = tmp_path / "damaged.arrow"
    with pa.ipc.new_file(path, table.schema) as file:
        file.write_batch(pa.RecordBatch.from_arrays([c.chunk(0) for c in table.columns], schema=table.schema))

    with pytest.raises(BadInput, match=r"damaged.arrow: expected a whole Arrow file"):
        read(spec_in(tmp_path), path)


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_a_name_of_a_column_that_is_no_text_is_refused(tmp_path: Path, kind: str) -> None:
    table, path = table_of(zzzz=pa.array([1] * 3)), tmp_path / f"names.{kind}"
    if kind == "parquet":
        pq.write_table(table, path, store_schema=False)
    else:
        with pa.ipc.new_file(path, table.schema) as file:
            file.write_table(table)
    path.write_bytes(path.read_bytes().replace(b"zzzz", b"zz\xffz"))

    with pytest.raises(BadInput, match=f"names.{kind}: expected a whole"):
        read(spec_in(tmp_path), path)


def write_parquet(table: pa.Table, to: Path) -> None:
    try:
        pq.write_table(table, to)
    except pa.ArrowNotImplementedError:
        pytest.skip(f"pyarrow {pa.__version__} writes no Parquet with values behind a null list")


def test_a_struct_is_the_record_that_its_fields_are_of(tmp_path: Path) -> None:
    table = table_of()
    user, item = (
        pa.StructArray.from_arrays(
            [table[name].combine_chunks() for name in table.column_names if name.startswith(head)],
            [name.partition(".")[2] for name in table.column_names if name.startswith(head)],
            mask=pa.array([False, True, False]),
        )
        for head in ("user.", "items.")
    )
    path = tmp_path / "samples.parquet"
    plain = {name: table[name] for name in ("ts", "click", "spent")}
    write_parquet(pa.table({"user": user, "items": item, **plain}), path)

    assert values(spec_in(tmp_path), path, "user.id") == [7, None, 7]
    assert values(spec_in(tmp_path), path, "items.sku") == ["s", None, "s"]


def test_decimal_point_instead_of_comma_is_refused(tmp_path: Path) -> None:
    path = csv_of(tmp_path, [{"items.price": "1.5", "spent": ""}])
    path.write_text(path.read_text().replace(",", ";"))
    spec = spec_in(tmp_path, '[files]\ndelimiter = ";"\ndecimal = ","\nlist_separator = "|"\n')

    with pytest.raises(
        BadInput, match=r"items.price: expected a finite number[\s\S]*leave .files. decimal out"
    ):
        read(spec, path)


def test_a_column_given_twice_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "samples.csv"
    path.write_text(",".join([*ROW, "user.id"]) + "\n" + ",".join([*ROW.values(), "8"]) + "\n")

    with pytest.raises(BadInput, match=r"expected one column 'user.id', found 2"):
        read(spec_in(tmp_path), path)


# --- without a schema


def without_schema(folder: Path) -> Spec:
    spec = spec_in(folder, FILES, schema=None)
    return replace(spec, features=tuple(f for f in spec.features if f.name != "born"))


def ids(folder: Path, *files: Sequence[str]) -> list[Any]:
    """Return the values of user.id over files with these cells."""
    paths = [csv_of(folder, [{"user.id": c} for c in cells], f"{i}.csv") for i, cells in enumerate(files)]
    return [row["user"]["id"] for row in read(without_schema(folder), *paths)]


def test_ids_without_schema_have_one_type_over_all_files(tmp_path: Path) -> None:
    assert ids(tmp_path, ["1", "", "9223372036854775807"], ["2.0", "NA"]) == [1, None, 2**63 - 1, 2, None]
    assert ids(tmp_path, ["1", "2"], ["3", "x"]) == ["1", "2", "3", "x"]
    assert ids(tmp_path, ["17", "00017"]) == ["17", "00017"]
    assert ids(tmp_path, ["1e5", "100000"]) == ["1e5", "100000"]
    assert ids(tmp_path, [str(2**64 - 1), str(2**64 - 2)]) == [str(2**64 - 1), str(2**64 - 2)]
    assert ids(tmp_path, ["NA", "NB"]) == ["NA", "NB"]


def test_a_separator_within_an_id_is_text_without_a_schema(tmp_path: Path) -> None:
    cells = [{"user.id": "1|2", "user.seen": "1|2"}, {"user.id": "3|4", "user.seen": "3"}]

    users = [row["user"] for row in read(without_schema(tmp_path), csv_of(tmp_path, cells))]

    assert [(user["id"], user["seen"]) for user in users] == [("1|2", [1, 2]), ("3|4", [3])]


def test_ids_of_csv_and_parquet_are_the_same_without_a_schema(tmp_path: Path) -> None:
    path = tmp_path / "samples.parquet"
    pq.write_table(table_of(**{"user.id": pa.array([7.0, None, 8.0])}), path)

    rows = read(without_schema(tmp_path), csv_of(tmp_path, [{}]), path)

    assert [row["user"]["id"] for row in rows] == [7, 7, None, 8]


# --- suspicious times


def seen(folder: Path, times: Sequence[int], unit: str = "ms") -> EventTimes:
    spec = spec_in(folder)
    found = EventTimes(f"ts:{unit}", unit, clock=FixedClock())
    list(read_samples(spec, [csv_of(folder, [{"ts": str(t)} for t in times])], seen=found))
    return found


class FixedClock:
    """A clock at T0."""

    def now_ms(self) -> int:
        return T0

    def monotonic(self) -> float:
        return 0.0


def test_times_in_1970_are_reported_with_likely_unit(tmp_path: Path) -> None:
    found = seen(tmp_path, [T0 // 1000 - 2, T0 // 1000 - 1])

    assert found.as_json()["in_1970_or_before"]["rows"] == 2
    assert found.as_json()["in_1970_or_before"]["first"].endswith("samples.csv, line 2 (row 1)")
    assert found.as_json()["likely_unit"] == "s"
    assert 'say time = "ts:s"' in "\n".join(found.lines())


def test_future_and_falling_times_are_reported(tmp_path: Path) -> None:
    found = seen(tmp_path, [T0, T0 - 5000, T0 + 200_000_000, T0 - 1])

    assert found.as_json()["in_the_future"] == {
        "rows": 1,
        "first": f"{tmp_path}/samples.csv, line 4 (row 3)",
        "first_time": "2023-11-17T05:46:40.000Z",
    }
    assert (found.as_json()["falling"]["rows"], found.as_json()["falling"]["furthest_ms"]) == (2, 200_000_001)
    assert "line 3 (row 2)" in "\n".join(found.lines())


def test_rising_times_are_not_reported(tmp_path: Path) -> None:
    found = seen(tmp_path, [T0 - 2, T0 - 2, T0])

    assert (found.as_json(), found.lines()) == ({}, [])


def test_a_column_that_is_missing_is_named_with_the_nearest(tmp_path: Path) -> None:
    path = tmp_path / "samples.csv"
    path.write_text(csv_of(tmp_path, [{}]).read_text().replace("user.country", "user.land"))

    with pytest.raises(ConfigError, match=r"no column 'user.country'[\s\S]*did you mean"):
        read(spec_in(tmp_path), path)


def test_a_value_of_a_map_is_found_by_its_key(tmp_path: Path) -> None:
    counts = {"type": "map", "values": "double"}
    fields = [f for f in SCHEMA["fields"] if f["name"] != "user"]  # type: ignore[index]
    user = {"type": "record", "name": "User", "fields": [*SCHEMA["fields"][2]["type"]["fields"]]}  # type: ignore[index]
    user["fields"][3] = field("born", counts)  # type: ignore[index]
    schema = {**SCHEMA, "fields": [*fields, field("user", user)]}
    spec = spec_in(tmp_path, schema=schema)
    born = next(f for f in spec.features if f.name == "born")
    features = tuple(replace(f, field="user.born.today") if f is born else f for f in spec.features)
    spec = replace(spec, features=features)
    path = tmp_path / "samples.parquet"
    maps = pa.array([[("today", 2.0)], [], None], pa.map_(pa.string(), pa.float64()))
    pq.write_table(table_of(**{"user.born": maps}), path)

    assert [row["user"]["born"]["today"] for row in read(spec, path)] == [2.0, None, None]


def test_a_struct_that_lacks_a_field_is_refused_by_its_path(tmp_path: Path) -> None:
    plain = table_of().drop_columns(["user.id", "user.country", "user.member", "user.born", "user.seen"])
    path = tmp_path / "samples.parquet"
    pq.write_table(plain.append_column("user", pa.array([{"id": 7}] * 3)), path)

    with pytest.raises(BadInput, match=r"no column 'user.country'"):
        read(spec_in(tmp_path), path)


def test_events_that_are_not_exploded_are_no_samples(tmp_path: Path) -> None:
    plain = table_of().drop_columns(["items.sku", "items.kind", "items.price"])
    path = tmp_path / "samples.parquet"
    items = pa.array([[{"sku": "s", "kind": "TOY", "price": 1.5}]] * 3)
    pq.write_table(plain.append_column("items", items), path)

    with pytest.raises(BadInput, match=r"row 1: items.kind: expected one of[\s\S]*freshet replay files"):
        read(spec_in(tmp_path), path)


def test_a_pipe_is_read_as_a_file_is(tmp_path: Path) -> None:
    text = csv_of(tmp_path, [{"items.sku": "00017"}] * 3).read_bytes()
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=pipe.write_bytes, args=(text,))
    writer.start()

    assert values(spec_in(tmp_path), pipe, "items.sku") == ["00017"] * 3
    writer.join(60)


@pytest.mark.parametrize("end", ["", "\n", "\n\n"])
def test_a_header_alone_is_a_file_without_rows(tmp_path: Path, end: str) -> None:
    path = tmp_path / "samples.csv"
    path.write_text(",".join(ROW) + end)

    assert read(spec_in(tmp_path), path) == []


@pytest.mark.parametrize("data", [b"\n\n", b"\xef\xbb\xbf"])
def test_a_file_without_any_text_is_refused(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "samples.csv"
    path.write_bytes(data)

    with pytest.raises(BadInput, match="has no text; expected a header line"):
        read(spec_in(tmp_path), path)


def test_utf_16_without_its_mark_is_refused(tmp_path: Path) -> None:
    path = csv_of(tmp_path, [{}])

    with pytest.raises(BadInput, match="expected text in utf-16, found other bytes"):
        read(spec_in(tmp_path, FILES + 'encoding = "utf-16"'), path)


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_a_row_without_request_is_a_request_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(tables, "CHUNK_ROWS", 2)  # a batch ends between two nulls
    paths = [tmp_path / f"{i}.{kind}" for i in range(2)]
    spec = spec_in(tmp_path, FILES + r"""text_nulls = ['\N']""")
    for path, (empty, pages) in zip(
        paths, [("", ["a", "a", "", "", "", ""]), (r"\N", ["", "b", "b", "", "b", "b"])], strict=True
    ):
        if kind == "csv":
            lines = [",".join([*ROW.values(), page or empty]) for page in pages]
            path.write_text("\n".join([",".join([*ROW, "page"]), *lines, ""]))
        else:
            table = pa.concat_tables([table_of()] * 2)
            pq.write_table(table.append_column("page", pa.array([p or None for p in pages])), path)

    numbers = np.concatenate([rows.requests for rows in read_samples(spec, paths, "page")])

    assert (numbers - numbers[0]).tolist() == [0, 0, 1, 2, 3, 4, 5, 6, 6, 7, 8, 8]


def test_times_in_nanoseconds_distinguish_requests(tmp_path: Path) -> None:
    paths = [tmp_path / "1.parquet", tmp_path / "2.parquet"]
    moments = pa.array([None, T0 * 10**6 + 1, T0 * 10**6 + 2], pa.timestamp("ns"))
    pq.write_table(table_of(session=moments), paths[0])
    pq.write_table(table_of(session=moments[::-1]), paths[1])

    numbers = [rows.requests.tolist() for rows in read_samples(spec_in(tmp_path), paths, "session")]

    assert numbers[0] == [numbers[0][0] + i for i in range(3)]
    assert numbers[1] == [numbers[0][2] + i for i in range(3)]


def test_a_column_of_requests_that_holds_lists_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "samples.parquet"
    pq.write_table(table_of(session=pa.array([[1], [2], [2]])), path)

    with pytest.raises(BadInput, match=r"samples.parquet: the column of requests is list"):
        list(read_samples(spec_in(tmp_path), [path], "session"))
