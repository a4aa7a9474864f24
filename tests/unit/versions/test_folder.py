import contextlib
import errno
import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from freshet.errors import Corrupt, Unavailable
from freshet.observability.skipped_state import skipped
from freshet.testing.contracts.versions import TENSORS, manifest_of
from freshet.versions.folder import FolderVersionStore
from freshet.versions.weights import read_manifest, write_manifest


@pytest.fixture
def store(tmp_path: Path) -> FolderVersionStore:
    store = FolderVersionStore(tmp_path)
    store.put(manifest_of(1), TENSORS)
    return store


@pytest.mark.parametrize(
    "call",
    [
        lambda store: store.numbers(),
        lambda store: store.aliases(),
        lambda store: store.manifest(1),
        lambda store: store.get(1),
        lambda store: store.judge(1, "held", ""),
        lambda store: store.point("stable", 1),
        lambda store: store.delete(1),
        lambda store: store.put(manifest_of(2), TENSORS),
    ],
)
def test_a_missing_folder_is_unavailable_not_empty(
    tmp_path: Path, call: Callable[[FolderVersionStore], object]
) -> None:
    store = FolderVersionStore(tmp_path / "versions")
    store.put(manifest_of(1), TENSORS)
    (tmp_path / "versions").rename(tmp_path / "moved")
    with pytest.raises(Unavailable, match=f"{tmp_path}/versions"):
        call(store)


@pytest.mark.parametrize("at", [0, 20, -1])
def test_changed_byte_of_the_weights_is_corrupt_with_its_path(
    store: FolderVersionStore, tmp_path: Path, at: int
) -> None:
    path = tmp_path / "0000000001" / "weights.safetensors"
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)
    with pytest.raises(Corrupt, match=r"0000000001/weights\.safetensors.*sha256"):
        store.get(1)


def test_truncated_weights_are_corrupt(store: FolderVersionStore, tmp_path: Path) -> None:
    path = tmp_path / "0000000001" / "weights.safetensors"
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(Corrupt, match="sha256"):
        store.get(1)


def test_missing_weights_are_corrupt_not_an_unknown_version(
    store: FolderVersionStore, tmp_path: Path
) -> None:
    (tmp_path / "0000000001" / "weights.safetensors").unlink()
    with pytest.raises(Corrupt, match="delete version 1"):
        store.get(1)


def test_bytes_that_are_no_safetensors_are_corrupt(store: FolderVersionStore, tmp_path: Path) -> None:
    folder = tmp_path / "0000000001"
    (folder / "weights.safetensors").write_bytes(b"not tensors")
    forged = replace(store.manifest(1), sha256=hashlib.sha256(b"not tensors").hexdigest())
    (folder / "manifest.json").write_bytes(write_manifest(forged))
    with pytest.raises(Corrupt, match="safetensors"):
        store.get(1)


@pytest.mark.parametrize(
    "change",
    [{"v": 2}, {"number": "1"}, {"applied": {"x": 1}}, {"measures": []}, {"number": 2}, {"step": None}],
)
def test_a_manifest_with_a_wrong_field_is_corrupt(
    store: FolderVersionStore, tmp_path: Path, change: dict[str, object]
) -> None:
    path = tmp_path / "0000000001" / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(Corrupt, match=r"manifest\.json"):
        store.manifest(1)


@given(st.binary(max_size=200))
def test_any_bytes_are_a_manifest_or_corrupt(data: bytes) -> None:
    with pytest.raises(Corrupt):
        read_manifest(data, "here")


@given(st.integers(0, 300), st.integers(0, 255))
def test_a_manifest_with_a_changed_byte_parses_or_is_corrupt(at: int, byte: int) -> None:
    data = bytearray(write_manifest(manifest_of(1)))
    data[at % len(data)] = byte
    with contextlib.suppress(Corrupt):
        read_manifest(bytes(data), "here")


def test_a_measure_that_is_not_finite_is_written_as_null() -> None:
    manifest = replace(manifest_of(1), measures={"auc": float("nan"), "n": np.int64(3)})
    assert read_manifest(write_manifest(manifest), "here").measures == {"auc": None, "n": 3}


def test_a_full_disk_is_unavailable_and_leaves_nothing_behind(
    store: FolderVersionStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        with pytest.raises(Unavailable, match="No space left"):
            store.put(manifest_of(2), TENSORS)
        with pytest.raises(Unavailable, match="No space left"):
            store.point("stable", 1)
    assert (list(store.numbers()), dict(store.aliases())) == ([1], {})
    store.put(manifest_of(2), TENSORS)
    assert not list(tmp_path.glob(".new-*"))


@pytest.mark.parametrize("content", [b"newest", b"", b"1\n", b"-1", b"9" * 30, b"\xff", "\u0663".encode()])
def test_damaged_alias_does_not_affect_others(
    store: FolderVersionStore, tmp_path: Path, content: bytes
) -> None:
    store.point("candidate", 1)
    (tmp_path / "aliases" / "stable").write_bytes(content)
    before = skipped()["alias"]

    aliases = store.aliases()

    assert aliases == {"candidate": 1}
    assert "aliases/stable" in aliases.damaged["stable"]
    assert skipped()["alias"] == before + 1
    store.aliases()
    assert skipped()["alias"] == before + 1, "the same damage counts once"
    store.point("stable", 1)
    assert store.aliases() == {"candidate": 1, "stable": 1}


def test_a_folder_in_place_of_an_alias_is_replaced(store: FolderVersionStore, tmp_path: Path) -> None:
    (tmp_path / "aliases" / "stable" / "deep").mkdir(parents=True)

    assert list(store.aliases().damaged) == ["stable"]
    store.point("stable", 1)
    assert store.aliases() == {"stable": 1}


STRAYS = ["12", "0000000012", "999999999999999999", "0000000001.bak", "\u0663", "notes.txt", "copy of 1"]


@pytest.mark.parametrize("name", STRAYS)
@pytest.mark.parametrize("kind", ["file", "folder"])
def test_strays_among_versions_are_no_versions(
    store: FolderVersionStore, tmp_path: Path, name: str, kind: str
) -> None:
    if kind == "file":
        (tmp_path / name).write_bytes(b"x")
    else:
        (tmp_path / name).mkdir()
    before = skipped()["version"]

    assert store.numbers() == [1]
    assert skipped()["version"] == before + 1


@pytest.mark.parametrize("file", ["manifest.json", "weights.safetensors"])
def test_a_folder_in_place_of_a_versions_file_is_corrupt(
    store: FolderVersionStore, tmp_path: Path, file: str
) -> None:
    path = tmp_path / "0000000001" / file
    path.unlink()
    path.mkdir()
    with pytest.raises(Corrupt, match=file):
        store.get(1)


def test_a_file_without_rights_is_corrupt_not_unavailable(
    store: FolderVersionStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_path: Path) -> bytes:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(Corrupt, match="Permission denied"):
        store.manifest(1)
