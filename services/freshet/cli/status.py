"""`freshet status`: what runs, what it has done, how fresh the served model is, and what happened."""

from __future__ import annotations

from pathlib import Path

import click

from freshet.apps.status import collect, collect_listed
from freshet.cli.options import examples, folder_option, json_option
from freshet.cli.status_text import as_text
from freshet.errors import Corrupt, Unavailable
from freshet.terminal import emit

__all__ = ["command"]


@click.command(
    epilog=examples(
        "freshet status",
        "freshet status --folder news-run --json",
        "freshet status --services gateway=gateway-0:7000,joiner=joiner-0:7010",
    )
)
@folder_option
@click.option(
    "--services",
    metavar="LIST",
    help="Ask these, role=host:port and commas between, instead of a run folder's. FRESHET_CONSOLE_SERVICES "
    "says it, too, where no run folder knows of any.",
)
@json_option
def command(folder: Path, services: str | None, as_json: bool) -> None:
    """Say what runs in a run folder, what it has done, how fresh the served model is, and what ended; or how
    services are that run on other machines or in containers."""
    from freshet.config.settings import load_settings

    if services is None and not _has_run(folder):
        services = load_settings(run_folder=folder).console.services
    status = collect_listed(folder, services) if services else collect(folder)
    emit(status, as_json=as_json, text=as_text(status))


def _has_run(folder: Path) -> bool:
    """Whether `freshet up` ever ran there."""
    from freshet.config.settings import RunFolder
    from freshet.process.run_state import read_run

    try:
        return folder.is_dir() and read_run(RunFolder(folder)) is not None
    except (Corrupt, Unavailable):
        return True
