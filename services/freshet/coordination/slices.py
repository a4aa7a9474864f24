"""Slices: the pieces in which a model's buckets are claimed (PROTOCOL 9), by embedded and remote shards
alike."""

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
    "NOBODY",
    "SEATS",
    "SLICES",
    "Owners",
    "ShardMap",
    "address_of",
    "owner_text",
    "seat_of",
    "slices_of",
]

# --- Who owns a model's buckets, as a client of several shards must know it.


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


SLICES = 64
"""Of a model with at least as many buckets: few enough for one record, many enough to balance by."""

SEATS = "shard:"
"""Before a shard's name: its seat, which it claims to be counted on."""

_OWNER = re.compile(r"(?P<name>[^@/\s]+)@(?P<address>[^@/\s]+:\d+)/\S+")


def slices_of(buckets: int) -> dict[str, BucketRange]:
    """{what a claim calls it: its buckets}, in order."""
    share = max(1, buckets // SLICES)
    starts = range(0, buckets, share)
    return {f"buckets:{start}-{start + share}": BucketRange(start, start + share) for start in starts}


def owner_text(name: str, address: str, life: str) -> str:
    """How a shard signs its claims: its name, where it answers, and something unique to its process's
    life."""
    return f"{name}@{address}/{life}"


def address_of(owner: str) -> str | None:
    """host:port of who signed a claim; None if it is no shard with an address."""
    found = _OWNER.fullmatch(owner)
    return found["address"] if found else None


def seat_of(owner: str) -> str | None:
    """The seat of who signed a claim; None as in `address_of`."""
    found = _OWNER.fullmatch(owner)
    return SEATS + found["name"] if found else None


class ShardMap:
    """Who owns what, as the claims say: what a client of several shards is given. Thread-safe.

    An owner stays one until its claims are released or taken over: whether it answers, its clients find out.
    """

    def __init__(self, claims: Claims, buckets: int) -> None:
        self._claims, self._slices, self._buckets = claims, slices_of(buckets), buckets
        self._seen = -1
        self._fences: Mapping[str, int] = {}
        self._owners = Owners(0, (), np.full(buckets, NOBODY, np.int64))

    def __call__(self) -> Owners:
        """The owners now; cheap while nothing changes."""
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
        of_bucket: I64 = np.full(self._buckets, NOBODY, np.int64)
        for what, claim in owned.items():
            buckets = self._slices[what]
            of_bucket[buckets.start : buckets.stop] = addresses.index(address_of(claim.owner) or "")
        self._fences = fences
        self._owners = Owners(self._owners.number + 1, tuple(addresses), of_bucket)


def _answers(claim: Claim) -> bool:
    return not claim.released and address_of(claim.owner) is not None
