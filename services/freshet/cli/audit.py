"""`freshet audit`: promotions, rollbacks, and tokens created or dropped."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import click
import orjson

from freshet.cli.options import examples, folder_option, json_option
from freshet.terminal import emit, table


@click.command(
    epilog=examples("freshet audit", "freshet audit --outcome done", "freshet audit --newest 1000 --json")
)
@folder_option
@click.option("--newest", type=click.IntRange(1, 1_000_000), default=50, show_default=True, help="Lines.")
@click.option(
    "--outcome",
    "outcomes",
    type=click.Choice(["done", "failed", "begun", "refused"]),
    multiple=True,
    help="Only lines with this outcome; may be repeated. Any client can cause refusals.",
)
@json_option
def command(folder: Path, newest: int, outcomes: tuple[str, ...], as_json: bool) -> None:
    """List changes of served versions and of tokens, with time, principal, address and outcome.

    The lines are those of audit.jsonl in the run folder, or of the file FRESHET_COMMON_AUDIT_FILE.
    """
    from freshet.config.settings import load_settings
    from freshet.errors import ConfigError
    from freshet.observability.audit import OUTCOMES, read_audit

    path = load_settings(run_folder=folder).common.audit
    if not path.exists():
        raise ConfigError(
            "audit", "--folder", str(folder), f"a folder with an audit log ({path})",
            "nothing was promoted, rolled back or refused there yet, or FRESHET_COMMON_AUDIT_FILE is set for "
            "the console and not here",
        )  # fmt: skip
    found_lines = read_audit(path, newest, outcomes or OUTCOMES)
    if found_lines.damaged:
        click.echo(f"{path}: {found_lines.damaged} lines cannot be understood", err=True)
    if found_lines.unread_bytes:
        click.echo(
            f"{path}: {found_lines.unread_bytes:,} bytes of older lines are not shown; --newest N shows "
            "more, --outcome done only completed changes",
            err=True,
        )
    rows = [
        [one.time, one.action, one.who or None, one.at, orjson.dumps(one.what).decode(), one.outcome, one.why]
        for one in found_lines.lines
    ]
    text = table(["time", "action", "who", "from", "what", "outcome", "why"], rows)
    found = {"lines": [asdict(line) for line in found_lines.lines], "damaged": found_lines.damaged}
    emit({**found, "unread_bytes": found_lines.unread_bytes}, as_json=as_json, text=text)
