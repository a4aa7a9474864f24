"""The spec of a run folder: a copy in its state, compared before services start."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from freshet.adapters import open_rowstore, open_versions
from freshet.config.settings import Settings
from freshet.config.spec import Spec, load_spec
from freshet.config.spec.identity import diff, explain_defaults, identity_hash, render
from freshet.config.spec.model import Stream
from freshet.config.spec.parse import with_defaults
from freshet.config.spec.schemas import Schemas, load_schemas, streams_of
from freshet.config.spec.transforms import check_outcomes
from freshet.errors import Corrupt, FreshetError, Mismatch
from freshet.process.run_state import replace_file

KEPT = ("state", "spec.toml")
"""Folder and file name of a kept spec."""


def kept_spec(settings: Settings) -> Path:
    """Return the path of a run folder's spec, for `freshet check --against`; its schemas are beside it."""
    return settings.common.run.state / KEPT[1]


def load_kept(path: Path) -> Spec:
    """Read a spec that a run folder keeps.

    A kept spec without `defaults` was written by a release that had no such key, so it means `defaults = 1`.
    Raises ConfigError.
    """
    spec = load_spec(path)
    return spec if "defaults" in spec.written else with_defaults(spec, 1)


def keep_spec(spec: Spec, settings: Settings) -> None:
    """Copy a spec and its schemas, so that later edits can be compared with the running model.

    Services also start from the copy. Raises OSError; each file is then whole or unchanged.
    """
    kept: dict[str, Stream] = {}
    files: dict[str, bytes] = {}
    for stream in streams_of(spec):
        if stream.schema is None:
            continue
        name = Path(stream.schema).name
        name = name if name not in files else f"{stream.role}-{name}"
        files[name] = (Path(spec.folder) / stream.schema).read_bytes()
        kept[stream.role] = replace(stream, schema=name)
    copy = replace(spec, events=replace(spec.events, **kept))
    files[kept_spec(settings).name] = render(copy).encode()
    for name, content in files.items():
        replace_file(kept_spec(settings).with_name(name), content)


def refuse_another_model(spec: Spec, schemas: Schemas, settings: Settings) -> None:
    """Raise Mismatch if the row store belongs to another spec, with the differing edits; if the kept schemas
    read a field in another unit or scale; or if a transform's code returns other numbers than it did for the
    newest version."""
    rows = open_rowstore(settings.common.rows_url)
    try:
        identity = rows.identity()
    finally:
        rows.close()
    if identity is None:
        return
    own = identity_hash(spec, schemas)
    if identity.spec_hash == own:
        _refuse_other_readings(spec, schemas, settings, own)
        _refuse_other_outcomes(spec, settings, own)
        return
    raise Mismatch(
        f"{settings.common.rows_url} holds model {identity.model!r} of another spec "
        f"({identity.spec_hash[:12]}; this one is {own[:12]})\n"
        + (
            explain_defaults(own, identity.spec_hash)
            or f"{_edits(spec, schemas, settings)}  undo these edits, or start a new model with --folder"
        )
    )


def _refuse_other_readings(spec: Spec, schemas: Schemas, settings: Settings, spec_hash: str) -> None:
    """Raise Mismatch for edits of schemas that the hash does not have.

    Without a readable copy of the model's schemas no edit is known.
    """
    try:
        old = load_kept(kept_spec(settings))
        kept = load_schemas(old, str(kept_spec(settings)))
        same = identity_hash(old, kept) == spec_hash
    except (FreshetError, OSError):
        return
    edits = [c for c in diff(old, spec, kept, schemas) if c.kind == "identity"] if same else []
    if edits:
        raise Mismatch(
            f"{kept_spec(settings)}: the model's schemas read fields otherwise than those of the spec\n"
            + "".join(f"  {edit}\n" for edit in edits)
            + "  undo these edits, or start a new model with --folder"
        )


def _refuse_other_outcomes(spec: Spec, settings: Settings, spec_hash: str) -> None:
    versions = open_versions(settings.common.versions_url)
    try:
        for number in reversed(versions.numbers()):
            try:
                manifest = versions.manifest(number)
            except (Corrupt, KeyError):
                continue  # as the trainer does
            if manifest.spec_hash == spec_hash:  # else it is a copy of another model's
                check_outcomes(spec, manifest.transforms, f"version {number}")
                return
    finally:
        versions.close()


def _edits(spec: Spec, schemas: Schemas, settings: Settings) -> str:
    """Return the edits that need a new model, a line each; or the reason why they are not known."""
    try:
        old = load_kept(kept_spec(settings))
        changes = diff(old, spec, load_schemas(old, str(kept_spec(settings))), schemas)
    except (FreshetError, OSError) as error:
        return f"  the edits are not known, as the former spec cannot be read: {error}\n"
    return "".join(f"  {change}\n" for change in changes if change.kind == "identity")
