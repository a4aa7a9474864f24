"""Sums of dense gradients over a slow link: steps a second of two ranks by reducer, and what `auto` takes.

    python -m bench.dense_links [--rate-mbit 100] [--delay-ms 1] [--codecs fp32,int8,int4,auto] [--batch 64]
                                [--seconds 20] [--rounds 3]

Each rank is a process with the torch process group of a trainer and the MLP of 128 and 64 of
`bench.reducers` (68 kB of gradients), and learns from a stream of its own: in two network namespaces that a
link joins (`bench.two_hosts`), or both on this host (`loopback`). Residuals are flushed every 1,000 steps, as
for a version, and whenever `auto` wants to change its codec. Cases take turns; rates are medians of the
rounds. `communication_share` is 1 - rate / rate of fp32 on the loopback; `auto_beside_best` the rate of
`auto` beside that of the fastest codec, `late` without the first half, which has the first round of probes.
Needs root.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from bench.reducers import FLUSH_STEPS, Adam, Gradients, Model, Stream
from bench.report import Figures, command
from bench.rounds import turns
from bench.two_hosts import FAR_HOST, NEAR_HOST, enter, missing, two_hosts
from freshet.testing.conditions import wait_until
from freshet.trainer.membership import Quorum, QuorumOptions
from freshet.trainer.reducers import ChoosesCodec, PlainReducer, Reducer
from freshet.trainer.reducers.group_codecs import IntegerCodec
from freshet.trainer.reducers.ladder import LadderReducer
from freshet.trainer.reducers.two_phase import TwoPhase
from freshet.trainer.torch_process_group import TorchProcessGroup, connect_store, host_store
from freshet.types import Fence

LIMIT_S = 300.0
CHECK_STEPS = 32
"""Steps between two looks of rank 0 at the clock, by which both ranks end at the same step."""


def measure(
    quick: bool = False,
    rate_mbit: float = 100.0,
    delay_ms: float = 1.0,
    codecs: str = "fp32,int8,int4,auto",
    batch: int = 64,
    seconds: float = 20.0,
    rounds: int = 3,
) -> Figures:
    """Measure each codec over the link, and fp32 and `auto` on this host. `rate_mbit` 0: no limit."""
    if (lack := missing()) is not None:
        sys.exit(f"bench.dense_links: {lack}")
    seconds, rounds = (min(seconds, 5.0), 1) if quick else (seconds, rounds)
    cases = [f"link/{codec}" for codec in codecs.split(",")] + ["loopback/fp32", "loopback/auto"]
    found: dict[str, list[Figures]] = {case: [] for case in cases}
    for case in turns(cases, rounds):
        where, _, codec = case.partition("/")
        one = _run(codec, batch, seconds, (rate_mbit, delay_ms) if where == "link" else None)
        print(f"{case}: {one}", file=sys.stderr, flush=True)
        found[case].append(one)
    settings: Figures = {"rate_mbit": rate_mbit, "delay_ms": delay_ms, "batch": batch, "seconds": seconds}
    return settings | _figures(found)


def _figures(found: Mapping[str, Sequence[Figures]]) -> Figures:
    base = _rate(found["loopback/fp32"])
    figures: Figures = {}
    for case, ones in found.items():
        rate = _rate(ones)
        figures[case] = {"steps_per_s": rate, "communication_share": 1 - rate / base}
        figures[case] |= {"choice": ones[-1]["choice"]} if ones[-1]["choice"] else {}
        if case.startswith("link/") and "link/fp32" in found:
            figures[case]["times_fp32"] = rate / _rate(found["link/fp32"])
    fixed = [case for case in found if case.startswith("link/") and case != "link/auto"]
    if fixed and "link/auto" in found:
        for name, key in (("auto_beside_best", "steps_per_s"), ("auto_beside_best_late", "late_steps_per_s")):
            figures[name] = _rate(found["link/auto"], key) / max(_rate(found[case], key) for case in fixed)
    figures["loopback_auto_beside_fp32"] = _rate(found["loopback/auto"]) / base
    return figures


def _rate(ones: Sequence[Figures], key: str = "steps_per_s") -> float:
    return float(statistics.median(one[key] for one in ones))


def _run(codec: str, batch: int, seconds: float, link: tuple[float, float] | None) -> Figures:
    """Train with two ranks, over a link of (Mbit/s, ms) or on this host; returns rank 0's figures."""
    with ExitStack() as stack:
        places: list[tuple[tuple[str, ...], str]] = [((), "127.0.0.1")] * 2
        if link is not None:
            hosts = stack.enter_context(two_hosts(*link))
            places = [(enter(hosts.near), NEAR_HOST), (enter(hosts.far), FAR_HOST)]
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        ranks = []
        for rank, (before, host) in enumerate(places):
            words = [*before, sys.executable, "-m", "bench.dense_links", "--rank", str(rank), "--host", host]
            words += ["--store", f"{folder}/store", "--codec", codec, "--batch", str(batch)]
            words += ["--seconds", str(seconds)]
            one = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}  # a core for each rank
            ranks.append(subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=one))
            stack.callback(ranks[-1].kill)
        out, _ = ranks[0].communicate(timeout=LIMIT_S)
        ranks[1].communicate(timeout=LIMIT_S)
    figures: Figures = json.loads(out)
    return figures


def _reducer(codec: str, size: int) -> Reducer:
    if codec == "auto":
        return LadderReducer(size)
    return PlainReducer() if codec == "fp32" else TwoPhase(IntegerCodec(int(codec.removeprefix("int"))), size)


def _run_rank(rank: int, host: str, store_file: Path, codec: str, batch: int, seconds: float) -> Figures:
    """Train as one of two ranks until rank 0 has done so for `seconds`."""
    if rank == 0:
        store, address = host_store(host, LIMIT_S)
        partial = store_file.with_suffix(".new")
        partial.write_text(address)
        partial.rename(store_file)
    else:
        wait_until("rank 0 has a store", store_file.exists, within_s=LIMIT_S)
        store = connect_store(store_file.read_text(), LIMIT_S)
    quorum = Quorum({0: Fence(1), 1: Fence(2)}, store_file.read_text(), 1, Fence(3))
    group = TorchProcessGroup(store, quorum, rank, QuorumOptions(host, 1, 2, LIMIT_S, LIMIT_S))
    model, stream = Model(1), Stream(rank, batch, 1 << 40)
    adam = Adam(model.ends[-1], model.ends, model.weights)
    reducer = _reducer(codec, model.ends[-1])
    case, step, ends = Gradients(reducer), 0, [time.perf_counter()]
    while True:
        _, gradients = model.learn(*stream.next_batch())
        case.step(group, gradients[0], adam)
        step += 1
        ends.append(time.perf_counter())
        due = step % FLUSH_STEPS == 0 or (isinstance(reducer, ChoosesCodec) and reducer.flush_due)
        over = step % CHECK_STEPS == 0 and ends[-1] >= ends[0] + seconds
        # As the leader's proposal before a step: one small message.
        due, over = (bool(flag) for flag in group.exchange(bytes([due, over]))[0])
        if due:
            case.flush(group, adam)
        if over:
            break
    group.close()
    half = len(ends) // 2
    return {
        "steps_per_s": step / (ends[-1] - ends[0]),
        "late_steps_per_s": (len(ends) - 1 - half) / (ends[-1] - ends[half]),
        "choice": f"{reducer.codec}: {reducer.reason}" if isinstance(reducer, ChoosesCodec) else "",
    }


def main() -> None:
    """Run one rank, as `_run` starts it."""
    parser = argparse.ArgumentParser()
    for name, kind in (("rank", int), ("host", str), ("store", Path), ("codec", str), ("batch", int)):
        parser.add_argument(f"--{name}", type=kind)
    parser.add_argument("--seconds", type=float)
    of = parser.parse_args()
    print(json.dumps(_run_rank(of.rank, of.host, of.store, of.codec, of.batch, of.seconds)), flush=True)


if __name__ == "__main__":
    if "--rank" in sys.argv:
        main()
    else:
        command(measure, __doc__)
