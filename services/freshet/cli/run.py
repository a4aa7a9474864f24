"""`freshet run ROLE SPEC`: one service in the foreground."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import click

from freshet.apps.ports import BESIDE, ROLES
from freshet.cli.options import PATH, examples, folder_option, json_option
from freshet.terminal import emit_end


@click.command(epilog=examples("freshet run trainer freshet.toml --folder news-run"))
@click.argument("role", type=click.Choice((*ROLES, *BESIDE)))
@click.argument("spec_file", type=PATH)
@folder_option
@json_option
def command(role: str, spec_file: Path, folder: Path, as_json: bool) -> None:
    """Run one service until SIGTERM or Ctrl-C; it then drains and exits with 0."""
    from freshet.apps.services import RUNNERS
    from freshet.config.settings import load_settings
    from freshet.config.spec import load_spec
    from freshet.http import tls
    from freshet.observability.logging import configure_logging, debug_on_signal
    from freshet.process.lifecycle import die_with_parent, stop_on_signals
    from freshet.process.memory import return_large_blocks
    from freshet.process.telemetry import start_traces

    supervisor = os.environ.get("FRESHET_SUPERVISOR_PID")
    if supervisor:
        die_with_parent(int(supervisor))
    return_large_blocks()
    stop = threading.Event()
    stop_on_signals(stop, supervised=bool(supervisor))
    settings = load_settings(run_folder=folder)
    common = settings.common
    name = getattr(getattr(settings, role), "name", "")
    configure_logging(role, level=common.log_level, form=common.log_format, instance=name)
    debug_on_signal(common.log_level)
    tls.use(settings)
    settings.common.run.create()
    spec = load_spec(spec_file)
    end_traces = start_traces(settings, role=role, instance=name, model=spec.name, on=role != "console")
    try:
        RUNNERS[role](spec, settings, stop)
    finally:
        end_traces()
    if not supervisor:  # which has one file for both outputs, JSON line by line
        emit_end({"role": role, "ended": "stopped"}, as_json=as_json, text=f"{role} stopped")
