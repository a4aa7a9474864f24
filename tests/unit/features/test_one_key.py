"""One key for one value, by every way in: Avro, JSON, a rank request, csv in several forms, Parquet and Arrow
in several types.

`FRESHET_TEST_KEYS=1000000 pytest tests/unit/features/test_one_key.py` is the long form: so many values.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from freshet.config.avro.schema import Record, parse_schema
from freshet.config.spec.layout import layout_of
from freshet.config.spec.model import Files, Spec, TimeField
from freshet.config.spec.parse import load_spec
from freshet.features import Decoded, JsonTranscoder, RequestDecoder, SampleDecoder, key_of, table_salt
from freshet.inference.schemas import request_schema
from freshet.recordings.sample_files import event_rows, read_samples
from freshet.types import BytesColumn
from tests.fixtures import feature_oracle as oracle
from tests.fixtures.effort import examples

VALUES = int(os.environ.get("FRESHET_TEST_KEYS", "20000"))
ROWS = 200
VALUES_A_ROW = 10
T0 = 1_700_000_000_000
TEXT = """
name = "ways"
[events]
served = { schema = "s.avsc", key = ["request"], time = "ts:ms" }
action = { schema = "s.avsc", key = ["request"], time = "ts:ms" }
[labels]
click = { on = "action.request == 'click'" }
[tables]
t = { dim = 4 }
[features]
user = { field = "user.id", table = "t" }
country = { field = "user.country", table = "t" }
small = { field = "small", table = "t" }
flag = { field = "flag", table = "t" }
kind = { field = "kind", table = "t" }
raw = { field = "raw", table = "t" }
recent = { field = "recent", table = "t", max = 9 }
tags = { field = "tags", table = "t", max = 9 }
price = { field = "price", dense = "log1p" }
band = { field = "price", buckets = [0.0, 1.0, 5.0], table = "t" }
[model]
experts = ["wide", "cross"]
crosses = [["user", "country"]]
"""


def either(type_: Any) -> Any:
    return ["null", type_]


def array_of(items: str) -> Any:
    return {"type": "array", "items": items}


USER = [{"name": "id", "type": either("long")}, {"name": "country", "type": either("string")}]
FIELDS = {
    "request": "string",
    "ts": {"type": "long", "logicalType": "timestamp-millis"},
    "user": {"type": "record", "name": "User", "fields": USER},
    "small": either("int"),
    "flag": either("boolean"),
    "kind": either({"type": "enum", "name": "Kind", "symbols": ["NA", "null", "BOOK"]}),
    "raw": either("bytes"),
    "recent": array_of("long"),
    "tags": array_of("string"),
    "price": either("double"),
}
SCHEMA_JSON = {
    "type": "record",
    "name": "Row",
    "fields": [{"name": name, "type": type_} for name, type_ in FIELDS.items()],
}
SCHEMA = parse_schema(SCHEMA_JSON)
LOOK_ALIKES = [
    "",
    "17",
    "017",
    "00017",
    "1e5",
    "100000",
    "1.0",
    "1",
    "NA",
    "null",
    "NaN",
    "true",
    "True",
    "-0",
    "0x1F",
]
AWKWARD = [
    '"',
    '""',
    "a,b",
    "a\nb",
    "a\r\nb",
    " a ",
    "é",
    "\u2028",
    "😀",
    "\\N",
    "::",
    ";",
    "'",
    "\t",
    "-1",
    "2026-01-01",
]
EDGES = [0, 1, -1, 2**31 - 1, -(2**31), 2**53, 2**53 + 1, -(2**53) - 1, 2**63 - 1, -(2**63)]


def rows_of(seed: int, count: int = ROWS) -> list[dict[str, Any]]:
    """Rows of values that readers of files like to change."""
    rng = random.Random(seed)

    def some(make: Callable[[], Any]) -> Any:
        return None if rng.random() < 0.1 else make()

    def whole() -> int:
        if rng.random() < 0.2:
            return rng.choice(EDGES)
        return rng.getrandbits(rng.randrange(1, 64)) * rng.choice((1, -1))

    def text() -> str:
        if rng.random() < 0.5:
            return rng.choice(LOOK_ALIKES) + (rng.choice(AWKWARD) if rng.random() < 0.4 else "")
        return "".join(rng.choice("abc019.,-eE xé☃") for _ in range(rng.randrange(0, 9)))

    def real() -> float:
        return rng.choice((0.1, 1 / 3, 5.0, -0.0, 1e-300, 1e22, 2.5, rng.random(), rng.uniform(-1e9, 1e9)))

    def raw() -> bytes:
        return bytes(rng.randrange(32, 256) for _ in range(rng.randrange(0, 6)))

    return [
        {
            "request": f"r{i}",
            "ts": T0 + i,
            "user": {"id": some(whole), "country": some(text)},
            "small": some(lambda: rng.choice((0, 1, -1, 2**31 - 1, -(2**31), rng.randrange(10**6)))),
            "flag": some(lambda: rng.random() < 0.5),
            "kind": some(lambda: rng.choice(("NA", "null", "BOOK"))),
            "raw": some(raw),
            "recent": [whole() for _ in range(rng.randrange(0, 4))],
            "tags": [text().replace("|", "") or "t" for _ in range(rng.randrange(0, 4))],
            "price": some(real),
        }
        for i in range(count)
    ]


# --- the ways in; each gives decoded rows, or (replays) the bytes of the events


def by_json(spec: Spec, rows: Sequence[Any], _: Path) -> BytesColumn:
    def spelled(value: Any, i: int) -> Any:  # some whole numbers as fractions
        whole = isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**53
        return float(value) if whole and i % 7 == 3 else value

    texts = [
        {
            **{name: spelled(value, i) for name, value in row.items()},
            "user": {name: spelled(value, i) for name, value in row["user"].items()},
            "recent": [spelled(value, i) for value in row["recent"]],
            "raw": None if row["raw"] is None else row["raw"].decode("latin-1"),
        }
        for i, row in enumerate(rows)
    ]
    made = JsonTranscoder(SCHEMA).body(json.dumps(texts).encode())
    assert not made.bad, made.bad
    return made.records


def flat(row: dict[str, Any]) -> dict[str, Any]:
    return {
        "user.id": row["user"]["id"],
        "user.country": row["user"]["country"],
        **{k: v for k, v in row.items() if k != "user"},
    }


def cell(value: Any, decimal: str) -> str:
    match value:
        case None:
            return ""
        case bool():
            return "true" if value else "False"
        case bytes():
            return value.decode("latin-1")
        case list():
            return "|".join(str(v) for v in value)
        case float():
            return repr(value).replace(".", decimal)
        case _:
            return str(value)


def quoted(text: str) -> str:
    return '"' + text.replace('"', '""') + '"'


FORMS = {
    "csv": Files(list_separator="|"),
    "tsv": Files(list_separator="|", delimiter="\t", encoding="utf-16", decimal=","),
    "double colons": Files(list_separator="|", delimiter="::", encoding="gb18030"),
}


def written(rows: Sequence[Any], path: Path, form: Files, *, label: bool) -> Path:
    """A csv of the rows: texts in quotes, numbers not; some whole numbers as fractions."""
    more: list[Any] = [1] if label else []
    lines = [form.delimiter.join([*flat(rows[0]), *(["click"] if label else [])])]
    for i, row in enumerate(rows):
        cells = []
        for value in [*flat(row).values(), *more]:
            text = cell(value, form.decimal)
            if isinstance(value, int) and not isinstance(value, bool) and i % 7 == 3:
                text += f"{form.decimal}0"
            whole = isinstance(value, str | bytes | list) or form.delimiter in text
            cells.append(quoted(text) if whole else text)
        lines.append(form.delimiter.join(cells))
    path.write_bytes(("\n".join(lines) + "\n").encode(form.encoding))
    return path


def by_csv(form: Files, *, events: bool = False) -> Callable[[Spec, Sequence[Any], Path], Any]:
    def way(spec: Spec, rows: Sequence[Any], folder: Path) -> Any:
        path = written(rows, folder / "rows.csv", form, label=not events)
        return replayed(path, form) if events else samples(replace(spec, files=form), path)

    return way


IDS: dict[str, Callable[[list[Any]], Any]] = {
    "int64": lambda ids: pa.array(ids, pa.int64()),
    "decimal": lambda ids: pa.array([None if i is None else Decimal(i) for i in ids], pa.decimal128(38, 2)),
    "text": lambda ids: pa.array([None if i is None else str(i) for i in ids]),
    "dictionary": lambda ids: pa.array(ids, pa.int64()).dictionary_encode(),
}
TEXTS: dict[str, Callable[[list[Any]], Any]] = {
    "int64": pa.array,
    "decimal": lambda texts: pa.array(texts, pa.large_string()),
    "text": lambda texts: pa.array(texts).dictionary_encode(),
    "dictionary": lambda texts: pa.array([None if t is None else t.encode() for t in texts], pa.binary()),
}


def table_of(rows: Sequence[Any], types: str, *, structs: bool, label: bool) -> pa.Table:
    ids, countries = (
        IDS[types]([r["user"]["id"] for r in rows]),
        TEXTS[types]([r["user"]["country"] for r in rows]),
    )
    columns: dict[str, Any] = {"user.id": ids, "user.country": countries}
    if structs:
        columns = {"user": pa.StructArray.from_arrays([ids, countries], ["id", "country"])}
    lists = pa.large_list if types == "decimal" else pa.list_
    columns |= {
        "request": pa.array([r["request"] for r in rows]),
        "ts": pa.array([r["ts"] for r in rows])
        .cast(pa.timestamp("ms", "UTC"))
        .cast(pa.timestamp("us" if structs else "ns", "UTC")),
        "small": pa.array([r["small"] for r in rows], pa.int32()),
        "flag": pa.array([r["flag"] for r in rows], pa.bool_()),
        "kind": TEXTS[types]([r["kind"] for r in rows]),
        "raw": pa.array([r["raw"] for r in rows], pa.binary()),
        "recent": pa.array([r["recent"] for r in rows], lists(pa.int64())),
        "tags": pa.array([r["tags"] for r in rows], lists(pa.string())),
        "price": pa.array([r["price"] for r in rows], pa.float64()),
    }
    return pa.table({**columns, **({"click": pa.array([1] * len(rows))} if label else {})})


def by_table(types: str, *, structs: bool, events: bool, arrow: bool = False) -> Callable[..., Any]:
    def way(spec: Spec, rows: Sequence[Any], folder: Path) -> Any:
        path = folder / ("rows.arrow" if arrow else "rows.parquet")
        table = table_of(rows, types, structs=structs, label=not events)
        if arrow:
            pyarrow.feather.write_feather(table, path, "uncompressed")
        else:
            pq.write_table(table, path)
        return replayed(path, Files()) if events else samples(spec, path)

    return way


def samples(spec: Spec, path: Path) -> list[tuple[BytesColumn, Record]]:
    return [(rows.payloads, rows.schema) for rows in read_samples(spec, [path])]


def replayed(path: Path, form: Files) -> BytesColumn:
    time = TimeField(path="ts", unit="ms")
    return BytesColumn.concat([records for _, _, records, _ in event_rows(path, time, SCHEMA, form)])


WAYS: dict[str, Callable[[Spec, Sequence[Any], Path], Any]] = {
    "json": by_json,
    **{name: by_csv(form) for name, form in FORMS.items()},
    "csv, replayed": by_csv(FORMS["csv"], events=True),
    **{f"parquet, {t}": by_table(t, structs=t == "text", events=False) for t in IDS},
    **{f"parquet, {t}, replayed": by_table(t, structs=t != "text", events=True) for t in IDS},
    "arrow": by_table("dictionary", structs=False, events=False, arrow=True),
}


SHARING = {
    "rows of its own for each feature": TEXT,
    "shared": TEXT.replace("t = { dim = 4 }", "t = { dim = 4, shared = true }"),
    "former defaults": f"defaults = 1{TEXT}",
}


@pytest.fixture(scope="module", params=SHARING)
def spec(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Spec:
    folder = tmp_path_factory.mktemp("ways")
    (folder / "s.avsc").write_text(json.dumps(SCHEMA_JSON))
    (folder / "freshet.toml").write_text(SHARING[request.param])
    return load_spec(folder / "freshet.toml")


def decoded(spec: Spec, records: BytesColumn, schema: Record) -> Decoded:
    got = SampleDecoder(spec, layout_of(spec), lambda _: schema).decode(records, 1, np.full(len(records), T0))
    assert not len(got.bad), got.why
    return got


def same(a: Decoded, b: Decoded, way: str) -> None:
    assert a.dense.tobytes() == b.dense.tobytes(), way
    for x, y in zip(a.groups, b.groups, strict=True):
        np.testing.assert_array_equal(x.feature_starts, y.feature_starts, way)
        np.testing.assert_array_equal(x.keys, y.keys, way)
        for ends, others in zip(x.list_ends, y.list_ends, strict=True):
            np.testing.assert_array_equal(
                ends if ends is not None else 0, others if others is not None else 0, way
            )


def by_rank(spec: Spec, rows: Sequence[Any]) -> Iterator[tuple[Any, Any]]:
    """(keys of a feature by a rank request, by samples): each row a request of one candidate."""
    schema = request_schema(spec, SCHEMA)
    texts = [{**r, "raw": None if r["raw"] is None else r["raw"].decode("latin-1")} for r in rows]
    made = JsonTranscoder(schema, ignore_unknown=True).body(json.dumps(texts).encode())
    assert not made.bad, made.bad
    ranked = RequestDecoder(spec, layout_of(spec), schema).decode(made.records, np.ones(len(rows), np.uint32))
    assert not len(ranked.bad), ranked.why
    direct = decoded(spec, oracle.write(SCHEMA, rows), SCHEMA)
    yield ranked.dense.tobytes(), direct.dense.tobytes()
    for x, y in zip(ranked.groups, direct.groups, strict=True):
        yield x.keys.tolist(), y.keys.tolist()


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(3_600)
@settings(
    max_examples=examples(max(3, VALUES // (ROWS * VALUES_A_ROW))),
    deadline=None,
    suppress_health_check=list(HealthCheck),
    phases=(Phase.generate,),  # a seed does not shrink
)
@given(seed=st.integers(0, 2**32))
def test_one_value_has_one_key_by_every_way_in(
    spec: Spec, tmp_path_factory: pytest.TempPathFactory, seed: int
) -> None:
    rows = rows_of(seed)
    direct = oracle.write(SCHEMA, rows)
    expected = decoded(spec, direct, SCHEMA)
    folder = tmp_path_factory.getbasetemp()

    for ranked, sampled in by_rank(spec, rows):
        assert ranked == sampled
    for name, way in WAYS.items():
        made = way(spec, rows, folder)
        if isinstance(made, BytesColumn):
            made = [(made, SCHEMA)]
        if len(made) == 1 and made[0][1] is SCHEMA:
            assert list(made[0][0]) == list(direct), name
        for records, schema in made:
            same(decoded(spec, records, schema), expected, name)


def keys_by_feature(spec: Spec, found: Decoded) -> dict[str, list[int]]:
    out = {}
    for group, keys in zip(layout_of(spec).groups, found.groups, strict=True):
        for i, index in enumerate(group.features):
            start, stop = keys.feature_starts[i : i + 2].tolist()
            out[spec.features[index].name] = keys.keys[start:stop].tolist()
    return out


@settings(deadline=None, max_examples=examples(50))
@given(value=st.integers(-(2**31), 2**31 - 1) | st.integers(0, 5), text=st.text("abcé ", max_size=6))
def test_features_have_one_row_of_an_id_only_if_they_share(spec: Spec, value: int, text: str) -> None:
    row = rows_of(1, 1)[0] | {"small": value, "recent": [value], "raw": text.encode(), "tags": [text]}
    row["user"] = {"id": value, "country": text}

    keys = keys_by_feature(spec, decoded(spec, oracle.write(SCHEMA, [row]), SCHEMA))

    salt = table_salt("t")
    integers = [*keys["user"], *keys["small"], *keys["recent"]]
    texts = [*keys["country"], *keys["raw"], *keys["tags"]]
    if spec.table("t").shared:
        assert integers == [key_of(value, salt)] * 3
        assert texts == [key_of(text, salt)] * 3
    else:
        assert len({*integers, key_of(value, salt)}) == 4
        assert len({*texts, key_of(text, salt)}) == 4


@pytest.mark.parametrize("defaults", [1, 2])
@pytest.mark.parametrize("kind", ["", ", max = 9"])
def test_a_feature_alone_in_its_table_has_the_tables_keys(tmp_path: Path, defaults: int, kind: str) -> None:
    field = "recent" if kind else "small"
    tables, features = (
        "[tables]\nu = { dim = 4 }",
        "[features]\n" + f'own = {{ field = "{field}", table = "u"{kind} }}',
    )
    (tmp_path / "s.avsc").write_text(json.dumps(SCHEMA_JSON))
    text = f"defaults = {defaults}{TEXT}".replace("[tables]", tables).replace("[features]", features)
    (tmp_path / "freshet.toml").write_text(text)
    alone = load_spec(tmp_path / "freshet.toml")
    row = rows_of(1, 1)[0] | {"small": 7, "recent": [7]}

    keys = keys_by_feature(alone, decoded(alone, oracle.write(SCHEMA, [row]), SCHEMA))

    assert keys["own"] == [key_of(7, table_salt("u"))]


def test_the_keys_are_those_of_the_book(spec: Spec) -> None:
    rows = rows_of(7)

    found = decoded(spec, oracle.write(SCHEMA, rows), SCHEMA)

    assert oracle.decoded_keys(found) == oracle.group_keys(spec, layout_of(spec), rows, [T0] * len(rows))
