"""Recorded events through encoding, joiner and trainer, and one run's topics as the source of another."""

import csv
import gzip
import json
import re
import shutil
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from click.testing import CliRunner

from freshet.adapters import open_eventlog
from freshet.apps import replay
from freshet.apps.replay import join_all
from freshet.cli import cli
from freshet.config.settings import RunFolder
from freshet.config.spec import load_spec
from freshet.errors import BadInput, ConfigError, Mismatch
from freshet.log.schema_ids import SchemaRegistry
from freshet.recordings.sources import events_of_files
from freshet.types import Append, BytesColumn, TopicPartition
from tests.fixtures.example_scripts import example

EXAMPLES = Path(__file__).parents[2] / "examples"
RETAIL = EXAMPLES / "online-retail" / "freshet.toml"
DAY = 86_400


@pytest.fixture
def retail(tmp_path):
    """Files of the impressions and actions of three days of a small shop."""
    path = tmp_path / "online_retail_ii_events.csv.gz"
    with gzip.open(path, "wt", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["ts", "invoice", "stock_code", "quantity", "price", "customer_id", "country"])
        for day in range(3):
            for n in range(20):
                for k in range(3):
                    item = f"item{(7 * n + 3 * k + day) % 40}"
                    at = 1_260_000_000 + day * DAY + n * 60
                    writer.writerow([at, 1000 + day * 20 + n, item, 2, 1 + k, n or "", "Norway"])
    return example("online-retail", "retail_events").write(tmp_path)


def run_replay(*arguments):
    result = CliRunner().invoke(
        cli, ["replay", *(str(a) for a in arguments), "--json"], catch_exceptions=False
    )
    return json.loads(result.stdout)


def replay_retail(files, *arguments):
    impressions, actions = files
    return run_replay("files", RETAIL, "--impressions", impressions, "--actions", actions, *arguments)


def retail_events(spec, files):
    """Return the pieces of the retail stream, as `freshet replay files` reads them."""
    impressions, actions = files
    times = {stream.role: stream.time for stream in (spec.events.served, spec.events.action)}
    return events_of_files({"served": impressions, "action": actions}, times)


def test_the_retail_stream_is_encoded_joined_and_learned(retail):
    outcome = replay_retail(retail, "--lanes", 1)

    assert {"samples", "samples_per_s", "auc", "logloss", "ne", "calibration"} <= set(outcome)
    assert outcome["ledger"]["events"]["actions_matched"] == 180
    labels = outcome["ledger"]["labels"]["buy"]
    assert outcome["samples"] == labels["trained_positive"] + labels["trained_negative"]
    assert labels["trained_positive"] == 180
    assert labels["pending"] == 0


def test_the_topics_of_one_run_are_the_events_of_another(retail, tmp_path):
    first = replay_retail(retail, "--lanes", 1, "--keep", tmp_path / "old")

    spec = RETAIL
    second = run_replay("topics", spec, "--from", tmp_path / "old", "--lanes", 1, "--keep", tmp_path / "new")

    assert second["samples"] == first["samples"]
    assert second["ledger"] == first["ledger"]


def test_topics_set_bad_records_aside_and_go_on(retail, tmp_path):
    first = replay_retail(retail, "--lanes", 1, "--keep", tmp_path / "old")
    spill(
        tmp_path / "old",
        impressions=[("none", b"no frame"), ("unknown", b"\2"), ("own", b"\xff")],
        actions=[(STRANGE, b"\2"), (STRANGE, b"\4")],
    )

    spec = RETAIL
    second = run_replay("topics", spec, "--from", tmp_path / "old", "--lanes", 1)

    assert second["ledger"] == first["ledger"]
    aside = second["set_aside"]
    assert {s: {r: k["records"] for r, k in reasons.items()} for s, reasons in aside.items()} == {
        "served": {"unreadable": 2, "no_schema": 1},
        "action": {"no_schema": 2},
    }
    assert re.search(r"impressions\[0\], offset \d+: .*no schema has id 99", str(aside["served"]))
    assert re.search(r"actions\[0\], offset \d+: .*strange", str(aside["action"]))


def test_topics_of_which_a_whole_stream_is_bad_are_refused(retail, tmp_path):
    replay_retail(retail, "--lanes", 1, "--keep", tmp_path / "old")
    folder = tmp_path / "new-spec"
    shutil.copytree(EXAMPLES / "online-retail", folder)
    schema = json.loads((folder / "actions.avsc").read_text())
    next(f for f in schema["fields"] if f["name"] == "event_id")["name"] = "renamed"
    (folder / "actions.avsc").write_text(json.dumps(schema))
    spec = (folder / "freshet.toml").read_text()
    (folder / "freshet.toml").write_text(spec.replace('id = "event_id"', 'id = "renamed"'))

    with pytest.raises(BadInput, match=r"the action stream .* found none among 180(.|\n)*renamed"):
        run_replay("topics", folder / "freshet.toml", "--from", tmp_path / "old")


def test_topics_in_json_are_read_by_record_and_not_by_line(retail, tmp_path):
    folder = tmp_path / "spec"
    shutil.copytree(EXAMPLES / "online-retail", folder)
    spec = folder / "freshet.toml"
    in_json = re.sub(
        r"^(served|action) = \{", r'\1 = { format = "json",', spec.read_text(), flags=re.MULTILINE
    )
    spec.write_text(in_json)
    wanted = load_spec(spec)
    replay.replay(wanted, retail_events(wanted, retail), keep=tmp_path / "old", lanes=1)
    log = open_eventlog(f"sqlite:{RunFolder(tmp_path / 'old').log}")
    with closing(log), closing(log.reader()) as reader, closing(log.writer()) as writer:
        reader.assign({TopicPartition("actions", 0): 0})
        ((_, records),) = reader.poll(1, 1.0)
        event = json.loads(records.values[0]) | {"event_id": "another"}
        texts = [json.dumps(event, indent=1), json.dumps(event | {"ts": "x"}), "[1]", "{"]
        values = BytesColumn.of(text.encode() for text in texts)
        writer.append([Append("actions", 0, values, BytesColumn.of([records.keys[0]] * 4))])

    outcome = run_replay("topics", spec, "--from", tmp_path / "old", "--lanes", 1)

    assert outcome["ledger"]["events"]["actions_again"] == 1
    assert outcome["set_aside"]["action"]["unreadable"]["records"] == 3
    assert "ts: expected long" in outcome["set_aside"]["action"]["unreadable"]["first"]


STRANGE = {"type": "record", "name": "strange", "fields": [{"name": "n", "type": "int"}]}


def spill(folder, **bad):
    """Append records by topic, each (its schema, "own", "unknown" or "none"; payload)."""
    log = open_eventlog(f"sqlite:{RunFolder(folder).log}")
    registry = SchemaRegistry(log)
    own = {t: (EXAMPLES / "online-retail" / f"{t}.avsc").read_text() for t in ("impressions", "actions")}
    with closing(log), closing(log.writer()) as writer:
        for topic, records in bad.items():
            values = []
            for schema, payload in records:
                text = own[topic] if schema == "own" else json.dumps(schema)
                schema_id = 99 if schema == "unknown" else 0 if schema == "none" else registry.register(text)
                values.append((b"" if schema == "none" else frame(schema_id)) + payload)
            writer.append([Append(topic, 0, BytesColumn.of(values))])


def frame(schema_id):
    return b"\0" + schema_id.to_bytes(4, "big")


def test_peek_shows_the_fields_of_events_and_the_shape_of_blocks(retail, tmp_path):
    replay_retail(retail, "--lanes", 1, "--keep", tmp_path / "old")

    def peek(topic):
        line = ["peek", topic, "--folder", str(tmp_path / "old"), "-n", "1", "--json"]
        output = CliRunner().invoke(cli, line, catch_exceptions=False).stdout
        return [json.loads(record)["value"] for record in output.splitlines()]

    assert all({"request_id", "items"} <= set(event) for event in peek("impressions"))
    assert all(action["type"] == "buy" for action in peek("actions"))
    assert all(block["samples"] >= 1 for block in peek("online-retail.samples"))
    assert all(commit["kind"] == "commit" for commit in peek("online-retail.joiner"))


def test_a_range_of_time_without_records_has_no_events(retail, tmp_path):
    replay_retail(retail, "--lanes", 1, "--keep", tmp_path / "old")

    spec = RETAIL
    outcome = run_replay("topics", spec, "--from", tmp_path / "old", "--until", "2020-01-01T00:00:00")

    assert outcome["samples"] == 0


def test_topics_of_another_model_are_refused_by_name(retail, tmp_path):
    replay_retail(retail, "--lanes", 1, "--keep", tmp_path / "old")

    with pytest.raises(Mismatch, match=r"has no topic 'feed.ranked'"):
        run_replay("topics", EXAMPLES / "feed" / "freshet.toml", "--from", tmp_path / "old")


def test_topics_are_not_sent_through_a_gateway(tmp_path):
    with pytest.raises(ConfigError, match="--keep keeps it"):
        run_replay(
            "topics",
            EXAMPLES / "feed" / "freshet.toml",
            "--from",
            tmp_path,
            "--gateway",
            "http://127.0.0.1:1",
        )


class _Racing:
    """A machine so slow that whatever waits for time finds it over."""

    def __init__(self) -> None:
        self.now = 0.0

    def now_ms(self):
        return 1_700_000_000_000

    def monotonic(self):
        self.now += 100.0
        return self.now


class _Standing(_Racing):
    """A machine so fast that no time passes."""

    def monotonic(self):
        return 0.0


@pytest.mark.parametrize("partitions", [1, 4])
def test_equal_events_make_equal_blocks_on_any_machine(retail, tmp_path, monkeypatch, partitions):
    spec = replace(load_spec(RETAIL), partitions=partitions)
    blocks = []
    for clock in (_Racing(), _Standing()):
        folder = tmp_path / type(clock).__name__
        monkeypatch.setattr(replay, "join_all", partial(join_all, clock=clock))
        replay.replay(spec, retail_events(spec, retail), keep=folder, lanes=1)
        blocks.append(blocks_in(folder, partitions))

    assert len(blocks[0]) > partitions
    assert blocks[0] == blocks[1]


def blocks_in(folder, partitions):
    """The samples of a kept run: (partition, block), in the order of each partition."""
    log = open_eventlog(f"sqlite:{RunFolder(folder).log}")
    reader = log.reader()
    places = [TopicPartition("online-retail.samples", p) for p in range(partitions)]
    ends = {at: log.bounds(at).end for at in places}
    reader.assign(dict.fromkeys(places, 0))
    found, seen = [], dict.fromkeys(places, 0)
    while seen != ends:
        for at, records in reader.poll(100, 1.0):
            found += [(at.partition, bytes(value)) for value in records.values]
            seen[at] = records.next_offset
    reader.close()
    log.close()
    return sorted(found, key=lambda each: each[0])
