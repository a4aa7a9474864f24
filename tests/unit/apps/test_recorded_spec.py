"""The spec that a run folder keeps."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from freshet.adapters import open_rowstore
from freshet.apps.recorded_spec import keep_spec, kept_spec, refuse_another_model
from freshet.config.settings import RunFolder, Settings, load_settings
from freshet.config.spec import load_spec
from freshet.config.spec.identity import identity_hash
from freshet.config.spec.schemas import load_schemas
from freshet.errors import Mismatch
from freshet.process.run_state import replace_file
from freshet.rows.store import StoreIdentity
from freshet.types import Bucket, BucketMeta, Fence, TimeMs

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


def test_a_unit_that_the_hash_lacks_is_compared_with_the_copy(settings: Settings, tmp_path: Path) -> None:
    shutil.copytree(QUICKSTART.parent, tmp_path / "edited")
    file = tmp_path / "edited" / "impressions.avsc"
    plain = file.read_text()

    def start(unit: str) -> None:
        long = f'{{"type": "long", "logicalType": "timestamp-{unit}"}}'
        file.write_text(plain.replace('"reader", "type": "string"', f'"reader", "type": {long}'))
        spec = load_spec(file.with_name("freshet.toml"))
        schemas = load_schemas(spec)
        rows = open_rowstore(settings.common.rows_url)
        if rows.identity() is None:
            own = StoreIdentity("news", identity_hash(spec, schemas), 1, {}, {}, "log")
            rows.create(own, {Bucket(0): BucketMeta(Fence(0), 0, 0, {}, 0, TimeMs(0))})
        rows.close()
        refuse_another_model(spec, schemas, settings)
        keep_spec(spec, settings)

    start("millis")
    start("millis")
    with pytest.raises(Mismatch, match=r"field served\.reader: .*time in ms.*time in us") as error:
        start("micros")
    assert "undo these edits" in str(error.value)
    start("millis")


def test_failed_replacement_leaves_the_old_file_alone(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()

    with pytest.raises(IsADirectoryError):
        replace_file(tmp_path / "folder", b"content")

    assert [path.name for path in tmp_path.iterdir()] == ["folder"]
