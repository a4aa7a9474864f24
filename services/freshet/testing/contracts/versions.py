"""Promises of every version store; see `freshet.versions`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from freshet.versions import Manifest, VersionStore

__all__ = ["VersionsContract", "manifest_of"]


def manifest_of(number: int) -> Manifest:
    """Return a manifest with a value in every field."""
    return Manifest(
        number=number,
        model="m",
        spec_hash="abc",
        created_ms=1_700_000_000_000 + number,
        step=10 * number,
        applied={0: 5, 7: 2**40},
        log_id="log",
        event_time_ms=123,
        measures={"auc": 0.75, "by": {"n": 3}},
        fence=4,
        sha256="",
        transforms={"price": [1.5, None]},
    )


TENSORS = {
    "weights/a": np.arange(6, dtype=np.float32).reshape(2, 3),
    "weights/scalar": np.array(2.5),
    "state/b": np.array([], np.int64),
    "state/c": np.array([[1], [2]], np.uint8).T,
}


class VersionsContract:
    """Subclass it and define the fixture `open_store`."""

    @pytest.fixture
    def open_store(self) -> Callable[[], VersionStore]:
        """Return a function that opens the same, initially empty, store, as another process would."""
        raise NotImplementedError("give the fixture `open_store`")

    @pytest.fixture
    def store(self, open_store: Callable[[], VersionStore]) -> Iterator[VersionStore]:
        """Return one handle on the store."""
        store = open_store()
        yield store
        store.close()

    def test_an_empty_store_has_neither_versions_nor_aliases(self, store: VersionStore) -> None:
        assert (list(store.numbers()), dict(store.aliases())) == ([], {})
        assert store.aliases().damaged == {}

    def test_another_handle_reads_a_stored_version(
        self, store: VersionStore, open_store: Callable[[], VersionStore]
    ) -> None:
        manifest = store.put(manifest_of(3), TENSORS)
        assert len(manifest.sha256) == 64
        version = open_store().get(3)
        assert version.manifest == manifest
        assert set(version.tensors) == set(TENSORS)
        for name, tensor in TENSORS.items():
            assert version.tensors[name].dtype == tensor.dtype
            assert version.tensors[name].shape == tensor.shape
            np.testing.assert_array_equal(version.tensors[name], tensor)

    def test_tensors_are_chosen_by_prefix(self, store: VersionStore) -> None:
        store.put(manifest_of(0), TENSORS)
        assert set(store.get(0, ["weights/"]).tensors) == {"weights/a", "weights/scalar"}
        assert store.get(0, ["none"]).tensors == {}

    def test_numbers_rise_however_they_were_put(self, store: VersionStore) -> None:
        for number in (10, 2, 0):
            store.put(manifest_of(number), TENSORS)
        assert list(store.numbers()) == [0, 2, 10]

    def test_a_number_is_never_put_twice(self, store: VersionStore) -> None:
        store.put(manifest_of(1), TENSORS)
        with pytest.raises(ValueError, match="1"):
            store.put(manifest_of(1), {})
        assert set(store.get(1).tensors) == set(TENSORS)

    def test_an_unknown_version_is_a_key_error(self, store: VersionStore) -> None:
        for question in (store.manifest, store.get, lambda n: store.judge(n, "held", "")):
            with pytest.raises(KeyError):
                question(9)

    def test_a_verdict_is_kept_with_its_reason(
        self, store: VersionStore, open_store: Callable[[], VersionStore]
    ) -> None:
        put = store.put(manifest_of(1), TENSORS)
        judged = store.judge(1, "held", "calibration 1.4")
        assert (put.verdict, judged.verdict, judged.reason) == ("pending", "held", "calibration 1.4")
        assert open_store().manifest(1) == judged
        assert set(store.get(1).tensors) == set(TENSORS)

    def test_an_unknown_verdict_is_refused(self, store: VersionStore) -> None:
        store.put(manifest_of(1), TENSORS)
        with pytest.raises(ValueError, match="maybe"):
            store.judge(1, "maybe", "")

    def test_an_alias_moves(self, store: VersionStore, open_store: Callable[[], VersionStore]) -> None:
        store.put(manifest_of(1), TENSORS)
        store.put(manifest_of(2), TENSORS)
        store.point("stable", 1)
        store.point("candidate", 2)
        store.point("stable", 2)
        assert dict(open_store().aliases()) == {"stable": 2, "candidate": 2}

    def test_an_alias_points_only_to_stored_versions(self, store: VersionStore) -> None:
        with pytest.raises(KeyError):
            store.point("stable", 5)
        store.put(manifest_of(5), TENSORS)
        with pytest.raises(ValueError, match="latest"):
            store.point("latest", 5)

    def test_a_deleted_version_is_gone(self, store: VersionStore) -> None:
        store.put(manifest_of(1), TENSORS)
        store.delete(1)
        assert list(store.numbers()) == []
        with pytest.raises(KeyError):
            store.get(1)

    def test_deleting_what_is_not_there_is_no_error(self, store: VersionStore) -> None:
        store.put(manifest_of(1), TENSORS)
        for number in (1, 1, 9):
            store.delete(number)
        assert list(store.numbers()) == []

    def test_threads_share_a_store(self, store: VersionStore) -> None:
        def work(number: int) -> None:
            store.put(manifest_of(number), {"w": np.full(1000, number)})
            store.judge(number, "promoted", "")
            store.point("candidate", number)
            stored = store.get(number)
            assert stored.manifest.verdict == "promoted"
            np.testing.assert_array_equal(stored.tensors["w"], np.full(1000, number))
            assert number in store.numbers()

        with ThreadPoolExecutor(4) as pool:
            list(pool.map(work, range(16)))
        assert list(store.numbers()) == list(range(16))

    def test_a_version_with_an_alias_is_not_deleted(self, store: VersionStore) -> None:
        store.put(manifest_of(1), TENSORS)
        store.point("canary", 1)
        with pytest.raises(ValueError, match="canary"):
            store.delete(1)
        assert list(store.numbers()) == [1]

    def test_of_two_writers_of_a_number_one_wins(self, open_store: Callable[[], VersionStore]) -> None:
        def put(value: int, number: int) -> bool:
            try:
                open_store().put(manifest_of(number), {"w": np.full(1000, value)})
            except ValueError:
                return False
            return True

        with ThreadPoolExecutor(2) as pool:
            for number in range(8):
                won = list(pool.map(put, (1, 2), (number, number)))
                assert sorted(won) == [False, True]
                stored = open_store().get(number).tensors["w"]
                np.testing.assert_array_equal(stored, np.full(1000, 1 if won[0] else 2))

    def test_two_writers_of_two_aliases_both_move_theirs(
        self, store: VersionStore, open_store: Callable[[], VersionStore]
    ) -> None:
        for number in range(4):
            store.put(manifest_of(number), {})

        def move(alias: str) -> None:
            mine = open_store()
            for number in (0, 1, 2, 3):
                mine.point(alias, number)

        with ThreadPoolExecutor(2) as pool:
            list(pool.map(move, ("stable", "candidate")))
        assert dict(open_store().aliases()) == {"stable": 3, "candidate": 3}

    def test_a_version_is_never_both_pointed_at_and_deleted(
        self, open_store: Callable[[], VersionStore]
    ) -> None:
        def point(number: int) -> bool:
            try:
                open_store().point("canary", number)
            except KeyError:
                return False
            return True

        def delete(number: int) -> bool:
            try:
                open_store().delete(number)
            except ValueError:
                return False
            return True

        with ThreadPoolExecutor(2) as pool:
            for number in range(8):
                store = open_store()
                store.put(manifest_of(number), {})
                pointed, deleted = pool.submit(point, number), pool.submit(delete, number)
                assert pointed.result() != deleted.result()
                assert (number in store.numbers()) == pointed.result()

    def test_closing_twice_is_once(self, store: VersionStore) -> None:
        store.close()
        store.close()
