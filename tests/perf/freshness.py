"""From a click to the score that has learned from it, through all four processes.

    python -m tests.perf.freshness [--clicks 200] [--rate 500] [--quick] [--json]

Bound by the waits that services choose, for batches of work to share a commit, and by the fsyncs. Budget: p50
<= 300 ms, p99 <= 1 s at 500 background events a second. A click is measured from its 202 until `/v1/rank`
scores its reader and article differently; both are touched by nobody else, and no dense version is written
meanwhile, so only the rows can have changed.
"""

from __future__ import annotations

import random
import threading
import time
import uuid
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from freshet.cli.local import Local, local
from freshet.client import Client
from freshet.joiner.plan import RAMP
from freshet.spec import Spec, load_spec
from freshet.spec.model import Explore
from tests.perf.report import Figures, command

WINDOW_MS, GRACE_MS = 2_000, 1_000
QUICKSTART = Path(__file__).parents[2] / "examples" / "quickstart" / "freshet.toml"
NEVER_MS = 24 * 3_600_000
RAMPED_S = RAMP * (WINDOW_MS + GRACE_MS) / 1e3 + 1
"""From then on clicks are learned from at once: early emission has begun in all partitions (ADR 0011)."""
GIVE_UP_S = 30.0
PAGE_ITEMS, CLICKS_SHARE = 4, 0.3  # of the background: items of a page, share of events that are clicks


def spec_of_rows_only() -> Spec:
    """The quickstart's, with windows of seconds, all events through the gateway and no new dense versions."""
    spec = load_spec(QUICKSTART)
    return replace(
        spec,
        join=replace(spec.join, grace_ms=GRACE_MS),
        labels=tuple(replace(label, window_ms=WINDOW_MS) for label in spec.labels),
        train=replace(spec.train, version_interval_ms=NEVER_MS),
        serve=replace(spec.serve, log_served=False, explore=Explore()),
    )


@dataclass
class Background:
    """Pages and clicks of others, so many events a second, ten requests a second."""

    system: Local
    events_per_s: float
    sent: int = 0
    _stop: threading.Event = field(default_factory=threading.Event)

    def __enter__(self) -> Background:
        self._thread = threading.Thread(target=self._work)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _work(self) -> None:
        rng = random.Random(1)
        client = Client(gateway=f"http://127.0.0.1:{self.system.ports['gateway']}")
        began = time.monotonic()
        round_ = 0
        while not self._stop.wait(max(0.0, began + round_ / 10 - time.monotonic())):
            round_ += 1
            many = int(self.events_per_s / 10)
            clicks = int(many * CLICKS_SHARE)
            pages = [
                _page(f"b{round_}-{i}", f"reader-{rng.randrange(5_000)}", rng) for i in range(many - clicks)
            ]
            if pages:
                client.impressions(pages)
            if clicks:
                client.actions([_click(rng.choice(pages)) for _ in range(clicks)])
            self.sent += many
        client.close()


def delays(system: Local, clicks: int) -> list[float]:
    """Seconds from each click's 202 to the first answer with another score."""
    inference = f"http://127.0.0.1:{system.ports['inference']}"
    return [_one(system, inference, uuid.uuid4().hex) for _ in range(clicks)]


def _one(system: Local, inference: str, name: str) -> float:
    item = {"article": f"article-{name}", "topic": f"topic-{name}", "age_s": 60.0}
    page = {"request_id": f"f-{name}", "ts": _now_ms(), "reader": f"fresh-{name}", "items": [item]}
    asked = {"context": {"reader": page["reader"]}, "candidates": [item]}
    system.client.impressions(page)
    with httpx.Client(timeout=10) as client:

        def score() -> float:
            answer = client.post(f"{inference}/v1/rank", json=asked)
            answer.raise_for_status()
            return float(answer.json()["items"][0]["score"])

        before = score()
        system.client.actions(_click(page))
        acknowledged = time.monotonic()
        while score() == before:
            if time.monotonic() - acknowledged > GIVE_UP_S:
                raise TimeoutError(f"the score of {name} has not changed {GIVE_UP_S:g} s after its click")
        return time.monotonic() - acknowledged


def _page(request: str, reader: str, rng: random.Random) -> dict[str, Any]:
    items = [
        {"article": f"article-{n}", "topic": f"topic-{n % 50}", "age_s": float(n)}
        for n in rng.sample(range(2_000), PAGE_ITEMS)
    ]
    return {"request_id": request, "ts": _now_ms(), "reader": reader, "items": items}


def _click(page: dict[str, Any]) -> dict[str, Any]:
    request, article = page["request_id"], page["items"][0]["article"]
    event = f"{request}/{article}"
    return {"event_id": event, "request_id": request, "article": article, "type": "click", "ts": _now_ms()}


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


def measure(quick: bool = False, clicks: int | None = None, rate: float = 500.0) -> Figures:
    """Percentiles of the delay of `clicks` clicks beside `rate` other events a second."""
    clicks = clicks or (40 if quick else 200)
    with local(spec_of_rows_only()) as system:
        delays(system, 5)  # first requests open connections and compile schemas
        with Background(system, rate) as background:
            time.sleep(RAMPED_S)
            began, background.sent = time.monotonic(), 0
            seconds = np.array(delays(system, clicks)) * 1e3
            reached = background.sent / (time.monotonic() - began)
    p50, p99 = np.percentile(seconds, [50, 99])
    return {
        "clicks": clicks,
        "background_events_per_s": reached,
        "p50_ms": float(p50),
        "p99_ms": float(p99),
        "max_ms": float(seconds.max()),
    }


def main() -> None:
    """Measure and print."""
    command(measure, __doc__, {"clicks": int, "rate": float})


if __name__ == "__main__":
    main()
