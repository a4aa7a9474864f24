"""`freshet backtest SPEC FILE...`: learn from files of ready samples, once, in order; print the measures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from freshet.cli.options import FILE, PATH, examples, json_option
from freshet.terminal import emit

__all__ = ["command"]


@click.command(
    epilog=examples(
        "freshet backtest freshet.toml samples.csv.gz",
        "freshet backtest freshet.toml january.parquet february.parquet --request page --keep kept",
        "freshet backtest freshet.toml samples.csv.gz --versus vw --plot curves.svg",
    )
)
@click.argument("spec_file", type=PATH)
@click.argument("files", nargs=-1, required=True, type=FILE)
@click.option("--request", help="Column with equal values for rows that were served together.")
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
    from freshet.cli.curves import check_plot, curves_svg
    from freshet.config.spec import load_spec
    from freshet.config.spec.schemas import written_by_us
    from freshet.process.memory import keep_large_blocks

    check_plot(plot)
    keep_large_blocks()
    spec = written_by_us(load_spec(spec_file))
    with click.progressbar(length=1000, label="training", hidden=as_json) as bar:
        outcome = backtest(
            spec, files, request=request, lanes=lanes, keep=keep, progress=_mover(bar), versus=versus
        )
    if plot is not None:
        plot.write_text(curves_svg(f"{spec.name}: {outcome.samples:,} samples", outcome.learners), "utf-8")
    emit(outcome.as_json(), as_json=as_json, text=outcome_text(outcome))


def _mover(bar: Any) -> Any:
    def move(share: float) -> None:
        bar.update(int(share * 1000) - bar.pos)

    return move
