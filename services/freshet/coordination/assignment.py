"""Assignment of a model's partitions and slices to processes, by their claims (PROTOCOL 9).

B buckets of the model.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

import numpy as np
import structlog

from freshet.clock import Clock
from freshet.coordination.claim_rules import Claim
from freshet.coordination.claims import Claims, Lease
from freshet.errors import Unavailable
from freshet.types import I64, Bucket, BucketRange, Fence

NO_OWNER = -1
"""Index of a bucket without an owner."""


@dataclass(frozen=True, slots=True, eq=False)
class Owners:
    """Owners of a model's buckets at one moment."""

    number: int  # increases with every change
    addresses: tuple[str, ...]  # host:port of each shard that owns a bucket
    of_bucket: I64  # (B,) index into `addresses`, or NO_OWNER

    @classmethod
    def of(cls, shards: Mapping[str, range], *, buckets: int) -> Owners:
        """Make it from {address: its buckets}."""
        of_bucket = np.full(buckets, NO_OWNER, np.int64)
        for i, owned in enumerate(shards.values()):
            of_bucket[owned.start : owned.stop] = i
        return cls(0, tuple(shards), of_bucket)

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

SHARD_LEASES = "shard:"
"""Prefix of the membership leases of shards, before the name."""

_OWNER = re.compile(r"(?P<name>[^@/\s]+)@(?P<address>[^@/\s]+:\d+)/\S+")


def slices_of(buckets: int) -> dict[str, BucketRange]:
    """Return {name of the slice in claims: its buckets}, in order."""
    share = max(1, buckets // SLICES)
    starts = range(0, buckets, share)
    return {f"buckets:{start}-{start + share}": BucketRange(start, start + share) for start in starts}


def former_fences(lease: Lease, slices: Mapping[str, BucketRange]) -> dict[Bucket, Fence]:
    """Return {bucket of the lease's slices: fence of the claim before}, without those that had none."""
    replaced = {name: fence for name, fence in lease.replaced.items() if fence is not None}
    return {Bucket(b): fence for name, fence in replaced.items() for b in slices[name]}


def owner_text(name: str, address: str, life: str) -> str:
    """Return the owner in a shard's claims. `life` is unique to the process."""
    return f"{name}@{address}/{life}"


def address_of(owner: str) -> str | None:
    """Return host:port of a claim's owner; None if it is no shard with an address."""
    found = _OWNER.fullmatch(owner)
    return found["address"] if found else None


def lease_of(owner: str) -> str | None:
    """Return the membership lease of a claim's owner; None as in `address_of`."""
    found = _OWNER.fullmatch(owner)
    return SHARD_LEASES + found["name"] if found else None


class ShardMap:
    """Owners of slices by their claims, for clients of several shards. Thread-safe.

    A shard stays an owner until its claims are released or replaced; its clients detect whether it answers.
    """

    def __init__(self, claims: Claims, buckets: int) -> None:
        self._claims, self._slices, self._buckets = claims, slices_of(buckets), buckets
        self._lock = threading.Lock()  # held to read claims: a later read never yields earlier owners
        self._fences: Mapping[str, int] = {}
        # The changes of claims that the owners include; replaced as one.
        self._seen = -1, Owners(0, (), np.full(buckets, NO_OWNER, np.int64))

    def __call__(self) -> Owners:
        """Return the present owners; cheap while nothing changes."""
        seen, owners = self._seen
        if seen == self._claims.changes:
            return owners
        with self._lock:
            changes = self._claims.changes
            if changes != self._seen[0]:
                self._seen = changes, self._read(self._seen[1])
            return self._seen[1]

    def _read(self, former: Owners) -> Owners:
        claims = self._claims.owners()
        owned = {thing: claim for thing in self._slices if (claim := claims.get(thing)) and _answers(claim)}
        fences = {thing: int(claim.fence) for thing, claim in owned.items()}
        if fences == self._fences:
            return former
        addresses = sorted({address_of(claim.owner) or "" for claim in owned.values()})
        of_bucket: I64 = np.full(self._buckets, NO_OWNER, np.int64)
        for thing, claim in owned.items():
            buckets = self._slices[thing]
            of_bucket[buckets.start : buckets.stop] = addresses.index(address_of(claim.owner) or "")
        self._fences = fences
        return Owners(former.number + 1, tuple(addresses), of_bucket)


def _answers(claim: Claim) -> bool:
    return not claim.released and address_of(claim.owner) is not None


_log = structlog.get_logger(__name__)

CLAIM_S = 1.0
"""Time for which to retry a claim of available partitions; another process may have been faster."""


def assigned_partitions(members: Sequence[str], member: str, partitions: int) -> set[int]:
    """Return the partitions of one of the living members, oldest first: every n-th, so that numbers are even
    and each process computes its own without communication."""
    if member not in members:
        return set()
    return set(range(list(members).index(member), partitions, len(members)))


class PartitionAssignment:
    """Partitions assigned to one process. Used by one thread.

    A process revokes partitions that another should have, which claims them once they are available. So each
    has at most one owner, and the higher fence wins if the former owner was only stopped (PROTOCOL 9).
    """

    def __init__(
        self, claims: Claims, kind: str, thing: str, name: str, owner: str, partitions: int, clock: Clock
    ) -> None:
        """Create an assignment without partitions.

        Args:
            claims: on the model's `control`.
            kind: prefix of the membership leases of all processes that share: `kind:name`.
            thing: prefix of a partition in a claim: `thing:number`.
            name: distinguishes processes of the kind.
            owner: unique to this process; its claims name it.
            partitions: number of the model's; may be set when there are more.
            clock: monotonic, for the wait for a claim.
        """
        self._claims, self._owner, self.partitions, self._clock = claims, owner, partitions, clock
        self._kind, self._thing = f"{kind}:", f"{thing}:"
        self.member = self._kind + name  # thing of the membership lease
        self._membership: Lease | None = None
        self._leases: dict[int, Lease] = {}  # {assigned partition: its claim}

    def join(self, wait_s: float) -> None:
        """Claim the membership lease. Raises Unavailable while another process of this name lives."""
        self._membership = self._claims.acquire(self.member, self._owner, self._clock.monotonic() + wait_s)

    @property
    def fences(self) -> Mapping[int, Fence]:
        """{assigned partition: the fence of its claim}."""
        leases = sorted(self._leases.items())
        return {p: lease.fence for p, lease in leases if self._thing_of(p) in lease.things}

    def update(self, on_revoke: Callable[[AbstractSet[int]], None]) -> bool:
        """Claim and revoke partitions according to the living members; returns whether the assignment has
        changed.

        `on_revoke` receives partitions before their claims are released, and must end their use. Some may
        have been lost already.

        Raises:
            Fenced: another process has claimed the membership lease.
            FreshetError: the error that stopped the claims.
        """
        self._claims.check()
        if self._membership is not None:
            self._membership.check()
        living = self._claims.living()
        members = sorted((c.fence, thing) for thing, c in living.items() if thing.startswith(self._kind))
        wanted = assigned_partitions([thing for _, thing in members], self.member, self.partitions)
        kept = wanted & self.fences.keys()
        revoked = {p: self._leases.pop(p) for p in self._leases.keys() - kept}  # first: no new use begins
        if revoked:
            on_revoke(revoked.keys())
        for p, lease in revoked.items():
            lease.release([self._thing_of(p)])
        claimed = self._claim([p for p in sorted(wanted - kept) if self._thing_of(p) not in living])
        if revoked or claimed:
            partitions = sorted(self._leases)
            _log.info(
                "partitions are assigned", member=self.member, partitions=partitions, members=len(members)
            )
        return bool(revoked or claimed)

    def release(self) -> None:
        """Release all partitions and the membership lease."""
        for lease in [*self._leases.values(), *([self._membership] if self._membership else [])]:
            lease.release()
        self._leases.clear()
        self._membership = None

    def _claim(self, available: Sequence[int]) -> bool:
        """Claim partitions together, so that they have one fence and share batches; returns success."""
        if not available:
            return False
        deadline = self._clock.monotonic() + CLAIM_S
        try:
            lease = self._claims.acquire_all(list(map(self._thing_of, available)), self._owner, deadline)
        except Unavailable as error:
            _log.info(
                "another process claimed partitions",
                member=self.member,
                partitions=available,
                reason=str(error),
            )
            return False
        self._leases.update(dict.fromkeys(available, lease))
        return True

    def _thing_of(self, partition: int) -> str:
        return f"{self._thing}{partition}"
