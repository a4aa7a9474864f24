"""Moves of `stable` by hand: which version a rollback serves, and what a refusal names."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from freshet.errors import ConfigError, Corrupt
from freshet.log.sqlite.event_log import SqliteEventLog
from freshet.testing.contracts.versions import manifest_of as written
from freshet.versions.folder import FolderVersionStore
from freshet.versions.promotions import manifest_of, move, version_to_roll_back_to

HELD = range(31, 41)


@pytest.fixture
def store(tmp_path: Path) -> FolderVersionStore:
    """A store whose trainer has held versions since `stable`, 5, and removed those between."""
    store = FolderVersionStore(tmp_path)
    for number in (0, 5, *HELD):
        store.put(replace(written(number), verdict="held" if number in HELD else "promoted"), {})
    store.point("stable", 5)
    return store


def test_rollback_serves_the_last_promoted_version(store: FolderVersionStore) -> None:
    store.judge(33, "promoted", "")
    store.point("stable", 40)

    assert version_to_roll_back_to(store) == 33


def test_rollback_never_chooses_the_untrained_version(store: FolderVersionStore) -> None:
    with pytest.raises(ConfigError) as refused:
        version_to_roll_back_to(store)

    assert refused.value.expected == "a stored version (0, 5, 31 to 40)"
    assert "name the one to serve" in refused.value.hint


def test_refusal_lists_the_stored_versions_as_ranges(store: FolderVersionStore) -> None:
    with pytest.raises(ConfigError) as refused:
        manifest_of(store, 7)

    assert refused.value.expected == "a stored version (0, 5, 31 to 40)"


def test_refusal_of_an_empty_store_says_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"a stored version \(none\)"):
        manifest_of(FolderVersionStore(tmp_path), 7)


def test_a_version_that_no_server_loads_is_not_served(store: FolderVersionStore, tmp_path: Path) -> None:
    store.put(written(41), {"weights/w": np.array([1, np.nan], np.float32), "optimizer/m": np.ones(2)})
    log = SqliteEventLog(tmp_path / "log")

    with pytest.raises(Corrupt, match=r"version 41: expected finite weights, .* in weights/w"):
        move(store, log, 41, pinned=False, by="operator", now_ms=1)

    assert store.aliases()["stable"] == 5
