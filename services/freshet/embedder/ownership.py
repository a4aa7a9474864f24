"""Which embedder owns which partitions: seats and claims in `control`, dealt by a rule that all know."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import structlog

from freshet.clock import Clock
from freshet.errors import Unavailable
from freshet.seams.eventlog.claimbook import Claim
from freshet.seams.eventlog.claims import Claims, Held
from freshet.types import Fence

__all__ = ["Partitions", "address_of", "embedders_of", "mine"]

log = structlog.get_logger("freshet.embedder")

SEAT, PARTITION = "embedder:", "partition:"
CLAIM_S = 1.0
"""How long a claim that is free is tried; another embedder may have been quicker."""


def mine(seats: Sequence[str], seat: str, partitions: int) -> set[int]:
    """The partitions of a seat, of all that live, oldest first: every so-many-th, so that shares are even and
    each embedder knows its own without asking."""
    return set(range(list(seats).index(seat), partitions, len(seats))) if seat in seats else set()


def address_of(owner: str) -> str:
    """host:port of an owner `name@host:port/life`; empty if it names none."""
    _, at, rest = owner.partition("@")
    return rest.rpartition("/")[0] if at else ""


def embedders_of(living: Mapping[str, Claim]) -> dict[int, str]:
    """{partition: host:port of the embedder that owns it}."""
    return {
        int(what.removeprefix(PARTITION)): address_of(claim.owner)
        for what, claim in living.items()
        if what.startswith(PARTITION) and address_of(claim.owner)
    }


class Partitions:
    """The partitions of one embedder. Used by one thread.

    Partitions that another embedder should have are let go of first, and claimed by it when they are free: so
    each has one owner at most, and the higher fence wins if somebody was only asleep (PROTOCOL 9).
    """

    def __init__(self, claims: Claims, name: str, owner: str, partitions: int, clock: Clock) -> None:
        """Own nothing yet; `owner` is `name@host:port/life`, unique to this process."""
        self._claims, self._owner, self._partitions, self._clock = claims, owner, partitions, clock
        self.seat = SEAT + name
        self._held: dict[int, Held] = {}
        self._seat: Held | None = None

    def sit(self, wait_s: float) -> None:
        """Take the seat. Raises Unavailable while another process of this name lives."""
        self._seat = self._claims.acquire(self.seat, self._owner, self._clock.monotonic() + wait_s)

    @property
    def fences(self) -> Mapping[int, Fence]:
        """{partition held: the fence of its claim}."""
        return {p: held.fence for p, held in sorted(self._held.items()) if _name(p) in held.things}

    def look(self, letting_go: Callable[[], None]) -> bool:
        """Claim and let go as the living seats ask for; True if what is held has changed.

        `letting_go` is called before anything is released: it ends what uses the partitions.

        Raises Fenced if the seat itself was claimed by another process.
        """
        self._claims.check()
        if self._seat is not None:
            self._seat.check()
        living = self._claims.living()
        seats = sorted((c.fence, what) for what, c in living.items() if what.startswith(SEAT))
        wanted = mine([what for _, what in seats], self.seat, self._partitions)
        kept = wanted & self.fences.keys()
        going = {p: self._held.pop(p) for p in self._held.keys() - kept}  # nothing may begin with them again
        if going:
            letting_go()
        for p, held in going.items():
            held.release([_name(p)])
        claimed = self._claim([p for p in sorted(wanted - kept) if _name(p) not in living])
        if going or claimed:
            log.info("partitions", held=sorted(self._held), seats=len(seats))
        return bool(going or claimed)

    def release(self) -> None:
        """Let go of everything."""
        for held in [*self._held.values(), *([self._seat] if self._seat else [])]:
            held.release()
        self._held.clear()

    def _claim(self, free: Sequence[int]) -> bool:
        """Claim partitions together, so that they have one fence and share batches; True if it went well."""
        if not free:
            return False
        deadline = self._clock.monotonic() + CLAIM_S
        try:
            held = self._claims.acquire_all([_name(p) for p in free], self._owner, deadline)
        except Unavailable as error:
            log.info("partitions went to another embedder", partitions=free, reason=str(error))
            return False
        self._held.update(dict.fromkeys(free, held))
        return True


def _name(partition: int) -> str:
    return f"{PARTITION}{partition}"
