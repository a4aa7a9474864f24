"""Slices of a model's buckets, the units of claims (PROTOCOL 9), for embedded and remote shards.

Letters: B buckets of the model.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from freshet.coordination.claim_rules import Claim
from freshet.coordination.claims import Claims
from freshet.errors import Unavailable
from freshet.types import I64, BucketRange

__all__ = [
    "NO_OWNER",
    "SEATS",
    "SLICES",
    "Owners",
    "ShardMap",
    "address_of",
    "owner_text",
    "seat_of",
    "slices_of",
]

NO_OWNER = -1
"""Index of a bucket without an owner."""


@dataclass(frozen=True, slots=True, eq=False)
class Owners:
    """Owners of a model's buckets at one moment."""

    number: int  # increases with every change
    addresses: tuple[str, ...]  # host:port of each shard that owns a bucket
    of_bucket: I64  # (B,) index into `addresses`, or NO_OWNER

    @classmethod
    def of(cls, shards: Mapping[str, range], *, buckets: int, number: int = 0) -> Owners:
        """Make it from {address: its buckets}."""
        of_bucket = np.full(buckets, NO_OWNER, np.int64)
        for i, owned in enumerate(shards.values()):
            of_bucket[owned.start : owned.stop] = i
        return cls(number, tuple(shards), of_bucket)

    def check_whole(self) -> None:
        """Raise Unavailable if a bucket has no owner."""
        missing = np.flatnonzero(self.of_bucket == NO_OWNER)
        if len(missing):
            raise Unavailable(
                f"{len(missing)} of {len(self.of_bucket)} buckets have no owner, the first is {missing[0]}; "
                "a shard claims them within seconds"
            )


SLICES = 64
"""Number of slices if a model has as many buckets: few enough for one record, many enough for balance."""

SEATS = "shard:"
"""Prefix of the membership leases of shards, before the name."""

_OWNER = re.compile(r"(?P<name>[^@/\s]+)@(?P<address>[^@/\s]+:\d+)/\S+")


def slices_of(buckets: int) -> dict[str, BucketRange]:
    """Return {name of the slice in claims: its buckets}, in order."""
    share = max(1, buckets // SLICES)
    starts = range(0, buckets, share)
    return {f"buckets:{start}-{start + share}": BucketRange(start, start + share) for start in starts}


def owner_text(name: str, address: str, life: str) -> str:
    """Return the owner in a shard's claims. `life` is unique to the process."""
    return f"{name}@{address}/{life}"


def address_of(owner: str) -> str | None:
    """Return host:port of a claim's owner; None if it is no shard with an address."""
    found = _OWNER.fullmatch(owner)
    return found["address"] if found else None


def seat_of(owner: str) -> str | None:
    """Return the membership lease of a claim's owner; None as in `address_of`."""
    found = _OWNER.fullmatch(owner)
    return SEATS + found["name"] if found else None


class ShardMap:
    """Owners of slices by their claims, for clients of several shards. Thread-safe.

    A shard stays an owner until its claims are released or replaced; its clients detect whether it answers.
    """

    def __init__(self, claims: Claims, buckets: int) -> None:
        self._claims, self._slices, self._buckets = claims, slices_of(buckets), buckets
        self._seen = -1
        self._fences: Mapping[str, int] = {}
        self._owners = Owners(0, (), np.full(buckets, NO_OWNER, np.int64))

    def __call__(self) -> Owners:
        """Return the present owners; cheap while nothing changes."""
        seen = self._claims.changes
        if seen != self._seen:
            self._read()
            self._seen = seen
        return self._owners

    def _read(self) -> None:
        claims = self._claims.owners()
        owned = {what: claim for what in self._slices if (claim := claims.get(what)) and _answers(claim)}
        fences = {what: int(claim.fence) for what, claim in owned.items()}
        if fences == self._fences:
            return
        addresses = sorted({address_of(claim.owner) or "" for claim in owned.values()})
        of_bucket: I64 = np.full(self._buckets, NO_OWNER, np.int64)
        for what, claim in owned.items():
            buckets = self._slices[what]
            of_bucket[buckets.start : buckets.stop] = addresses.index(address_of(claim.owner) or "")
        self._fences = fences
        self._owners = Owners(self._owners.number + 1, tuple(addresses), of_bucket)


def _answers(claim: Claim) -> bool:
    return not claim.released and address_of(claim.owner) is not None
