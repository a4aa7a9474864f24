"""A network of one's own, trained and served: readers click on the topics that they like.

    python examples/custom-model/run.py [--folder RUN] [--requests 300]

Every request orders six headlines; the reader reads all of them and clicks on the topics that they like.
Clicks go through the gateway. The last line shows how often the first headline was clicked, in the orders of
the model and in the random ones among them.
"""

from __future__ import annotations

import argparse
import random
import time
from pathlib import Path

import freshet
from freshet.apps.local import Local

TOPICS = ["politics", "sport", "science", "music", "film", "food"]
SPEC = Path(__file__).with_name("freshet.toml")


def play(system: Local, requests: int) -> dict[str, list[bool]]:
    """Ask, show, click; returns whether the first headline was, in the model's orders and in random ones."""
    rng = random.Random(7)
    likes = {f"reader-{n}": TOPICS[n % len(TOPICS)] for n in range(12)}
    clicks: dict[str, list[bool]] = {"model": [], "random": []}
    for _ in range(requests):
        reader = rng.choice(list(likes))
        headlines = [
            {"article": f"{topic}-{rng.randrange(5)}", "topic": topic, "age_s": rng.random() * 86_400}
            for topic in TOPICS
        ]
        ranking = system.rank({"reader": reader}, headlines)
        shown = [headlines[item.index] for item in ranking.items]
        clicked = [rng.random() < (0.7 if h["topic"] == likes[reader] else 0.03) for h in shown]
        clicks["random" if ranking.explored else "model"].append(clicked[0])
        events = [
            {
                "event_id": f"{ranking.request_id}-{h['article']}",
                "request_id": ranking.request_id,
                "article": h["article"],
                "type": "click",
                "ts": int(time.time() * 1000),
            }
            for h, yes in zip(shown, clicked, strict=True)
            if yes
        ]
        if events:
            system.client.actions(events)
        time.sleep(0.01)  # about as fast as readers come
    return clicks


def main() -> None:
    """Run it, and start it once more from its last version."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", default="freshet-towers", help="run folder; delete it to start over")
    parser.add_argument("--requests", type=int, default=300)
    options = parser.parse_args()
    for turn in ("from nothing", "again, from the last version"):
        with freshet.local(SPEC, folder=options.folder) as system:
            clicks = play(system, options.requests)
        half = len(clicks["model"]) // 2
        first, second, chance = clicks["model"][:half], clicks["model"][half:], clicks["random"]
        rates = [sum(part) / max(len(part), 1) for part in (first, second, chance)]
        print(
            "{}: first headline clicked {:.2f}, then {:.2f}; in random orders {:.2f}".format(turn, *rates),
            flush=True,
        )


if __name__ == "__main__":
    main()
