"""`freshet backtest SPEC FILE...`: learn from files of ready samples, once, in order; print the measures."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from freshet.cli.options import FILE, PATH, examples, json_option
from freshet.errors import ConfigError
from freshet.terminal import emit

if TYPE_CHECKING:
    from freshet.evaluation.predictions import Curve, LearnerFigures


@click.command(
    epilog=examples(
        "freshet backtest freshet.toml samples.csv.gz",
        "freshet backtest freshet.toml january.parquet february.parquet --request page --keep kept",
        "freshet backtest freshet.toml samples.csv.gz --versus vw --plot curves.svg",
    )
)
@click.argument("spec_file", type=PATH)
@click.argument("files", nargs=-1, required=True, type=FILE)
@click.option("--request", help="Column with equal values for rows that were served together; empty: alone.")
@click.option(
    "--lanes", type=click.IntRange(1, 64), help="Lanes; 1, the default, gives the same result each time."
)
@click.option("--keep", type=PATH, help="New or empty folder for log, rows and versions.")
@click.option(
    "--versus",
    type=click.Choice(["vw"]),
    multiple=True,
    help="Run another learner on the same rows, with the same label delay: vw is Vowpal Wabbit with three "
    "usual settings, and with centred numbers where there are numbers; needs the package vowpalwabbit.",
)
@click.option(
    "--plot", type=PATH, help="SVG file for the learners' curves, by windows of equally many samples."
)
@json_option
def command(
    spec_file: Path,
    files: tuple[Path, ...],
    request: str | None,
    lanes: int | None,
    keep: Path | None,
    versus: tuple[str, ...],
    plot: Path | None,
    as_json: bool,
) -> None:
    """Learn from FILES (csv, Parquet or Arrow, in time order); score every row before it is trained on.

    Columns are named as the spec's fields and labels; a row without a label's value gives no sample of it.
    Figures are over all samples, and without the first fifth, in which a new model has learned little. The
    baseline is popularity, the past rate of the item, if the key of served events names an item; otherwise
    the running mean of the label.
    """
    from freshet.apps.backtest import backtest
    from freshet.apps.results import outcome_text
    from freshet.config.spec import load_spec
    from freshet.config.spec.schemas import written_by_us
    from freshet.process.memory import keep_large_blocks

    _check_plot(plot)
    keep_large_blocks()
    spec = written_by_us(load_spec(spec_file))
    with click.progressbar(length=1000, label="training", hidden=as_json) as bar:
        outcome = backtest(
            spec, files, request=request, lanes=lanes, keep=keep, progress=_mover(bar), versus=versus
        )
    emit(outcome.as_json(), as_json=as_json, text=outcome_text(outcome))
    if plot is not None:  # last: a disk that is full must not lose the figures
        plot.write_text(curves_svg(f"{spec.name}: {outcome.samples:,} samples", outcome.learners), "utf-8")


def _mover(bar: Any) -> Any:
    def move(share: float) -> None:
        bar.update(int(share * 1000) - bar.pos)

    return move


# --- The curves as an SVG file.

WIDTH, HEIGHT = 860, 250
LEFT, RIGHT, TOP, BOTTOM = 62, 14, 30, 40
PLOT = HEIGHT - TOP - BOTTOM
LEGEND = 26
LEGEND_LINE = 18
COLOURS = ("#0b66c3", "#8a8a8a", "#d1651a", "#2f8f3e", "#9747b3", "#b3282d", "#5b4a3f", "#b79a00")
"""Colours of the learners, in their order; the legend names them."""

TICKS = 5
PLOTTED = {
    "auc": "AUC (higher is better)",
    "logloss": "logloss (lower is better)",
    "calibration": "calibration (1 is best)",
    "mse": "mean squared error (lower is better)",
}
"""Measures with a chart, for each label that has them."""

DAY_MS = 86_400_000
YEAR_2000_MS = 946_684_800_000


def _check_plot(file: Path | None) -> None:
    """Raise ConfigError if the file cannot be written, before the pass begins."""
    if file is None:
        return
    if file.suffix.lower() != ".svg":
        raise ConfigError(
            "--plot", "", str(file), "a file that ends in .svg", "browsers open it; name it FILE.svg"
        )
    if file.is_dir() or (file.parent.is_dir() and not os.access(file.parent, os.W_OK)):
        raise ConfigError("--plot", "", str(file), "a file that can be written", "name another")
    if not file.parent.is_dir():
        raise ConfigError("--plot", "", str(file), "a file in a folder that exists", f"mkdir {file.parent}")


def curves_svg(title: str, learners: Mapping[str, LearnerFigures]) -> str:
    """Return an SVG page with a chart per label and measure: windows from left to right, a line per
    learner."""
    charts = []
    labels = dict.fromkeys(label for figures in learners.values() for label in figures.curve)
    for label in labels:
        curves = {name: figures.curve[label] for name, figures in learners.items() if label in figures.curve}
        charts += [
            _Chart(f"{label}: {caption}", measure, curves)
            for measure, caption in PLOTTED.items()
            if any(measure in window.measures for curve in curves.values() for window in curve)
        ]
    colours = {name: COLOURS[i % len(COLOURS)] for i, name in enumerate(learners)}
    legend, top = _legend(colours)
    height = top + HEIGHT * len(charts)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" '
        f'viewBox="0 0 {WIDTH} {height}" font-family="system-ui, sans-serif" font-size="12" fill="#222">',
        f'<rect width="{WIDTH}" height="{height}" fill="#fff"/>',
        f'<text x="{LEFT}" y="18" font-size="14">{_text(title)}</text>',
        *legend,
        *(line for i, chart in enumerate(charts) for line in chart.lines(top + HEIGHT * i, colours)),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _legend(colours: Mapping[str, str]) -> tuple[list[str], int]:
    """Return the elements of the legend, over as many lines as necessary, and the y of the first chart."""
    parts, x, y = [], LEFT, LEGEND
    for name, colour in colours.items():
        width = 36 + 7 * len(name)
        if x > LEFT and x + width > WIDTH:
            x, y = LEFT, y + LEGEND_LINE
        parts.append(f'<rect x="{x}" y="{y + 8}" width="14" height="4" fill="{colour}"/>')
        parts.append(f'<text x="{x + 18}" y="{y + 15}">{_text(name)}</text>')
        x += width
    return parts, y + LEGEND


class _Chart:
    """The chart of one measure of one label."""

    def __init__(self, title: str, measure: str, curves: Mapping[str, Sequence[Curve]]) -> None:
        self.title, self.measure, self.curves = title, measure, curves
        self.windows = max(curves.values(), key=len)
        numbers = [
            value
            for curve in curves.values()
            for window in curve
            if math.isfinite(value := window.measures.get(measure, math.nan))
        ]
        self.low, self.high = _range(numbers)

    def lines(self, top: int, colours: Mapping[str, str]) -> list[str]:
        """Return the chart's elements; `top` is its upper edge."""
        parts = [f'<text x="{LEFT}" y="{top + 18}" font-weight="600">{_text(self.title)}</text>']
        for i in range(TICKS):
            number = self.low + (self.high - self.low) * i / (TICKS - 1)
            y = self._y(top, number)
            parts.append(
                f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#e4e4e4"/>'
            )
            parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{number:.4g}</text>')
        for i in range(TICKS):
            at = (len(self.windows) - 1) * i // (TICKS - 1)
            anchor = "start" if i == 0 else "end" if i == TICKS - 1 else "middle"
            window = self.windows[at]
            x, y = self._x(window), top + TOP + PLOT + 16
            parts.append(
                f'<text x="{x:.1f}" y="{y}" text-anchor="{anchor}">{window.stop:,} samples</text>'
                f'<text x="{x:.1f}" y="{y + 14}" text-anchor="{anchor}" fill="#777">{_day(window)}</text>'
            )
            if len(self.windows) == 1:
                break
        plot = f'x="{LEFT - 3}" y="{top + TOP - 3}" width="{WIDTH - LEFT - RIGHT + 6}" height="{PLOT + 6}"'
        parts.append(f'<clipPath id="plot{top}"><rect {plot}/></clipPath><g clip-path="url(#plot{top})">')
        for name, curve in self.curves.items():
            parts += self._line(top, curve, colours[name], name)
        return [*parts, "</g>"]

    def _line(self, top: int, curve: Sequence[Curve], colour: str, name: str) -> list[str]:
        """Return a polyline for each run of windows with finite values; a single window is a dot."""
        runs: list[list[tuple[float, float]]] = [[]]
        for window in curve:
            value = window.measures.get(self.measure, math.nan)
            if math.isfinite(value):
                runs[-1].append((self._x(window), self._y(top, value)))
            elif runs[-1]:
                runs.append([])
        parts = []
        for run in filter(None, runs):
            if len(run) == 1:
                parts.append(f'<circle cx="{run[0][0]:.1f}" cy="{run[0][1]:.1f}" r="2.5" fill="{colour}"/>')
                continue
            points = " ".join(f"{x:.1f},{y:.1f}" for x, y in run)
            parts.append(
                f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.6">'
                f"<title>{_text(name)}</title></polyline>"
            )
        return parts

    def _x(self, window: Curve) -> float:
        """Return the x of a window's last sample."""
        first, last = self.windows[0].stop, self.windows[-1].stop
        share = (window.stop - first) / (last - first) if last > first else 0.5
        return LEFT + (WIDTH - LEFT - RIGHT) * share

    def _y(self, top: int, number: float) -> float:
        share = (number - self.low) / (self.high - self.low)
        return top + TOP + PLOT * (1 - share)


def _range(numbers: Sequence[float]) -> tuple[float, float]:
    """Return the 2nd and 98th percentile with a margin of 8 %, so that one outlier does not flatten the
    chart."""
    if not numbers:
        return 0.0, 1.0
    ranked = sorted(numbers)
    low, high = ranked[len(ranked) // 50], ranked[-1 - len(ranked) // 50]
    margin = (high - low) * 0.08 or abs(low) * 0.05 or 0.5
    return low - margin, high + margin


def _day(window: Curve) -> str:
    """Return the date on which a window ends; "" if the times are no plausible dates."""
    if window.stop_ms < YEAR_2000_MS - 50 * 365 * DAY_MS or window.stop_ms <= DAY_MS:
        return ""
    try:
        return datetime.fromtimestamp(window.stop_ms / 1000, UTC).strftime("%Y-%m-%d")
    except (OverflowError, ValueError, OSError):
        return ""


def _text(text: str) -> str:
    """Escape the text of an element, and replace control characters, which XML forbids."""
    return escape("".join(c if c.isprintable() else "?" for c in text))
