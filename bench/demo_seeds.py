"""How well the demo learns: the real system and the real simulator, one seed after the other.

    python -m bench.demo_seeds --seeds 1 2 3 4 5 --minutes 5

Prints the figures of each seed, then one JSON object. Click rates are expected clicks, by the simulator's
truth, of the orders that were shown: the click rate without its noise ("clicks" has the clicks themselves,
over the whole run). AUC is the trainer's own, on the random slates, of the predictions at serving: "whole"
over everything, with the first half minute, in which early positives make a model look bad and popularity
good; and the mean of its windows after the first minute, weighted by their clicks.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from math import nan
from pathlib import Path
from typing import Any

import freshet
from freshet.adapters import open_eventlog
from freshet.apps.local import Local
from freshet.config.settings import RunFolder
from freshet.demo import write_spec
from freshet.log import EventLog
from freshet.process.ports import lease_ports
from freshet.terminal import table
from freshet.types import TopicPartition

LOOK_S = 5.0
LAST_CLICKS_S = 14.0  # a window is reported 8 s after its end
WINDOW_S = 5.0  # of the simulator's figures; their seconds are not those of the drift
RECENT_S = 15.0  # how many seconds a click rate is the mean of
DRIFT_S = 150.0
SETTLED_MS = 60_000
AUC_OF = ("random", "popularity")

Windows = Mapping[int, Mapping[str, Any]]
"""The simulator's windows by the second at which they began, from the start of the simulation."""


def status_of(port: int) -> dict[str, Any]:
    """Return the `/status` of a service."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/status", timeout=5) as answer:
        found: dict[str, Any] = json.load(answer)
        return found


def simulator_status(port: int) -> dict[str, Any] | None:
    """Return the simulator's status; None before it has begun."""
    try:
        found = status_of(port)
    except OSError:
        return None
    return found if found["began_ms"] is not None else None


def rates(windows: Windows, start_s: float, stop_s: float, what: str = "expected") -> dict[str, float]:
    """Return clicks per item shown, by kind of slate, in the windows within [start_s, stop_s)."""
    chosen = [w for second, w in windows.items() if start_s <= second <= stop_s - WINDOW_S]

    def rate(kind: str) -> float:
        key = "clicks" if kind == "best" else what
        shown = sum(w[kind]["impressions"] for w in chosen)
        return sum(w[kind][key] for w in chosen) / shown if shown else float("nan")

    return {kind: rate(kind) for kind in ("model", "random", "best")}


def figures(windows: Windows, drift_s: float, end_s: float) -> dict[str, Any]:
    """Return the figures of a run: how soon the model beats random slates, and how it follows the drift."""
    starts = range(0, int(end_s - RECENT_S) + 1, 5)
    recent = {s + RECENT_S: rates(windows, s, s + RECENT_S) for s in starts}
    twice = next((at for at, r in recent.items() if r["model"] >= 2 * r["random"]), None)
    before = rates(windows, drift_s - 30, drift_s)
    after = rates(windows, drift_s + 45, drift_s + 60)
    end, whole = rates(windows, end_s - 60, end_s), rates(windows, 0, end_s, "clicks")

    def lead(r: Mapping[str, float]) -> float:
        return r["model"] - r["random"]

    def possible(r: Mapping[str, float]) -> float:
        return lead(r) / (r["best"] - r["random"])

    return {
        "twice after s": twice,
        "x random at 120 s": recent[120.0]["model"] / recent[120.0]["random"] if 120.0 in recent else None,
        "of best before drift": before["model"] / before["best"],
        "of best, last minute": end["model"] / end["best"],
        "lead recovered in 60 s": lead(after) / lead(before),
        "of possible lead recovered": possible(after) / possible(before),
        "clicks": whole,
        "by 15 s, of best": [round(recent[a]["model"] / recent[a]["best"], 3) for a in recent if a % 15 == 0],
    }


def play(seed: int, minutes: float, rate: float) -> dict[str, Any]:
    """Run all processes for one seed."""
    with tempfile.TemporaryDirectory(prefix="freshet-seeds-") as temporary:
        spec = write_spec(Path(temporary) / "spec")
        with freshet.local(spec, folder=Path(temporary) / "run") as system:
            return watch(system, seed, minutes, rate)


def watch(system: Local, seed: int, minutes: float, rate: float) -> dict[str, Any]:
    """Run the simulator beside a system, and collect its figures and the trainer's."""
    port = lease_ports(1)[0]
    environment = {
        **os.environ,
        "FRESHET_GATEWAY_PORT": str(system.ports["gateway"]),
        "FRESHET_INFERENCE_PORT": str(system.ports["inference"]),
        "FRESHET_SIMULATOR_ADMIN_PORT": str(port),
    }
    words = ["simulate", "--folder", str(system.folder), "--seed", str(seed), "--rate", str(rate)]
    words += ["--drift-at", f"{DRIFT_S:g}s", "--drift-every", "none"]
    simulator = subprocess.Popen([sys.executable, "-m", "freshet.cli", *words], env=environment)
    windows: dict[int, Mapping[str, Any]] = {}
    pause, status = threading.Event(), dict[str, Any]()
    end_s = minutes * 60 + LAST_CLICKS_S
    try:
        while not status or time.time() < status["began_ms"] / 1_000 + end_s:
            pause.wait(LOOK_S)
            if simulator.poll() is not None:
                raise SystemExit(f"the simulator ended with {simulator.returncode}")
            status = simulator_status(port) or status
            for window in status.get("windows", ()):
                windows[round((window["start_ms"] - status["began_ms"]) / 1_000)] = window
        measures = status_of(system.ports["trainer"])["measures"]
        log = open_eventlog(f"sqlite:{RunFolder(system.folder).log}")
        settled = settled_auc(records(log, "demo.measures"), status["began_ms"] + SETTLED_MS)
        verdicts = Counter(r["verdict"] for r in records(log, "demo.versions") if r["kind"] == "verdict")
        log.close()
    finally:
        simulator.terminate()
        simulator.wait(30)
    whole = {f"{of} whole": measures.get(of, {}).get("click", {}).get("auc") for of in AUC_OF}
    auc = settled | whole
    kept: dict[str, Any] = {"versions held": verdicts["held"]}
    kept |= {k: status[k] for k in ("events", "measured_rate", "errors", "abandoned", "actions")}
    return {"seed": seed, **figures(windows, DRIFT_S, minutes * 60), "auc": auc, **kept}


def settled_auc(found: Iterable[Mapping[str, Any]], from_ms: int) -> dict[str, float]:
    """Return the AUC of clicks on the random slates, over the windows from a time on."""
    auc = {}
    for of in AUC_OF:
        windows = [
            w["measures"]
            for w in found
            if w["kind"] == "window"
            and (w["of"], w["label"], w["segment"]) == (of, "click", None)
            and w["start_ms"] >= from_ms
            and w["measures"].get("auc") is not None
        ]
        clicks = [w["n"] * w["mean_label"] for w in windows]
        total = sum(clicks)
        auc[of] = sum(c * w["auc"] for c, w in zip(clicks, windows, strict=True)) / total if total else nan
    return auc


def records(log: EventLog, topic: str) -> list[dict[str, Any]]:
    """Return the records of a topic of one partition."""
    at = TopicPartition(topic, 0)
    bounds, reader, found = log.bounds(at), log.reader(), list[dict[str, Any]]()
    reader.assign({at: bounds.start})
    position = bounds.start
    while position < bounds.end:
        for _, polled in reader.poll(10_000, 1.0):
            found += [json.loads(value) for value in polled.values]
            position = polled.next_offset
    reader.close()
    return found


def main(words: Sequence[str] | None = None) -> None:
    """Run the seeds and print their figures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4, 5])
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--rate", type=float, default=1_000.0)
    options = parser.parse_args(words)
    found = []
    for seed in options.seeds:
        found.append(play(seed, options.minutes, options.rate))
        print(json.dumps(found[-1]), flush=True)
    names = [n for n, v in found[0].items() if isinstance(v, float | int)]
    rows = [[f["seed"], *(f[n] for n in names if n != "seed"), *f["auc"].values()] for f in found]
    print(table(["seed", *(n for n in names if n != "seed"), *(f"AUC {of}" for of in found[0]["auc"])], rows))
    print(json.dumps({"minutes": options.minutes, "rate": options.rate, "seeds": found}))


if __name__ == "__main__":
    main()
