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
@click.option(
    "--stop-on-stdin",
    is_flag=True,
    help="Stop, too, once standard input has a byte or ends: with a pipe, when the program that starts this "
    "one ends, killed or not.",
)
@json_option
def command(spec_file: Path, folder: Path, console: bool, stop_on_stdin: bool, as_json: bool) -> None:
    """Run gateway, joiner, trainer, inference and console of SPEC_FILE until Ctrl-C; restart those that die.

    All files are in the run folder; deleting it deletes the model.
    """
    from freshet.apps.supervision import run_up

    run_up(spec_file, folder, console=console, until_stdin=stop_on_stdin, as_json=as_json)
