"""Who owns a model's buckets, as a client of several shards must know it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from freshet.errors import Unavailable
from freshet.types import I64

__all__ = ["NOBODY", "Owners"]

NOBODY = -1


@dataclass(frozen=True, slots=True, eq=False)
class Owners:
    """The owners at one moment. B buckets of the model."""

    number: int  # rises with every change
    addresses: tuple[str, ...]  # host:port of each shard that owns a bucket
    of_bucket: I64  # (B,) index into `addresses`, or NOBODY

    @classmethod
    def of(cls, shards: Mapping[str, range], *, buckets: int, number: int = 0) -> Owners:
        """From {address: its buckets}."""
        of_bucket = np.full(buckets, NOBODY, np.int64)
        for i, owned in enumerate(shards.values()):
            of_bucket[owned.start : owned.stop] = i
        return cls(number, tuple(shards), of_bucket)

    def check_whole(self) -> None:
        """Raise Unavailable if a bucket has no owner."""
        missing = np.flatnonzero(self.of_bucket == NOBODY)
        if len(missing):
            raise Unavailable(
                f"{len(missing)} of {len(self.of_bucket)} buckets have no owner, the first is {missing[0]}; "
                "a shard takes them over within seconds"
            )
