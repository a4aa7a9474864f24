"""From a click to the score that has learned from it, through all four processes, beside other events.

    python -m bench.freshness [--clicks 200] [--rate 5000] [--quick] [--json]

Bound by the waits that services choose, for work to share a commit, and by the fsyncs; near saturation, by
the processor. Budget: p50 <= 300 ms, p99 <= 1 s at 5,000 other events a second, which `bench.load` sends: a
page of four articles is an event, so that 14,000 impressions a second are joined and trained on. A click is
measured from the moment it is sent until `/v1/rank`, requested every 5 ms, scores its reader and article
differently. No other event has this reader or article, and no dense version is written meanwhile, so only the
rows can have changed. The waterfall shows when the click had reached each stage, from the moment it was sent,
as the console's tracer sees it every 15 ms: logged (its 202), joined, trained, published, and served (the
score).
"""

from __future__ import annotations

import json
import threading
import time
import uuid
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

import httpx
import numpy as np

from bench.load import Background, click, page
from bench.report import Figures, command
from freshet.adapters import open_eventlog
from freshet.apps.local import Local, local
from freshet.clock import SYSTEM_CLOCK
from freshet.config.spec import Spec, load_spec
from freshet.config.spec.model import Explore
from freshet.config.spec.topics import topics_of
from freshet.console.instances import Instance
from freshet.console.traces import STAGES, Trace, Tracer
from freshet.http.addresses import Address
from freshet.joiner.plan import RAMP

WINDOW_MS, GRACE_MS = 1_000, 500
QUICKSTART = Path(__file__).parents[1] / "examples" / "quickstart" / "freshet.toml"
NEVER_MS = 24 * 3_600_000
WARMED_UP_S = RAMP * (WINDOW_MS + GRACE_MS) / 1e3 + 1
"""After this time clicks are learned from at once: the label-delay warm-up is over (ADR 0011)."""
GIVE_UP_S = 30.0
POLL_S = 0.005


def spec_of_rows_only() -> Spec:
    """Return the quickstart's spec with windows of seconds, no served log and no new dense versions."""
    spec = load_spec(QUICKSTART)
    return replace(
        spec,
        join=replace(spec.join, grace_ms=GRACE_MS),
        labels=tuple(replace(label, window_ms=WINDOW_MS) for label in spec.labels),
        train=replace(spec.train, version_interval_ms=NEVER_MS),
        serve=replace(spec.serve, log_served=False, explore=Explore()),
    )


@dataclass(frozen=True, slots=True)
class Click:
    """The delays of one click, in seconds from when it was sent."""

    served_s: float
    stages_s: Mapping[str, float]  # "logged", "joined", "trained", "published"


class Clicks:
    """Clicks of new readers, one after the other."""

    def __init__(self, system: Local) -> None:
        self._system = system
        self._http = httpx.Client(timeout=10)
        self._log = open_eventlog(f"sqlite:{system.folder / 'log'}")
        spec = spec_of_rows_only()
        self._tracer = Tracer(spec, topics_of(spec), self._log, self._instances, SYSTEM_CLOCK, 0.0)

    def __enter__(self) -> Clicks:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()
        self._tracer.close()
        self._log.close()

    def _instances(self, role: str) -> list[Instance]:
        port = self._system.ports.get(role)
        return [Instance(role, role, Address("127.0.0.1", port))] if port else []

    def one(self) -> Click:
        """Show a page, click on it, wait for the score. Raises TimeoutError if it never changes."""
        name = uuid.uuid4().hex
        item = {"article": f"article-{name}", "topic": f"topic-{name}", "age_s": 60.0}
        shown = {**page(f"f-{name}", f"fresh-{name}", [], _now_ms()), "items": [item]}
        body = json.dumps({"context": {"reader": shown["reader"]}, "candidates": [item]}).encode()
        self._send("impressions", shown)
        before, ends = self._score(body), self._tracer.commit_ends()
        sent, sent_ms = time.monotonic(), _now_ms()
        ack = self._send("actions", click(shown, sent_ms))["acks"][0]
        trace = Trace("action", ack["partition"], ack["offset"], sent_ms)
        trace.logged(_now_ms())
        stop = threading.Event()
        with closing(self._tracer.commits_from(ack["partition"], ends[ack["partition"]])) as commits:
            follower = threading.Thread(target=self._tracer.follow, args=(trace, commits, stop))
            follower.start()
            try:
                while self._score(body) == before:
                    if time.monotonic() - sent > GIVE_UP_S:
                        raise TimeoutError(
                            f"the score has not changed {GIVE_UP_S:g} s after the click; "
                            f"it was last {', '.join(trace.stages)}"
                        )
                    time.sleep(POLL_S)
                served_s = time.monotonic() - sent
            finally:
                stop.set()
                follower.join()
        # A stage that was not seen before the score changed had been reached by then.
        stages = {s: min(trace.stages.get(s, np.inf) / 1e3, served_s) for s in STAGES if s != "served"}
        return Click(served_s, stages)

    def _send(self, what: str, event: Mapping[str, object]) -> Figures:
        url = f"http://127.0.0.1:{self._system.ports['gateway']}/v1/{what}"
        answer = self._http.post(url, content=json.dumps(event), headers={"content-type": "application/json"})
        answer.raise_for_status()
        body: Figures = answer.json()
        return body

    def _score(self, body: bytes) -> float:
        url = f"http://127.0.0.1:{self._system.ports['inference']}/v1/rank"
        answer = self._http.post(url, content=body, headers={"content-type": "application/json"})
        answer.raise_for_status()
        return float(answer.json()["items"][0]["score"])


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


def waterfall(clicks: Sequence[Click]) -> Figures:
    """Return percentiles of the delay until each stage, in milliseconds."""
    figures: Figures = {}
    for stage in STAGES:
        times = [c.served_s if stage == "served" else c.stages_s[stage] for c in clicks]
        p50, p99 = np.percentile(times, [50, 99]) * 1e3
        figures[stage] = {"p50_ms": float(p50), "p99_ms": float(p99)}
    return figures


def measure(quick: bool = False, clicks: int | None = None, rate: float = 5_000.0) -> Figures:
    """Measure the delay of `clicks` clicks beside `rate` other events a second."""
    clicks = clicks or (40 if quick else 200)
    with local(spec_of_rows_only()) as system, Clicks(system) as probe:
        for _ in range(5):  # first requests open connections and compile schemas
            probe.one()
        with Background(system.ports["gateway"], rate) as background:
            time.sleep(WARMED_UP_S)
            background.begin()
            done = [probe.one() for _ in range(clicks)]
            load = background.figures()
    stages = waterfall(done)
    return {
        "clicks": clicks,
        "background": load,
        **stages["served"],
        "max_ms": max(c.served_s for c in done) * 1e3,
        "waterfall": stages,
    }


if __name__ == "__main__":
    command(measure, __doc__)
