"""A linear model by `freshet backtest` and by Vowpal Wabbit's own driver: whole commands, the same samples.

    python -m bench.peers.setup vw
    python -m bench.linear --source online_retail_ii_events.csv.gz

The retail stream (`bench.retail`), 4,970,510 samples, six features each, no interactions. Both are
progressive: a sample is scored before it is learned from; Vowpal Wabbit learns from each at once, freshet
from batches of 64. Each run is a process of its own, from start to exit, on files in the page cache; CPU
seconds are user and system time of the whole process. `start_s` is the time of the command for 1,000 samples.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

from bench.peers.setup import python_of
from bench.report import Figures, command
from bench.retail import SPECS, RetailFiles, retail_files
from bench.rounds import interleaved

DRIVER = Path(__file__).parent / "peers" / "vw_driver.py"
SPEC = SPECS / "retail-linear.toml"
EVENTS = Path("online_retail_ii_events.csv.gz")
START_SAMPLES = 1_000
BASE = ("--loss_function", "logistic", "-b", "24")
VW: Mapping[str, Sequence[str]] = {
    "default": (),
    "adaptive": ("--adaptive", "--invariant", "-l", "0.05"),
    "ftrl": ("--ftrl", "--ftrl_alpha", "0.1", "--ftrl_beta", "1"),
    "ftrl_l1": ("--ftrl", "--ftrl_alpha", "0.1", "--ftrl_beta", "1", "--l1", "5"),
}
"""The best of a grid over update rule, step size, --power_t, --l1 and --l2, and the defaults."""
RULES: Mapping[str, tuple[str, str, str]] = {
    "ftrl": (
        '{ name = "ftrl", lr = 0.01, beta = 1, l2 = 1 }',
        '{ name = "ftrl", lr = 0.3, beta = 1, l2 = 1 }',
        '{ name = "ftrl", lr = 0.05, beta = 1, l2 = 1 }',
    ),
    "adagrad": (
        '{ name = "adagrad", lr = 0.01 }',
        '{ name = "adagrad", lr = 0.3 }',
        '{ name = "adagrad", lr = 0.05 }',
    ),
}
"""Rules of the tables user, item and small, the best of a grid of our own. A user's own weight can only be
wrong here, as one item in five of every invoice is bought: it moves least. Vowpal Wabbit has one step size
for all; with 0.1 for all tables, FTRL was as good to 0.0002, in batches of 256."""


@dataclass(slots=True)
class _Case:
    """A command. Calling it runs it and returns its wall seconds."""

    words: Sequence[str]
    logloss_of: Callable[[Mapping[str, float]], float]
    cpu_s: list[float] = field(default_factory=list)
    logloss: float = float("nan")

    def __call__(self) -> float:
        with tempfile.TemporaryFile() as out:
            began = time.perf_counter()
            child = subprocess.Popen(self.words, stdout=out)
            _, status, used = os.wait4(child.pid, 0)
            wall_s = time.perf_counter() - began
            child.returncode = os.waitstatus_to_exitcode(status)
            if child.returncode:
                raise RuntimeError(f"{' '.join(self.words)}: exit status {child.returncode}")
            out.seek(0)
            figures = json.loads(out.read().splitlines()[-1])
        self.cpu_s.append(used.ru_utime + used.ru_stime)
        self.logloss = self.logloss_of(figures)
        return wall_s


def _ours(folder: Path, rule: str, file: Path) -> _Case:
    spec = folder / f"{rule}.toml"
    text = SPEC.read_text()
    for update in RULES[rule]:  # of the tables in the order of the spec
        text = text.replace("ttl = false }", f"ttl = false, scalar_optimizer = {update} }}", 1)
    spec.write_text(text)
    words = [sys.executable, "-m", "freshet.cli", "backtest", str(spec), str(file), "--json"]
    return _Case(words, lambda figures: figures["logloss"])


def _vw(settings: Sequence[str], file: Path, *more: str) -> _Case:
    words = [str(python_of("vw")), str(DRIVER), "-d", str(file), *BASE, *settings, *more]
    return _Case(words, lambda figures: figures["logloss"])


def _cases(files: RetailFiles, folder: Path, quick: bool) -> dict[str, _Case]:
    best = VW["ftrl_l1"]
    cached = folder / "retail.cache"
    _vw(best, files.vw, "--cache_file", str(cached))()  # writes it
    cases = {
        "freshet_ftrl_csv": _ours(folder, "ftrl", files.csv),
        "freshet_ftrl_parquet": _ours(folder, "ftrl", files.parquet),
        "vw_ftrl_l1": _vw(best, files.vw),
        "vw_ftrl_l1_cache": _vw(best, files.vw, "--cache_file", str(cached)),
    }
    if quick:
        return cases
    more = {f"vw_{name}": _vw(settings, files.vw) for name, settings in VW.items() if settings is not best}
    return {**cases, "freshet_adagrad_csv": _ours(folder, "adagrad", files.csv), **more}


def measure(quick: bool = False, source: Path = EVENTS, folder: Path = Path("build/retail")) -> Figures:
    """Measure wall and CPU seconds, samples a second and progressive logloss of each command."""
    files = retail_files(source, folder, days=40 if quick else None)
    with tempfile.TemporaryDirectory() as temporary:
        cases = _cases(files, Path(temporary), quick)
        for file in (files.csv, files.parquet, files.vw):
            file.read_bytes()  # into the page cache
        wall = interleaved(cases, 1 if quick else 3, unit="s")
        start = _starts(files, Path(temporary))
    figures: Figures = {"samples": files.samples, "start_s": start}
    for name, case in cases.items():
        seconds = wall[name].median
        figures[name] = {
            "wall_s": seconds,
            "cpu_s": sorted(case.cpu_s)[len(case.cpu_s) // 2],
            "samples_per_s": files.samples / seconds,
            "logloss_1e_5": round(case.logloss * 1e5),
        }
    vw = figures["vw_ftrl_l1"]
    for ours in ("freshet_ftrl_csv", "freshet_ftrl_parquet"):
        figures[ours]["times_vw"] = vw["wall_s"] / figures[ours]["wall_s"]
        figures[ours]["times_vw_per_cpu"] = vw["cpu_s"] / figures[ours]["cpu_s"]
    return figures


def _starts(files: RetailFiles, folder: Path) -> Figures:
    """Return the seconds of each command for 1,000 samples: the time to start and to end."""
    few = {end: folder / f"few.{end}" for end in ("csv", "vw")}
    for end, path in few.items():
        with getattr(files, end).open() as file:
            path.write_text("".join(islice(file, START_SAMPLES + (end == "csv"))))
    return {"freshet": _ours(folder, "ftrl", few["csv"])(), "vw": _vw(VW["ftrl_l1"], few["vw"])()}


if __name__ == "__main__":
    command(measure, __doc__)
