"""Codecs and training modes over a slow link: rates, share of communication, bytes as counted and as sent.

    python -m bench.links [--rate-mbit 100] [--delay-ms 1] [--modes sync,hybrid] [--codecs fp32,int8,auto]
                          [--way embedders|shards] [--batch 256] [--staleness 1024] [--rounds 3]

Shards and embedder run in one network namespace, the rank in another (`bench.two_hosts`): real processes, by
one event log in a shared folder. `--way shards`: the rank looks rows up itself. The data are those of
`bench.spread`: 26 ids of 16 floats and 13 numbers a sample, the default model, one lane. `loopback` is the
same on one host: fp32, and `auto`, whose cost is its share below 1 of fp32.

Cases take turns; rates are medians of the rounds. `communication_share` is the part of a step that the link
costs: 1 - rate / rate of fp32 on the loopback, in the same mode. `link_busy` is the share of time for which
the rank's busier direction sends. `counted` bytes are those of `freshet status` (its counters are sums of
frames), `device` bytes those of the network device, of which TCP/IP headers are 52 a packet; `of_device` is
counted / (device - headers). `auto_beside_best` is its rate beside the fastest codec's. Needs root.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench.report import Figures, command
from bench.rounds import turns
from bench.runner import run_measurement
from bench.spread import log_in, spec_in
from bench.two_hosts import TCP_HEADER_BYTES, enter, missing, two_hosts
from bench.workload import Workload
from freshet.config.spec.identity import render

CODECS = "fp32,bf16,int8,int4,auto"
LOOPBACK = ("fp32", "auto")
LIMIT_S = 600.0

Case = tuple[str, str, str]
"""Where (link or loopback), mode, codec."""


def measure(
    quick: bool = False,
    rate_mbit: float = 100.0,
    delay_ms: float = 1.0,
    modes: str = "sync,hybrid",
    codecs: str = CODECS,
    way: str = "embedders",
    batch: int = 256,
    staleness: int = 1024,
    samples: int = 200_000,
    rounds: int = 3,
) -> Figures:
    """Measure each mode and codec. `rate_mbit` 0: no limit."""
    if (lack := missing()) is not None:
        sys.exit(f"bench.links: {lack}")
    if way not in {"embedders", "shards"}:
        sys.exit(f"bench.links: --way {way}: there are embedders and shards")
    samples, rounds = (min(samples, 30_000), 1) if quick else (samples, rounds)
    cases: list[Case] = [("link", mode, codec) for mode in modes.split(",") for codec in codecs.split(",")]
    cases += [("loopback", mode, codec) for mode in modes.split(",") for codec in LOOPBACK]
    found: dict[Case, list[Figures]] = {case: [] for case in cases}
    with tempfile.TemporaryDirectory() as name:
        folder, names = Path(name), {"/".join(case): case for case in cases}
        spec = spec_in(folder, lanes=1, rows=batch)
        log = log_in(folder, spec, Workload(rows=samples))
        for mode in modes.split(","):
            train = replace(spec.train, mode=mode, staleness_rows=staleness)  # type: ignore[arg-type]
            (folder / f"{mode}.toml").write_text(render(replace(spec, train=train)), encoding="utf-8")
        for turn in turns(list(names), rounds):
            where, mode, codec = case = names[turn]
            words = ["--spec", str(folder / f"{mode}.toml"), "--log", str(log), "--codec", codec]
            words += ["--embedders", "1" if way == "embedders" else "0"]
            one = _run(words, (rate_mbit, delay_ms) if where == "link" else None)
            print(f"{turn}: {one}", file=sys.stderr, flush=True)
            found[case].append(one)
    settings = {"rate_mbit": rate_mbit, "delay_ms": delay_ms, "way": way, "batch": batch}
    settings |= {"staleness": staleness, "samples": samples, "rounds": rounds}
    return settings | {mode: _of_mode(mode, found, rate_mbit) for mode in modes.split(",")} | _modes(found)


def _run(words: Sequence[str], link: tuple[float, float] | None) -> Figures:
    """Train once, over a link of (Mbit/s, ms) or on this host. Raises RuntimeError if it fails."""
    with ExitStack() as stack:
        before: tuple[str, ...] = ()
        if link is not None:
            hosts = stack.enter_context(two_hosts(*link))
            before, words = enter(hosts.near), [*words, "--far", hosts.far]
        one = run_measurement("bench.apart", words, LIMIT_S, before)
    if isinstance(one, str):
        raise RuntimeError(f"bench.apart {' '.join(words)}: {one}")
    return one


def _of_mode(mode: str, found: Mapping[Case, Sequence[Figures]], rate_mbit: float) -> Figures:
    of_link = {codec: ones for (where, m, codec), ones in found.items() if (where, m) == ("link", mode)}
    base = _rate(found["loopback", mode, "fp32"])
    figures: Figures = {codec: _of_codec(ones, base, rate_mbit) for codec, ones in of_link.items()}
    for one in figures.values():
        if "fp32" in figures:
            one["times_fp32"] = one["samples_per_s"] / figures["fp32"]["samples_per_s"]
    fixed = [one["samples_per_s"] for codec, one in figures.items() if codec != "auto"]
    if fixed and "auto" in figures:
        figures["auto_beside_best"] = figures["auto"]["samples_per_s"] / max(fixed)
    auto = _rate(found["loopback", mode, "auto"])
    figures["loopback"] = {
        "fp32_samples_per_s": base,
        "auto_samples_per_s": auto,
        "auto_beside_fp32": auto / base,
        "fp32_auc_1e_5": found["loopback", mode, "fp32"][-1]["auc_1e_5"],
    }
    return figures


def _of_codec(ones: Sequence[Figures], base: float, rate_mbit: float) -> Figures:
    last, rate = ones[-1], _rate(ones)
    counted = {way: last[f"{way}_bytes"] for way in ("sent", "received")}
    device = {way: last[f"device_{way}_bytes"] for way in counted}
    payload = sum(device.values()) - TCP_HEADER_BYTES * last["device_packets"]
    figures: Figures = {
        "samples_per_s": rate,
        "communication_share": 1 - rate / base,
        "counted_sent_bytes_per_sample": counted["sent"],
        "counted_received_bytes_per_sample": counted["received"],
        "device_sent_bytes_per_sample": device["sent"],
        "device_received_bytes_per_sample": device["received"],
        "of_device": sum(counted.values()) / payload,
        "auc_1e_5": last["auc_1e_5"],
    }
    if rate_mbit:
        figures["link_busy"] = max(device.values()) * rate * 8e-6 / rate_mbit
    if (choice := _choice(last["codecs"])) is not None:
        figures["choice"] = choice
    return figures


def _choice(codecs: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> Figures | None:
    """Return codec and reason by direction, of the links if a codec was chosen."""
    for ways in codecs.values():
        if any(way["why"] != "as set" for way in ways.values()):
            return {name: f"{way['codec']}: {way['why']}" for name, way in ways.items()}
    return None


def _modes(found: Mapping[Case, Sequence[Figures]]) -> Figures:
    """Return hybrid beside sync, if both were measured."""
    figures: Figures = {}
    for (where, mode, codec), ones in found.items():
        sync = found.get((where, "sync", codec))
        if mode == "hybrid" and sync is not None:
            figures.setdefault("hybrid_beside_sync", {})[f"{where}_{codec}"] = {
                "times_samples_per_s": _rate(ones) / _rate(sync),
                "auc_1e_5": ones[-1]["auc_1e_5"] - sync[-1]["auc_1e_5"],
            }
    return figures


def _rate(ones: Sequence[Figures]) -> float:
    return float(statistics.median(one["samples_per_s"] for one in ones))


if __name__ == "__main__":
    command(measure, __doc__)
