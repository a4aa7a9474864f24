"""`freshet simulate`: simulated readers of a running system."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import click

from freshet.cli.options import SEED, FiniteRange, examples, folder_option, json_option
from freshet.demo import DRIFT_AT, DRIFT_EVERY
from freshet.terminal import emit_end


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
@click.option("--seed", type=SEED, default=7, show_default=True, help="Seed of all random choices.")
@click.option(
    "--drift-at",
    multiple=True,
    metavar="DURATION",
    help=f"Time after the start when tastes change abruptly; may be repeated.  [default: {DRIFT_AT}]",
)
@click.option(
    "--drift-every",
    metavar="DURATION",
    default=DRIFT_EVERY,
    show_default=True,
    help='Interval of further changes; "none" for no more.',
)
@click.option(
    "--gateway",
    multiple=True,
    metavar="URL",
    help="Gateway or load balancer for actions; may be repeated.  [default: this machine's]",
)
@click.option("--inference", multiple=True, metavar="URL", help="Inference server for pages; likewise.")
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
    """Simulate readers of the run folder's system, which uses the demo's spec, until Ctrl-C.

    Ports are those of the settings, unless URLs name gateway and inference. A restarted simulator continues
    with the same readers.
    """
    from freshet.apps.demo import seconds_of
    from freshet.config.settings import load_settings
    from freshet.demo.connections import targets_by
    from freshet.demo.service import run
    from freshet.demo.start_time import RunStart
    from freshet.http import tls
    from freshet.observability.logging import configure_logging
    from freshet.process.lifecycle import die_with_parent, stop_on_signals

    at = tuple(sorted(seconds_of("--drift-at", text) for text in drift_at or (DRIFT_AT,)))
    every = None if drift_every == "none" else seconds_of("--drift-every", drift_every)
    supervisor = os.environ.get("FRESHET_SUPERVISOR_PID")
    if supervisor:
        die_with_parent(int(supervisor))
    stop = threading.Event()
    stop_on_signals(stop, supervised=bool(supervisor))
    settings = load_settings(run_folder=folder)
    configure_logging("simulator", level=settings.common.log_level, form=settings.common.log_format)
    tls.use(settings)
    settings.common.run.create()
    run(settings, RunStart(seed, at, every), rate, targets_by(settings, gateway, inference), stop=stop)
    if not supervisor:  # which has one file for both outputs, JSON line by line
        emit_end({"role": "simulator", "ended": "stopped"}, as_json=as_json, text="simulator stopped")
