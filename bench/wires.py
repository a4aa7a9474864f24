"""Bytes a sample on each wire, and the cost of shorter codecs in quality.

    python -m bench.wires --file build/retail/retail.parquet [--samples 300000] [--codecs fp32,int8]
                          [--seeds 5]
    python -m bench.wires --stream drift --samples 200000 --seeds 5

`--stream retail`: the spec of examples/online-retail. `--stream drift`: 26 ids and 13 numbers a sample, the
default model; each id is replaced 16 times over the stream by one with another effect, and after 60 % of the
samples the rate of labels jumps (`bench.workload`). Mode `sync` with one lane, so that two runs differ by the
codec alone. `shards`: the rank looks rows up itself; rows and gradients cross one wire, once. `embedders`: an
embedder does, and both cross two wires by the same codec. Bytes are those of the rank's wire: its requests
and gradients are sent, rows and batches received.

AUC is progressive, over all samples: each is scored before it is learned from. A seed is that of the model's
weights and rows, and of the drifting stream; stochastic rounding differs in each run. `auc_beside_fp32_1e_5`
is the mean of the differences to fp32 with the same seed and way, `_95` half its 95 % interval (Student's t).
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import get_args

from bench.apart import Apart, Passed
from bench.modes import log_of, spec_of
from bench.report import Figures, command
from bench.rounds import interval_95
from bench.spread import log_in, spec_in
from bench.workload import Workload
from freshet.config.settings.common import Codec
from freshet.config.spec import Spec

CODECS = ",".join(get_args(Codec))
WAYS = {"shards": 0, "embedders": 1}


def measure(
    quick: bool = False,
    stream: str = "retail",
    file: Path = Path("build/retail/retail.parquet"),
    samples: int = 300_000,
    codecs: str = CODECS,
    ways: str = ",".join(WAYS),
    seeds: int = 1,
) -> Figures:
    """Measure each way and codec; fp32 is the first of CODECS. `stream`: retail or drift."""
    samples = min(samples, 30_000) if quick else samples
    found: dict[str, dict[str, list[Passed]]] = {
        way: {codec: [] for codec in codecs.split(",")} for way in ways.split(",")
    }
    for seed in range(1, seeds + 1):
        with tempfile.TemporaryDirectory() as folder:
            spec, log = stream_in(Path(folder), stream, file, samples, seed)
            for way, of_codecs in found.items():
                for codec, passed in of_codecs.items():
                    with tempfile.TemporaryDirectory() as run:
                        apart = Apart(embedders=WAYS[way], codec=codec)
                        passed.append(apart.train(spec, log, Path(run)))
                    print(f"{way} {codec} seed {seed}: {passed[-1]}", file=sys.stderr, flush=True)
    return {"stream": stream, "samples": samples, "seeds": seeds} | {
        way: {codec: _figures(passed, of_codecs.get("fp32")) for codec, passed in of_codecs.items()}
        for way, of_codecs in found.items()
    }


def stream_in(folder: Path, stream: str, file: Path, samples: int, seed: int) -> tuple[Spec, Path]:
    """Return the spec of a stream, in mode `sync` with one lane, and the folder of its log."""
    if stream == "retail":
        spec, log = spec_of("sync", 512, 1), log_of(file, samples, 1, folder)
    elif stream == "drift":
        spec = spec_in(folder, mode="sync", lanes=1)
        log = log_in(folder, spec, Workload(rows=samples, cardinality=5_000, seed=seed, drifts=True))
    else:
        raise ValueError(f"--stream {stream}: there are retail and drift")
    return replace(spec, model=replace(spec.model, seed=seed)), log


def _figures(passed: Sequence[Passed], plain: Sequence[Passed] | None) -> Figures:
    figures: Figures = {
        "sent_bytes_per_sample": statistics.mean(one.sent_bytes for one in passed),
        "received_bytes_per_sample": statistics.mean(one.received_bytes for one in passed),
        "auc_1e_5": round(statistics.mean(one.auc for one in passed) * 1e5),
        "logloss_1e_5": round(statistics.mean(one.logloss for one in passed) * 1e5),
    }
    if plain is not None:
        for name in ("auc", "logloss"):
            beside = [1e5 * (getattr(a, name) - getattr(b, name)) for a, b in zip(passed, plain, strict=True)]
            figures[f"{name}_beside_fp32_1e_5"] = statistics.mean(beside)
            if len(beside) > 1:
                figures[f"{name}_beside_fp32_1e_5_95"] = interval_95(beside)
    return figures


if __name__ == "__main__":
    command(measure, __doc__)
