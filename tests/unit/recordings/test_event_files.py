"""Events from files with columns, by the schema of their stream."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from freshet.config.avro.schema import parse_schema
from freshet.config.spec.model import Files, TimeField
from freshet.errors import BadInput, ConfigError
from freshet.recordings.sample_files import event_rows
from freshet.recordings.sources import json_events
from freshet.recordings.tables import TableFile

T0 = 1_700_000_000_000
TS = TimeField(path="ts", unit="ms")


def field(name: str, type_: Any, **more: Any) -> dict[str, Any]:
    return {"name": name, "type": type_, **more}


def record(name: str, *fields: dict[str, Any]) -> dict[str, Any]:
    return {"type": "record", "name": name, "fields": list(fields)}


ITEM = record("Item", field("sku", "string"), field("price", ["null", "double"], default=None))
PLACE = record("Place", field("city", "string"), field("zip", ["null", "string"], default=None))
SLATE = parse_schema(
    record(
        "Slate",
        field("request_id", "string"),
        field("ts", {"type": "long", "logicalType": "timestamp-millis"}),
        field("place", ["null", PLACE], default=None),
        field("seen", {"type": "array", "items": "long"}, default=[]),
        field("page", "string", default="home"),
        field("items", {"type": "array", "items": ITEM}),
    )
)
ROWS: list[dict[str, Any]] = [
    {
        "request_id": "00017",
        "ts": T0,
        "place": {"city": "Ulm", "zip": None},
        "seen": [1, 2**62 + 1],
        "page": "list",
        "items": [{"sku": "NA", "price": 1.5}, {"sku": "", "price": None}],
    },
    {"request_id": "1e5", "ts": T0 + 1, "place": None, "seen": [], "page": "home", "items": []},
]
TYPES = pa.schema(
    [
        ("request_id", pa.string()),
        ("ts", pa.timestamp("us", "UTC")),
        ("place", pa.struct([("city", pa.string()), ("zip", pa.string())])),
        ("seen", pa.list_(pa.int64())),
        ("page", pa.string()),
        ("items", pa.list_(pa.struct([("sku", pa.string()), ("price", pa.float64())]))),
    ]
)


def parquet(folder: Path, rows: list[dict[str, Any]], types: pa.Schema = TYPES) -> Path:
    path = folder / "events.parquet"
    pq.write_table(pa.Table.from_pylist([{**r, "ts": r["ts"] * 1000} for r in rows], types), path)
    return path


def read(path: Path, files: Files | None = None) -> list[dict[str, Any]]:
    return [
        json.loads(event)
        for _, _, records, _ in event_rows(path, TS, SLATE, files or Files())
        for event in json_events(records, SLATE)
    ]


def test_structs_lists_of_structs_and_timestamps_are_events(tmp_path: Path) -> None:
    assert read(parquet(tmp_path, ROWS)) == ROWS


def test_a_value_that_is_missing_takes_the_default(tmp_path: Path) -> None:
    rows = [{**ROWS[0], "seen": None, "page": None, "place": None}]

    assert read(parquet(tmp_path, rows)) == [{**ROWS[0], "seen": [], "page": "home", "place": None}]


def test_a_column_that_is_missing_takes_the_default(tmp_path: Path) -> None:
    types = pa.schema([f for f in TYPES if f.name not in ("seen", "page", "place")])

    assert read(parquet(tmp_path, ROWS[:1], types)) == [
        {**ROWS[0], "seen": [], "page": "home", "place": None}
    ]


def test_a_value_that_is_never_null_is_refused_with_its_row(tmp_path: Path) -> None:
    path = parquet(tmp_path, [ROWS[0], {**ROWS[1], "request_id": None}])

    with pytest.raises(BadInput, match=r"row 2: request_id: expected a value[\s\S]*found nothing"):
        read(path)


def test_misfit_within_list_is_refused_with_row(tmp_path: Path) -> None:
    path = parquet(tmp_path, [ROWS[1], ROWS[0], {**ROWS[0], "items": [{"sku": "a"}, {"sku": None}]}])

    with pytest.raises(BadInput, match=r"row 3: items.sku: expected a value"):
        read(path)


@pytest.mark.parametrize("at", ["contry", "place.contry", "items.contry"])
def test_a_column_that_no_field_is_of_is_refused(tmp_path: Path, at: str) -> None:
    extra = [("contry", pa.string())]
    types: dict[str, Any] = {f.name: f.type for f in TYPES}
    if at == "contry":
        types["contry"] = pa.string()
    elif at.startswith("place"):
        types["place"] = pa.struct([("city", pa.string()), *extra])
    else:
        types["items"] = pa.list_(pa.struct([("sku", pa.string()), *extra]))

    with pytest.raises(BadInput, match=rf"column '{at}': no field of the schema"):
        read(parquet(tmp_path, ROWS[:1], pa.schema(types.items())))


@pytest.mark.parametrize("kind", ["csv", "parquet", "arrow", "struct"])
def test_two_columns_of_one_field_are_refused(tmp_path: Path, kind: str) -> None:
    path = tmp_path / f"events.{kind}"
    if kind == "csv":
        path.write_text("request_id,ts,page,page,seen\nr,1700000000000,list,home,\n")
    else:
        page = {"page": pa.array(["list"]), "": pa.array(["home"])}
        if kind == "struct":
            page = {"place": pa.array([{"city": "Ulm"}]), "place.city": pa.array(["Bonn"])}
        held = {"request_id": pa.array(["r"]), "ts": pa.array([T0]), **page}
        table = pa.table(held).rename_columns([name or "page" for name in held])
        if kind == "arrow":
            with pa.ipc.new_file(path, table.schema) as file:
                file.write_table(table)
        else:
            pq.write_table(table, path)

    with pytest.raises(BadInput, match=r"expected one column '(page|place.city)', found 2"):
        read(path)


def test_a_name_of_a_csv_column_that_is_not_utf_8_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "events.csv"
    path.write_bytes("request_id,ts,größe\nr,1700000000000,3\n".encode("cp1252"))
    hint = r'\[files\] encoding = "cp1252"'

    with pytest.raises(BadInput, match=rf"events.csv, line 1: expected names .* found 'gr.+e'\n.*{hint}"):
        read(path)
    with pytest.raises(BadInput, match="column 'größe': no field of the schema"):
        read(path, Files(encoding="cp1252"))
    [batch] = TableFile(path, Files()).batches(["ts"])  # a reader of other columns needs no name
    assert batch.rows.to_pydict() == {"ts": [b"1700000000000"]}
    path.write_text("request_id,ts,gr\ufffd\nr,1700000000000,3\n")
    with pytest.raises(BadInput, match="column 'gr\ufffd': no field of the schema"):
        read(path)


def test_cells_with_leading_zeros_stay_texts(tmp_path: Path) -> None:
    path = tmp_path / "events.csv"
    path.write_text(
        'request_id,ts,place.city,seen\n"00000",1700000000000,Ulm,7|8\n00001,1700000000001,Ulm,\n'
    )
    schema = parse_schema(
        record(
            "Act",
            field("request_id", "string"),
            field("ts", "long"),
            field("place", PLACE),
            field("seen", {"type": "array", "items": "long"}),
        )
    )

    rows = [
        json.loads(event)
        for _, _, records, _ in event_rows(path, TS, schema, Files(list_separator="|"))
        for event in json_events(records, schema)
    ]

    assert [(row["request_id"], row["seen"]) for row in rows] == [("00000", [7, 8]), ("00001", [])]


def test_a_row_without_a_time_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "events.csv"
    path.write_text("request_id,ts,items\nr,1700000000000,\nr,,\n")

    with pytest.raises(BadInput, match=r"line 3 \(row 2\): ts: expected a time"):
        read(path)


NS = {"s": 10**9, "ms": 10**6, "us": 10**3, "ns": 1, "days": 86_400 * 10**9}
NOON = datetime(2024, 1, 2, 12, 30, tzinfo=UTC)
NOON_NS = int(NOON.timestamp()) * 10**9


def held(type_: str, ticks: int) -> bool:
    return ticks < {"int": 2**31, "float": 2**24}.get(type_, 2**63)


@pytest.mark.parametrize(
    ("unit", "type_"),
    [(u, t) for u in NS for t in ("int", "long", "float", "double") if held(t, NOON_NS // NS[u])],
)
def test_an_event_time_is_read_in_every_form(tmp_path: Path, unit: str, type_: str) -> None:
    schema = parse_schema(record("Act", field("request_id", "string"), field("ts", type_)))
    time = TimeField(path="ts", unit=unit)  # type: ignore[arg-type]
    ticks, midnight_ns = NOON_NS // NS[unit], NOON_NS - NOON_NS % NS["days"]
    forms: list[tuple[Any, int]] = [
        (pa.array([ticks]), ticks * NS[unit]),
        (pa.array([float(ticks)]), ticks * NS[unit]),
        (pa.array([NOON.date()], pa.date32()), midnight_ns),
        (pa.array([NOON.date()], pa.date64()), midnight_ns),
        (pa.array([NOON], pa.timestamp("us", "UTC")), NOON_NS),
        (f"{ticks}", ticks * NS[unit]),
        (NOON.isoformat(), NOON_NS),
    ]
    for form, moment_ns in forms if type_ in ("int", "long") else forms[:-1]:
        path = tmp_path / ("events.csv" if isinstance(form, str) else "events.parquet")
        if isinstance(form, str):
            path.write_text(f"request_id,ts\nr,{form}\n")
        else:
            pq.write_table(pa.table({"request_id": ["r"], "ts": form}), path)

        ((_, times_us, records, _),) = event_rows(path, time, schema, Files())

        assert times_us.tolist() == [moment_ns // 1000], form
        assert [json.loads(e)["ts"] for e in json_events(records, schema)] == [moment_ns // NS[unit]], form


@pytest.mark.parametrize(("logical", "unit"), [("time-micros", "us"), ("time-nanos", "ns")])
def test_a_time_of_day_is_read_in_the_units_of_its_field(tmp_path: Path, logical: str, unit: str) -> None:
    opens = {"type": "long", "logicalType": logical}
    schema = parse_schema(
        record("Act", field("request_id", "string"), field("ts", "long"), field("at", opens))
    )
    path = tmp_path / "events.parquet"
    times = pa.array([43_200 * NS["s"] // NS[unit]], pa.time64(unit))
    pq.write_table(pa.table({"request_id": ["r"], "ts": [T0], "at": times}), path)

    ((_, _, records, _),) = event_rows(path, TS, schema, Files())

    assert [json.loads(e)["at"] for e in json_events(records, schema)] == [43_200 * NS["s"] // NS[unit]]


def with_default(folder: Path, type_: Any, default: Any, column: Any) -> list[Any]:
    """Read a column with nulls as a field that has a default and is never null."""
    path = folder / "events.parquet"
    times = pa.array([T0] * len(column))
    pq.write_table(pa.table({"request_id": ["r"] * len(column), "ts": times, "x": column}), path)
    fields = (field("request_id", "string"), field("ts", "long"), field("x", type_, default=default))
    schema = parse_schema(record("Act", *fields))
    ((_, _, records, _),) = event_rows(path, TS, schema, Files())
    return [json.loads(e)["x"] for e in json_events(records, schema)]


@pytest.mark.parametrize(
    ("type_", "default"),
    [
        ("bytes", "\u00ff\u0001"),
        ({"type": "fixed", "name": "F", "size": 2}, "\u00ff\u0001"),
        ("string", "\u00ff\u0416"),
    ],
)
def test_a_default_beyond_ascii_keeps_its_bytes(tmp_path: Path, type_: Any, default: str) -> None:
    assert with_default(tmp_path, type_, default, pa.array([b"ab", None])) == ["ab", default]


@pytest.mark.parametrize("default", ["x", "ab\u0416", "abc", 5])
def test_a_default_of_another_type_is_refused(tmp_path: Path, default: Any) -> None:
    with pytest.raises(ConfigError, match=r"x\.default"):
        with_default(tmp_path, {"type": "fixed", "name": "F", "size": 2}, default, pa.array([b"ab", None]))


def test_a_default_of_another_branch_is_no_value(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"row 2: x: expected a value"):
        with_default(tmp_path, ["string", "long"], "none", pa.array([1, None]))
