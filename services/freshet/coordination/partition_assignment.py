"""How processes of one kind share a model's partitions: seats and claims in `control`, dealt by a rule that
all know."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet

import structlog

from freshet.clock import Clock
from freshet.coordination.claims import Claims, Held
from freshet.errors import Unavailable
from freshet.types import Fence

__all__ = ["Shares", "mine"]

_log = structlog.get_logger(__name__)

CLAIM_S = 1.0
"""How long a claim that is free is tried; another process may have been quicker."""


def mine(seats: Sequence[str], seat: str, partitions: int) -> set[int]:
    """The partitions of a seat, of all that live, oldest first: every so-many-th, so that shares are even and
    each process knows its own without asking."""
    return set(range(list(seats).index(seat), partitions, len(seats))) if seat in seats else set()


class Shares:
    """The partitions of one process. Used by one thread.

    Partitions that another process should have are let go of first, and claimed by it when they are free: so
    each has one owner at most, and the higher fence wins if somebody was only asleep (PROTOCOL 9).
    """

    def __init__(
        self, claims: Claims, kind: str, thing: str, name: str, owner: str, partitions: int, clock: Clock
    ) -> None:
        """Own nothing yet.

        Args:
            claims: on the model's `control`.
            kind: what the seats of all that share are called: `kind:name`.
            thing: what a partition is called in a claim: `thing:number`.
            name: tells processes of the kind apart.
            owner: unique to this process; it stands in its claims.
            partitions: of the model; may be set anew when there are more.
            clock: for how long a claim is waited for.
        """
        self._claims, self._owner, self.partitions, self._clock = claims, owner, partitions, clock
        self._kind, self._thing = f"{kind}:", f"{thing}:"
        self.seat = self._kind + name
        self._held: dict[int, Held] = {}
        self._seat: Held | None = None

    def sit(self, wait_s: float) -> None:
        """Take the seat. Raises Unavailable while another process of this name lives."""
        self._seat = self._claims.acquire(self.seat, self._owner, self._clock.monotonic() + wait_s)

    @property
    def fences(self) -> Mapping[int, Fence]:
        """{partition held: the fence of its claim}."""
        return {p: held.fence for p, held in sorted(self._held.items()) if self._what(p) in held.things}

    def look(self, letting_go: Callable[[AbstractSet[int]], None]) -> bool:
        """Claim and let go as the living seats ask for; True if what is held has changed.

        `letting_go` is called with partitions before their claims are released: it ends what uses them. Some
        may have been lost already.

        Raises Fenced if the seat itself was claimed by another process.
        """
        self._claims.check()
        if self._seat is not None:
            self._seat.check()
        living = self._claims.living()
        seats = sorted((c.fence, what) for what, c in living.items() if what.startswith(self._kind))
        wanted = mine([what for _, what in seats], self.seat, self.partitions)
        kept = wanted & self.fences.keys()
        going = {p: self._held.pop(p) for p in self._held.keys() - kept}  # nothing may begin with them again
        if going:
            letting_go(going.keys())
        for p, held in going.items():
            held.release([self._what(p)])
        claimed = self._claim([p for p in sorted(wanted - kept) if self._what(p) not in living])
        if going or claimed:
            _log.info("partitions are held", seat=self.seat, partitions=sorted(self._held), seats=len(seats))
        return bool(going or claimed)

    def release(self) -> None:
        """Let go of everything."""
        for held in [*self._held.values(), *([self._seat] if self._seat else [])]:
            held.release()
        self._held.clear()
        self._seat = None

    def _claim(self, free: Sequence[int]) -> bool:
        """Claim partitions together, so that they have one fence and share batches; True if it went well."""
        if not free:
            return False
        deadline = self._clock.monotonic() + CLAIM_S
        try:
            held = self._claims.acquire_all([self._what(p) for p in free], self._owner, deadline)
        except Unavailable as error:
            _log.info("partitions went to another", seat=self.seat, partitions=free, reason=str(error))
            return False
        self._held.update(dict.fromkeys(free, held))
        return True

    def _what(self, partition: int) -> str:
        return f"{self._thing}{partition}"
