"""`freshet late`: set event time back after clocks were wrong, and join late impressions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import click

from freshet.cli.options import PATH, examples, folder_option, json_option
from freshet.errors import ConfigError, Corrupt, Unavailable
from freshet.process.run_state import existing_folder
from freshet.terminal import emit, table

if TYPE_CHECKING:
    from freshet.config.settings import Settings
    from freshet.joiner.late import LateJoined, SetBackPartition
    from freshet.joiner.service import JoinerService


@click.group()
def command() -> None:
    """Join late events again, after clocks were wrong."""


@command.command(
    "set-back",
    epilog=examples("freshet late set-back freshet.toml --dry-run", "freshet late set-back freshet.toml"),
)
@click.argument("spec_file", type=PATH)
@folder_option
@click.option("--dry-run", is_flag=True, help="Print the changes without making them.")
@json_option
def set_back_command(spec_file: Path, folder: Path, dry_run: bool, as_json: bool) -> None:
    """Set event time back to the present where it is ahead of this machine's clock.

    Events are late while event time is ahead, and it never goes back by itself. Correct the clocks and stop
    the joiner first. Decisions and known ids stay, so no sample is written twice. Partitions that are not
    ahead stay unchanged, so the command can be repeated.
    """
    from freshet.config.settings import load_settings
    from freshet.joiner.late import set_back

    settings = load_settings(run_folder=folder)
    if not dry_run:
        _refuse_beside_joiner(settings)
    with _joiner(spec_file, settings) as joiner:
        found = set_back(joiner.context, dry_run=dry_run)
    listed = [asdict(one) | {"changed": one.changed} for one in found]
    emit({"dry_run": dry_run, "partitions": listed}, as_json=as_json, text=_set_back_text(found, dry_run))


def _set_back_text(found: Sequence[SetBackPartition], dry_run: bool) -> str:
    rows = [
        [
            one.partition,
            _date(one.was_ms),
            _date(one.watermark_ms) if one.changed else "unchanged",
            _from(one),
        ]
        for one in found
    ]
    changed = sum(one.changed for one in found)
    if not changed:
        then = "event time is not ahead of this machine's clock in any partition: nothing was changed"
    elif dry_run:
        then = f"{changed} of {len(found)} partitions would be set back; nothing was changed"
    else:
        then = f"{changed} of {len(found)} partitions are set back: start the joiner"
    return f"{table(['partition', 'event time was', 'is', 'joined by it'], rows)}\n{then}"


@command.command(
    "join", epilog=examples("freshet late join freshet.toml --dry-run", "freshet late join freshet.toml")
)
@click.argument("spec_file", type=PATH)
@folder_option
@click.option("--dry-run", is_flag=True, help="Print the counts without appending samples.")
@json_option
def join_command(spec_file: Path, folder: Path, dry_run: bool, as_json: bool) -> None:
    """Join the late impressions that the log holds, and append them to the model's samples.

    The command reads all of <model>.samples.late, and the events of its samples. It leaves out samples that
    were joined before, so it can be repeated; run it again for windows that are still open. The joiner may
    run.
    """
    from freshet.config.settings import load_settings
    from freshet.joiner.late import LateJoin

    with _joiner(spec_file, load_settings(run_folder=folder)) as joiner:
        found = list(LateJoin(joiner.context, dry_run=dry_run).run())
    partitions = [asdict(one) for one in found]
    emit({"dry_run": dry_run, "partitions": partitions}, as_json=as_json, text=_join_text(found, dry_run))


def _join_text(found: Sequence[LateJoined], dry_run: bool) -> str:
    header = ["partition", "offsets", "late", "joined before", "positive", "negative", "no sample", *_LEFT]
    rows: list[list[object]] = [
        [
            one.partition,
            f"[{one.start}, {one.stop})",
            one.read,
            one.already,
            one.positive,
            one.negative,
            one.no_sample,
            *(one.left[reason] for reason in _LEFT.values()),
        ]
        for one in found
    ]
    joined = sum(one.positive + one.negative for one in found)
    then = (
        f"{joined} samples would be joined; nothing was appended" if dry_run else f"{joined} samples joined"
    )
    return f"{table(header, rows)}\n{then}"


_LEFT = {
    "left: windows open": "windows_open",
    "event gone": "event_gone",
    "samples gone": "samples_gone",
}
"""Column -> reason why late samples are not joined: their windows are open; the log no longer holds their
event; or it no longer holds all samples of their time, so that they may have been joined before."""


def _from(one: SetBackPartition) -> str:
    return ", ".join(f"{role} from offset {offset}" for role, offset in one.next.items()) or "all events"


def _date(time_ms: int | None) -> str:
    """Format in UTC, to the millisecond; as a number if it is no date."""
    if time_ms is None:
        return "none yet"
    try:
        return datetime.fromtimestamp(time_ms / 1000, UTC).isoformat(" ", "milliseconds")
    except (OverflowError, ValueError, OSError):
        return f"{time_ms} ms"


def _refuse_beside_joiner(settings: Settings) -> None:
    """Raise ConfigError if the joiner of the run folder runs. A joiner elsewhere is fenced by `set_back`."""
    from freshet.process.process_info import is_alive
    from freshet.process.run_state import read_state

    run = settings.common.run
    if settings.common.log_url != run.log_url:
        return
    try:
        state = read_state(run).get("joiner")
    except (Corrupt, Unavailable):
        return
    if state is not None and state["pid"] is not None and is_alive(state["pid"], state["birth"]):
        raise ConfigError(
            "late set-back",
            "--folder",
            str(run.path),
            "a run folder whose joiner is stopped",
            f"the joiner runs (process {state['pid']}): end `freshet up`, and start it again afterwards",
        )


@contextmanager
def _joiner(spec_file: Path, settings: Settings) -> Iterator[JoinerService]:
    """Yield the joiner of a model without starting it; close its log after the block."""
    from freshet.adapters import open_eventlog
    from freshet.apps.services import external_registry
    from freshet.config.spec import load_spec
    from freshet.config.spec.topics import topics_of
    from freshet.joiner.start import make

    spec, common = load_spec(spec_file), settings.common
    if common.log_url == common.run.log_url:
        existing_folder(common.run.path)
    log = open_eventlog(common.log_url)
    try:
        if topics_of(spec).joiner not in log.topics():
            raise ConfigError(
                "late",
                "SPEC_FILE",
                str(spec_file),
                f"the spec of a model that has run on this log; {spec.name} has not",
                "--folder or FRESHET_COMMON_LOG_URL names the log",
            )
        yield make(spec, log, external_schemas=external_registry(settings))
    finally:
        log.close()
