"""Your own transform in the loop: articles are always new, only their first click rate distinguishes them.

    python examples/custom-transform/run.py [--folder RUN] [--requests 300]

Every request orders six articles; visitors click on each at its own rate. The last line shows how often the
first article was clicked, in the orders of the model and in the random ones among them.
"""

from __future__ import annotations

import argparse
import random
import time
from pathlib import Path

import freshet
from freshet.apps.local import Local

SPEC = Path(__file__).with_name("freshet.toml")


def play(system: Local, requests: int) -> dict[str, list[bool]]:
    """Rank, show, click; returns clicks on the first article, in the model's and in random orders."""
    rng = random.Random(7)
    clicks: dict[str, list[bool]] = {"model": [], "random": []}
    for n in range(requests):
        rates = [10 ** rng.uniform(-2.5, -0.2) for _ in range(6)]
        offers = [
            {"article": f"{n}-{i}", "ctr": None if rng.random() < 0.1 else rate}  # some have no hour yet
            for i, rate in enumerate(rates)
        ]
        ranking = system.rank({"visitor": f"visitor-{n % 20}"}, offers)
        clicked = [rng.random() < rates[item.index] for item in ranking.items]
        clicks["random" if ranking.explored else "model"].append(clicked[0])
        events = [
            {
                "event_id": f"{ranking.request_id}-{item.index}",
                "request_id": ranking.request_id,
                "article": offers[item.index]["article"],
                "type": "click",
                "ts": int(time.time() * 1000),
            }
            for item, yes in zip(ranking.items, clicked, strict=True)
            if yes
        ]
        if events:
            system.client.actions(events)
        time.sleep(0.01)  # about as fast as visitors come
    return clicks


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", default="freshet-offers", help="run folder; delete it to start over")
    parser.add_argument("--requests", type=int, default=300)
    options = parser.parse_args()
    with freshet.local(SPEC, folder=options.folder) as system:
        clicks = play(system, options.requests)
    half = len(clicks["model"]) // 2
    first, second, chance = clicks["model"][:half], clicks["model"][half:], clicks["random"]
    rates = [sum(part) / max(len(part), 1) for part in (first, second, chance)]
    print("first offer clicked {:.2f}, then {:.2f}; in random orders {:.2f}".format(*rates))


if __name__ == "__main__":
    main()
