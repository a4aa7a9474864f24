"""Following versions: what `stable` names is served, what is bad is kept out, and the old one serves on."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from numpy.typing import NDArray
from prometheus_client import CollectorRegistry

from freshet.errors import Mismatch, Unavailable
from freshet.inference.versions import RETRY_S, VersionFollower
from freshet.versions import Manifest, VersionStore
from freshet.versions.folder import open_url
from tests.unit.inference.version_source import Constant, follower, put


@pytest.fixture
def store(tmp_path: Path) -> Iterator[VersionStore]:
    store = open_url(f"file:{tmp_path}/versions")
    yield store
    store.close()


def served(follower: VersionFollower) -> int | None:
    return follower.state.serving.manifest.number if follower.state.serving else None


def test_nothing_is_served_before_a_version_is_promoted(store: VersionStore) -> None:
    follow = follower(store)
    put(store, 0, 0.5)
    follow.poll()

    assert served(follow) is None
    assert "no version has been promoted" in follow.state.reason


def test_the_promoted_initial_version_serves_until_stable_is_set(store: VersionStore) -> None:
    follow = follower(store)
    put(store, 0, 0.5)
    store.judge(0, "promoted", "initial")
    follow.poll()
    assert served(follow) == 0

    put(store, 1, 0.7)
    follow.poll()
    assert served(follow) == 0

    store.point("stable", 1)
    follow.poll()
    assert served(follow) == 1


def test_a_rollback_serves_the_older_version_again(store: VersionStore) -> None:
    follow = follower(store)
    for number in (0, 1):
        put(store, number, 0.5)
        store.point("stable", number)
        follow.poll()

    store.point("stable", 0)
    follow.poll()

    assert served(follow) == 0


@pytest.mark.parametrize("weight", [float("nan"), float("inf")])
def test_version_that_is_not_finite_is_kept_out(store: VersionStore, weight: float) -> None:
    follow = follower(store)
    put(store, 0, 0.5)
    put(store, 1, weight)
    store.point("stable", 0)
    follow.poll()
    store.point("stable", 1)
    follow.poll()

    assert served(follow) == 0
    assert follow.state.refused == 1
    assert "NaN" in follow.state.reason


def test_a_corrupt_file_is_kept_out_and_reported(store: VersionStore, tmp_path: Path) -> None:
    follow = follower(store)
    put(store, 0, 0.5)
    store.point("stable", 0)
    path = next((tmp_path / "versions").glob("*0/weights.safetensors"))
    path.write_bytes(path.read_bytes()[:-1] + b"\x7f")
    follow.poll()

    assert served(follow) is None
    assert "sha256" in follow.state.reason


def test_a_version_of_another_spec_is_kept_out(store: VersionStore) -> None:
    follow = follower(store)
    put(store, 0, 0.5, spec_hash="s2")
    store.point("stable", 0)
    follow.poll()

    assert served(follow) is None
    assert "spec" in follow.state.reason


def test_whatever_the_model_raises_keeps_the_version_out(store: VersionStore) -> None:
    follow = follower(store)
    put(store, 0, 0.5, name="other")
    store.point("stable", 0)
    follow.poll()

    assert "KeyError" in follow.state.reason


def test_refused_version_is_tried_again_after_a_while(store: VersionStore) -> None:
    tried: list[int] = []

    def load(tensors: Mapping[str, NDArray[Any]]) -> Constant:
        tried.append(1)
        if len(tried) < 2:
            raise OSError("disk away")
        return Constant(tensors)

    follow = VersionFollower(store, load, CollectorRegistry(), model="shop", spec_hash="s1", poll_s=1.0)
    put(store, 0, 0.5)
    store.point("stable", 0)
    follow.poll()
    follow.poll()
    assert len(tried) == 1

    for _ in range(10):
        follow.poll()
    assert served(follow) == 0
    assert follow.state.reason == ""


def test_a_mended_alias_clears_the_reason(store: VersionStore) -> None:
    follow = follower(store)
    put(store, 0, 0.5)
    put(store, 1, float("nan"))
    for number in (0, 1, 0):
        store.point("stable", number)
        follow.poll()

    assert served(follow) == 0
    assert follow.state.reason == ""


def test_an_unreadable_store_is_reported_and_changes_nothing(store: VersionStore, tmp_path: Path) -> None:
    follow = follower(store)
    put(store, 0, 0.5)
    store.point("stable", 0)
    follow.poll()
    (tmp_path / "versions/aliases/stable").write_text("no number")
    follow.poll()

    assert served(follow) == 0
    assert "found b'no number'" in follow.state.reason


def test_start_on_a_damaged_version_serves_the_newest_good_one(store: VersionStore, tmp_path: Path) -> None:
    for number in (0, 1, 2, 3):
        put(store, number, number / 10)
        store.judge(number, "held" if number == 2 else "promoted", "")
    store.point("stable", 3)
    (tmp_path / "versions" / "0000000003" / "weights.safetensors").write_bytes(b"damaged")
    follow = follower(store)

    follow.poll()

    assert served(follow) == 1
    assert "version 3 kept out" in follow.state.reason


def test_version_of_other_transform_code_is_kept_out(
    store: VersionStore,
) -> None:
    def fits(manifest: Manifest) -> None:
        raise Mismatch("features.price.dense: my:f makes 3 of 1")

    follow = VersionFollower(
        store, Constant, CollectorRegistry(), model="shop", spec_hash="s1", poll_s=1.0, fits=fits
    )
    put(store, 0, 0.5)
    store.point("stable", 0)

    follow.poll()

    assert served(follow) is None
    assert "version 0 kept out: features.price.dense: my:f makes 3 of 1" in follow.state.reason


class Away:
    """A version store that fails after it has resolved `stable`, until `away` is cleared."""

    def __init__(self, store: VersionStore) -> None:
        self._store, self.away = store, True

    def __getattr__(self, name: str) -> Any:
        if self.away and name != "aliases":
            raise Unavailable("the version store is away")
        return getattr(self._store, name)


def test_a_store_that_fails_in_a_poll_does_not_end_the_follower(store: VersionStore) -> None:
    put(store, 0, 0.5)
    store.point("stable", 0)
    away = Away(store)
    follow = follower(away)

    follow.poll()
    assert served(follow) is None
    assert "version 0 kept out: the version store is away" in follow.state.reason

    away.away = False
    for _ in range(int(RETRY_S) + 1):
        follow.poll()
    assert served(follow) == 0


def test_error_of_a_poll_is_reported_and_polls_go_on(
    store: VersionStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(store, 0, 0.5)
    store.point("stable", 0)
    follow = VersionFollower(store, Constant, CollectorRegistry(), model="shop", spec_hash="s1", poll_s=0.001)
    poll, stop, reasons = follow.poll, threading.Event(), list[str]()

    def first_fails() -> None:
        reasons.append(follow.state.reason)
        if len(reasons) == 1:
            raise RuntimeError("a fault of ours")
        poll()
        stop.set()

    monkeypatch.setattr(follow, "poll", first_fails)
    follow.run(stop)

    assert "following versions failed: RuntimeError: a fault of ours" in reasons[1]
    assert served(follow) == 0


def damaged_stable(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "versions" / "aliases" / "stable"
    path.unlink()
    if content is not None:
        path.write_bytes(content)


@pytest.mark.parametrize("content", [b"x", b"", None])
def test_a_damaged_or_missing_stable_moves_nothing(
    store: VersionStore, tmp_path: Path, content: bytes | None
) -> None:
    follow = follower(store)
    for number in (0, 1):
        put(store, number, 0.5)
        store.judge(number, "promoted", "")
    store.point("stable", 1)
    follow.poll()
    damaged_stable(tmp_path, content)
    follow.poll()

    assert served(follow) == 1
    assert "version 1 is served" in follow.state.reason
    store.point("stable", 0)
    follow.poll()
    assert (served(follow), follow.state.reason) == (0, "")


@pytest.mark.parametrize("content", [b"x", b"", b"77", None])
def test_start_with_a_damaged_stable_serves_the_newest_promoted(
    store: VersionStore, tmp_path: Path, content: bytes | None
) -> None:
    for number, verdict in ((0, "promoted"), (1, "promoted"), (2, "held")):
        put(store, number, 0.5)
        store.judge(number, verdict, "")
    store.point("stable", 1)
    damaged_stable(tmp_path, content)
    follow = follower(store)
    follow.poll()

    assert served(follow) == 1
    assert follow.state.reason


def test_damaged_first_stable_serves_a_later_version(store: VersionStore) -> None:
    put(store, 1, float("nan"))
    put(store, 3, 0.5)
    store.judge(3, "promoted", "")
    store.point("stable", 1)
    follow = follower(store)
    follow.poll()

    assert served(follow) == 3
