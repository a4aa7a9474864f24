"""Wrong files for `freshet backtest` and `freshet replay files`.

Each gets one message with the name of the file and a remedy, and no traceback."""

from __future__ import annotations

import gzip
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from freshet.__main__ import main

HEAD = b"user.id,user.country,items.sku,items.price,ts,click\n"
ROW = b"7,DE,s1,1.5,1700000000000,1\n"
SPEC = """
name = "flat"
[events]
served = { schema = "served.avsc", explode = "items", key = ["request_id", "items.sku"], time = "ts:ms" }
action = { schema = "actions.avsc", key = ["request_id", "sku"], time = "ts:ms", id = "event_id" }
[labels]
click = { on = "action.what == 'click'", window = "2s" }
[tables]
t = { dim = 4 }
[features]
user = { field = "user.id", table = "t" }
country = { field = "user.country", table = "t" }
item = { field = "items.sku", table = "t" }
price = { field = "items.price", dense = "log1p" }
[model]
experts = ["wide"]
"""
USER = {
    "type": "record",
    "name": "User",
    "fields": [{"name": "id", "type": "long"}, {"name": "country", "type": ["null", "string"]}],
}
ITEM = {
    "type": "record",
    "name": "Item",
    "fields": [{"name": "sku", "type": "string"}, {"name": "price", "type": ["null", "double"]}],
}
TIME = {"type": "long", "logicalType": "timestamp-millis"}
SERVED = {
    "request_id": "string",
    "ts": TIME,
    "user": USER,
    "items": {"type": "array", "items": ITEM},
}
ACTION = {"event_id": "string", "request_id": "string", "sku": "string", "what": "string", "ts": TIME}
EVENT = {"request_id": "r1", "ts": 1_700_000_000_000, "user": {"id": 7, "country": None}, "items": []}
ACT = b"event_id,request_id,sku,what,ts\n00001,r1,s1,click,1700000000500\n"


def schema(name: str, fields: Mapping[str, object]) -> str:
    return json.dumps(
        {"type": "record", "name": name, "fields": [{"name": n, "type": t} for n, t in fields.items()]}
    )


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "served.avsc").write_text(schema("Served", SERVED))
    (tmp_path / "actions.avsc").write_text(schema("Act", ACTION))
    (tmp_path / "freshet.toml").write_text(SPEC)
    monkeypatch.chdir(tmp_path)
    return tmp_path


Said = Callable[..., tuple[int, str]]


@pytest.fixture
def say(place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Said:
    """Runs a command; returns its exit status and what it said."""

    def run(*words: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["freshet", *words])
        try:
            main()
        except SystemExit as ended:
            out = capsys.readouterr()
            return int(ended.code or 0), out.out + out.err
        out = capsys.readouterr()
        return 0, out.out + out.err

    return run


ROWS = HEAD + ROW * 50
WRONG_SAMPLES: list[tuple[str, bytes | None, str]] = [
    ("missing.csv", None, "does not exist"),
    ("empty.csv", b"", "is empty"),
    ("header.csv", HEAD, "expected samples"),
    ("blank.csv", b"\n\n\n", "has no text"),
    ("no_header.csv", ROW, "[files] columns"),
    ("semicolons.csv", ROWS.replace(b",", b";"), 'delimiter = ";"'),
    ("tabs.csv", ROWS.replace(b",", b"\t"), 'delimiter = "\\t"'),
    ("colons.dat", ROWS.replace(b",", b"::"), 'delimiter = "::"'),
    ("ragged.csv", HEAD + ROW + b"7,DE,s1\n", "line 3 (row 2): expected 6 cells"),
    ("long_row.csv", HEAD + ROW + b"7,DE,s1,1,2,3,4\n", "line 3 (row 2): expected 6 cells"),
    ("open_quote.csv", HEAD + ROW + b'7,DE,"s1,1.5,1700000000000,1\n' + ROW * 9, "quotes = false"),
    ("twice.csv", HEAD.replace(b"country", b"id") + ROW, "expected one column 'user.id', found 2"),
    ("utf16.csv", ROWS.decode().encode("utf-16"), 'encoding = "utf-16"'),
    ("latin1.csv", HEAD + ROW.replace(b"s1", "café".encode("latin-1")), 'encoding = "latin-1"'),
    ("text.parquet", ROWS, "expected a csv, csv.gz or parquet file"),
    ("plain.csv.gz", ROWS, "expected gzip"),
    ("cut.csv.gz", gzip.compress(HEAD + ROW * 20_000)[:-40], "is it cut?"),
    ("damaged.csv.gz", gzip.compress(ROWS)[:30] + b"\0" * 30, "gzip"),
    ("cut.parquet", b"PAR1" + b"\0" * 100, "expected a whole Parquet file"),
    ("table.xlsx", b"PK\x03\x04" + bytes(100), "zip archive"),
    ("samples.orc", b"ORC" + bytes(100), "write Parquet"),
    ("samples.avro", b"Obj\x01" + bytes(100), "Avro container"),
    ("samples.zst", b"\x28\xb5\x2f\xfd" + bytes(100), "decompress"),
    ("noise.csv", bytes(range(256)) * 9, "binary"),
    ("secret.parquet", b"PARE" + bytes(100) + b"PARE", "encrypted"),
    ("stream.arrow", b"\xff\xff\xff\xff\x08\x01" + bytes(100), "an Arrow stream"),
    ("old.feather", b"FEA1" + bytes(100), "version 2"),
    ("samples.lz4", b"\x04\x22\x4d\x18" + ROWS, "lz4"),
    ("pointer.parquet", b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "git lfs pull"),
    ("login.csv", b"<!DOCTYPE html>\n<html></html>\n", "an HTML page"),
    ("twice.csv.gz", gzip.compress(gzip.compress(ROWS)), "decompress it once"),
    ("excel.csv", b"sep=;\n" + ROWS.replace(b",", b";"), "take the line out"),
    ("joined.csv", HEAD + ROW + HEAD + ROW, "line 3 (row 2): click: expected 0 or 1"),
    ("headed.csv", HEAD + ROW + HEAD + ROW, "is it a header line?"),
    ("capitals.csv", HEAD.replace(b"ts", b"TS") + ROW, "did you mean 'TS'"),
    ("events.jsonl", json.dumps(EVENT).encode() + b"\n", "freshet replay files"),
    ("array.json", json.dumps([EVENT]).encode() + b"\n", "JSON"),
    ("thousands.csv", HEAD + ROW.replace(b"1.5", b'"1,000.5"'), "between thousands"),
    ("dates.csv", HEAD + ROW.replace(b"1700000000000", b"14/11/2023 22:13"), "expected a time"),
]


@pytest.mark.parametrize(("name", "content", "words"), WRONG_SAMPLES, ids=[w[0] for w in WRONG_SAMPLES])
def test_a_wrong_file_of_samples_is_named_with_the_way_out(
    say: Said, place: Path, name: str, content: bytes | None, words: str
) -> None:
    if content is not None:
        (place / name).write_bytes(content)

    status, said = say("backtest", "freshet.toml", name)

    assert status != 0
    assert words in said, said
    assert name in said
    assert "Traceback" not in said
    assert "pyarrow" not in said


def test_a_folder_is_no_file_of_samples(say: Said, place: Path) -> None:
    (place / "spark.parquet").mkdir()

    status, said = say("backtest", "freshet.toml", "spark.parquet")

    assert status != 0
    assert "spark.parquet is a folder: name the files in it, spark.parquet/*" in said


@pytest.mark.parametrize(
    ("names", "pattern"),
    [
        (("_SUCCESS", ".part-0.crc", "part-0.snappy.parquet"), "spark/*.snappy.parquet"),
        (("day=1/part-0.parquet", "day=2/part-1.parquet", "_SUCCESS"), "spark/*/*.parquet"),
        (("a.csv", "b.csv.gz"), "spark/*"),
        (("_SUCCESS",), "spark/*"),
    ],
)
def test_a_folder_of_spark_is_answered_with_the_files_in_it(
    say: Said, place: Path, names: tuple[str, ...], pattern: str
) -> None:
    for name in names:
        (place / "spark" / name).parent.mkdir(parents=True, exist_ok=True)
        (place / "spark" / name).write_bytes(b"")

    status, said = say("backtest", "freshet.toml", "spark/")

    assert status != 0
    assert said.endswith(f"name the files in it, {pattern}\n"), said


@pytest.mark.parametrize(("name", "words"), [("s3://b/a.parquet", "fetch it first"), ("-", "/dev/stdin")])
def test_path_that_is_no_file_is_refused_with_a_hint(say: Said, name: str, words: str) -> None:
    status, said = say("backtest", "freshet.toml", name)

    assert status != 0
    assert words in said


def test_partition_column_of_hive_is_reported(say: Said, place: Path) -> None:
    path = place / "items.sku=a" / "part.csv"
    path.parent.mkdir()
    path.write_bytes(ROWS.replace(b"items.sku", b"other"))

    status, said = say("backtest", "freshet.toml", str(path))

    assert status != 0
    assert "no column 'items.sku'" in said
    assert "the folder's name has its value" in said


LINE = json.dumps(EVENT).encode() + b"\n"
WRONG_EVENTS: list[tuple[str, bytes | None, str]] = [
    ("missing.jsonl", None, "does not exist"),
    ("empty.jsonl", b"", "no events"),
    ("header.csv", b"request_id,ts,user.id\n", "no events"),
    ("array.json", json.dumps([EVENT, EVENT]).encode(), "jq -c '.[]'"),
    ("pretty.json", json.dumps(EVENT, indent=1).encode(), "jq -c"),
    ("lines_of_arrays.jsonl", LINE + b"[1]\n", "line 2: expected a JSON object"),
    ("cut.jsonl", LINE + LINE[:20], "line 2: expected a JSON object"),
    ("cut.jsonl.gz", gzip.compress(LINE * 5_000)[:-30], "is it cut?"),
    ("plain.jsonl.gz", LINE, "expected gzip"),
    ("utf16.jsonl", LINE.decode().encode("utf-16"), "UTF-16"),
    ("wrong_type.jsonl", LINE + LINE.replace(b'"id": 7', b'"id": "7"'), "line 2: user.id: expected a long"),
    ("unknown.jsonl", LINE + LINE.replace(b"request_id", b"req"), "line 2: req"),
    ("no_time.jsonl", LINE + LINE.replace(b'"ts"', b'"at"'), "line 2: expected a time at 'ts'"),
    ("unknown.csv", b"request_id,ts,user.id,country,items\nr,1,7,DE,\n", "no field of the schema"),
    ("lacks.csv", b"ts,user.id\n1,7\n", "no column 'request_id'"),
    ("csv.jsonl", b"request_id,ts\nr,1\n", "named .csv"),
    ("items.csv", b"request_id,ts,user.id,items.sku\nr,1,7,a\n", "freshet backtest"),
    ("events.jsonl.zst", b"\x28\xb5\x2f\xfd" + bytes(100), "zstd: decompress"),
    ("LACKS.CSV", b"ts,user.id\n1,7\n", "no column 'request_id'"),
]


@pytest.mark.parametrize(("name", "content", "words"), WRONG_EVENTS, ids=[w[0] for w in WRONG_EVENTS])
def test_a_wrong_file_of_events_is_named_with_the_way_out(
    say: Said, place: Path, name: str, content: bytes | None, words: str
) -> None:
    if content is not None:
        (place / name).write_bytes(content)
    (place / "actions.csv").write_bytes(ACT)

    status, said = say(
        "replay", "files", "freshet.toml", "--impressions", name, "--actions", "actions.csv", "--json"
    )

    assert status != 0
    assert words in said, said
    assert name in said
    assert "Traceback" not in said


def test_a_schema_that_lacks_a_field_of_the_spec_is_named(say: Said, place: Path) -> None:
    (place / "rows.csv").write_bytes(ROWS)
    (place / "served.avsc").write_text(schema("Served", {k: v for k, v in SERVED.items() if k != "user"}))

    status, said = say("backtest", "freshet.toml", "rows.csv")

    assert status == 1
    assert "user" in said
    assert "request_id, ts, items" in said
