"""Records as `freshet peek` shows them."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import fastavro
import pytest
from click.testing import CliRunner

from freshet.apps import services
from freshet.cli.peek import command, record_text
from freshet.config.avro.schema import Written, parse_written
from freshet.log.schema_ids import SchemaRegistry, frame
from freshet.log.sqlite.event_log import open_url
from freshet.types import Append, BytesColumn

CLICK = {
    "type": "record",
    "name": "Click",
    "fields": [
        {"name": "kind", "type": {"type": "enum", "name": "Kind", "symbols": ["seen"]}},
        {"name": "at", "type": {"type": "long", "logicalType": "timestamp-millis"}},
    ],
}


def record(name: str, **types: str) -> dict[str, Any]:
    return {"type": "record", "name": name, "fields": [{"name": n, "type": t} for n, t in types.items()]}


def test_control_characters_of_clients_are_escaped() -> None:
    line = {"partition": 0, "offset": 7, "key": "\x1b[31mred\x07", "value": {"text": "\x9b2J é\u202e"}}

    assert record_text(line) == r'0:7 \x1b[31mred\x07 {"text":"\x9b2J é\u202e"}'


@pytest.mark.parametrize("broken", [b"\0", b"\x10\0", b"\0" + b"\xff" * 9 + b"\1", b""])
def test_unreadable_record_is_shown_with_its_reason(
    broken: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FRESHET_COMMON_LOG_URL", f"sqlite:{tmp_path}/log")
    log = open_url(f"sqlite:{tmp_path}/log")
    log.create_topic("clicks", partitions=1, retention_ms=None)
    schema_id = SchemaRegistry(log).register(json.dumps(CLICK))
    out = io.BytesIO()
    fastavro.schemaless_writer(out, fastavro.parse_schema(CLICK), {"kind": "seen", "at": 5})
    good = frame(schema_id, out.getvalue())
    values = BytesColumn.of([good, frame(schema_id, broken), good])
    log.writer().append([Append("clicks", 0, values)])
    log.close()

    result = CliRunner().invoke(command, ["clicks", "--folder", str(tmp_path), "--json"])

    assert result.exit_code == 0, result.output
    shown = [json.loads(line)["value"] for line in result.output.splitlines()]
    assert [one.get("kind") for one in shown] == ["seen", None, "seen"]
    assert shown[1]["unreadable"]
    assert shown[1]["bytes"] == 5 + len(broken)


SPEC = """
name = "shop"
[events]
served = { schema = "served.avsc", key = ["request_id", "sku"], time = "ts:ms" }
action = { FORMAT topic = "shop.clicks", schema = "clicks.avsc", key = ["request_id", "sku"], time = "ts:ms" }
[labels]
click = { on = "action.sku != ''" }
[tables]
t = { dim = 4 }
[features]
sku = { field = "sku", table = "t" }
[model]
experts = ["wide"]
"""
OWN = record("Served", request_id="string", ts="long")
FOREIGN = record("Act", what="string", amount="long", user="string")
EXTERNAL = {"what": "click", "amount": 7, "user": "ada"}


def avro(schema: Any, value: Any) -> bytes:
    out = io.BytesIO()
    fastavro.schemaless_writer(out, fastavro.parse_schema(schema), value)
    return out.getvalue()


def keep(folder: Path, action: str) -> None:
    """Keep a spec and its schemas in a run folder, as `freshet up` does."""
    (folder / "state").mkdir()
    (folder / "state" / "spec.toml").write_text(SPEC.replace("FORMAT", action))
    fields = {"request_id": "string", "sku": "string", "ts": "long"}
    (folder / "state" / "served.avsc").write_text(json.dumps(record("Served", **fields)))
    (folder / "state" / "clicks.avsc").write_text(json.dumps(record("Click", **fields)))


def shown(folder: Path, value: bytes, *, topic: str = "shop.clicks", schemas: bool = True) -> Any:
    """Append a record to a run folder's log, beside a schema of freshet with id 1; return what peek shows."""
    log = open_url(f"sqlite:{folder}/log")
    log.create_topic(topic, partitions=1, retention_ms=None)
    if schemas:
        assert SchemaRegistry(log).register(json.dumps(OWN)) == 1
    log.writer().append([Append(topic, 0, BytesColumn.of([value]))])
    before = set(log.topics())
    result = CliRunner().invoke(command, [topic, "--folder", str(folder), "--json"])
    assert result.exit_code == 0, result.output
    assert set(log.topics()) == before, "a read created a topic"
    log.close()
    return json.loads(result.stdout)["value"]


def test_bytes_after_the_fields_make_a_record_unreadable(tmp_path: Path) -> None:
    value = shown(tmp_path, frame(1, avro(FOREIGN, EXTERNAL)))

    assert "schema 1, found 4 bytes after its fields" in value["unreadable"]


def test_an_id_of_another_registry_is_not_taken_for_our_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep(tmp_path, 'format = "confluent",')
    data = avro(OWN, {"request_id": "click", "ts": 7})  # fits the schema with that id here, too

    value = shown(tmp_path, frame(1, data))

    assert (value["schema"], value["bytes"]) == (1, data.hex())
    assert "FRESHET_REGISTRY_URL" in value["hint"]


def test_records_of_a_topic_that_the_spec_lacks_are_bytes(tmp_path: Path) -> None:
    keep(tmp_path, "")

    value = shown(tmp_path, frame(1, avro(OWN, {"request_id": "r", "ts": 7})), topic="other.clicks")

    assert value["schema"] == 1
    assert "has no such topic; --folder" in value["hint"]


def test_a_topic_of_the_spec_has_the_ids_of_the_log(tmp_path: Path) -> None:
    keep(tmp_path, "")

    assert shown(tmp_path, frame(1, avro(OWN, {"request_id": "r", "ts": 7}))) == {"request_id": "r", "ts": 7}


def test_fields_of_external_records_come_from_their_registry(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Registry:
        def get(self, schema_id: int) -> Written:
            return {1: parse_written(json.dumps(FOREIGN))}[schema_id]

    monkeypatch.setattr(services, "external_registry", lambda settings: Registry())
    keep(tmp_path, 'format = "confluent",')

    assert shown(tmp_path, frame(1, avro(FOREIGN, EXTERNAL))) == EXTERNAL


def test_bare_records_have_the_fields_of_the_spec(tmp_path: Path) -> None:
    keep(tmp_path, 'format = "bare",')
    click = {"request_id": "", "sku": "s", "ts": 7}  # the first byte is zero, as of a frame
    data = avro(json.loads((tmp_path / "state" / "clicks.avsc").read_text()), click)

    assert shown(tmp_path, data) == click


def test_reading_a_log_without_schemas_creates_no_topic(tmp_path: Path) -> None:
    value = shown(tmp_path, frame(1, b"x"), schemas=False)

    assert (value["schema"], value["bytes"]) == (1, "78")
    assert "no topic schemas" in value["hint"]
