"""The shard manager: claims, serves and releases the slices of a shard among others (PROTOCOL 9 and 10).

Each shard has a membership lease. The living shard with the lowest fence leads: it publishes plans
by the reported load (`freshet.paramserver.placement`). A plan is a proposal; ownership is by claims. A
shard claims its planned slices once they are unclaimed, released, or their owner's lease has expired. It
revokes a slice by flushing it and releasing the claim.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import structlog

from freshet.clock import Clock
from freshet.coordination.assignment import SHARD_LEASES, former_fences, lease_of, owner_text, slices_of
from freshet.coordination.claims import Claims, Lease
from freshet.errors import Corrupt, Fenced, FreshetError, Unavailable
from freshet.paramserver.balancer import LoadBalancer
from freshet.paramserver.shard import Shard
from freshet.types import Bucket, Fence

log = structlog.get_logger("freshet.paramserver")

ROUND_S = 0.05
"""Time between two rounds: short against the lease of 3 s, after which a dead shard is replaced."""

UNCLAIMED_S = 5.0
"""Time after which a slice that its planned owner does not claim stops delaying revocations, if that owner
has slices to revoke itself and may need their memory first."""

DAMAGED_RETRY_S = 30.0
"""Time before a slice with damaged rows is claimed again; an operator may have repaired it."""

CLAIM_S = 1.0
"""Time-out for reading a claim back; another shard may have claimed first."""


@dataclass(slots=True)
class SliceCounts:
    """Ownership changes of slices since the shard's start."""

    taken: int = 0
    given: int = 0
    lost: int = 0
    doubted: int = 0
    """released because their rows changed while they loaded; claimed anew"""


class ShardManager:
    """Claims, serves and releases a shard's slices. `run` repeats rounds; `step` is one round.

    A round may block up to the row store's time-out. `run` and `leave` need one thread; `drain` may be called
    from another one, and waits for the current round.
    """

    def __init__(
        self,
        shard: Shard,
        claims: Claims,
        balancer: LoadBalancer,
        *,
        name: str,
        address: str,
        life: str,
        buckets: int,
        clock: Clock,
    ) -> None:
        self._shard, self._claims, self._clock, self._balancer = shard, claims, clock, balancer
        self._slices = slices_of(buckets)
        self._member = SHARD_LEASES + name
        self._owner = owner_text(name, address, life)
        self._lease: Lease | None = None
        self._owned: dict[str, Lease] = {}  # {slice: its claim}
        self._conflicted: set[str] = set()  # slices to read whole before they are served again
        self._unserved: dict[Bucket, tuple[Fence, Fence | None]] = {}
        """{bucket: its claim of this shard that never served it, and the claim before}"""
        self._at_once = len(self._slices)  # most conflicted slices in one claim
        self._left: set[str] = set()  # given up, not known to be served elsewhere; retention is held for them
        self._damaged: dict[str, tuple[float, str]] = {}  # {slice: (when to claim it again, reason)}
        self._unclaimed_since: dict[str, float] = {}  # {planned slice without an owner: monotonic time}
        self._leaving = False
        self._round = threading.Lock()
        self.counts = SliceCounts()

    def join(self, deadline: float, stop: threading.Event | None = None) -> None:
        """Acquire the membership lease; plans include this shard from then on.

        Raises:
            Unavailable: another process of this name lives until the deadline, or until `stop` is set.
        """
        self._lease = self._claims.acquire(self._member, self._owner, deadline, stop)

    def run(self, stop: threading.Event) -> None:
        """Repeat rounds until `stop`. Raises the error that ends the shard, such as Fenced."""
        while not stop.wait(ROUND_S):
            try:
                self.step()
            except Unavailable as error:
                log.warning("a round of the shard manager failed, tried again", reason=str(error))

    def step(self) -> None:
        """Run one round. Raises Unavailable (`run` continues), Fenced, DataLost, Mismatch or Corrupt."""
        with self._round:
            assert self._lease is not None, "join comes first"
            self._lease.check()
            if self._shard.failed is not None:
                raise self._shard.failed
            self._drop_lost()
            self._release_conflicted()
            self._release_retention()
            loading = self._slices_with(self._shard.buckets.loading())
            loaded = [name for name in self._owned if name not in loading]
            self._balancer.step(self._lease, loaded, self._owned)
            plan = self._claims.plan()
            if plan is None or len(plan.owners) != len(self._slices):
                return
            planned = dict(zip(self._slices, plan.owners, strict=True))
            unclaimed: Unavailable | None = None
            try:
                if not self._leaving:
                    wanted = [name for name, shard in planned.items() if shard == self._member]
                    free = self._claims.available([name for name in wanted if name not in self._owned])
                    free = self._without_damaged(wanted, free)
                    self._claim(self._balancer.fitting(free))
            except Unavailable as error:  # a failed claim must not delay revocations
                unclaimed = error
            self._revoke(self._balancer.next_to_move(self._slices_to_revoke(planned)))
            if unclaimed is not None:
                raise unclaimed

    def leave(self, deadline: float) -> None:
        """Release the membership lease and hand the slices over to other shards, a few at a time.

        Returns when others serve all slices, at `deadline` (monotonic), or when no other shard lives. `drain`
        releases the rest.
        """
        assert self._lease is not None, "join comes first"
        self._leaving, pause = True, threading.Event()
        self._lease.release()
        while self._owned or self._left:
            if self._clock.monotonic() >= deadline or not self._claims.alive(SHARD_LEASES):
                return
            try:
                self.step()
            except FreshetError as error:
                log.warning("slices are not handed over one by one", reason=str(error))
                return
            pause.wait(ROUND_S)

    def drain(self) -> None:
        """Flush and release all slices, so that other shards need not wait for the lease. Raises Unavailable.

        Retention is held for slices that no other shard reports as loaded: others may lack memory, or die
        before they have read them. It is held under this shard's name until that shard starts again.
        """
        with self._round:
            self._revoke(list(self._owned))
            self._release_retention()
            if self._left and any(claim.thing != self._member for claim in self._claims.alive(SHARD_LEASES)):
                log.warning(
                    "no other shard serves these slices yet; the log is held for them until this one is "
                    "started again",
                    slices=len(self._left),
                )
            if self._lease is not None:
                self._lease.release()

    @property
    def slices(self) -> Sequence[str]:
        """The slices served here."""
        return list(self._owned)

    @property
    def ready(self) -> str | None:
        """None, or the reason why this shard does not serve its planned slices."""
        if (reason := self._balancer.full or self._balancer.lacks_memory) is not None:
            return reason
        if self._damaged:
            name, (_, reason) = next(iter(self._damaged.items()))
            return f"{len(self._damaged)} slices are not served, {name} first: {reason}"
        plan = self._claims.plan()
        wanted = plan.owners.count(self._member) if plan is not None else 0
        if plan is None or wanted > len(self._owned):
            return f"{len(self._owned)} of {wanted} slices are served"
        return None

    def _drop_lost(self) -> None:
        lost = [name for name, claim in self._owned.items() if name not in claim.things]
        if lost:
            log.warning("slices were taken over by another shard", slices=len(lost), slice=lost[0])
            for name in lost:
                del self._owned[name]
            self._shard.buckets.release(
                self._buckets(lost)
            )  # the new owner may die before it holds retention
            self._left.update(lost)
            self.counts.lost += len(lost)

    def _release_conflicted(self) -> None:
        """Release slices with rows that changed while they loaded.

        Their learned rows are lost. The release is an owner change, so clients replay (PROTOCOL 7).
        """
        for name in self._slices_with(self._shard.buckets.pop_conflicted()) & set(self._owned):
            self._shard.buckets.release(self._buckets([name]))
            self._owned.pop(name).release([name])
            self._conflicted.add(name)
            self._left.add(name)
            self.counts.doubted += 1

    def _release_retention(self) -> None:
        """Stop holding retention for slices that other shards report as loaded; those hold it now."""
        if not self._left:
            return
        claims, living = self._claims.snapshot()
        served = []
        for name in sorted(self._left & living.keys()):
            owner = lease_of(claims[name].owner)
            if owner != self._member and self._balancer.reported_owner(name) == owner:
                served.append(name)
        if served:
            self._shard.buckets.drop(self._buckets(served))
            self._left -= set(served)

    def _slices_to_revoke(self, planned: Mapping[str, str]) -> list[str]:
        """Return owned slices that the plan gives to others, if it is this shard's turn to revoke.

        One shard revokes at a time, and only after the slices moved last are reported as loaded: a client's
        batch waits for all slices that load at once, and must find all slices served in between.
        """
        claims, living = self._claims.snapshot()
        now_s = self._clock.monotonic()
        unclaimed = planned.keys() - living.keys()
        self._unclaimed_since = {name: self._unclaimed_since.get(name, now_s) for name in unclaimed}
        owners = {name: lease_of(claims[name].owner) for name in planned.keys() & living.keys()}
        revoking = {
            owner
            for name, owner in owners.items()
            if owner is not None and planned[name] != owner and planned[name] in living
        }
        for name, shard in planned.items():
            if shard not in living:
                continue
            owner = owners.get(name)
            if owner is None and shard in revoking and now_s - self._unclaimed_since[name] > UNCLAIMED_S:
                continue
            if owner == shard and self._balancer.reported_owner(name) == shard:
                continue
            released = owner == self._member and name not in self._owned  # and the release not read back yet
            if owner is None or owner == shard or released:
                return []  # a slice is unclaimed or loading
        if min(revoking, default=None) != self._member:
            return []
        loading = self._slices_with(self._shard.buckets.loading())  # their changes cannot be flushed yet
        return [
            name
            for name in self._owned
            if planned[name] != self._member and planned[name] in living and name not in loading
        ]

    def _claim(self, free: Sequence[str]) -> None:
        if not free:
            return
        clean = [name for name in free if name not in self._conflicted]
        # Conflicted slices come last, in claims of their own, so that they delay no others.
        free, whole = (clean, False) if clean else (free[: self._at_once], True)
        held = self._claims.acquire_all(free, self._owner, self._clock.monotonic() + CLAIM_S)
        buckets, former = self._buckets(free), self._former(held)
        self._unserved |= {bucket: (held.fence, former.get(bucket)) for bucket in buckets}
        try:
            rows = self._shard.buckets.claim(buckets, held.fence, former=former, whole=whole)
        except Corrupt as error:
            held.release()
            if len(free) > 1:  # bisect for the damaged one
                self._conflicted.update(free)
                self._at_once = len(free) // 2
            else:
                self._set_aside(free, str(error))
            raise Unavailable(f"slices are not claimed: {error}") from error
        except FreshetError as error:
            held.release()
            if isinstance(error, Fenced):  # another shard claimed them later
                raise Unavailable(str(error)) from error
            raise
        for bucket in buckets:
            del self._unserved[bucket]
        self._owned.update(dict.fromkeys(free, held))
        for name in self._damaged.keys() & set(free):
            del self._damaged[name]
        self._conflicted -= set(free)
        self._at_once = min(2 * self._at_once, len(self._slices))
        self._left -= set(free)
        self.counts.taken += len(free)
        log.info("slices are served", slices=len(free), rows=rows, fence=int(held.fence), loaded=whole)

    def _former(self, held: Lease) -> dict[Bucket, Fence]:
        """Return the fences of the claims before.

        A claim of this shard that never served a bucket does not count, as no reader has seen its fence.
        """
        former: dict[Bucket, Fence | None] = dict(former_fences(held, self._slices))
        for bucket, (fence, before) in self._unserved.items():
            if former.get(bucket) == fence:
                former[bucket] = before
        return {bucket: fence for bucket, fence in former.items() if fence is not None}

    def _without_damaged(self, wanted: Sequence[str], free: Sequence[str]) -> list[str]:
        """Return the free slices without those found damaged in the last DAMAGED_RETRY_S."""
        now_s = self._clock.monotonic()
        for name in self._damaged.keys() - set(wanted):  # planned for another shard now
            del self._damaged[name]
        return [name for name in free if self._damaged.get(name, (now_s, ""))[0] <= now_s]

    def _set_aside(self, slices: Sequence[str], reason: str) -> None:
        until_s = self._clock.monotonic() + DAMAGED_RETRY_S
        self._damaged.update(dict.fromkeys(slices, (until_s, reason)))
        first = slices[0]
        log.error("slices with damaged rows are not served", slices=len(slices), slice=first, reason=reason)

    @property
    def damaged(self) -> Mapping[str, str]:
        """{slice that is not served because its rows are damaged: reason}."""
        return {name: reason for name, (_, reason) in self._damaged.items()}

    def _revoke(self, slices: Sequence[str]) -> None:
        if not slices:
            return
        self._shard.buckets.revoke(self._buckets(slices))
        for name in slices:
            self._owned.pop(name).release([name])
        self._left.update(slices)
        self.counts.given += len(slices)
        log.info("slices were revoked", slices=len(slices))

    def _slices_with(self, buckets: Iterable[Bucket]) -> set[str]:
        """The slices that contain one of these buckets."""
        chosen = set(buckets)
        return {name for name, of in self._slices.items() if chosen and not chosen.isdisjoint(of)}

    def _buckets(self, slices: Sequence[str]) -> list[Bucket]:
        return [Bucket(b) for name in slices for b in self._slices[name]]
