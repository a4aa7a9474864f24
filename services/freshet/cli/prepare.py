"""`freshet prepare SPEC`: create topics and check stores before any service starts."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from freshet.cli.options import PATH, FiniteRange, examples, folder_option, json_option
from freshet.terminal import emit

T = TypeVar("T")

PAUSE_S = 0.5


@click.command(epilog=examples("freshet prepare freshet.toml", "freshet prepare freshet.toml --wait 60"))
@click.argument("spec_file", type=PATH)
@folder_option
@click.option(
    "--wait",
    "wait_s",
    type=FiniteRange(0, 3_600),
    default=0,
    show_default=True,
    help="Seconds for which to retry while a store cannot be reached.",
)
@json_option
def command(spec_file: Path, folder: Path, wait_s: float, as_json: bool) -> None:
    """Create missing topics of SPEC_FILE, and check the row store and the version store.

    Existing topics keep their records, and their retention is set to the spec's; stores stay unchanged. So
    the command may run before every start. Services do the same; this command reports an error once, and
    lets services run without the right to create topics.
    """
    from freshet.config.settings import load_settings
    from freshet.config.spec import load_spec

    spec, common = load_spec(spec_file), load_settings(run_folder=folder).common
    common.run.create()
    deadline = time.monotonic() + wait_s

    found: dict[str, Any] = {
        "model": spec.name,
        "topics": _until(deadline, lambda: _topics(spec, common.log_url)),
        "rows_of": _until(deadline, lambda: check_rows(spec, common.rows_url)),
        "versions": _until(deadline, lambda: _versions(common.versions_url)),
    }
    made = ", ".join(found["topics"]["made"]) or "none was missing"
    rows = f"of {found['rows_of']}" if found["rows_of"] else "none yet; the store can be used"
    emit(
        found,
        as_json=as_json,
        text="\n".join(
            (
                f"topics    {found['topics']['there']} of {spec.name} exist; created now: {made}",
                f"rows      {rows}",
                f"versions  {found['versions']} are stored",
            )
        ),
    )


def _until(deadline: float, do: Callable[[], T]) -> T:
    """Return the result of `do`; retry until the deadline while it raises Unavailable."""
    from freshet.errors import Unavailable

    while True:
        try:
            return do()
        except Unavailable:
            if time.monotonic() + PAUSE_S > deadline:
                raise
            time.sleep(PAUSE_S)


def _topics(spec: Any, url: str) -> dict[str, Any]:
    from freshet.adapters import open_eventlog
    from freshet.log.topics import ensure_topics

    log = open_eventlog(url)
    try:
        before = set(log.topics())
        plans = ensure_topics(log, spec).plans
    finally:
        log.close()
    names = [plan.name for plan in plans]
    return {"there": len(names), "made": [name for name in names if name not in before]}


def check_rows(spec: Any, url: str) -> str | None:
    """Return the model of the row store, or None if it is empty. Raises Mismatch if it is another model."""
    from freshet.adapters import open_rowstore
    from freshet.config.spec.identity import explain_defaults, identity_hash
    from freshet.config.spec.schemas import load_schemas
    from freshet.errors import Mismatch
    from freshet.rows.store import A_STORE_OF_ITS_OWN

    rows = open_rowstore(url)
    try:
        identity = rows.identity()
    finally:
        rows.close()
    if identity is None:
        return None
    wanted = spec.name, identity_hash(spec, load_schemas(spec))
    if (identity.model, identity.spec_hash) != wanted:
        raise Mismatch(
            f"{url}: expected rows of model {wanted[0]!r}, spec {wanted[1]}; found those of "
            f"{identity.model!r}, spec {identity.spec_hash}\n"
            + (explain_defaults(wanted[1], identity.spec_hash) or A_STORE_OF_ITS_OWN)
        )
    return identity.model


def _versions(url: str) -> int:
    from freshet.adapters import open_versions

    versions = open_versions(url)
    try:
        return len(list(versions.numbers()))
    finally:
        versions.close()
