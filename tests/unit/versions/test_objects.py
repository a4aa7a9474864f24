import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np
import obstore
import pytest
from hypothesis import given
from hypothesis import strategies as st
from obstore.store import MemoryStore

from freshet.adapters import open_versions
from freshet.errors import ConfigError, Corrupt, FreshetError, Unavailable
from freshet.testing.contracts.versions import TENSORS, manifest_of
from freshet.versions import ALIASES, objects
from freshet.versions.objects import (
    Bucket,
    Conflict,
    Listed,
    ObjectVersionStore,
    Stored,
    open_bucket,
    open_url,
)
from freshet.versions.weights import write_manifest
from tests.servers.s3 import ENVIRONMENT, S3

DAY = timedelta(days=1)


class Scripted(Bucket):
    """A bucket in memory that calls a hook of the test before or after a write, once."""

    def __init__(self) -> None:
        self.objects = MemoryStore()
        super().__init__(self.objects, "memory:")
        self.before: dict[str, Callable[[], None]] = {}
        self.after: dict[str, Callable[[], None]] = {}
        self.ages: dict[str, timedelta] = {}

    def _scripted(self, key: str, write: Callable[[], None]) -> None:
        self.before.pop(key, lambda: None)()
        write()
        self.after.pop(key, lambda: None)()

    def create(self, key: str, data: bytes) -> None:
        self._scripted(key, lambda: Bucket.create(self, key, data))

    def replace(self, key: str, data: bytes, was: Stored) -> None:
        self._scripted(key, lambda: Bucket.replace(self, key, data, was))

    def list(self, prefix: str = "") -> list[Listed]:
        now = datetime.now(UTC)
        return [Listed(x.key, now - self.ages.get(x.key, timedelta())) for x in super().list(prefix)]

    def held(self) -> set[str]:
        return {listed.key for listed in super().list()}


class Died(Exception):
    pass


def die() -> None:
    raise Died


def lose_response() -> None:
    raise Conflict("a retry of a write that has succeeded")


@pytest.fixture
def bucket() -> Scripted:
    return Scripted()


@pytest.fixture
def store(bucket: Scripted) -> ObjectVersionStore:
    store = ObjectVersionStore(bucket)
    store.put(manifest_of(1), TENSORS)
    return store


def weights_key(bucket: Scripted, number: int) -> str:
    (key,) = (key for key in bucket.held() if key.startswith(f"{number:010d}/") and "safetensors" in key)
    return key


def test_put_with_a_lost_response_is_stored(bucket: Scripted, store: ObjectVersionStore) -> None:
    bucket.after["0000000002/manifest.json"] = lose_response
    store.put(manifest_of(2), TENSORS)
    assert list(store.numbers()) == [1, 2]


def test_move_with_a_lost_response_is_done(bucket: Scripted, store: ObjectVersionStore) -> None:
    bucket.after["aliases.json"] = lose_response
    store.point("stable", 1)
    assert store.aliases() == {"stable": 1}


def test_a_writer_that_comes_second_leaves_nothing_behind(
    bucket: Scripted, store: ObjectVersionStore
) -> None:
    other = ObjectVersionStore(bucket)
    bucket.before["0000000002/manifest.json"] = lambda: void(other.put(manifest_of(2), {"w": np.ones(3)}))
    with pytest.raises(ValueError, match="version 2 exists"):
        store.put(manifest_of(2), TENSORS)
    assert set(store.get(2).tensors) == {"w"}
    weights_key(bucket, 2)  # there is one


def void(_: object) -> None:
    pass


def test_writer_killed_before_its_manifest_wrote_no_version(
    bucket: Scripted, store: ObjectVersionStore
) -> None:
    bucket.before["0000000002/manifest.json"] = die
    with pytest.raises(Died):
        store.put(manifest_of(2), {"w": np.zeros(3)})
    assert list(store.numbers()) == [1]
    with pytest.raises(KeyError):
        store.get(2)

    store.put(manifest_of(2), TENSORS)
    assert set(store.get(2).tensors) == set(TENSORS)
    weights_key(bucket, 2)  # the dead writer's is gone


def test_weights_of_a_dead_writer_are_removed_a_day_later(
    bucket: Scripted, store: ObjectVersionStore
) -> None:
    bucket.before["0000000002/manifest.json"] = die
    with pytest.raises(Died):
        store.put(manifest_of(2), {"w": np.zeros(3)})
    left = weights_key(bucket, 2)

    bucket.ages[left] = DAY / 2
    store.delete(7)
    assert left in bucket.held(), "it may still be on its way"
    bucket.ages[left] = 2 * DAY
    store.delete(7)
    assert left not in bucket.held()
    assert set(store.get(1).tensors) == set(TENSORS)


def test_interrupted_deletion_is_finished_by_the_next(bucket: Scripted, store: ObjectVersionStore) -> None:
    store.put(manifest_of(2), TENSORS)
    bucket.after["aliases.json"] = die
    with pytest.raises(Died):
        store.delete(1)
    assert list(store.numbers()) == [2]
    with pytest.raises(KeyError):
        store.point("stable", 1)
    with pytest.raises(ValueError, match="version 1 exists"):
        store.put(manifest_of(1), TENSORS)

    store.delete(9)
    assert not [key for key in bucket.held() if key.startswith("0000000001/")]
    assert list(store.numbers()) == [2]


def test_alias_cannot_point_at_a_version_being_deleted(bucket: Scripted, store: ObjectVersionStore) -> None:
    """The aliases then equal the former ones except for their serial number."""
    store.put(manifest_of(2), TENSORS)
    store.point("stable", 2)
    bucket.before["aliases.json"] = lambda: ObjectVersionStore(bucket).delete(1)
    with pytest.raises(KeyError):
        store.point("canary", 1)
    assert store.aliases() == {"stable": 2}


def test_a_verdict_of_another_is_not_written_over_unseen(bucket: Scripted, store: ObjectVersionStore) -> None:
    bucket.before["0000000001/manifest.json"] = lambda: void(
        ObjectVersionStore(bucket).judge(1, "held", "first")
    )
    assert store.judge(1, "promoted", "second").reason == "second"
    assert store.manifest(1).reason == "second"


def test_alias_that_others_always_move_is_unavailable(bucket: Scripted, store: ObjectVersionStore) -> None:
    class Busy(Scripted):
        def create(self, key: str, data: bytes) -> None:
            raise Conflict(key)

        def demand_conditions(self) -> None:
            pass

    busy = Busy()
    busy.objects = bucket.objects
    with pytest.raises(Unavailable, match="two trainers"):
        ObjectVersionStore(busy).delete(1)


@pytest.mark.parametrize("at", [0, 20, -1])
def test_changed_byte_of_the_weights_is_corrupt_with_its_key(
    bucket: Scripted, store: ObjectVersionStore, at: int
) -> None:
    key = weights_key(bucket, 1)
    data = bytearray(bytes(obstore.get(bucket.objects, key).bytes()))
    data[at] ^= 1
    bucket.write(key, bytes(data))
    with pytest.raises(Corrupt, match=r"0000000001/[0-9a-f]{64}\.safetensors.*sha256"):
        store.get(1)


def test_missing_weights_are_corrupt_not_an_unknown_version(
    bucket: Scripted, store: ObjectVersionStore
) -> None:
    bucket.delete(weights_key(bucket, 1))
    with pytest.raises(Corrupt, match="delete version 1"):
        store.get(1)


@pytest.mark.parametrize("sha256", ["", "../../0000000002/x", "A" * 64])
def test_a_manifest_whose_sum_is_none_is_corrupt(
    bucket: Scripted, store: ObjectVersionStore, sha256: str
) -> None:
    bucket.write("0000000001/manifest.json", write_manifest(replace(manifest_of(1), sha256=sha256)))
    with pytest.raises(Corrupt, match="64 hexadecimal digits"):
        store.get(1)


@given(st.binary(max_size=200))
def test_any_bytes_as_aliases_are_damage_that_is_mended(data: bytes) -> None:
    bucket = Scripted()
    bucket.write("aliases.json", data)
    store = ObjectVersionStore(bucket)

    assert dict(store.aliases()) == {}
    assert set(store.aliases().damaged) == set(ALIASES)
    store.put(manifest_of(1), {})
    assert list(store.numbers()) == [1]
    store.point("stable", 1)
    assert (store.aliases(), store.aliases().damaged) == ({"stable": 1}, {})


@given(
    st.dictionaries(
        st.sampled_from(["v", "serial", "aliases", "deleting"]),
        st.none()
        | st.integers()
        | st.lists(st.integers() | st.none())
        | st.just({"stable": 1, "canary": "x"}),
    )
)
def test_any_json_as_aliases_leaves_a_store_that_works(change: dict[str, object]) -> None:
    bucket = Scripted()
    whole = {"v": 1, "serial": 4, "aliases": {"stable": 1}, "deleting": []}
    bucket.write("aliases.json", json.dumps(whole | change).encode())
    store = ObjectVersionStore(bucket)
    store.aliases()
    store.put(manifest_of(7), {})
    store.point("stable", 7)
    assert store.aliases()["stable"] == 7


@given(st.integers(0, 300), st.integers(0, 255))
def test_aliases_with_a_changed_byte_are_read_or_damaged(at: int, byte: int) -> None:
    bucket = Scripted()
    store = ObjectVersionStore(bucket)
    store.put(manifest_of(1), {})
    store.point("stable", 1)
    data = bytearray(bytes(obstore.get(bucket.objects, "aliases.json").bytes()))
    data[at % len(data)] = byte
    bucket.write("aliases.json", bytes(data))
    aliases = store.aliases()
    assert set(aliases) <= {"stable"}
    assert all("aliases.json" in reason for reason in aliases.damaged.values())


def test_objects_of_others_below_the_prefix_are_no_versions(
    bucket: Scripted, store: ObjectVersionStore
) -> None:
    for key in ("12/manifest.json", "notes.txt", "000000000x/manifest.json", "0000000003/other"):
        bucket.write(key, b"?")
    assert list(store.numbers()) == [1]


def test_storage_that_ignores_conditions_is_refused_unwritten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    with S3(tmp_path, ignores_conditions=True) as server:
        server.make_bucket("old")
        store = open_url(server.url("old"))
        with pytest.raises(ConfigError, match=r"ignores If-None-Match: \* and If-Match"):
            store.put(manifest_of(0), TENSORS)
        assert list(store.numbers()) == []


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("s3://key:verysecret@bucket/prefix", "without user and password"),
        ("s3://bucket/prefix?secret_access_key=verysecret", "options endpoint, region"),
        ("s3:///verysecret", "s3://bucket/prefix"),
        ("s3:bucket", "s3://bucket/prefix"),
        ("s3://bucket/x#verysecret", "s3://bucket/prefix"),
    ],
)
def test_a_url_that_is_not_understood_is_refused(url: str, expected: str) -> None:
    with pytest.raises(ConfigError, match=expected) as refused:
        open_bucket(url)
    if "s3:///" not in url:
        assert "verysecret" not in str(refused.value)


@pytest.mark.parametrize("url", ["s3://bucket", "s3://bucket/", "s3://bucket/a/b?region=eu-central-1"])
def test_a_url_names_bucket_prefix_and_region(url: str) -> None:
    assert open_bucket(url).where("x") in {"s3://bucket/x", "s3://bucket/a/b/x"}


def test_credentials_come_from_a_file_and_are_never_repeated(
    s3: S3, s3_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ENVIRONMENT:
        monkeypatch.delenv(name)
    monkeypatch.setattr(objects, "RETRY", {"max_retries": 0})
    file = tmp_path / "credentials"
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))
    monkeypatch.setenv("AWS_PROFILE", "trainer")
    store = open_url(s3_url)
    with pytest.raises(FreshetError, match="credentials: cannot be read"):
        store.numbers()
    file.write_text("[trainer]\naws_access_key_id = verysecret\nnonsense")
    with pytest.raises(FreshetError, match="expected \\[trainer\\] with aws_access_key_id") as refused:
        store.numbers()
    assert "verysecret" not in str(refused.value)
    file.write_text("[trainer]\naws_access_key_id = me\naws_secret_access_key = verysecret\n")
    assert list(store.numbers()) == []


def test_a_storage_that_cannot_be_reached_is_unavailable(
    monkeypatch: pytest.MonkeyPatch, s3: S3, s3_url: str
) -> None:
    monkeypatch.setattr(objects, "RETRY", {"max_retries": 0})
    nobody = s3_url.replace(s3.endpoint, "http://127.0.0.1:1")
    with pytest.raises(Unavailable, match=r"s3://.*: cannot list"):
        open_url(nobody).numbers()
    with pytest.raises(Unavailable, match="cannot list"):
        open_url(s3_url.replace("s3://b-", "s3://no-such-")).numbers()


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
        lambda store: store.put(manifest_of(1), TENSORS),
    ],
)
def test_a_missing_bucket_is_unavailable_and_named(
    s3_url: str, call: Callable[[ObjectVersionStore], object]
) -> None:
    expected = r"s3://no-such-.*: cannot (read|list|create): .*\n  the bucket or container was not found"
    with pytest.raises(Unavailable, match=expected):
        call(open_url(s3_url.replace("s3://b-", "s3://no-such-")))


def test_an_object_that_is_missing_in_a_bucket_is_absent(s3_url: str) -> None:
    bucket = open_bucket(s3_url)
    assert bucket.read("aliases.json") is None
    assert not bucket.exists("aliases.json")
    bucket.delete("aliases.json")


@pytest.mark.slow
def test_processes_are_as_exclusive_as_threads(s3_url: str) -> None:
    """Two processes put the same ten numbers; each number is put once."""
    assert _put_by_two_processes(s3_url) == list(range(10))


@pytest.mark.slow
def test_processes_on_a_shared_folder_are_as_exclusive(tmp_path: Path) -> None:
    assert _put_by_two_processes(f"file:{tmp_path}/versions") == list(range(10))


_PUTS = """
import sys, numpy as np
from freshet.adapters import open_versions
from freshet.testing.contracts.versions import manifest_of
store = open_versions(sys.argv[1])
sys.stdin.readline()
for number in range(10):
    try:
        store.put(manifest_of(number), {"w": np.full(2000, int(sys.argv[2]))})
        print(number, flush=True)
    except ValueError:
        pass
"""


def _put_by_two_processes(url: str) -> list[int]:
    """Return the numbers that the processes put, after checking each one's contents."""
    writers = [
        subprocess.Popen(
            [sys.executable, "-c", _PUTS, url, str(value)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=dict(os.environ),
        )
        for value in (1, 2)
    ]  # fmt: skip
    said = dict.fromkeys((1, 2), "")
    for writer in writers:
        assert writer.stdin is not None
        writer.stdin.write("go\n")
        writer.stdin.flush()
    for value, writer in zip((1, 2), writers, strict=True):
        said[value], _ = writer.communicate(timeout=120)
        assert writer.returncode == 0
    store = open_versions(url)
    for value, numbers in said.items():
        for number in map(int, numbers.split()):
            np.testing.assert_array_equal(store.get(number).tensors["w"], np.full(2000, value))
    return sorted(int(number) for numbers in said.values() for number in numbers.split())
