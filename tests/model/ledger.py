"""The ledger: what the log says the state must be, and the exception that ends a run that says otherwise.

Every row has two columns, the number of samples that touched it and the sum of a small hash of their ids,
so that one lost and another doubled cannot cancel; the dense weights have the same two.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from .store import Cut, Row

if TYPE_CHECKING:
    from .world import World


class Broken(Exception):
    """The promise was broken: how, and what differed."""

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(f"{kind}: {detail}")
        self.kind = kind
        self.detail = detail


def mix(number: int) -> int:
    """A bijective scramble of 32 bits, so that neighbouring ids do not touch neighbouring keys."""
    number = (number ^ (number >> 16)) * 0x45D9F3B & 0xFFFFFFFF
    number = (number ^ (number >> 16)) * 0x45D9F3B & 0xFFFFFFFF
    return number ^ (number >> 16)


def checksum(sample: int) -> int:
    """The small hash of a sample's id; never 0."""
    return 1 + mix(sample + 7) % 9973


class Ledger:
    """Expectations, computed from the log alone."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.claimed: dict[int, tuple[int, int]] = {}  # bucket -> fence, failovers before it was read back
        self._prefixes: list[list[list[Row]]] = [[[(0, 0)] * world.buckets] for _ in range(world.partitions)]

    def keys_of(self, sample: int) -> tuple[int, int]:
        """The two rows that a sample touches."""
        first = mix(sample) % self._world.keys
        return first, (first + 1 + mix(sample + 99) % (self._world.keys - 1)) % self._world.keys

    def add_gradients(self, samples: Iterable[int], rows: dict[int, dict[int, Row]]) -> None:
        """Sum the gradients of samples per row, grouped by bucket."""
        for sample in samples:
            for key in self.keys_of(sample):
                bucket = rows.setdefault(self._world.bucket_of(key), {})
                old = bucket.get(key, (0, 0))
                bucket[key] = (old[0] + 1, old[1] + checksum(sample))

    def dense_gradient(self, samples: Sequence[int]) -> Row:
        """What samples add to the dense weights."""
        return len(samples), sum(map(checksum, samples))

    def check_loaded(self, bucket: int, applied: Sequence[int], rows: Mapping[int, Row]) -> None:
        """A claimed bucket must be some moment of its own history: rows and offsets of the same one."""
        self._check_moment(bucket, applied, rows)

    def check_stored(self, cut: Cut) -> None:
        """So must a stored one, after every flush; and a fenced owner cannot have written it.

        Fences are compared unless a failover came after the claim, which may have lost it.
        """
        node = self._world.store.node(cut.bucket)
        fence, generation = self.claimed.get(cut.bucket, (-1, -1))
        if cut.meta.fence < fence and generation == node.generation:
            self._fail(
                "zombie", f"bucket {cut.bucket} claimed under fence {fence}, written under {cut.meta.fence}"
            )
        self._check_moment(cut.bucket, node.master.metas[cut.bucket].applied, node.master.rows[cut.bucket])

    def _check_moment(self, bucket: int, applied: Sequence[int], rows: Mapping[int, Row]) -> None:
        expected = [self._prefix(partition, offset)[bucket] for partition, offset in enumerate(applied)]
        if _total(expected) != _total(rows.values()):
            self._fail(
                "torn", f"bucket {bucket} at {list(applied)}: {_total(rows.values())}, not {_total(expected)}"
            )

    def check_joined(self, expected: Sequence[int]) -> None:
        """The samples are those of an unkilled run, each once."""
        joined = Counter(s for p in self._world.samples.partitions for s in p.records if s is not None)
        wanted = Counter(expected)
        if joined != wanted:
            self._fail("joined", f"too many {dict(joined - wanted)}, missing {dict(wanted - joined)}")

    def check_rows(self, where: str, rows: Mapping[int, Row]) -> None:
        """Rows equal what the log says: in the store, or as served."""
        expected = self._rows()
        wrong = {
            key: f"{rows.get(key)}, not {expected.get(key)}"
            for key in expected.keys() | rows.keys()
            if rows.get(key) != expected.get(key)
        }
        if wrong:
            self._fail("served" if "reader" in where else "rows", f"{where}: {wrong}")

    def check_dense(self, weights: Row) -> None:
        """Dense weights equal what the log says."""
        samples = [
            sample for p in self._world.samples.partitions for sample in p.records if sample is not None
        ]
        if weights != self.dense_gradient(samples):
            self._fail("dense", f"{weights}, not {self.dense_gradient(samples)}")

    def _rows(self) -> dict[int, Row]:
        buckets: dict[int, dict[int, Row]] = {}
        for partition in self._world.samples.partitions:
            self.add_gradients((sample for sample in partition.records if sample is not None), buckets)
        return {key: row for bucket in buckets.values() for key, row in bucket.items()}

    def _prefix(self, partition: int, offset: int) -> list[Row]:
        """Per bucket, the sum over a partition's samples before an offset; readable records do not change."""
        sums = self._prefixes[partition]
        records = self._world.samples.partitions[partition].records
        while len(sums) <= offset:
            now = list(sums[-1])
            sample = records[len(sums) - 1]
            for key in () if sample is None else self.keys_of(sample):
                bucket = self._world.bucket_of(key)
                now[bucket] = _total([now[bucket], (1, checksum(sample or 0))])
            sums.append(now)
        return sums[offset]

    def _fail(self, kind: str, detail: str) -> None:
        raise Broken(kind, detail)


def _total(rows: Iterable[Row]) -> Row:
    pairs = list(rows)
    return sum(count for count, _ in pairs), sum(value for _, value in pairs)
