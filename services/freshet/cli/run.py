"""`freshet run ROLE SPEC`: one service in the foreground."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import click

from freshet.cli.options import PATH, emit_end, examples, folder_option, json_option

__all__ = ["BESIDE", "ROLES", "command"]

ROLES = ("gateway", "joiner", "trainer", "inference", "console")
"""Of a run on one machine: what `freshet up` starts."""
BESIDE = ("embedder", "paramserver")
"""Started by hand, or by what runs services in a cluster."""


@click.command(epilog=examples("freshet run trainer freshet.toml --folder news-run"))
@click.argument("role", type=click.Choice((*ROLES, *BESIDE)))
@click.argument("spec_file", type=PATH)
@folder_option
@json_option
def command(role: str, spec_file: Path, folder: Path, as_json: bool) -> None:
    """Run one service until SIGTERM or Ctrl-C; then it drains and ends with 0."""
    from freshet.cli.wiring import RUNNERS
    from freshet.runtime import tls
    from freshet.runtime.allocator import return_large_blocks
    from freshet.runtime.lifecycle import die_with_parent, stop_on_signals
    from freshet.runtime.logging import configure_logging, debug_on_signal
    from freshet.runtime.traces import start_traces
    from freshet.settings import load_settings
    from freshet.spec import load_spec

    supervisor = os.environ.get("FRESHET_SUPERVISOR_PID")
    if supervisor:
        die_with_parent(int(supervisor))
    return_large_blocks()
    stop = threading.Event()
    stop_on_signals(stop)
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
    emit_end({"role": role, "ended": "stopped"}, as_json=as_json, text=f"{role} stopped")
