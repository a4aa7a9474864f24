"""Online Retail II as files of impressions and actions, by a convention of this project.

    python retail_events.py FOLDER     FOLDER: holds online_retail_ii_events.csv.gz (see convert.py)

An invoice is a request by a customer. Its impressions are the items bought plus `NEGATIVES` times as many
drawn by popularity over the last 30 days, without replacement, in shuffled order. Every order line is an
action on its item after a log-normal delay (median 20 s, at most 100 s); a cancellation line is a late action
on that customer's last request with the item. Users, items, prices, countries and times are real; the
impressions without a purchase, the seconds within a minute, and the delays are simulated; the seed determines
them.

Data: Online Retail II, UCI Machine Learning Repository (D. Chen), CC BY 4.0.
Letters: N order lines.
"""

from __future__ import annotations

import argparse
import csv
import gzip
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import orjson
from numpy.typing import NDArray

from freshet.errors import BadInput
from freshet.types import F64, I64

EVENTS_FILE = "online_retail_ii_events.csv.gz"
COLUMNS = ("ts", "invoice", "stock_code", "quantity", "price", "customer_id", "country")
NEGATIVES = 4  # impressions not bought, for each one bought
POPULARITY_DAYS = 30
DELAY_MEDIAN_S, DELAY_SIGMA, DELAY_MAX_S = 20.0, 0.8, 100.0
DAY_S = 86_400


@dataclass(frozen=True, slots=True, eq=False)
class Lines:
    """Order lines in the order of the file; strings are codes into vocabularies."""

    ts: I64  # (N,) s
    invoice: I64  # (N,) codes
    item: I64  # (N,) codes
    quantity: I64  # (N,)
    price: F64  # (N,)
    customer: I64  # (N,) customer id, -1 where empty
    country: I64  # (N,) codes
    invoices: list[str]
    items: list[str]
    countries: list[str]

    def __len__(self) -> int:
        return len(self.ts)


@dataclass(frozen=True, slots=True)
class Slice:
    """Events of one day; each stream is newline-delimited JSON in the order of event time."""

    impressions: bytes
    actions: bytes
    requests: int
    shown: int  # items in these requests
    lines: int  # order lines; each yields an action


def read_lines(path: Path) -> Lines:
    """Read the csv, plain or gzipped. Raises BadInput if a column is missing, or not a number."""
    opened = gzip.open if path.suffix == ".gz" else open
    with opened(path, "rt", encoding="utf-8") as file:
        rows = csv.reader(file)
        header = next(rows, [])
        if tuple(header) != COLUMNS:
            raise BadInput(
                f"{path}: expected the columns {', '.join(COLUMNS)}, "
                f"found {', '.join(header) or 'an empty file'}\n"
                f"  convert.py writes {EVENTS_FILE}"
            )
        columns = list(zip(*rows, strict=True))
    try:
        numbers = (
            np.array(columns[0], np.int64),
            np.array(columns[3], np.int64),
            np.array(columns[4], np.float64),
            np.array([c or "-1" for c in columns[5]], np.int64),
        )
    except (ValueError, IndexError) as error:
        raise BadInput(f"{path}: ts, quantity, price and customer_id must be numbers: {error}") from error
    ts, quantity, price, customer = numbers
    invoices, invoice = _codes(columns[1])
    items, item = _codes(columns[2])
    countries, country = _codes(columns[6])
    return Lines(ts, invoice, item, quantity, price, customer, country, invoices, items, countries)


def slices(lines: Lines, seed: int = 0) -> Iterator[Slice]:
    """Yield the stream by days in time order; an action of the next day comes with that day."""
    rng = np.random.default_rng(seed)
    day = lines.ts // DAY_S
    popularity = _Popularity(len(lines.items))
    last_price = np.full(len(lines.items), np.nan)
    last_request: dict[tuple[int, int], str] = {}
    carried: list[tuple[int, bytes]] = []
    edges = np.flatnonzero(np.diff(day, prepend=day[0] - 1, append=day[-1] + 1))
    for start, stop in pairwise(edges):
        today = int(day[start])
        popularity.move_to(today)
        impressions: list[tuple[int, bytes]] = []
        actions = carried
        shown = 0
        for first, last in _invoices(lines, int(start), int(stop)):
            request = _build_request(lines, first, last, rng, popularity, last_price, last_request)
            impressions += request.impressions
            actions += request.actions
            shown += request.shown
        popularity.add(today, lines.item[start:stop][_bought(lines, int(start), int(stop))])
        end_ms = (today + 1) * DAY_S * 1000
        carried = [a for a in actions if a[0] >= end_ms] if stop != len(lines) else []
        ready = [a for a in actions if a[0] < end_ms or stop == len(lines)]
        yield Slice(_ndjson(impressions), _ndjson(ready), len(impressions), shown, int(stop - start))


@dataclass(slots=True)
class _Request:
    impressions: list[tuple[int, bytes]]
    actions: list[tuple[int, bytes]]
    shown: int


def _build_request(
    lines: Lines,
    first: int,
    last: int,
    rng: np.random.Generator,
    popularity: _Popularity,
    last_price: F64,
    last_request: dict[tuple[int, int], str],
) -> _Request:
    """Build the impression of one invoice, and an action for each of its lines."""
    number = lines.invoices[lines.invoice[first]]
    at_ms = int(lines.ts[first]) * 1000 + int(rng.integers(60_000))
    customer = int(lines.customer[first])
    bought = _bought(lines, first, last)
    items, where = np.unique(lines.item[first:last][bought], return_index=True)
    impressions: list[tuple[int, bytes]] = []
    if len(items):
        unbought = popularity.draw(rng, NEGATIVES * len(items), items)
        # The last known price of every item: the price of the purchase itself would reveal the label.
        prices = last_price[items]
        prices = np.where(np.isnan(prices), lines.price[first:last][bought][where], prices)
        slate = np.concatenate([items, unbought])
        shown_prices = np.concatenate([prices, last_price[unbought]])
        order = rng.permutation(len(slate))
        event = {
            "request_id": number,
            "ts": at_ms,
            "customer_id": customer if customer >= 0 else None,
            "country": lines.countries[lines.country[first]],
            "items": [
                {"stock_code": lines.items[i], "price": None if np.isnan(p) else float(p), "pos": n}
                for n, (i, p) in enumerate(zip(slate[order], shown_prices[order], strict=True))
            ],
        }
        impressions.append((at_ms, orjson.dumps(event)))
        last_request.update({(customer, int(i)): number for i in items})
    delays = np.minimum(np.exp(rng.normal(np.log(DELAY_MEDIAN_S), DELAY_SIGMA, last - first)), DELAY_MAX_S)
    actions = []
    for n in range(first, last):
        item = int(lines.item[n])
        cancelled = number.startswith("C")
        kind = "cancel" if cancelled else "buy" if lines.quantity[n] > 0 else "adjust"
        request = last_request.get((customer, item), number) if cancelled else number
        action_ms = at_ms + int(delays[n - first] * 1000)
        action = {
            "event_id": f"{number}-{n}",
            "request_id": request,
            "stock_code": lines.items[item],
            "type": kind,
            "quantity": int(lines.quantity[n]),
            "ts": action_ms,
        }
        actions.append((action_ms, orjson.dumps(action)))
        if lines.price[n] > 0:
            last_price[item] = lines.price[n]
    return _Request(impressions, actions, len(impressions) and len(slate))


class _Popularity:
    """Purchases of each item on the last `POPULARITY_DAYS`, and draws by them."""

    def __init__(self, items: int) -> None:
        self._counts = np.zeros(items, np.int64)
        self._days: list[tuple[int, I64]] = []
        self._seen: I64 = np.empty(0, np.int64)
        self._cumulative: F64 = np.empty(0)

    def move_to(self, day: int) -> None:
        while self._days and self._days[0][0] < day - POPULARITY_DAYS:
            np.subtract.at(self._counts, self._days.pop(0)[1], 1)
        self._seen = np.flatnonzero(self._counts)
        self._cumulative = np.cumsum(self._counts[self._seen], dtype=np.float64)

    def add(self, day: int, items: I64) -> None:
        np.add.at(self._counts, items, 1)
        self._days.append((day, items))

    def draw(self, rng: np.random.Generator, n: int, without: I64) -> I64:
        """Draw `n` different items by popularity, or all there are, except those in `without`."""
        candidates = np.setdiff1d(self._seen, without)
        if n >= len(candidates):
            return candidates
        drawn: dict[int, None] = {}
        excluded = {int(i) for i in without}
        total = self._cumulative[-1]
        for _ in range(8):  # rejection sampling; afterwards one draw from the remaining items
            picks = self._seen[np.searchsorted(self._cumulative, rng.random(2 * n) * total, side="right")]
            for pick in picks.tolist():
                if pick not in excluded and len(drawn) < n:
                    drawn[pick] = None
            if len(drawn) == n:
                return np.fromiter(drawn, np.int64, n)
        rest = np.setdiff1d(candidates, np.fromiter(drawn, np.int64, len(drawn)))
        weights = self._counts[rest] / self._counts[rest].sum()
        more = rng.choice(rest, n - len(drawn), replace=False, p=weights)
        return np.concatenate([np.fromiter(drawn, np.int64, len(drawn)), more])


def _bought(lines: Lines, start: int, stop: int) -> NDArray[np.bool_]:
    cancelled = np.array([lines.invoices[i].startswith("C") for i in lines.invoice[start:stop]])
    bought: NDArray[np.bool_] = (lines.quantity[start:stop] > 0) & ~cancelled
    return bought


def _invoices(lines: Lines, start: int, stop: int) -> Iterator[tuple[int, int]]:
    """Return the ranges of consecutive lines of one invoice, in file order."""
    codes = lines.invoice[start:stop]
    edges = np.flatnonzero(np.diff(codes, prepend=-1, append=-1)) + start
    return pairwise(edges.tolist())


def _codes(values: tuple[str, ...]) -> tuple[list[str], I64]:
    vocabulary: dict[str, int] = {}
    codes = np.fromiter((vocabulary.setdefault(v, len(vocabulary)) for v in values), np.int64, len(values))
    return list(vocabulary), codes


def _ndjson(events: list[tuple[int, bytes]]) -> bytes:
    return b"\n".join(e[1] for e in sorted(events, key=lambda e: e[0]))


def write(folder: Path, seed: int = 0) -> tuple[Path, Path]:
    """Write impressions.jsonl.gz and actions.jsonl.gz into the folder of the csv, and return their paths."""
    paths = folder / "impressions.jsonl.gz", folder / "actions.jsonl.gz"
    with gzip.open(paths[0], "wb") as impressions, gzip.open(paths[1], "wb") as actions:
        for day in slices(read_lines(folder / EVENTS_FILE), seed):
            impressions.write(day.impressions + b"\n")
            actions.write(day.actions + b"\n")
    return paths


def main() -> None:
    """Run the program."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    print("\n".join(map(str, write(options.folder, options.seed))))


if __name__ == "__main__":
    main()
