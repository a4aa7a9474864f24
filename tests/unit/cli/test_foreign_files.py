"""Files as others write them: read right, or refused with the option that reads them and then read right."""

from __future__ import annotations

import datetime as dt
import gzip
import json
import random
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from freshet.apps.backtest import backtest
from freshet.config.spec.model import Spec
from freshet.config.spec.parse import load_spec
from freshet.errors import BadInput, ConfigError
from freshet.recordings.sample_files import read_samples
from freshet.recordings.sources import json_events

T0 = 1_700_000_000_000
ROWS = 2_000


def spec_of(
    folder: Path, fields: dict[str, Any], features: str, *, time: str, label: str = "", files: str = ""
) -> Spec:
    """A spec with a schema of these fields."""
    schema = [{"name": name, "type": type_} for name, type_ in fields.items()]
    (folder / "s.avsc").write_text(json.dumps({"type": "record", "name": "Sample", "fields": schema}))
    (folder / "freshet.toml").write_text(f"""
name = "foreign"
[events]
served = {{ schema = "s.avsc", key = ["request_id"], time = "{time}" }}
action = {{ key = ["request_id"], time = "ts:ms" }}
[labels]
{label or '''click = { on = "action.what == 'click'" }'''}
[tables]
t = {{ dim = 4 }}
[features]
{features}
[model]
experts = ["wide"]
{files}
""")
    return load_spec(folder / "freshet.toml")


def read(spec: Spec, path: Path) -> list[dict[str, Any]]:
    return [
        json.loads(event)
        for rows in read_samples(spec, [path])
        for event in json_events(rows.payloads, rows.schema)
    ]


# --- Criteo: tabs, no header, hexadecimal ids, gaps

COUNTS = [f"i{n}" for n in range(1, 14)]
CODES = [f"c{n}" for n in range(1, 27)]


def criteo(path: Path) -> list[list[str]]:
    rng = random.Random(1)
    rows = []
    for i in range(ROWS):
        good = rng.random() < 0.3
        counts = ["" if rng.random() < 0.3 else str(rng.randrange(-1, 5000)) for _ in COUNTS]
        codes = ["" if rng.random() < 0.1 else f"{rng.getrandbits(32):08x}" for _ in CODES]
        codes[0] = rng.choice(("00e00017", "0e000170")) if good else "00000017"
        rows.append([str(int(good)), *counts, *codes, str(T0 + i)])
    path.write_text("".join("\t".join(row) + "\n" for row in rows))
    return rows


def test_criteo_with_hexadecimal_ids_and_gaps(tmp_path: Path) -> None:
    path = tmp_path / "day_0.tsv"
    rows = criteo(path)
    fields: dict[str, Any] = {"request_id": "string", "ts": "long"}
    fields |= {c: ["null", "long"] for c in COUNTS} | {c: ["null", "string"] for c in CODES}
    features = "\n".join(
        [f'{c} = {{ field = "{c}", dense = "log1p" }}' for c in COUNTS]
        + [f'{c} = {{ field = "{c}", table = "t" }}' for c in CODES]
    )
    columns = json.dumps(["click", *COUNTS, *CODES, "ts"])

    with pytest.raises(BadInput, match=r'delimiter = "\\t"'):
        read(spec_of(tmp_path, fields, features, time="ts:ms"), path)
    with pytest.raises(ConfigError, match=r"\[files\] columns"):
        read(spec_of(tmp_path, fields, features, time="ts:ms", files='[files]\ndelimiter = "\\t"'), path)
    spec = spec_of(
        tmp_path, fields, features, time="ts:ms", files=f'[files]\ndelimiter = "\\t"\ncolumns = {columns}'
    )

    assert read(spec, path) == [
        {
            **{c: int(v) if v else None for c, v in zip(COUNTS, row[1:14], strict=True)},
            **{c: v or None for c, v in zip(CODES, row[14:40], strict=True)},
        }
        for row in rows
    ]
    outcome = backtest(spec, [path])
    assert outcome.samples == ROWS
    assert outcome.measures["click"]["auc"] > 0.8  # by c1 alone, among 38 others


# --- MovieLens: two colons, no header, a number to predict


def test_movielens_with_two_colons(tmp_path: Path) -> None:
    path = tmp_path / "ratings.dat"
    rng = random.Random(2)
    rows = [
        (rng.randrange(1, 6041), rng.randrange(1, 3953), rng.randrange(1, 6), T0 // 1000 + i)
        for i in range(ROWS)
    ]
    path.write_text("".join("::".join(map(str, row)) + "\n" for row in rows))
    fields = {"request_id": "string", "user": "long", "movie": "long", "ts": "long"}
    features = 'user = { field = "user", table = "t" }\nmovie = { field = "movie", table = "t" }'
    columns = 'columns = ["user", "movie", "rating", "ts"]'
    rating = """rating = { on = "action.what == 'rate'", loss = "mse", value = "last(action.rating)" }"""

    def spec(files: str, label: str = rating) -> Spec:
        return spec_of(tmp_path, fields, features, time="ts:s", label=label, files=files)

    with pytest.raises(BadInput, match=r'delimiter = "::"'):
        read(spec(""), path)
    with pytest.raises(ConfigError, match=r"\[files\] columns"):
        read(spec('[files]\ndelimiter = "::"'), path)
    with pytest.raises(BadInput, match=r"rating: expected 0 or 1[\s\S]*mse"):
        backtest(
            spec(f'[files]\ndelimiter = "::"\n{columns}', """rating = { on = "action.what == 'rate'" }"""),
            [path],
        )
    whole = spec(f'[files]\ndelimiter = "::"\n{columns}')

    assert read(whole, path) == [{"user": user, "movie": movie} for user, movie, _, _ in rows]
    outcome = backtest(whole, [path])
    assert outcome.samples == ROWS
    assert outcome.times["samples"].as_json() == {}


# --- pandas: nullable integers, categories, an index


def test_pandas_parquet_with_nullable_integers_and_categories(tmp_path: Path) -> None:
    path = tmp_path / "frame.parquet"
    users = [None if i % 5 == 0 else 2**53 + 1 + 2 * (i % 7) for i in range(ROWS)]
    countries = [None if i % 11 == 0 else ("NA", "DE", "FR")[i % 3] for i in range(ROWS)]
    table = pa.table(
        {
            "user": pa.array(users, pa.int64()),
            "country": pa.array(countries).dictionary_encode(),
            "price": pa.array([float("nan") if i % 3 == 0 else i / 7 for i in range(ROWS)]),
            "at": pa.array([T0 * 1000 + i for i in range(ROWS)])
            .cast(pa.timestamp("us"))
            .cast(pa.timestamp("ns")),
            "click": pa.array([i % 3 == 0 for i in range(ROWS)]),
            "__index_level_0__": pa.array(list(range(ROWS))),
        }
    )
    described = {"index_columns": ["__index_level_0__"], "columns": [], "pandas_version": "2.2.0"}
    pq.write_table(table.replace_schema_metadata({"pandas": json.dumps(described)}), path)
    fields = {
        "request_id": "string",
        "at": {"type": "long", "logicalType": "timestamp-millis"},
        "user": ["null", "long"],
        "country": ["null", "string"],
        "price": ["null", "double"],
    }
    features = """
user = { field = "user", table = "t" }
country = { field = "country", table = "t" }
price = { field = "price", dense = "log1p" }
"""
    spec = spec_of(tmp_path, fields, features, time="at:ms")

    assert [(row["user"], row["country"]) for row in read(spec, path)] == list(
        zip(users, countries, strict=True)
    )
    outcome = backtest(spec, [path])
    assert (outcome.samples, outcome.times["samples"].as_json()) == (ROWS, {})
    assert outcome.measures["click"]["auc"] > 0.7  # the country says it


# --- Spark: structs, decimals, timestamps of 96 bits


def test_spark_parquet_with_decimals_and_timestamps(tmp_path: Path) -> None:
    path = tmp_path / "part-00000.snappy.parquet"
    ids = [Decimal(10**17 + i % 40) for i in range(ROWS)]
    user = pa.StructArray.from_arrays(
        [pa.array(ids, pa.decimal128(20, 0)), pa.array([dt.date(1990, 1, 1 + i % 28) for i in range(ROWS)])],
        ["id", "born"],
    )
    table = pa.table(
        {
            "user": user,
            "price": pa.array([Decimal(i % 900) / 100 for i in range(ROWS)], pa.decimal128(10, 2)),
            "ts": pa.array([(T0 + i) * 1_000_000 + 123 for i in range(ROWS)]).cast(pa.timestamp("ns")),
            "click": pa.array([int(i % 40 < 20) for i in range(ROWS)], pa.int32()),
        }
    )
    pq.write_table(table, path, use_deprecated_int96_timestamps=True)
    day = {"type": "int", "logicalType": "date"}
    record = [{"name": "id", "type": "long"}, {"name": "born", "type": day}]
    fields = {
        "request_id": "string",
        "ts": {"type": "long", "logicalType": "timestamp-millis"},
        "user": {"type": "record", "name": "User", "fields": record},
        "price": "double",
    }
    features = """
user = { field = "user.id", table = "t" }
born = { field = "user.born", dense = "log1p" }
price = { field = "price", dense = "log1p" }
"""
    spec = spec_of(tmp_path, fields, features, time="ts:ms")

    rows = read(spec, path)
    assert [row["user"]["id"] for row in rows] == [int(i) for i in ids]
    assert [row["price"] for row in rows] == [i % 900 / 100 for i in range(ROWS)]
    (first, *_) = read_samples(spec, [path])
    assert first.times_ms.tolist() == [T0 + i for i in range(ROWS)]
    assert backtest(spec, [path]).measures["click"]["auc"] > 0.9


def test_a_list_of_structs_may_lack_values(tmp_path: Path) -> None:
    path = tmp_path / "lists.parquet"
    seen = [[{"id": 7}, {"id": None}], [], None]
    pq.write_table(pa.table({"seen": seen, "ts": [T0] * 3, "click": [1] * 3}), path)
    item = {"type": "record", "name": "Item", "fields": [{"name": "id", "type": ["null", "long"]}]}
    fields = {"request_id": "string", "ts": "long", "seen": {"type": "array", "items": item}}
    spec = spec_of(tmp_path, fields, 'seen = { field = "seen.id", table = "t", max = 3 }', time="ts:ms")

    assert [row["seen"]["id"] for row in read(spec, path)] == [[7, None], [], None]
    assert backtest(spec, [path]).samples == 3


# --- a gzip csv of an office program: latin-1, semicolons, decimal commas, line ends in quotes


def test_gzip_csv_in_latin_1_with_quoted_newlines(tmp_path: Path) -> None:
    path = tmp_path / "export.csv.gz"
    names = [f'Caf\u00e9 {i % 9}\nM\u00fcnchen; ""Nr. 1""' for i in range(ROWS)]
    lines = ["shop;price;ts;click"]
    lines += [f'"{name}";"{i % 50},5";{T0 + i};{int(i % 9 < 3)}' for i, name in enumerate(names)]
    path.write_bytes(gzip.compress("\r\n".join(lines).encode("latin-1")))
    fields = {"request_id": "string", "ts": "long", "shop": "string", "price": "double"}
    features = 'shop = { field = "shop", table = "t" }\nprice = { field = "price", dense = "log1p" }'

    def spec(*more: str) -> Spec:
        return spec_of(tmp_path, fields, features, time="ts:ms", files="\n".join(["[files]", *more]))

    semicolon, latin, comma = 'delimiter = ";"', 'encoding = "latin-1"', 'decimal = ","'
    for given, missing in (((), semicolon), ((semicolon,), comma), ((semicolon, comma), latin)):
        with pytest.raises(BadInput) as refused:
            read(spec(*given), path)
        assert missing in str(refused.value)
    whole = spec(semicolon, latin, comma)

    assert [row["shop"] for row in read(whole, path)] == [name.replace('""', '"') for name in names]
    assert [row["price"] for row in read(whole, path)] == [i % 50 + 0.5 for i in range(ROWS)]
    assert backtest(whole, [path]).measures["click"]["auc"] > 0.7  # the shop says it
