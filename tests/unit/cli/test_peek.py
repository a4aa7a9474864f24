"""Records as `freshet peek` shows them."""

from __future__ import annotations

import io
import json
from pathlib import Path

import fastavro
import pytest
from click.testing import CliRunner

from freshet.cli.peek import command, record_text
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
