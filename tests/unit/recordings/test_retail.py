import gzip
from itertools import pairwise

import orjson
import pytest

from freshet.errors import BadInput
from freshet.recordings.retail import NEGATIVES, read_lines, slices

HEADER = "ts,invoice,stock_code,quantity,price,customer_id,country\n"
DAY = 86_400


def write(tmp_path, lines):
    path = tmp_path / "events.csv.gz"
    with gzip.open(path, "wt") as file:
        file.write(HEADER + "".join(line + "\n" for line in lines))
    return path


def month(tmp_path):
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


def events(path, seed=0):
    impressions, actions = [], []
    for day in slices(read_lines(path), seed):
        impressions += [orjson.loads(line) for line in day.impressions.splitlines()]
        actions += [orjson.loads(line) for line in day.actions.splitlines()]
    return impressions, actions


def test_order_lines_are_actions_and_seed_repeats_stream(tmp_path):
    path = month(tmp_path)

    impressions, actions = events(path)

    assert len(actions) == 181
    assert (impressions, actions) == events(path)
    assert (impressions, actions) != events(path, seed=1)


def test_request_shows_purchases_and_four_times_as_many_others(tmp_path):
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
        assert len(shown) == (1 + NEGATIVES) * len(bought[event["request_id"]])


def test_actions_follow_impressions_in_order_within_100_seconds(tmp_path):
    impressions, actions = events(month(tmp_path))
    at = {event["request_id"]: event["ts"] for event in impressions}

    assert all(a["ts"] <= b["ts"] for a, b in pairwise(actions))
    for action in actions:
        if action["type"] == "buy":
            assert 0 <= action["ts"] - at[action["request_id"]] <= 100_000


def test_cancellation_refers_to_last_request_with_item(tmp_path):
    impressions, actions = events(month(tmp_path))
    cancelled = next(a for a in actions if a["type"] == "cancel")

    request = next(e for e in impressions if e["request_id"] == cancelled["request_id"])

    assert cancelled["stock_code"] in {item["stock_code"] for item in request["items"]}


def test_prices_do_not_reveal_purchases(tmp_path):
    impressions, _ = events(month(tmp_path))
    prices: dict[tuple[int, str], set[float | None]] = {}
    for event in impressions[20:]:
        for item in event["items"]:
            prices.setdefault((event["ts"] // 1000 // DAY, item["stock_code"]), set()).add(item["price"])

    assert all(None not in found for found in prices.values())


def test_other_file_is_refused_with_expected_columns(tmp_path):
    path = tmp_path / "other.csv"
    path.write_text("a,b\n1,2\n")

    with pytest.raises(BadInput, match=r"expected the columns ts, invoice, .*found a, b"):
        read_lines(path)


def test_a_line_that_is_no_number_is_refused(tmp_path):
    with pytest.raises(BadInput, match="must be numbers"):
        read_lines(write(tmp_path, ["soon,1,a,1,1,1,x"]))
