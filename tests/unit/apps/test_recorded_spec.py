"""The spec that a run folder keeps."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from freshet.apps.recorded_spec import keep_spec, kept_spec
from freshet.config.settings import RunFolder, Settings, load_settings
from freshet.config.spec import load_spec
from freshet.config.spec.identity import identity_hash
from freshet.config.spec.schemas import load_schemas
from freshet.process.run_state import replace_file

QUICKSTART = Path(__file__).parents[3] / "examples" / "quickstart" / "freshet.toml"


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return load_settings({}, run_folder=RunFolder(tmp_path / "run").create().path)


def test_the_kept_spec_can_be_started_itself(settings: Settings) -> None:
    spec = load_spec(QUICKSTART)
    keep_spec(spec, settings)
    before = {path.name: path.read_bytes() for path in kept_spec(settings).parent.iterdir()}

    kept = load_spec(kept_spec(settings))
    keep_spec(kept, settings)

    assert {path.name: path.read_bytes() for path in kept_spec(settings).parent.iterdir()} == before
    assert identity_hash(kept, load_schemas(kept)) == identity_hash(spec, load_schemas(spec))


def test_schemas_of_one_name_are_kept_apart(settings: Settings, tmp_path: Path) -> None:
    for folder, schema in (("a", "impressions.avsc"), ("b", "actions.avsc")):
        (tmp_path / folder).mkdir()
        shutil.copyfile(QUICKSTART.with_name(schema), tmp_path / folder / "events.avsc")
    spec = load_spec(QUICKSTART)
    events = replace(
        spec.events,
        served=replace(spec.events.served, schema="a/events.avsc"),
        action=replace(spec.events.action, schema="b/events.avsc"),
    )
    moved = replace(spec, events=events, folder=str(tmp_path))

    keep_spec(moved, settings)

    kept = load_spec(kept_spec(settings))
    assert load_schemas(kept) == load_schemas(spec)


def test_failed_replacement_leaves_the_old_file_alone(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()

    with pytest.raises(IsADirectoryError):
        replace_file(tmp_path / "folder", b"content")

    assert [path.name for path in tmp_path.iterdir()] == ["folder"]
