"""Outcome of a replay or a backtest: its folder, its figures, its text."""

from __future__ import annotations

import math
import shutil
import signal
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from freshet.errors import ConfigError
from freshet.evaluation.predictions import LearnerFigures
from freshet.observability.losses import JOINER_FIGURES, counted, losses_text
from freshet.recordings.event_times import EventTimes, SetAside
from freshet.terminal import table


@contextmanager
def pass_folder(keep: str | Path | None) -> Iterator[Path]:
    """Yield a run folder for one pass over recorded events.

    `keep` stays after the pass, but a failed or interrupted pass empties it, so that half a result is not
    mistaken for a whole one. None: a temporary folder. Raises ConfigError if `keep` is not empty: a second
    pass into a log would learn every sample twice.
    """
    if keep is None:
        with _interruptible(), tempfile.TemporaryDirectory(prefix="freshet-") as temporary:
            yield Path(temporary)
        return
    folder = Path(keep)
    is_new = not folder.exists()
    if folder.is_dir() and any(folder.iterdir()):
        raise ConfigError(
            "--keep",
            "",
            f"{folder} is not empty",
            "a folder that does not exist yet, or an empty one",
            "delete it, or name another; a second pass into one log would learn every sample twice",
        )
    try:
        with _interruptible():
            yield folder
    except BaseException:  # Ctrl-C and SIGTERM as well: half a pass must not look like a whole one
        if is_new:
            shutil.rmtree(folder, ignore_errors=True)
        else:
            _empty(folder)
        raise


@contextmanager
def _interruptible() -> Iterator[None]:
    """Turn signals with the default action into exceptions within the block, so that it cleans up."""
    main = threading.current_thread() is threading.main_thread()
    ours = [s for s in _ENDING if main and signal.getsignal(s) is signal.SIG_DFL]
    for number in ours:
        signal.signal(number, _raise)
    try:
        yield
    finally:
        for number in ours:
            signal.signal(number, signal.SIG_DFL)


_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Sent by Ctrl-C; by a scheduler or a shutdown; by a closed terminal."""


def _raise(number: int, _frame: object) -> None:
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    raise SystemExit(128 + number)  # the convention of shells


def _empty(folder: Path) -> None:
    if not folder.is_dir():
        return
    for entry in folder.iterdir():
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry, ignore_errors=True)
        else:
            entry.unlink(missing_ok=True)


ALL, AFTER_FIRST = "all", "after a fifth"


@dataclass(frozen=True, slots=True)
class Outcome:
    """The figures of a pass."""

    samples: int
    seconds: float  # of training
    lanes: int
    measures: Mapping[
        str, Mapping[str, float]
    ]  # label -> measure -> value, every sample before it was trained on
    stages: Mapping[str, float]  # stage -> events or samples a second
    ledger: Mapping[str, Any] | None = None  # the joiner's counts of outcomes
    windows: Sequence[Mapping[str, Any]] = ()  # records of `<model>.measures`, by event time
    times: Mapping[str, EventTimes] = field(default_factory=dict)  # by stream: findings about event times
    outliers: int = 0  # numeric labels that the measures leave out
    set_aside: SetAside | None = None  # counts of records that the spec cannot read
    learners: Mapping[str, LearnerFigures] = field(
        default_factory=dict
    )  # of a backtest: `freshet`, a baseline and other learners, each by label

    @property
    def losses(self) -> dict[str, Any]:
        """Shares of the events from which nothing was learned; empty if nothing was joined."""
        if self.ledger is None:
            return {}
        counts = {**self.ledger["events"], "refused": self.ledger["refused"]}
        return counted(JOINER_FIGURES, counts)

    def as_json(self) -> dict[str, Any]:
        """Return the object for `--json`: figures of the first label at the top level, all under `labels`."""
        first = next(iter(self.measures.values()), {})
        return {
            "samples": self.samples,
            "samples_per_s": self.samples / self.seconds if self.seconds else 0.0,
            "auc": first.get("auc"),
            "logloss": first.get("logloss"),
            "ne": first.get("ne"),
            "calibration": first.get("calibration"),
            "lanes": self.lanes,
            "labels": {name: dict(values) for name, values in self.measures.items()},
            **({"learners": {k: v.as_json() for k, v in self.learners.items()}} if self.learners else {}),
            "stages": dict(self.stages),
            **({"outliers": self.outliers} if self.outliers else {}),
            **({"set_aside": aside} if self.set_aside and (aside := self.set_aside.as_json()) else {}),
            **({"times": odd} if (odd := odd_times(self.times)) else {}),
            **({} if self.ledger is None else {"ledger": dict(self.ledger), "losses": self.losses}),
        }


def outcome_text(outcome: Outcome) -> str:
    """Format an outcome for the terminal."""
    rates = "\n".join(f"  {stage:18} {rate:12,.0f}/s" for stage, rate in outcome.stages.items())
    said = "".join(f"\n{line}" for seen in outcome.times.values() for line in seen.lines())
    lost = "".join(f"lost: {line}\n" for line in losses_text(None, outcome.losses))
    if outcome.set_aside is not None:
        lost = "".join(f"{line}\n" for line in outcome.set_aside.lines()) + lost
    if outcome.ledger is not None and not lost:
        lost = "lost: nothing; every event was joined\n"
    if outcome.outliers:
        said = f"\nmeasures leave out {_counted(outcome.outliers, 'label')} far beyond the others{said}"
    samples = f"{_counted(outcome.samples, 'sample')}, {_counted(outcome.lanes, 'lane')}"
    return f"{samples}\n{lost}{rates}\n{_figures_text(outcome)}{said}"


def _counted(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'s' if count != 1 else ''}"


def _figures_text(outcome: Outcome) -> str:
    """Format figures by label; in a backtest also by learner, over all samples and after the first fifth."""
    names = list(dict.fromkeys(m for values in outcome.measures.values() for m in values))
    if not outcome.learners:
        return table(
            ["label", *names],
            [[label, *(values.get(m) for m in names)] for label, values in outcome.measures.items()],
        )
    rows = [
        [label, learner, part, *(_cell(m, values.get(m)) for m in names)]
        for label in outcome.measures
        for part in (ALL, AFTER_FIRST)
        for learner, figures in outcome.learners.items()
        if (values := (figures.all if part == ALL else figures.after_first).get(label)) is not None
    ]
    return table(["label", "learner", "samples", *names], rows)


def _cell(measure: str, value: float | None) -> float | int | None:
    """Return a count as an integer, other measures unchanged."""
    counts = measure in ("n", "not_finite") and value is not None and math.isfinite(value)
    return int(value or 0) if counts else value


def odd_times(times: Mapping[Any, EventTimes]) -> dict[str, Any]:
    """Return the suspicious event times by stream, for `--json`; streams without any are left out."""
    return {str(stream): odd for stream, seen in times.items() if (odd := seen.as_json())}
