"""Quorums of ranks: the membership lease of a rank, agreement on the next quorum, and its process group.

Every rank holds a membership lease: a claim of `trainer:<i>` with the lowest free i (PROTOCOL 9). The ranks
that train together are a quorum: a claim of `world` that replaces the previous one and lists its members with
the fences of their leases. The first such record in the log wins. Batches, pushes and versions carry the
fence of the quorum, so receivers refuse those of an earlier quorum.

A rank outside the quorum, or one that leaves it because a rank failed or another wants to join, claims its
lease anew. The new fence is in no quorum, so the rank *waits*. Once all members have left the quorum, the
waiting rank with the lowest number writes the next one. Members that do not leave delay this until their
leases end. A former member has observed the failure itself, so it excludes them after GRACE_S.
"""

from __future__ import annotations

import importlib
import os
import socket
import threading
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import orjson
import structlog

from freshet.clock import SYSTEM_CLOCK, Clock
from freshet.coordination.claims import LEASE_S, Claims, Lease
from freshet.errors import Corrupt, Unavailable
from freshet.observability.skipped_state import skip
from freshet.trainer.process_group import LocalProcessGroup, ProcessGroup, RankLost
from freshet.types import Fence

QUORUM_CLAIM = "world"
MEMBER_PREFIX = "trainer:"

GRACE_S = 0.25
"""Seconds that former members of a broken quorum wait for the others. Ranks that meet in every step notice a
reset connection in a fraction of it; others when they meet next (`QuorumOptions.meet_s`)."""


def member_claim(member: int) -> str:
    """Return the name of a member's claim."""
    return f"{MEMBER_PREFIX}{member}"


def member_of_claim(name: str) -> int | None:
    """Return the member of a membership claim; None for claims of another kind."""
    number = name.removeprefix(MEMBER_PREFIX)
    return int(number) if number != name and number.isascii() and number.isdecimal() else None


@dataclass(frozen=True, slots=True)
class Quorum:
    """Ranks that train together; ranks are numbered in the order of their members."""

    members: Mapping[int, Fence]  # member -> fence of its lease
    store: str  # host:port of the rendezvous store; empty for one rank
    lanes: int  # of each rank
    fence: Fence  # of the quorum's record
    lost: Mapping[int, Fence] = field(default_factory=dict)  # excluded although their leases were live

    def rank(self, member: int, fence: Fence) -> int | None:
        """Return the rank of the member with this lease; None if the quorum does not contain it."""
        return sorted(self.members).index(member) if self.members.get(member) == fence else None


def encode_quorum(members: Mapping[int, Fence], lost: Mapping[int, Fence], store: str, lanes: int) -> str:
    """Encode a quorum as the owner of its claim; `decode_quorum` is the inverse."""
    listed, excluded = ([[i, int(fence)] for i, fence in sorted(part.items())] for part in (members, lost))
    return orjson.dumps({"members": listed, "lost": excluded, "store": store, "lanes": lanes}).decode()


def decode_quorum(text: str, fence: Fence) -> Quorum:
    """Decode the owner of a quorum's claim. Raises Corrupt if it is not one."""
    try:
        record = orjson.loads(text)
        store, lanes = record["store"], record["lanes"]
        members, lost = ({i: Fence(f) for i, f in record[name]} for name in ("members", "lost"))
        numbers = [lanes, *members, *members.values(), *lost, *lost.values()]
        if not all(type(number) is int for number in numbers) or lanes < 1 or not isinstance(store, str):
            raise TypeError("members, store or lanes have the wrong type")
    except (orjson.JSONDecodeError, KeyError, TypeError, ValueError) as error:
        raise Corrupt(
            f"the claim of {QUORUM_CLAIM} with fence {fence}: expected ranks, found {text[:80]!r}"
        ) from error
    return Quorum(members, store, lanes, fence, lost)


@dataclass(frozen=True, slots=True)
class MembershipSnapshot:
    """The newest quorum and the live membership leases at one moment."""

    quorum: Quorum | None
    live: Mapping[int, Fence]  # member -> fence of its lease

    def waiting(self) -> dict[int, Fence]:
        """Return the live members in no quorum, in order, without those that the newest quorum excluded.

        An excluded member that is alive returns with a new lease; the lease of a dead one ends later.
        """
        members, lost = (self.quorum.members, self.quorum.lost) if self.quorum else ({}, {})
        live = sorted(self.live.items())
        return {i: fence for i, fence in live if fence not in (members.get(i), lost.get(i))}

    def staying(self) -> dict[int, Fence]:
        """Return the live members of the newest quorum that have not left it."""
        members = self.quorum.members if self.quorum else {}
        return {i: fence for i, fence in sorted(self.live.items()) if members.get(i) == fence}

    def excluded(self) -> dict[int, Fence]:
        """Return the live members that a quorum written now would exclude."""
        lost = self.quorum.lost if self.quorum else {}
        return self.staying() | {i: fence for i, fence in self.live.items() if lost.get(i) == fence}


def may_write_quorum(
    snapshot: MembershipSnapshot,
    member: int,
    former: Fence | None,
    waited_s: float,
    grace_s: float = GRACE_S,
) -> bool:
    """Return whether this waiting member must write the next quorum now.

    Args:
        snapshot: the state of the log.
        member: number of the waiting member.
        former: fence of the quorum that it was in; None if it was in none.
        waited_s: seconds that it has waited.
        grace_s: seconds in which other members of that quorum observe its failure.
    """
    waiting = list(snapshot.waiting())
    if member not in waiting:
        return False
    if not snapshot.staying():
        return waiting[0] == member
    if snapshot.quorum is None or snapshot.quorum.fence != former:
        return False  # the member has not observed the failure of that quorum
    # Members try one after the other, the lowest first: which of them observed the failure is unknown.
    return waited_s >= grace_s * (1 + waiting.index(member))


log = structlog.get_logger("freshet.trainer")

POLL_S = 0.01
"""Seconds between two reads of the claims while a quorum forms."""

RETRY_S = 0.5
"""Seconds between two tries while the log is unavailable; each try waits for its own time-out as well."""

QUIET_S = 10.0
"""Seconds for which waiting ranks are ignored after a process group failed to form, times the failures."""


@dataclass(frozen=True, slots=True)
class QuorumOptions:
    """Settings by which a rank forms quorums."""

    address: str  # of this host, as other ranks reach it
    lanes: int  # wanted for this rank
    partitions: int  # of the model
    form_s: float = 2 * LEASE_S  # time-out of forming a process group
    answer_s: float = LEASE_S  # time-out of each collective; a rank silent for longer is lost
    meet_s: float = 0.0  # longest time between two collectives of all ranks, beside a step

    def lanes_of(self, ranks: int) -> int:
        """Return the lanes of each of `ranks` ranks: at most one lane a partition."""
        return max(1, min(self.lanes, self.partitions // ranks))


def load_torch_process_group() -> None:
    """Import the module of process groups, and torch with it."""
    importlib.import_module("freshet.trainer.torch_process_group")


class Loading:
    """One import of torch, started by the first call. Thread-safe.

    A rank that never observes another member's lease never imports torch.
    """

    def __init__(self, load: Callable[[], None] = load_torch_process_group) -> None:
        self._load = load
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None

    def begin(self) -> bool:
        """Start the import in a thread unless it was started; return whether it has ended."""
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="load-torch", daemon=True)
                self._thread.start()
            return not self._thread.is_alive()

    def wait(self) -> None:
        """Wait for the end of the import. Raises its error, such as ImportError if torch is not installed."""
        if not self.begin():
            assert self._thread is not None
            self._thread.join()
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            self._load()
        except Exception as error:
            self._error = error


class Membership:
    """A rank's membership lease and its way from quorum to quorum.

    One thread uses it; `members_waiting`, `is_superseded` and `quorum` are safe from any thread.
    """

    def __init__(
        self,
        claims: Claims,
        options: QuorumOptions,
        stop: Callable[[], bool],
        clock: Clock = SYSTEM_CLOCK,
        loading: Loading | None = None,
    ) -> None:
        """`stop` returns whether the process must end; it is polled while the rank waits for others."""
        self._loading = loading or Loading()
        self._claims, self._options, self._stop, self._clock = claims, options, stop, clock
        self._owner = f"{socket.gethostname()}:{os.getpid()}/{uuid.uuid4().hex[:12]}"
        self._pause = threading.Event()
        self._lease: Lease | None = None
        self._member = -1
        self._store: object | None = None  # of the present quorum, if this rank hosts it
        self.quorum: Quorum | None = None  # the one that this rank is in, or was in last
        self._reached: set[int] = set()  # members of the last process group that formed
        self._failures = 0  # process groups that failed to form since then
        self._quiet_until = 0.0

    @property
    def member(self) -> int:
        """The number of the membership lease; -1 before the first `join`."""
        return self._member

    def join(self) -> ProcessGroup | None:
        """Leave the present quorum and form the process group of the next; None once `stop()` is True.

        While the log is unavailable the call waits. Raises DataLost, Corrupt: as `Claims` does.
        """
        while not self._stop():
            try:
                if self.snapshot().live:  # the import must not delay ranks that have left their quorum
                    self._loading.wait()
                self._claim_member()
                quorum = self._next_quorum()
            except Unavailable as error:  # a record written all the same has no owner, and its lease ends
                log.warning("no quorum forms while the log is unavailable", reason=str(error))
                self._pause.wait(RETRY_S)
                continue
            if quorum is None:
                continue
            try:
                group = self._form_group(quorum)
            except RankLost as lost:
                log.warning("the process group did not form", world=int(quorum.fence), reason=str(lost))
                self._failures += 1
                self.quorum = quorum
                continue
            # An unreachable rank may retry, but later: each try interrupts the training of all others.
            self._quiet_until = self._clock.monotonic() + QUIET_S * self._failures
            self._failures = 0
            self.quorum, self._reached = quorum, set(quorum.members)
            log.info("quorum formed", world=int(quorum.fence), rank=group.rank, ranks=group.size)
            return group
        return None

    def members_waiting(self) -> bool:
        """Return whether a live rank is in no quorum, or a newer quorum superseded this rank's. Any thread.

        A rank that trains alone continues until torch is loaded.
        """
        if self.is_superseded():
            return True
        waits = bool(self.snapshot().waiting()) and self._clock.monotonic() >= self._quiet_until
        return waits and self._loading.begin()

    def is_superseded(self) -> bool:
        """Return whether a quorum newer than this rank's exists: receivers fence this rank. Any thread."""
        newest = self.snapshot().quorum
        return newest is not None and (self.quorum is None or newest.fence != self.quorum.fence)

    def await_superseded(self) -> bool:
        """Wait up to `answer_s` for `is_superseded`; return it.

        For a rank with fenced requests: the receiver may have read more of the log than this process,
        for example after this process was suspended.
        """
        deadline = self._clock.monotonic() + self._options.answer_s
        while not self.is_superseded():
            if self._stop() or self._clock.monotonic() >= deadline:
                return False
            self._pause.wait(POLL_S)
        return True

    def missing(self) -> str | None:
        """Return why this rank trains in no quorum; None once it was in one."""
        return None if self._reached else "this rank is in no quorum yet"

    def snapshot(self) -> MembershipSnapshot:
        """Read the newest quorum and the live members from the claims. Any thread."""
        self._claims.check()
        claims, living = self._claims.snapshot()
        record = claims.get(QUORUM_CLAIM)
        live = {i: claims[name].fence for name in living if (i := member_of_claim(name)) is not None}
        try:
            quorum = decode_quorum(record.owner, record.fence) if record is not None else None
        except Corrupt as error:  # treated as a quorum without members, so the next one replaces it at once
            assert record is not None
            skip("world", f"{QUORUM_CLAIM} with fence {record.fence}", str(error))
            quorum = Quorum({}, "", 1, record.fence)
        return MembershipSnapshot(quorum, live)

    def leave(self) -> None:
        """Release the membership lease."""
        self._store = None
        if self._lease is not None:
            self._lease.release()
            self._lease = None

    def _claim_member(self) -> None:
        """Claim the lease anew, or the lowest free one; keep a lease that no quorum has listed."""
        lease, deadline = self._lease, self._clock.monotonic() + self._options.form_s
        if lease is not None and not lease.lost.is_set():
            if self.quorum is None or self.quorum.rank(self._member, lease.fence) is None:
                return
            self._lease = self._claims.replace(lease.thing, self._owner, lease.fence, deadline)
        else:
            self._lease = None
        while self._lease is None:
            claims, living = self._claims.snapshot()
            self._member = next(i for i in range(len(living) + 1) if member_claim(i) not in living)
            name = member_claim(self._member)
            former = claims[name].fence if name in claims else None
            self._lease = self._claims.replace(name, self._owner, former, deadline)

    def _next_quorum(self) -> Quorum | None:
        """Wait for a quorum that contains this rank, and write it if that is this rank's task.

        Returns None if the lease is lost or `stop()` is True.
        """
        assert self._lease is not None
        since = self._clock.monotonic()
        former = self.quorum.fence if self.quorum else None
        while not self._stop() and not self._lease.lost.is_set():
            snapshot = self.snapshot()
            if len(snapshot.live) > 1:  # load before the quorum is written: then `form_s` runs
                self._loading.wait()
            quorum = snapshot.quorum
            if quorum is not None and quorum.rank(self._member, self._lease.fence) is not None:
                return quorum
            waited_s, grace_s = self._clock.monotonic() - since, GRACE_S + self._options.meet_s
            if may_write_quorum(snapshot, self._member, former, waited_s, grace_s):
                self._write_quorum(snapshot)
            else:
                self._pause.wait(POLL_S)
        return None

    def _write_quorum(self, snapshot: MembershipSnapshot) -> None:
        members = {i: fence for i, fence in snapshot.waiting().items() if self._is_eligible(i)}
        store = ""
        if len(members) > 1:
            from freshet.trainer.torch_process_group import host_store  # noqa: PLC0415 - imports torch

            self._store, store = host_store(self._options.address, self._options.form_s)
        text = encode_quorum(members, snapshot.excluded(), store, self._options.lanes_of(len(members)))
        former = snapshot.quorum.fence if snapshot.quorum else None
        deadline = self._clock.monotonic() + self._options.form_s
        try:
            claim = self._claims.replace(QUORUM_CLAIM, text, former, deadline)
        except Unavailable as error:
            log.warning("a quorum could not be written", reason=str(error))
            return
        if claim is not None:
            claim.forget()

    def _is_eligible(self, member: int) -> bool:
        """Return whether to include a member: after one failure only those reached before, then none."""
        if self._failures == 0 or member == self._member:
            return True
        return self._failures == 1 and member in self._reached

    def _form_group(self, quorum: Quorum) -> ProcessGroup:
        assert self._lease is not None
        rank = quorum.rank(self._member, self._lease.fence)
        assert rank is not None
        size = len(quorum.members)
        if size == 1:
            self._store = None
            return LocalProcessGroup(quorum.fence)
        from freshet.trainer.torch_process_group import TorchProcessGroup, connect_store  # noqa: PLC0415 - imports torch

        store = connect_store(quorum.store, self._options.form_s)
        return TorchProcessGroup(store, quorum, rank, self._options)


class FixedMembership:
    """The membership of a rank that trains alone, under a claim that it holds already."""

    member = 0

    def __init__(self, fence: Fence, lanes: int) -> None:
        self.group = LocalProcessGroup(fence)
        self.quorum: Quorum | None = Quorum({self.member: fence}, "", lanes, fence)

    def join(self) -> ProcessGroup | None:
        """Return the group of this rank."""
        return self.group

    def members_waiting(self) -> bool:
        """Return False: no rank can join."""
        return False

    def await_superseded(self) -> bool:
        """Return False: no quorum follows."""
        return False

    def missing(self) -> str | None:
        """Return None: the quorum exists from the start."""
        return None

    def leave(self) -> None:
        """Do nothing: the holder of the claim releases it."""
