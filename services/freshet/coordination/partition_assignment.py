"""Partition assignment among processes of a kind, by membership leases, claims and a fixed rule."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet

import structlog

from freshet.clock import Clock
from freshet.coordination.claims import Claims, Held
from freshet.errors import Unavailable
from freshet.types import Fence

__all__ = ["PartitionAssignment", "assigned_partitions"]

_log = structlog.get_logger(__name__)

CLAIM_S = 1.0
"""Time for which to retry a claim of free partitions; another process may have been faster."""


def assigned_partitions(seats: Sequence[str], seat: str, partitions: int) -> set[int]:
    """Return the partitions of a membership lease among all living ones, oldest first: every n-th, so that
    numbers are even and each process computes its own without communication."""
    return set(range(list(seats).index(seat), partitions, len(seats))) if seat in seats else set()


class PartitionAssignment:
    """Partitions assigned to one process. Used by one thread.

    A process revokes partitions that another should have, which claims them once they are free. So each has
    at most one owner, and the higher fence wins if the former owner was only stopped (PROTOCOL 9).
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
        self.seat = self._kind + name
        self._held: dict[int, Held] = {}
        self._seat: Held | None = None

    def join(self, wait_s: float) -> None:
        """Claim the membership lease. Raises Unavailable while another process of this name lives."""
        self._seat = self._claims.acquire(self.seat, self._owner, self._clock.monotonic() + wait_s)

    @property
    def fences(self) -> Mapping[int, Fence]:
        """{assigned partition: the fence of its claim}."""
        return {p: held.fence for p, held in sorted(self._held.items()) if self._what(p) in held.things}

    def update(self, on_revoke: Callable[[AbstractSet[int]], None]) -> bool:
        """Claim and revoke partitions according to the living members; returns whether the assignment has
        changed.

        `on_revoke` receives partitions before their claims are released, and must end their use. Some may
        have been lost already.

        Raises Fenced if another process has claimed the membership lease.
        """
        self._claims.check()
        if self._seat is not None:
            self._seat.check()
        living = self._claims.living()
        seats = sorted((c.fence, what) for what, c in living.items() if what.startswith(self._kind))
        wanted = assigned_partitions([what for _, what in seats], self.seat, self.partitions)
        kept = wanted & self.fences.keys()
        revoked = {p: self._held.pop(p) for p in self._held.keys() - kept}  # removed first: no new use begins
        if revoked:
            on_revoke(revoked.keys())
        for p, held in revoked.items():
            held.release([self._what(p)])
        claimed = self._claim([p for p in sorted(wanted - kept) if self._what(p) not in living])
        if revoked or claimed:
            _log.info(
                "partitions are assigned", seat=self.seat, partitions=sorted(self._held), seats=len(seats)
            )
        return bool(revoked or claimed)

    def release(self) -> None:
        """Release all partitions and the membership lease."""
        for held in [*self._held.values(), *([self._seat] if self._seat else [])]:
            held.release()
        self._held.clear()
        self._seat = None

    def _claim(self, free: Sequence[int]) -> bool:
        """Claim partitions together, so that they have one fence and share batches; returns success."""
        if not free:
            return False
        deadline = self._clock.monotonic() + CLAIM_S
        try:
            held = self._claims.acquire_all([self._what(p) for p in free], self._owner, deadline)
        except Unavailable as error:
            _log.info(
                "another process claimed partitions", seat=self.seat, partitions=free, reason=str(error)
            )
            return False
        self._held.update(dict.fromkeys(free, held))
        return True

    def _what(self, partition: int) -> str:
        return f"{self._thing}{partition}"
