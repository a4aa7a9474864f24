"""`freshet up SPEC`: every service of a spec on this machine, supervised."""

from __future__ import annotations

from pathlib import Path

import click

from freshet.cli.options import PATH, examples, folder_option, json_option


@click.command(
    epilog=examples("freshet up freshet.toml", "freshet up freshet.toml --folder news-run --no-console")
)
@click.argument("spec_file", type=PATH)
@folder_option
@click.option("--console/--no-console", default=True, show_default=True, help="Run the console, too.")
@json_option
def command(spec_file: Path, folder: Path, console: bool, as_json: bool) -> None:
    """Run gateway, joiner, trainer, inference and console of SPEC_FILE until Ctrl-C; restart those that die.

    All files are in the run folder; deleting it deletes the model.
    """
    from freshet.apps.supervision import run_up

    run_up(spec_file, folder, console=console, as_json=as_json)
