"""Training starts from the newest readable version of this spec and log."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from freshet.errors import Corrupt, Mismatch
from freshet.trainer.version_writer import restart_point
from freshet.versions import Manifest, VersionStore
from freshet.versions.folder import open_url


@pytest.fixture
def store(tmp_path: Path) -> Iterator[VersionStore]:
    store = open_url(f"file:{tmp_path}")
    for number in range(3):
        manifest = Manifest(number, "shop", "spec", 0, number, {0: number}, "log", 0, {}, 0, "")
        store.put(manifest, {"weights/w": np.array([number], np.float32)})
    yield store
    store.close()


def start(store: VersionStore) -> int | None:
    found = restart_point(store, "spec", "log")
    return found.number if found else None


def test_training_starts_from_the_newest_version(store: VersionStore) -> None:
    assert start(store) == 2


def test_empty_store_has_no_restart_point(tmp_path: Path) -> None:
    assert start(open_url(f"file:{tmp_path}/empty")) is None


@pytest.mark.parametrize("file", ["weights.safetensors", "manifest.json"])
@pytest.mark.parametrize("damage", [b"", b"{}", b"\0" * 100])
def test_damaged_version_is_skipped(store: VersionStore, tmp_path: Path, file: str, damage: bytes) -> None:
    (tmp_path / "0000000002" / file).write_bytes(damage)

    assert start(store) == 1


def test_version_that_is_not_finite_is_skipped(store: VersionStore) -> None:
    store.judge(2, "held", "not finite: a weight or a statistic is NaN or infinite")

    assert start(store) == 1


def test_version_held_for_quality_is_a_restart_point(store: VersionStore) -> None:
    store.judge(2, "held", "click: calibration 1.5")

    assert start(store) == 2


def test_unreadable_versions_raise_corrupt(store: VersionStore, tmp_path: Path) -> None:
    for number in range(3):
        (tmp_path / f"{number:010d}" / "weights.safetensors").unlink()

    with pytest.raises(Corrupt, match="restore the versions folder"):
        start(store)


@pytest.mark.parametrize(("spec", "log"), [("other", "log"), ("spec", "other")])
def test_versions_of_another_spec_or_log_are_refused(store: VersionStore, spec: str, log: str) -> None:
    with pytest.raises(Mismatch, match="version 2 was trained under another"):
        restart_point(store, spec, log)


@pytest.mark.parametrize(("spec", "log"), [("other", "log"), ("spec", "other")])
def test_stray_version_of_another_model_is_skipped(store: VersionStore, spec: str, log: str) -> None:
    store.put(Manifest(9, "shop", spec, 0, 9, {0: 9}, log, 0, {}, 0, ""), {"w": np.zeros(1)})

    assert start(store) == 2


def test_stray_folder_is_skipped(store: VersionStore, tmp_path: Path) -> None:
    (tmp_path / "0000000777").mkdir()
    (tmp_path / "0000000778").write_text("")

    assert start(store) == 2
