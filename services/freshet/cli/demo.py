"""`freshet demo`: every service and simulated readers, with one command."""

from __future__ import annotations

from pathlib import Path

import click

from freshet.cli.options import PATH, SEED, FiniteRange, examples, json_option
from freshet.demo import DEMO_FOLDER


@click.command(epilog=examples("freshet demo", "freshet demo --rate 300 --drift-at 60s --seconds 300"))
@click.argument("folder", type=PATH, default=DEMO_FOLDER)
@click.option(
    "--rate",
    type=FiniteRange(10, 5_000),
    default=1_000,
    show_default=True,
    help="Events a second: items shown and actions.",
)
@click.option("--seed", type=SEED, help="Seed of all random choices.  [default: 7]")
@click.option(
    "--drift-at",
    multiple=True,
    metavar="DURATION",
    help="When readers' tastes change abruptly; may be repeated.  [default: 150s, then every 5m]",
)
@click.option(
    "--seconds", type=FiniteRange(0, 100_000_000, min_open=True), help="Time after which the demo ends."
)
@json_option
def command(
    folder: Path,
    rate: float,
    seed: int | None,
    drift_at: tuple[str, ...],
    seconds: float | None,
    as_json: bool,
) -> None:
    """Run a small news site with simulated readers, in FOLDER (./freshet-demo), until Ctrl-C.

    The terminal shows click rates of the model's choices, of random choices, and of the best possible ones;
    the console shows the rest. The next start continues with the same model; deleting FOLDER starts over.
    """
    from freshet.apps.demo import DemoOptions, run_demo

    run_demo(folder, DemoOptions(rate, seed, drift_at), seconds=seconds, as_json=as_json)
