"""Detection of clients' partitioners by the keys of their records."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from freshet.joiner.inputs import ENOUGH, PARTITIONERS, REMEMBERED, SAMPLE_EVERY_S, PartitionerDetector
from freshet.types import BytesColumn

Place = Callable[[bytes, int], int]
MURMUR2 = PARTITIONERS["murmur2"]


def by_chance(seed: int) -> Place:
    rng = random.Random(seed)
    return lambda key, partitions: rng.randrange(partitions)


def by_length(key: bytes, partitions: int) -> int:
    """A partitioner that no common client has."""
    return (key[-1] * 7 + key[0]) % partitions


def sampled(
    places: dict[str, Place], keys: int = 400, partitions: int = 6, shared: bool = False
) -> PartitionerDetector:
    """Return the detector after a number of keys of each topic; `shared`: each key is in all topics."""
    placing, now = PartitionerDetector(), 0.0
    for i in range(keys):
        for topic, of in places.items():
            now += 1.5 * SAMPLE_EVERY_S
            key = b"request-%d" % i if shared else b"%s-%d" % (topic.encode(), i)
            placing.sample(topic, of(key, partitions), {partitions}, BytesColumn.of([key]), now)
    return placing


@pytest.mark.parametrize("name", [n for n in PARTITIONERS if n != "murmur2"])
def test_a_partitioner_that_is_not_that_of_the_others_is_named(name: str) -> None:
    placing = sampled({"served": MURMUR2, "action": PARTITIONERS[name]})

    assert placing.named == {"served": "murmur2", "action": name}
    assert list(placing.trouble) == ["action"]
    assert "those of served by murmur2" in placing.trouble["action"]


@pytest.mark.parametrize("of", [*PARTITIONERS.values(), by_length])
def test_one_partitioner_for_all_topics_is_no_trouble(of: Place) -> None:
    assert sampled({"served": of, "action": of}, shared=True).trouble == {}


@pytest.mark.parametrize("of", [*PARTITIONERS.values(), by_length])
def test_few_keys_that_agree_by_chance_are_no_trouble(of: Place) -> None:
    """Other partitioners explain a share of the keys by chance, and of so few keys another in each topic."""
    few = range(ENOUGH, 3 * ENOUGH, 5)
    assert [n for n in few if sampled({"served": of, "action": of}, keys=n, partitions=4).trouble] == []


def test_randomly_placed_keys_are_found_in_two_partitions() -> None:
    placing = sampled({"served": by_chance(1), "action": by_chance(2)}, shared=True)

    (reason,) = placing.trouble.values()
    assert "chance" in reason
    assert "key 'request-" in reason
    assert "action[" in reason


def test_random_placement_in_one_topic_is_detected_by_shares() -> None:
    assert list(sampled({"served": MURMUR2, "action": by_chance(3)}).trouble) == ["action"]


def test_records_without_key_are_reported() -> None:
    placing = PartitionerDetector()
    for i in range(ENOUGH):
        placing.sample("action", i % 4, {4}, BytesColumn.of([b""]), float(i))

    assert "no key" in placing.trouble["action"]


def test_one_deviating_client_is_reported() -> None:
    rng = random.Random(5)

    def either(key: bytes, partitions: int) -> int:
        return PARTITIONERS["crc32" if rng.random() < 0.3 else "murmur2"](key, partitions)

    reason = sampled({"served": MURMUR2, "action": either}).trouble["action"]
    assert "several partitioners (murmur2 explains" in reason


@pytest.mark.slow
def test_corrected_client_is_forgotten() -> None:
    placing = sampled({"served": MURMUR2, "action": PARTITIONERS["crc32"]})
    assert placing.trouble
    now = 1_000.0
    for i in range(20_000):
        key = b"later-%d" % i
        for topic in ("served", "action"):
            now += SAMPLE_EVERY_S
            placing.sample(topic, MURMUR2(key, 6), {6}, BytesColumn.of([key]), now)

    assert placing.trouble == {}


def test_key_is_forgotten_after_many_others() -> None:
    def twice(others: int) -> PartitionerDetector:
        placing, now = PartitionerDetector(), 0.0
        keys = [b"twice", *(b"other-%d" % i for i in range(others)), b"twice"]
        for i, key in enumerate(keys):
            now += 1.5 * SAMPLE_EVERY_S
            last = i == len(keys) - 1
            placing.sample("served", (MURMUR2(key, 6) + last) % 6, {6}, BytesColumn.of([key]), now)
        return placing

    assert twice(others=100).trouble
    assert not twice(others=REMEMBERED).trouble


def test_a_topic_that_grew_is_no_trouble() -> None:
    placing, now = PartitionerDetector(), 0.0
    for i in range(400):
        for topic in ("served", "action"):
            now += SAMPLE_EVERY_S
            key = b"request-%d" % i
            placing.sample(topic, MURMUR2(key, 4 if i < 200 else 6), {4, 6}, BytesColumn.of([key]), now)

    assert placing.trouble == {}


def test_few_keys_or_one_partition_give_no_report() -> None:
    few = sampled({"served": MURMUR2, "action": PARTITIONERS["crc32"]}, keys=ENOUGH - 1)
    one = sampled({"served": MURMUR2, "action": PARTITIONERS["crc32"]}, partitions=1)

    assert few.trouble == one.trouble == {}
