"""Where training starts from: the newest version that can be read and belongs to this spec and log."""

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


def test_the_newest_version_is_where_training_starts(store: VersionStore) -> None:
    assert start(store) == 2


def test_an_empty_store_starts_from_nothing(tmp_path: Path) -> None:
    assert start(open_url(f"file:{tmp_path}/empty")) is None


@pytest.mark.parametrize("file", ["weights.safetensors", "manifest.json"])
@pytest.mark.parametrize("damage", [b"", b"{}", b"\0" * 100])
def test_a_damaged_version_is_passed_over(
    store: VersionStore, tmp_path: Path, file: str, damage: bytes
) -> None:
    (tmp_path / "0000000002" / file).write_bytes(damage)

    assert start(store) == 1


def test_a_version_that_is_not_finite_is_passed_over(store: VersionStore) -> None:
    store.judge(2, "held", "not finite: a weight or a statistic is NaN or infinite")

    assert start(store) == 1


def test_a_version_held_for_its_quality_is_trained_on_from(store: VersionStore) -> None:
    store.judge(2, "held", "click: calibration 1.5")

    assert start(store) == 2


def test_if_no_version_can_be_read_an_operator_decides(store: VersionStore, tmp_path: Path) -> None:
    for number in range(3):
        (tmp_path / f"{number:010d}" / "weights.safetensors").unlink()

    with pytest.raises(Corrupt, match="restore the versions folder"):
        start(store)


@pytest.mark.parametrize(("spec", "log"), [("other", "log"), ("spec", "other")])
def test_versions_of_another_spec_or_log_are_refused(store: VersionStore, spec: str, log: str) -> None:
    with pytest.raises(Mismatch, match="version 2 was trained under another"):
        restart_point(store, spec, log)


@pytest.mark.parametrize(("spec", "log"), [("other", "log"), ("spec", "other")])
def test_a_stray_version_of_another_model_is_passed_over(store: VersionStore, spec: str, log: str) -> None:
    store.put(Manifest(9, "shop", spec, 0, 9, {0: 9}, log, 0, {}, 0, ""), {"w": np.zeros(1)})

    assert start(store) == 2


def test_a_stray_folder_is_passed_over(store: VersionStore, tmp_path: Path) -> None:
    (tmp_path / "0000000777").mkdir()
    (tmp_path / "0000000778").write_text("")

    assert start(store) == 2
