"""A closed loop in a hundred lines of the Python API: readers with tastes of their own ask for headlines, and
click or do not. `freshet demo` shows more; this one is to read and to change.

    python examples/quickstart/demo.py                 until Ctrl-C; the status is printed every half minute
    python examples/quickstart/demo.py --seconds 60    ends by itself

Every request goes to /v1/rank; the inference server logs what it served, clicks go through the gateway.
Readers like two of ten topics. The click rate of the order that the model chose is printed beside that of the
random orders among the requests (exploration) and the best possible one.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

import freshet
from freshet.apps.local import Local
from freshet.cli.status import as_text

TOPICS = ["politics", "sport", "science", "music", "film", "food", "travel", "tech", "health", "money"]
LIKED, OTHER = 0.5, 0.05  # probability of a click on a liked and on any other headline
CANDIDATES = 10


@dataclass
class World:
    """Readers and articles, and who clicks on what. Seeded: the same readers every time."""

    rng: random.Random = field(default_factory=lambda: random.Random(7))

    def __post_init__(self) -> None:
        self.likes = {f"reader-{n}": set(self.rng.sample(TOPICS, 2)) for n in range(20)}
        self.articles = [(f"article-{n}", self.rng.choice(TOPICS)) for n in range(100)]

    def probability(self, reader: str, topic: str) -> float:
        """How likely this reader clicks on a headline of this topic."""
        return LIKED if topic in self.likes[reader] else OTHER


def main() -> None:
    """Run the loop."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--folder", default="freshet-run", help="run folder; delete it to start over")
    parser.add_argument("--rate", type=float, default=40.0, help="requests a second")
    options = parser.parse_args()
    spec = freshet.Spec.load(Path(__file__).with_name("freshet.toml"))
    print(f"starting gateway, joiner, trainer and inference in {options.folder} ...", flush=True)
    with freshet.local(spec, folder=options.folder) as system:
        print(
            f"ready: gateway :{system.ports['gateway']}, inference :{system.ports['inference']}", flush=True
        )
        with contextlib.suppress(KeyboardInterrupt):
            play(system, World(), options.seconds, options.rate)
        print(as_text(system.status()), flush=True)


def play(system: Local, world: World, seconds: float, rate: float) -> None:
    """Serve readers, click as they would, and say now and then how it goes."""
    began = time.monotonic()
    clicks: dict[str, deque[float]] = {who: deque(maxlen=1000) for who in ("model", "random", "best")}
    told = 0
    sent = 0
    while (now := time.monotonic() - began) < seconds:
        serve_one(system, world, clicks)
        sent += 1
        if now // 10 > told:
            told = int(now // 10)
            rates = ", ".join(f"{who} {sum(c) / len(c):.3f}" for who, c in clicks.items() if c)
            print(f"{now:4.0f} s  clicks per request: {rates}", flush=True)
            if told % 3 == 0:
                print(as_text(system.status()), flush=True)
        time.sleep(max(0.0, began + sent / rate - time.monotonic()))


def serve_one(system: Local, world: World, clicks: dict[str, deque[float]]) -> None:
    """One request: of ten headlines show the best one; the reader clicks or not."""
    rng = world.rng
    reader = rng.choice(list(world.likes))
    offered = rng.sample(world.articles, CANDIDATES)
    candidates = [{"article": a, "topic": t, "age_s": rng.random() * 86_400} for a, t in offered]
    ranking = system.client.rank({"reader": reader}, candidates, k=1)
    first = ranking.items[0].index
    article, topic = offered[first]
    clicked = rng.random() < world.probability(reader, topic)
    clicks["random" if ranking.explored else "model"].append(float(clicked))
    clicks["best"].append(max(world.probability(reader, t) for _, t in offered))
    if clicked:
        system.client.actions(
            {
                "event_id": f"click-{ranking.request_id}",
                "request_id": ranking.request_id,
                "article": article,
                "type": "click",
                "ts": int(time.time() * 1000),
            }
        )


if __name__ == "__main__":
    main()
