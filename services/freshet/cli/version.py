"""`freshet version`: list, show, promote and roll back dense versions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import click
import orjson

from freshet.cli.options import examples, folder_option, json_option
from freshet.errors import ConfigError, Corrupt
from freshet.process.run_state import existing_folder
from freshet.terminal import emit, table

if TYPE_CHECKING:
    from freshet.versions import Manifest, VersionStore


@click.group()
def command() -> None:
    """List, show, promote and roll back dense versions."""


@command.command("list", epilog=examples("freshet version list"))
@folder_option
@json_option
def list_versions(folder: Path, as_json: bool) -> None:
    """List stored versions, newest last, with verdicts and aliases."""
    store = _store(folder)
    aliases = _aliases(store)
    manifests = list(_manifests(store))
    rows = [
        [
            m.number,
            _time(m.created_ms),
            m.step,
            m.verdict,
            " ".join(sorted(a for a, number in aliases.items() if number == m.number)),
            m.reason,
        ]
        for m in manifests
    ]
    text = "no version is stored yet; the trainer writes one when it starts"
    if rows:
        text = table(["version", "written", "step", "verdict", "alias", "reason"], rows)
    emit({"versions": [asdict(m) for m in manifests], "aliases": aliases}, as_json=as_json, text=text)


@command.command("show", epilog=examples("freshet version show 12"))
@click.argument("number", type=int)
@folder_option
@json_option
def show(number: int, folder: Path, as_json: bool) -> None:
    """Print a version's manifest, after checking the checksum of its weights."""
    from freshet.versions.promotions import manifest_of

    store = _store(folder)
    manifest = manifest_of(store, number)
    version = store.get(number)
    shapes = {name: list(tensor.shape) for name, tensor in version.tensors.items()}
    value = {**asdict(manifest), "tensors": shapes}
    emit(value, as_json=as_json, text=orjson.dumps(value, option=_PRETTY).decode())


@command.command("promote", epilog=examples("freshet version promote 12"))
@click.argument("number", type=int)
@folder_option
@json_option
def promote(number: int, folder: Path, as_json: bool) -> None:
    """Serve this version whatever its verdict, and let the gate promote later ones again.

    After a rollback the number of `stable` lifts the pin. Weights that are not finite are refused.
    """
    _move(folder, number, pinned=False, as_json=as_json)


@command.command("rollback", epilog=examples("freshet version rollback", "freshet version rollback 11"))
@click.argument("number", type=int, required=False)
@folder_option
@json_option
def rollback(number: int | None, folder: Path, as_json: bool) -> None:
    """Serve an older version, by default the last before `stable` that the gate promoted, until `promote`.

    Only the served dense weights change; rows continue to learn. Version 0, the untrained model, is served
    only if NUMBER is 0.
    """
    _move(folder, number, pinned=True, as_json=as_json)


_PRETTY = orjson.OPT_INDENT_2 | orjson.OPT_NON_STR_KEYS


def _aliases(store: VersionStore) -> Mapping[str, int]:
    aliases = store.aliases()
    for reason in dict.fromkeys(aliases.damaged.values()):
        click.echo(f"an alias is damaged: {reason}", err=True)
    return aliases


def _manifests(store: VersionStore) -> Iterator[Manifest]:
    """Yield the manifests that can be read; print the damage of others."""
    for number in store.numbers():
        try:
            yield store.manifest(number)
        except KeyError:
            continue  # deleted by the trainer meanwhile
        except Corrupt as error:
            click.echo(f"version {number} is damaged: {error}", err=True)


def _store(folder: Path) -> VersionStore:
    """Open the version store of the run folder, or FRESHET_COMMON_VERSIONS_URL."""
    from freshet.adapters import open_versions
    from freshet.config.settings import load_settings

    common = load_settings(run_folder=folder).common
    run = common.run
    if common.versions_url == run.versions_url or common.log_url == run.log_url:
        existing_folder(folder)  # with log and versions elsewhere, the folder need not exist
    if common.versions_url == run.versions_url and not run.versions.is_dir():
        raise ConfigError(
            "version",
            "--folder",
            str(folder),
            "a run folder in which a trainer has run (it holds versions/)",
            f"`freshet up SPEC --folder {folder}` starts one",
        )
    return open_versions(common.versions_url)


def _move(folder: Path, number: int | None, *, pinned: bool, as_json: bool) -> None:
    from freshet.adapters import open_eventlog
    from freshet.clock import SYSTEM_CLOCK
    from freshet.config.settings import load_settings
    from freshet.observability.audit import Audit, os_user
    from freshet.versions.promotions import move, version_to_roll_back_to

    store = _store(folder)
    common = load_settings(run_folder=folder).common
    details: dict[str, object] = {} if number is None else {"version": number}
    with Audit(common.audit).of("rollback" if pinned else "promote", os_user(), details):
        if number is None:
            details["version"] = number = version_to_roll_back_to(store)
        log = open_eventlog(common.log_url)
        try:
            record = move(store, log, number, pinned=pinned, by="operator", now_ms=SYSTEM_CLOCK.now_ms())
        finally:
            log.close()
    text = f"stable is now version {number}" + (
        "; the gate promotes nothing until `freshet version promote NUMBER`" if pinned else ""
    )
    emit(record, as_json=as_json, text=text)


def _time(ms: int) -> str:
    return datetime.fromtimestamp(ms / 1000, UTC).strftime("%Y-%m-%d %H:%M:%S")
