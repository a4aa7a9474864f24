"""Recorded events through encoding, joiner and trainer, and one run's topics as the source of another."""

import csv
import gzip
import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from freshet.cli import cli
from freshet.errors import ConfigError, Mismatch

EXAMPLES = Path(__file__).parents[2] / "examples"
DAY = 86_400


@pytest.fixture
def retail(tmp_path):
    """Three days of a small shop: twenty invoices a day over forty items."""
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
    return path


def replay(*arguments):
    result = CliRunner().invoke(
        cli, ["replay", *(str(a) for a in arguments), "--json"], catch_exceptions=False
    )
    return json.loads(result.stdout)


def test_the_retail_stream_goes_through_encoding_joiner_and_trainer(retail):
    outcome = replay("online-retail", retail, "--lanes", 1)

    assert {"samples", "samples_per_s", "auc", "logloss", "ne", "calibration"} <= set(outcome)
    assert outcome["ledger"]["events"]["actions_matched"] == 180
    labels = outcome["ledger"]["labels"]["buy"]
    assert outcome["samples"] == labels["trained_positive"] + labels["trained_negative"]
    assert labels["trained_positive"] == 180
    assert labels["pending"] == 0


def test_the_topics_of_one_run_are_the_events_of_another(retail, tmp_path):
    first = replay("online-retail", retail, "--lanes", 1, "--keep", tmp_path / "old")

    spec = EXAMPLES / "online-retail" / "freshet.toml"
    second = replay("topics", spec, "--from", tmp_path / "old", "--lanes", 1, "--keep", tmp_path / "new")

    assert second["samples"] == first["samples"]
    assert second["ledger"] == first["ledger"]


def test_peek_shows_the_fields_of_events_and_the_shape_of_blocks(retail, tmp_path):
    replay("online-retail", retail, "--lanes", 1, "--keep", tmp_path / "old")

    def peek(topic):
        line = ["peek", topic, "--folder", str(tmp_path / "old"), "-n", "1", "--json"]
        output = CliRunner().invoke(cli, line, catch_exceptions=False).stdout
        return [json.loads(record)["value"] for record in output.splitlines()]

    assert all({"request_id", "items"} <= set(event) for event in peek("impressions"))
    assert all(action["type"] == "buy" for action in peek("actions"))
    assert all(block["samples"] >= 1 for block in peek("online-retail.samples"))
    assert all(commit["kind"] == "commit" for commit in peek("online-retail.joiner"))


def test_a_range_of_time_in_which_the_log_took_nothing_holds_no_events(retail, tmp_path):
    replay("online-retail", retail, "--lanes", 1, "--keep", tmp_path / "old")

    spec = EXAMPLES / "online-retail" / "freshet.toml"
    outcome = replay("topics", spec, "--from", tmp_path / "old", "--until", "2020-01-01T00:00:00")

    assert outcome["samples"] == 0


def test_topics_of_another_model_are_refused_by_name(retail, tmp_path):
    replay("online-retail", retail, "--lanes", 1, "--keep", tmp_path / "old")

    with pytest.raises(Mismatch, match=r"has no topic 'feed.ranked'"):
        replay("topics", EXAMPLES / "feed" / "freshet.toml", "--from", tmp_path / "old")


def test_topics_are_not_sent_through_a_gateway(tmp_path):
    with pytest.raises(ConfigError, match="--keep keeps it"):
        replay(
            "topics",
            EXAMPLES / "feed" / "freshet.toml",
            "--from",
            tmp_path,
            "--gateway",
            "http://127.0.0.1:1",
        )
