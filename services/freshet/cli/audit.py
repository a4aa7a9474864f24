"""`freshet audit`: who has promoted, rolled back, and made or dropped tokens."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import click
import orjson

from freshet.cli.options import emit, examples, folder_option, json_option, table

__all__ = ["command"]


@click.command(epilog=examples("freshet audit", "freshet audit --newest 1000 --json"))
@folder_option
@click.option("--newest", type=click.IntRange(1, 1_000_000), default=50, show_default=True, help="Lines.")
@json_option
def command(folder: Path, newest: int, as_json: bool) -> None:
    """Say who has changed what is served, or who may: when, from where, and how it went.

    Read from audit.jsonl of the run folder, or where FRESHET_COMMON_AUDIT_FILE says.
    """
    from freshet.errors import ConfigError
    from freshet.runtime.audit import read_audit
    from freshet.settings import load_settings

    path = load_settings(run_folder=folder).common.audit
    if not path.exists():
        raise ConfigError(
            "audit", "--folder", str(folder), f"a folder in which something was done ({path})",
            "nothing was promoted, rolled back or refused there yet, or FRESHET_COMMON_AUDIT_FILE is set for "
            "the console and not here",
        )  # fmt: skip
    lines, damaged = read_audit(path, newest)
    if damaged:
        click.echo(f"{path}: {damaged} lines cannot be understood", err=True)
    rows = [
        [one.time, one.action, one.who or None, one.at, orjson.dumps(one.what).decode(), one.outcome, one.why]
        for one in lines
    ]
    text = table(["time", "action", "who", "from", "what", "outcome", "why"], rows)
    emit({"lines": [asdict(line) for line in lines], "damaged": damaged}, as_json=as_json, text=text)
