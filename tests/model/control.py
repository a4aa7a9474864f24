"""Rule 9: ownership is decided in the log: the view of `control`, and the members that live by it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .rules import Rules
from .simulation import HOP, Process, Steps, Unavailable

if TYPE_CHECKING:
    from .world import World

HEARTBEAT = 10  # ticks
LEASE = 60  # ticks; several heartbeats, so that a lost one costs nothing
POLL = 6  # ticks between two reads of `control`
NOBODY = ""


@dataclass(frozen=True, slots=True)
class Record:
    """A heartbeat (no resource), a claim, or a release (owner `NOBODY`)."""

    owner: str
    resource: str = ""
    replaces: int = -1
    decided_at: int = 0  # for the ledger only


@dataclass(frozen=True, slots=True)
class Claim:
    """Who owns a resource. The fence is the record's offset: unique, never going back (rule 9)."""

    owner: str
    fence: int
    previous: int = -1  # the fence of the owner before


UNCLAIMED = Claim(NOBODY, -1)


class ControlView:
    """What one reader of `control` knows: a function of the records and of the times it read them."""

    def __init__(self, rules: Rules) -> None:
        self._rules = rules
        self.position = 0
        self.claims: dict[str, Claim] = {}
        self._readable = 0  # ticks during which the log could be read
        self._read_at: int | None = None
        self.read_at = 0
        self._heard: dict[str, int] = {}  # owner -> readable ticks when last heard of

    def owner(self, resource: str) -> Claim:
        """The winning claim."""
        return self.claims.get(resource, UNCLAIMED)

    def failed(self, now: int) -> None:
        """The log could not be read: that time counts for no lease (rule 9)."""
        if self._rules.lease_of_readable_log:
            self._read_at = None
        else:
            self.tick(now)

    def tick(self, now: int) -> None:
        """The log was read to its end.

        Who slept between two reads cannot know whether the log was there meanwhile (found by this model):
        a gap counts as one poll.
        """
        if self._read_at is not None:
            since = now - self._read_at
            self._readable += min(since, POLL + 2 * HOP) if self._rules.lease_of_readable_log else since
        self._read_at = self.read_at = now

    def apply(self, offset: int, record: Record) -> Claim | None:
        """Take a record; returns the claim that it replaced, if it was a winning one."""
        self.position = offset + 1
        self._heard[record.owner] = self._readable
        if not record.resource:
            return None
        current = self.owner(record.resource)
        if record.replaces != current.fence and self._rules.first_claim_wins:
            return None  # a claim names the one it replaces; the first in the log wins
        previous = current.previous if current.owner == NOBODY else current.fence
        self.claims[record.resource] = Claim(record.owner, offset, previous)
        return current

    def claimable(self, resource: str) -> bool:
        """Free, or its owner was silent for a full lease of readable log."""
        owner = self.owner(resource).owner
        return owner == NOBODY or self._readable - self._heard.get(owner, 0) >= LEASE


class Member(Process):
    """A process that owns resources under a lease: it beats, follows `control` and claims what is free."""

    def __init__(self, world: World, name: str, wanted: tuple[str, ...]) -> None:
        super().__init__(world.sim, name)
        self.world = world
        self.rules = world.rules
        self.view = ControlView(world.rules)
        self.blind_until = 0  # its reads of `control` fail until then; all else goes on
        self._wanted = wanted
        self._tried: dict[str, int] = {}
        self.spawn(self._beat())
        self.spawn(self._follow(), delay=self.sim.hop())

    def owned(self) -> Iterator[tuple[str, int]]:
        """The resources that the log gives to this process, with their fences."""
        for resource in self._wanted:
            claim = self.view.owner(resource)
            if claim.owner == self.name:
                yield resource, claim.fence

    def on_control(self) -> None:
        """Called when the view has changed."""

    def post(self, record: Record) -> Steps[bool]:
        """Append to `control`; True if it is known to be there."""
        try:
            yield from self.call(lambda: self.world.control[0].append(record))
        except Unavailable:
            return False
        return True

    def claim(self, resource: str) -> Steps[bool]:
        """Ask for a resource; whether it was won is seen by reading on."""
        record = Record(self.name, resource, self.view.owner(resource).fence, decided_at=self.view.read_at)
        return (yield from self.post(record))

    def ask_for(self, resource: str) -> Steps[None]:
        """Claim as a task of its own."""
        yield from self.claim(resource)

    def release(self, resource: str) -> Steps[bool]:
        """Give a resource back, and stay away from it for a while so that others get it."""
        self._tried[resource] = self.sim.now + LEASE
        return (yield from self.post(Record(NOBODY, resource, self.view.owner(resource).fence)))

    def _beat(self) -> Steps[None]:
        while True:
            yield from self.post(Record(self.name))
            yield HEARTBEAT - 4

    def _follow(self) -> Steps[None]:
        view = self.view
        while True:
            try:
                yield self.sim.hop()
                if self.sim.now < self.blind_until:
                    raise Unavailable
                records = self.world.control[0].records[view.position :]
            except Unavailable:
                view.failed(self.sim.now)
            else:
                view.tick(
                    self.sim.now
                )  # before the pause that may follow: the lease ends where the reading ended
                yield 1
                for offset, record in enumerate(records, view.position):
                    if record is not None:
                        view.apply(offset, record)
                self.on_control()
                for resource in self._wanted:
                    if view.claimable(resource) and self._tried.get(resource, -1) < self.sim.now:
                        self._tried[resource] = self.sim.now + 20
                        if self.sim.rng.random() < 0.5:
                            self.spawn(self.ask_for(resource))
            yield POLL
