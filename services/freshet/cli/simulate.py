"""`freshet simulate`: simulated readers visit a running system, and do what readers do."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import click

from freshet.cli.options import SEED, FiniteRange, emit_end, examples, folder_option, json_option

__all__ = ["DRIFT_AT", "DRIFT_EVERY", "command", "seconds_of"]

DRIFT_AT, DRIFT_EVERY = "150s", "5m"


@click.command(
    epilog=examples(
        "freshet simulate --rate 200 --seed 7 --drift-at 2m",
        "freshet simulate --gateway http://gateway-0:7000 --inference http://inference-0:7001",
    )
)
@folder_option
@click.option(
    "--rate",
    type=FiniteRange(10, 5_000),
    default=1_000,
    show_default=True,
    help="Events a second: items shown and actions.",
)
@click.option("--seed", type=SEED, default=7, show_default=True, help="Of everything by chance.")
@click.option(
    "--drift-at",
    multiple=True,
    metavar="DURATION",
    help=f"When tastes change abruptly, after the beginning; may be repeated.  [default: {DRIFT_AT}]",
)
@click.option(
    "--drift-every",
    metavar="DURATION",
    default=DRIFT_EVERY,
    show_default=True,
    help='Again and again after the last of them; "none" for no more.',
)
@click.option(
    "--gateway",
    multiple=True,
    metavar="URL",
    help="Where actions go; may be repeated, or be a load balancer's.  [default: this machine's]",
)
@click.option("--inference", multiple=True, metavar="URL", help="Where pages come from; likewise.")
@json_option
def command(
    folder: Path,
    rate: float,
    seed: int,
    drift_at: tuple[str, ...],
    drift_every: str,
    gateway: tuple[str, ...],
    inference: tuple[str, ...],
    as_json: bool,
) -> None:
    """Have readers visit the system that runs in the run folder with the demo's spec, until Ctrl-C.

    Ports are those of the settings, unless URLs say where gateway and inference answer. A simulator that is
    started again goes on with the same world.
    """
    from freshet.runtime import tls
    from freshet.runtime.lifecycle import die_with_parent, stop_on_signals
    from freshet.runtime.logging import configure_logging
    from freshet.settings import load_settings
    from freshet.testing.simulator.began import Began
    from freshet.testing.simulator.service import run
    from freshet.testing.simulator.targets import targets_by

    at = tuple(sorted(seconds_of("--drift-at", text) for text in drift_at or (DRIFT_AT,)))
    every = None if drift_every == "none" else seconds_of("--drift-every", drift_every)
    supervisor = os.environ.get("FRESHET_SUPERVISOR_PID")
    if supervisor:
        die_with_parent(int(supervisor))
    stop = threading.Event()
    stop_on_signals(stop)
    settings = load_settings(run_folder=folder)
    configure_logging("simulator", level=settings.common.log_level, form=settings.common.log_format)
    tls.use(settings)
    settings.common.run.create()
    run(settings, Began(seed, at, every), rate, targets_by(settings, gateway, inference), stop=stop)
    emit_end({"role": "simulator", "ended": "stopped"}, as_json=as_json, text="simulator stopped")


def seconds_of(option: str, text: str) -> float:
    """A duration of the command line. Raises ConfigError, naming the option."""
    from freshet.errors import ConfigError
    from freshet.options import Duration, Wrong

    form = Duration(1_000, 365 * 86_400_000)
    try:
        return float(form.read(text) or 0) / 1_000
    except Wrong as wrong:
        raise ConfigError(option, "", text, wrong.expected, wrong.hint) from None
