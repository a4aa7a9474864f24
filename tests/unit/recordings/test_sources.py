import gzip
import os
import threading

import orjson
import pytest

from freshet.config.avro.schema import parse_schema
from freshet.config.spec.model import TimeField
from freshet.errors import BadInput
from freshet.recordings import sources
from freshet.recordings.sources import events_of_files, json_events

TS = TimeField(path="ts", unit="ms")
USER = {"type": "record", "name": "User", "fields": [{"name": "id", "type": "long"}]}
ACT = parse_schema(
    {
        "type": "record",
        "name": "Act",
        "fields": [
            {"name": "ts", "type": "long"},
            {"name": "user", "type": USER},
            {"name": "kind", "type": ["null", "string"], "default": None},
        ],
    }
)


def test_events_of_all_formats_are_merged_by_time(tmp_path):
    impressions = tmp_path / "impressions.jsonl.gz"
    with gzip.open(impressions, "wb") as file:
        file.write(b"\n".join(orjson.dumps({"ts": t, "user": {"id": t}}) for t in (1, 4, 6)))
    actions = tmp_path / "actions.csv"
    actions.write_text("ts,user.id,kind\n2,7,click\n5,8,\n")

    (piece,) = events_of_files(
        {"served": impressions, "action": actions}, {"served": TS, "action": TS}, {"action": ACT}
    )

    assert [orjson.loads(line)["ts"] for line in piece.lines["served"].splitlines()] == [1, 4, 6]
    (records,) = piece.records
    assert [orjson.loads(line) for line in json_events(records.payloads, records.schema)] == [
        {"ts": 2, "user": {"id": 7}, "kind": "click"},
        {"ts": 5, "user": {"id": 8}, "kind": None},
    ]
    assert piece.place("action", 1) == f"{actions}, line 3 (row 2)"
    assert piece.events == 5


def test_streams_with_different_time_units_are_merged_by_time(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "PIECE_EVENTS", 1)
    pages, clicks = tmp_path / "pages.jsonl", tmp_path / "clicks.jsonl"
    pages.write_text('{"ts": 1000}\n{"ts": 3000}\n')
    clicks.write_text('{"at": "1970-01-01T00:00:02Z"}\n{"at": "1970-01-01T01:00:04+01:00"}\n')

    pieces = events_of_files(
        {"action": clicks, "served": pages}, {"served": TS, "action": TimeField(path="at", unit="iso")}
    )

    assert [next(iter(piece.lines)) for piece in pieces] == ["served", "action", "served", "action"]


@pytest.mark.parametrize("at", ['"2026"', '"soon"', "7", "null", '""'])
def test_a_time_in_iso_that_is_none_is_refused_with_its_place(tmp_path, at):
    path = tmp_path / "events.jsonl"
    path.write_text(f'{{"at": {at}}}\n')

    with pytest.raises(BadInput, match=r"line 1: expected a time at 'at' \(ISO 8601 text\)"):
        list(events_of_files({"served": path}, {"served": TimeField(path="at", unit="iso")}))


def test_a_line_that_is_no_object_is_refused_with_its_place(tmp_path):
    path = tmp_path / "events.jsonl"
    path.write_text('{"ts": 1}\n[1]\n')

    with pytest.raises(BadInput, match=r"events.jsonl, line 2: expected a JSON object"):
        list(events_of_files({"served": path}, {"served": TS}))


def test_an_event_without_time_is_refused_with_its_place(tmp_path):
    path = tmp_path / "events.jsonl"
    path.write_text('{"at": 1}\n')

    with pytest.raises(BadInput, match=r"line 1: expected a time at 'ts' \(a number of ms\), found None"):
        list(events_of_files({"served": path}, {"served": TS}))


def test_json_lines_come_from_a_pipe_too(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=pipe.write_bytes, args=(b'{"ts": 1}\n{"ts": 2}\n',))
    writer.start()

    (piece,) = events_of_files({"served": pipe}, {"served": TS})

    assert piece.events == 2
    writer.join(60)
