"""The Excel file of the retail data becomes a csv, and the csv impressions and actions."""

import gzip
from collections.abc import Sequence
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

import orjson
import pytest

from freshet.errors import BadInput
from tests.fixtures.example_scripts import example

convert = example("online-retail", "convert")
retail = example("online-retail", "retail_events")


def row(invoice: object, minute: int, **changed: object) -> dict[str, object]:
    made = {
        "Invoice": invoice,
        "StockCode": "85123A",
        "Description": "HOLDER",
        "Quantity": 6,
        "InvoiceDate": datetime(2010, 12, 1, 8, minute),
        "Price": 2.55,
        "Customer ID": 17850.0,
        "Country": "United Kingdom",
    }
    return {**made, **changed}


def test_sheets_become_one_file_by_time_without_what_both_hold(tmp_path: Path) -> None:
    first = [row(536365, 26, **{"Customer ID": None}), row("C536379", 20, Quantity=-1, StockCode=22632)]
    second = [row(536365, 26), row(536370, 45), row(1, 50, StockCode=None), row(2, 51, InvoiceDate=None)]

    read = retail.read_lines(convert.write(convert.lines([first, second]), tmp_path / "data"))

    assert read.invoices == ["C536379", "536365", "536370"]
    assert read.customer.tolist() == [17850, -1, 17850]
    assert read.quantity.tolist() == [-1, 6, 6]
    assert read.ts.tolist() == [1291191600, 1291191960, 1291193100]
    assert read.items == ["22632", "85123A"]


HEADER = "ts,invoice,stock_code,quantity,price,customer_id,country\n"
DAY = 86_400


def write(tmp_path: Path, lines: Sequence[str]) -> Path:
    path = tmp_path / str(retail.EVENTS_FILE)
    with gzip.open(path, "wt") as file:
        file.write(HEADER + "".join(line + "\n" for line in lines))
    return path


def month(tmp_path: Path) -> Path:
    """Twenty invoices on each of three days, over 40 items; the last day cancels one line."""
    lines = []
    for day in range(3):
        for n in range(20):
            number = 1000 + day * 20 + n
            for k in range(3):
                item = f"item{(7 * n + 3 * k + day) % 40}"
                lines.append(f"{1_260_000_000 + day * DAY + n * 60},{number},{item},2,{1 + k},{n},Norway")
    lines.append(f"{1_260_000_000 + 2 * DAY + 3600},C2000,item0,-2,1,0,Norway")
    return write(tmp_path, lines)


def events(path: Path, seed: int = 0) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    impressions, actions = retail.write(path.parent, seed)
    return objects(impressions), objects(actions)


def objects(file: Path) -> list[dict[str, Any]]:
    return [orjson.loads(line) for line in gzip.decompress(file.read_bytes()).splitlines() if line]


def test_order_lines_are_actions_and_seed_repeats_stream(tmp_path: Path) -> None:
    path = month(tmp_path)

    impressions, actions = events(path)

    assert len(actions) == 181
    assert (impressions, actions) == events(path)
    assert (impressions, actions) != events(path, seed=1)


def test_request_shows_purchases_and_four_times_as_many_others(tmp_path: Path) -> None:
    impressions, actions = events(month(tmp_path))
    bought: dict[str, set[str]] = {}
    for action in actions:
        if action["type"] == "buy":
            bought.setdefault(action["request_id"], set()).add(action["stock_code"])

    later = impressions[20:]  # the first day knows no popular items yet
    for event in later:
        shown = [item["stock_code"] for item in event["items"]]
        assert len(set(shown)) == len(shown)
        assert bought[event["request_id"]] <= set(shown)
        assert len(shown) == (1 + retail.NEGATIVES) * len(bought[event["request_id"]])


def test_actions_follow_impressions_in_order_within_100_seconds(tmp_path: Path) -> None:
    impressions, actions = events(month(tmp_path))
    at = {event["request_id"]: event["ts"] for event in impressions}

    assert all(a["ts"] <= b["ts"] for a, b in pairwise(actions))
    for action in actions:
        if action["type"] == "buy":
            assert 0 <= action["ts"] - at[action["request_id"]] <= 100_000


def test_cancellation_refers_to_last_request_with_item(tmp_path: Path) -> None:
    impressions, actions = events(month(tmp_path))
    cancelled = next(a for a in actions if a["type"] == "cancel")

    request = next(e for e in impressions if e["request_id"] == cancelled["request_id"])

    assert cancelled["stock_code"] in {item["stock_code"] for item in request["items"]}


def test_prices_do_not_reveal_purchases(tmp_path: Path) -> None:
    impressions, _ = events(month(tmp_path))
    prices: dict[tuple[int, str], set[float | None]] = {}
    for event in impressions[20:]:
        for item in event["items"]:
            prices.setdefault((event["ts"] // 1000 // DAY, item["stock_code"]), set()).add(item["price"])

    assert all(None not in found for found in prices.values())


def test_other_file_is_refused_with_expected_columns(tmp_path: Path) -> None:
    path = tmp_path / "other.csv"
    path.write_text("a,b\n1,2\n")

    with pytest.raises(BadInput, match=r"expected the columns ts, invoice, .*found a, b"):
        retail.read_lines(path)


def test_a_line_that_is_no_number_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="must be numbers"):
        retail.read_lines(write(tmp_path, ["soon,1,a,1,1,1,x"]))
