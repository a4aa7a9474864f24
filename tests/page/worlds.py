"""States of a scripted console: a loop that learns, a system without data, and hostile data."""

from __future__ import annotations

import math
import random
import time
from typing import Any

STEP_MS = 5_000
FOLDER = "/home/ada/freshet-demo"  # of an invented user
SERVICES = ("gateway", "joiner", "trainer", "inference", "simulator", "console")
HOSTILE = '<img src=x onerror="window.pwned=1"><script>window.pwned=1</script>"\'`${window.pwned=1}'


def learning(minutes: int = 20) -> dict[str, Any]:
    """A demo that has run for some minutes, with a drift, a held version and dead letters."""
    now = int(time.time() * 1000)
    start = now - minutes * 60_000
    drift = now - 170_000
    times = list(range(start + STEP_MS, now - 12_000, STEP_MS))
    return {
        "state": learning_state(now, drift),
        "history": lambda span_s: learning_history([t for t in times if t > now - span_s * 1000], drift, now),
        "requests": [request(i) for i in range(5)],
        "ranking": ranking(),
    }


def learning_history(times: list[int], drift: int, now: int) -> dict[str, Any]:
    """Answer of /api/history for these times."""
    return {
        "next": 1_000_000,
        "vitals": [vitals(t) for t in times],
        "clicks": [clicks(t, drift) for t in times],
        "windows": [
            window(of, t) for t in times[::2] for of in ("training", "served", "random", "popularity")
        ],
        "drifts": [{"time_ms": drift, "what": "the tastes of half the users were drawn anew"}],
        "versions": [{"time_ms": now - 64_000, "number": 141, "what": "held", "reason": "calibration 1.31"}],
    }


def learned(time_ms: int, drift: int) -> float:
    """How much of the best order the model has, 0 to 1, at a time."""
    since = (time_ms - drift) / 1000
    return 0.93 - (0.4 * math.exp(-since / 15) if since > 0 else 0.02)


def clicks(stop_ms: int, drift: int = 0) -> dict[str, Any]:
    """One window of the simulator."""
    rng = random.Random(stop_ms)
    model = 0.05 + 0.13 * learned(stop_ms, drift)

    def part(rate: float, shown: int) -> dict[str, Any]:
        return {"impressions": shown, "clicks": round(shown * rate + rng.gauss(0, math.sqrt(shown * rate)))}

    shown = {
        "model": part(model, 4000),
        "random": part(0.051, 450),
        "best": {"impressions": 4000, "clicks": 720.5},
    }
    return {"v": 1, "kind": "clicks", "start_ms": stop_ms - STEP_MS, "stop_ms": stop_ms, **shown}


def vitals(time_ms: int) -> dict[str, Any]:
    """The console's own record of every five seconds."""
    rng = random.Random(time_ms)
    served = 620 + rng.gauss(0, 60)
    return {
        "v": 1,
        "kind": "vitals",
        "time_ms": time_ms,
        "rates": {"client>gateway": 1000},
        "lag": {},
        "freshness_ms": round(780 + rng.gauss(0, 90)),
        "trace": {"logged": 4, "joined": 210, "trained": 380, "published": 470, "served": round(served)},
        "memory_mb": dict.fromkeys(SERVICES, 60.0),
        "rows": {"user": 500, "item": 2000},
        "rows_bytes": 2_100_000,
        "version": 142,
    }


def window(of: str, stop_ms: int, *, start_ms: int | None = None) -> dict[str, Any]:
    """One window's measures."""
    rng = random.Random(f"{of} {stop_ms}")
    auc = {"training": 0.742, "served": 0.71, "random": 0.726, "popularity": 0.611}[of]
    return {
        "v": 1,
        "kind": "window",
        "of": of,
        "start_ms": stop_ms - 2 * STEP_MS if start_ms is None else start_ms,
        "stop_ms": stop_ms,
        "label": "click",
        "segment": None,
        "value": None,
        "measures": {
            "n": 900 if of in {"random", "popularity"} else 9000,
            "auc": auc + rng.gauss(0, 0.009),
            "ne": 1.45 - 0.8 * auc + rng.gauss(0, 0.008),
            "calibration": 1.02 + rng.gauss(0, 0.05),
            "mean_label": 0.16,
        },
    }


def learning_state(now: int, drift: int) -> dict[str, Any]:
    """Answer of /api/state."""
    totals = {
        "random": {"n": 41_200, "auc": 0.727, "ne": 0.871, "calibration": 1.02},
        "popularity": {"n": 41_200, "auc": 0.612, "ne": 0.961, "calibration": 1.0},
        "served": {"n": 412_000, "auc": 0.708, "ne": 0.893, "calibration": 1.03},
        "training": {"n": 412_000, "auc": 0.741, "ne": 0.862, "calibration": 1.01},
    }
    return {
        "v": 1,
        "now_ms": now,
        "model": "demo",
        "freshet": "0.1.0",
        "folder": FOLDER,
        "token_file": f"{FOLDER}/state/console.token",
        "health": "good",
        "notes": [],
        "services": [service(i, name) for i, name in enumerate(SERVICES)],
        "roles": [role(name) for name in SERVICES],
        "edges": edges(),
        "freshness_ms": 742,
        "trace": {"at_ms": now - 2_000, "n": 20, "stages": stages()},
        "asking": {"scheme": "http", "token": False, "certificate": False},
        "quality": {
            "labels": [label("click"), label("purchase")],
            "totals": {of: {"click": m} for of, m in totals.items()},
            "open": [window(of, now + 6_000, start_ms=now - 14_000) for of in totals],
            "reliability": {"click": reliability()},
        },
        "segments": segments(),
        "tables": [
            {"table": "user", "rows": 500, "bytes": 412_000, "evicted": 0},
            {"table": "item", "rows": 2_014, "bytes": 1_640_000, "evicted": 12},
        ],
        "rows_bytes": 2_052_000,
        "wires": [
            {
                "wire": "batch",
                "tables": "user,item",
                "codec": "uint8",
                "rows": 90_000,
                "bytes_raw": 6_480_000,
                "bytes_wire": 2_160_000,
                "error": 0.0041,
                "codec_s": 0.0135,
            }
        ],
        "links": [
            {
                "service": "trainer",
                "address": "10.0.0.7:7103",
                "carries": "rows",
                "codec": "int8",
                "why": "busy 4.1% of the time at 11.8 MB/s, in fp32 14%",
            }
        ],
        "versions": {"serving": 142, "aliases": {"stable": 142}, "pinned": False, "list": versions(now)},
        "dead_letters": {"refused": 1, "joiner": 1, "newest": letters(now)},
        "losses": [
            {"figure": "unmatched", "lost": 3, "of": 50},
            {"figure": "late_impressions", "lost": 0, "of": 400},
        ],
        "simulator": {"rate": 1000, "seed": 7, "drifts": [{"time_ms": drift, "what": "half the users"}]},
    }


def label(name: str, kind: str = "truth", given: str | None = None) -> dict[str, Any]:
    """One label as the state names it."""
    return {"name": name, "kind": kind, "given": given}


def one_label(of: dict[str, Any], mean: float) -> dict[str, Any]:
    """A loop of readers that are not simulated, with this one label and its mean."""
    world = learning()
    past = world["history"]

    def renamed(w: dict[str, Any]) -> dict[str, Any]:
        return {**w, "label": of["name"], "measures": {**w["measures"], "mean_label": mean}}

    world["state"] |= {"simulator": None, "segments": []}
    world["state"]["quality"] = {"labels": [of], "totals": {}, "open": [], "reliability": {}}
    world["history"] = lambda span_s: (
        (found := past(span_s)) | {"clicks": [], "windows": [renamed(w) for w in found["windows"]]}
    )
    return world


def service(i: int, name: str) -> dict[str, Any]:
    """One supervised process."""
    killed = name == "trainer"
    return {
        "name": name,
        "role": name,
        "state": "ready",
        "reason": None,
        "host": None,
        "port": [7000, 7010, 7011, 7001, 7012, 7002][i],
        "pid": 4100 + i,
        "up_s": 84 if killed else 1_210,
        "restarts": 1 if killed else 0,
        "last_exit": "killed by SIGKILL 86 s ago" if killed else None,
        "memory_mb": 57.3 + 3 * i,
    }


def role(name: str, ready: int = 1, of: int = 1) -> dict[str, Any]:
    """All instances of a role; if some are not ready, they do not answer."""
    state = "ready" if ready == of else "degraded" if ready else "down"
    return {"role": name, "state": state, "ready": ready, "of": of, "memory_mb": 61.2 * ready}


FLEET = {"gateway": 2, "joiner": 2, "embedder": 2, "paramserver": 2, "trainer": 2, "inference": 2}
AWAY = ("gateway-1", "inference-0")


def fleet() -> dict[str, Any]:
    """Two of each role on machines of their own; a gateway and a replica of inference do not answer."""
    world = learning()
    services = [instance(name, i) for name, count in FLEET.items() for i in range(count)]
    world["state"] |= {
        "health": "degraded",
        "notes": [f"{s['name']}: {s['reason']}" for s in services if s["reason"]],
        "services": services,
        "roles": [role(name, 2 - sum(a.startswith(name) for a in AWAY), 2) for name in FLEET],
        "simulator": None,
    }
    return world


def instance(name: str, i: int) -> dict[str, Any]:
    """One of several processes, on a machine of its own."""
    host, port = f"{name}-{i}.{name}.news.svc.cluster.local", 7000 + 10 * list(FLEET).index(name)
    away = f"{name}-{i}" in AWAY
    return {
        **service(0, name),
        "name": f"{name}-{i}",
        "state": "down" if away else "ready",
        "reason": f"nothing answers at {host}:{port}: [Errno 111] Connection refused" if away else "",
        "host": host,
        "port": port,
        "pid": None,
        "last_exit": "",
        "memory_mb": None if away else 61.2,
    }


def edges() -> list[dict[str, Any]]:
    """The pipeline's edges; one of them is behind."""
    rows: list[tuple[str, str, str, float, str, int | None, str | None, str]] = [
        ("client", "gateway", "events", 1012.4, "events/s", None, None, "ok"),
        ("gateway", "joiner", "events", 1012.4, "events/s", 14, "records", "ok"),
        ("joiner", "trainer", "samples", 941.0, "samples/s", 3, "blocks", "ok"),
        ("trainer", "inference", "rows", 1630.2, "rows/s", 1204, "records", "warn"),
        ("inference", "joiner", "what was served", 880.0, "served/s", None, None, "ok"),
        ("inference", "client", "rankings", 88.0, "requests/s", None, None, "ok"),
    ]
    names = ("from", "to", "what", "rate", "unit", "lag", "lag_unit", "level")
    return [dict(zip(names, row, strict=True)) for row in rows]


def stages() -> list[dict[str, Any]]:
    """Median and 90th percentile of when an action reached each stage."""
    rows = (
        ("logged", 4, 9),
        ("joined", 212, 260),
        ("trained", 388, 470),
        ("published", 471, 560),
        ("served", 624, 790),
    )
    return [{"stage": stage, "ms": ms, "p90": p90} for stage, ms, p90 in rows]


def reliability() -> list[list[float]]:
    """[n, mean predicted, mean label] of each bin."""
    rng = random.Random(5)
    bins = []
    for i in range(12):
        p = 1 / (1 + math.exp(3.6 - 0.36 * i))
        n = round(9000 * math.exp(-((i - 5) ** 2) / 9)) + 40
        bins.append([n, p, min(1.0, max(0.0, p * 0.96 + rng.gauss(0, math.sqrt(p / n))))])
    return bins


def segments() -> list[dict[str, Any]]:
    """Changes in NE: better, worse, unclear."""
    rows = (
        ("country", "DE", 9_120, -0.021, 0.006),
        ("country", "FR", 4_310, 0.014, 0.009),
        ("country", "IT", 2_004, -0.004, 0.013),
        ("device", "phone", 12_800, -0.012, 0.004),
        ("device", "desktop", 3_500, 0.024, 0.011),
    )
    return [
        {
            "segment": s,
            "value": f"{i:016x}",
            "text": v,
            "label": "click",
            "n": n,
            "ne": 0.87,
            "change": c,
            "low": c - e,
            "high": c + e,
        }
        for i, (s, v, n, c, e) in enumerate(rows)
    ]


def versions(now: int) -> list[dict[str, Any]]:
    """Newest first: one serves, one was held."""
    held = "calibration 1.31 on the last 20,000 samples; at most 1.20 is let through"
    return [
        {
            "number": 143 - i,
            "created_ms": now - (4_000 + i * 30_000),
            "step": 81_200 - 500 * i,
            "verdict": "held" if i == 2 else "promoted",
            "reason": held if i == 2 else None,
            "aliases": {0: ["latest"], 1: ["stable"]}.get(i, []),
            "measures": {"training": {"click": version_measures(i)}},
        }
        for i in range(8)
    ]


def version_measures(i: int) -> dict[str, float]:
    """Return the measures of the i-th newest version."""
    return {"auc": 0.741 - 0.002 * i, "ne": 0.862 + 0.001 * i, "calibration": 1.31 if i == 2 else 1.01}


def letters(now: int) -> list[dict[str, Any]]:
    """Two of them."""
    return [
        {
            "time_ms": now - 31_000,
            "from": "gateway",
            "topic": "demo.refused",
            "reason": 'actions.ts: expected a long, found "yesterday"',
            "text": '{"event_id": "e-77", "request_id": "r-12", "item": "i-4", "ts": "yesterday"}',
        },
        {
            "time_ms": now - 300_000,
            "from": "joiner",
            "topic": "demo.dead-letters",
            "reason": "an action of an impression that is unknown after its grace",
            "text": '{"event_id": "e-12", "request_id": "r-0", "item": "i-9", "type": "click"}',
        },
    ]


def request(i: int) -> dict[str, Any]:
    """Return a served request; its user's id exceeds the integers of JavaScript."""
    context = {
        "request_id": f"r-{900 + i}",
        "user": 9_007_199_254_740_993 + i,
        "country": "DE",
        "device": "phone",
        "hour": 14,
    }
    return {
        "request_id": f"r-{900 + i}",
        "context": context,
        "candidates": [{"item": f"i-{7 * j}", "topic": "film", "age_s": 60 * j} for j in range(12)],
    }


def ranking() -> dict[str, Any]:
    """An answer of inference with dry_run and explain; one item is new."""

    def item(place: int) -> dict[str, Any]:
        new = place == 3
        return {
            "index": (place * 5) % 12,
            "score": 0.21 - 0.012 * place,
            "predictions": {"click": 0.19 - 0.01 * place, "purchase": 0.011},
            "propensity": 0.9,
            "rows": {
                "user": {"known": 1, "of": 1, "age_s": 2.4},
                "item": {"known": 0 if new else 1, "of": 1, "age_s": None if new else 0.8 + place},
            },
        }

    return {
        "request_id": "r-1",
        "items": [item(i) for i in range(10)],
        "version": 142,
        "freshness_ms": 731,
        "unknown_rows": {"item": 1, "user": 0},
        "defaulted_rows": {"late": 1, "busy": 0},
        "explored": False,
    }


def empty() -> dict[str, Any]:
    """A system that has just started: everything is there, nothing has happened."""
    now = int(time.time() * 1000)
    nothing: dict[str, Any] = {"labels": [label("click")], "totals": {}, "open": [], "reliability": {}}
    state = {
        **learning_state(now, now),
        "health": "starting",
        "notes": ["trainer: waits for its first samples"],
        "services": [
            {**service(i, name), "last_exit": None, "restarts": 0, "up_s": 3}
            for i, name in enumerate(SERVICES[:4])
        ],
        "roles": [role(name) for name in SERVICES[:4]],
        "edges": [{**e, "rate": 0.0, "lag": 0, "level": "idle"} for e in edges()],
        "freshness_ms": None,
        "trace": None,
        "quality": nothing,
        "segments": [],
        "tables": [],
        "wires": [],
        "links": [],
        "rows_bytes": None,
        "versions": {"serving": None, "aliases": {}, "pinned": False, "list": []},
        "dead_letters": {"refused": 0, "joiner": 0, "newest": []},
        "losses": [],
        "simulator": None,
    }
    history = {"next": 0, "vitals": [], "windows": [], "clicks": [], "drifts": [], "versions": []}
    return {"state": state, "history": history, "requests": [], "ranking": ranking()}


def poisoned(value: Any, rng: random.Random) -> Any:
    """A copy in which text is markup, numbers are absurd, and keys and values are missing."""
    if isinstance(value, dict):
        return {k: poisoned(v, rng) for k, v in value.items() if rng.random() > 0.04}
    if isinstance(value, list):
        return [poisoned(v, rng) for v in value] + [None, 7, "x"]
    if rng.random() < 0.15:
        return rng.choice([None, {}, [], HOSTILE, 1e300, -1e300, 5e-324, True, ""])
    if isinstance(value, str):
        return value if rng.random() < 0.3 else HOSTILE
    if isinstance(value, int | float) and not isinstance(value, bool):
        return value * rng.choice([1, 1, 1, -1, 1e12, 1e-12])
    return value
