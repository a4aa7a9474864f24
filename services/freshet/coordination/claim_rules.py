"""Rules of ownership by claims in the log (PROTOCOL 9), without I/O, which `freshet.coordination.claims`
does.

Claims, heartbeats and releases are JSON records of the one-partition topic `control`. The fence of a claim is
the offset of its record: unique, always increasing. A claim names the claim that it replaces; of several that
name the same, the first in the log wins, so every reader of the log, at any time, finds the same owner. One
record may claim several things, all or none, under one fence.

Each claimer decides by itself when it may claim: after a release, or after a full lease in which it could
read the log and saw no heartbeat. So no lease expires while the log is unavailable, or while the claimer was
stopped.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import orjson

from freshet.errors import Corrupt
from freshet.observability.skipped_state import skip
from freshet.types import Fence

_FORMAT = 1
_LATER = 2
"""Format of kinds that a reader of format 1 must not ignore, as it would treat claimed things as free."""


_ADVICE = frozenset({"heartbeat", "plan", "load"})
"""Kinds of records that do not affect ownership: a reader may ignore them."""

_MOST = 2**63 - 1
"""Largest fence or offset."""

_MOST_LOAD = 2**53
"""Largest rate or number of rows of a load; loads are added up as floats."""


class LaterFormat(Corrupt):
    """A record of a later format that may be a claim; ignoring it would treat owned things as free."""


@dataclass(frozen=True, slots=True)
class Claim:
    """The newest valid claim of something."""

    thing: str  # name of the claimed thing; things never overlap, such as "partition/3"
    owner: str  # unique to one run of a process
    fence: Fence
    released: bool = False


@dataclass(frozen=True, slots=True)
class Plan:
    """Advice of one process on the owners of slices (PROTOCOL 9: claims decide)."""

    by: str  # membership lease of the adviser
    fence: Fence  # of that lease when it wrote the plan
    owners: tuple[str, ...]  # membership lease of the advised owner of each slice, in order


@dataclass(frozen=True, slots=True)
class SliceLoad:
    """Load of one slice on its owner."""

    slice: int  # index of the slice in a plan
    rate: int  # rows looked up and pushed per second
    rows: int  # rows stored


@dataclass(frozen=True, slots=True)
class Load:
    """Load of a shard, which it reports every few seconds as input of plans."""

    by: str  # membership lease of the shard
    fence: Fence  # of that lease
    bytes: int  # memory of the rows of these slices
    limit: int  # of those bytes; 0: no limit
    slices: tuple[SliceLoad, ...]  # slices that it serves


def claim_record(thing: str, owner: str, replaces: Fence | None) -> bytes:
    """Encode a claim of `thing` in place of the one with the fence `replaces`; None: there was none."""
    return _dump("claim", what=thing, owner=owner, replaces=replaces)


def claims_record(owner: str, replaces: Mapping[str, Fence | None]) -> bytes:
    """Encode a claim of several things. It is void as a whole if one names a claim that is not the newest."""
    return _dump("claims", _LATER, owner=owner, things=list(replaces.items()))


def heartbeat_record(fences: Iterable[Fence]) -> bytes:
    """Encode a heartbeat of the owner of these claims."""
    return _dump("heartbeat", fences=list(fences))


def release_record(thing: str, fence: Fence) -> bytes:
    """Encode the release of a claim, which the next owner may replace at once."""
    return _dump("release", what=thing, fence=fence)


def releases_record(things: Iterable[str], fence: Fence) -> bytes:
    """Encode the release of some of the things that were claimed together."""
    return _dump("releases", _LATER, things=list(things), fence=fence)


def plan_record(plan: Plan) -> bytes:
    """Encode advice on the owners of slices; the last record in the log counts."""
    return _dump("plan", _LATER, by=plan.by, fence=plan.fence, seats=list(plan.owners))


def load_record(load: Load) -> bytes:
    """Encode a shard's load; the last record of each membership lease counts. Readers may ignore the kind."""
    slices = [[part.slice, part.rate, part.rows] for part in load.slices]
    return _dump("load", by=load.by, fence=load.fence, bytes=load.bytes, limit=load.limit, slices=slices)


def state_record(upto: int, claims: Iterable[Claim], plan: Plan | None) -> bytes:
    """Encode all claims and the plan as of offset `upto`, below which records may then be trimmed."""
    rows = [[c.thing, c.owner, c.fence, c.released] for c in claims]
    advice = None if plan is None else [plan.by, plan.fence, list(plan.owners)]
    return _dump("state", upto=upto, claims=rows, plan=advice)


def parse_record(data: bytes, where: str) -> dict[str, Any]:
    """Parse a record of `control`. Unknown kinds and keys pass; the reader ignores them.

    Raises:
        LaterFormat: the record may be a claim of a later release.
        Corrupt: the record does not parse.
    """
    try:
        record = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise Corrupt(f"{where}: expected a claim record in JSON, found {data[:60]!r}") from error
    if not isinstance(record, dict) or not isinstance(record.get("kind"), str):
        raise Corrupt(f"{where}: expected a claim record of format {_FORMAT}, found {data[:60]!r}")
    kind, version = record["kind"], record.get("v")
    known = _LATER if kind in _LISTS else _FORMAT
    if type(version) is int and version > known and kind not in _ADVICE:
        raise LaterFormat(
            f"{where}: expected a claim record of format {known} at most, found {data[:60]!r}\n"
            "  a later release may own things that this one treats as free: upgrade this process"
        )
    expected = _SHAPES.get(kind, {})
    if version != known or not all(key in record for key in expected):
        raise Corrupt(f"{where}: expected a claim record of format {known}, found {data[:60]!r}")
    for key, shape in expected.items():
        if not isinstance(record[key], shape) or isinstance(record[key], bool):
            raise Corrupt(f"{where}: {key} = {record[key]!r:.60} in a {kind} record")
        if isinstance(record[key], int) and not -1 <= record[key] <= _MOST:
            raise Corrupt(f"{where}: {key} = {record[key]} in a {kind} record, expected 0 to 2^63 - 1")
    if kind == "state":
        _check_state(record, where)
    elif kind == "load":
        _check_load(record, where)
    elif kind == "heartbeat":
        _check_fences(record, where)
    elif kind in _LISTS:
        _check_list(record, where)
    return record


def read_record(data: bytes | None, where: str) -> dict[str, Any] | None:
    """Parse a record; returns None for an empty value, and for a record that does not parse, which is counted
    and logged. All readers of the log leave out the same records, so they find the same owners.

    Raises LaterFormat if the record may be a claim of a later release.
    """
    if not data:
        return None
    try:
        return parse_record(data, where)
    except LaterFormat:
        raise
    except Corrupt as error:
        skip("control", where, str(error))
        return None


_SHAPES: Mapping[str, Mapping[str, Any]] = {
    "claim": {"what": str, "owner": str, "replaces": int | None},
    "heartbeat": {"fences": list},
    "release": {"what": str, "fence": int},
    "state": {"upto": int, "claims": list},
    "claims": {"owner": str, "things": list},
    "releases": {"things": list, "fence": int},
    "plan": {"by": str, "fence": int, "seats": list},
    "load": {"by": str, "fence": int, "bytes": int, "limit": int, "slices": list},
}

_LISTS: Mapping[str, str] = {"claims": "things", "releases": "things", "plan": "seats"}


def _check_fences(record: Mapping[str, Any], where: str) -> None:
    for fence in record["fences"]:
        if type(fence) is not int or not 0 <= fence <= _MOST:
            raise Corrupt(f"{where}: expected fences in a heartbeat record, found {fence!r:.60}")


def _check_state(record: Mapping[str, Any], where: str) -> None:
    for row in record["claims"]:
        whole = isinstance(row, list) and [type(cell) for cell in row] == [str, str, int, bool]
        if not whole or not 0 <= row[2] <= _MOST:
            raise Corrupt(
                f"{where}: expected [what, owner, fence, released] in a state record, found {row!r}"
            )
    plan = record.get("plan")  # earlier releases wrote none
    if plan is not None and not (
        isinstance(plan, list)
        and [type(cell) for cell in plan] == [str, int, list]
        and all(isinstance(owner, str) for owner in plan[2])
    ):
        raise Corrupt(f"{where}: expected `[by, fence, seats]` as plan of a state record, found {plan!r}")


def _check_load(record: Mapping[str, Any], where: str) -> None:
    for row in record["slices"]:
        whole = isinstance(row, list) and [type(cell) for cell in row] == [int, int, int]
        if not whole or min(row) < 0 or max(row) > _MOST_LOAD:
            raise Corrupt(
                f"{where}: expected [slice, rows a second, rows] from 0 to 2^53 in a load record, found "
                f"{row!r:.80}"
            )
    if min(record["bytes"], record["limit"]) < 0:
        raise Corrupt(f"{where}: expected bytes and limit from 0 in a load record, found a negative number")


def _check_list(record: Mapping[str, Any], where: str) -> None:
    pairs = record["kind"] == "claims"
    for row in record[_LISTS[record["kind"]]]:
        types = [type(cell) for cell in row] if isinstance(row, list) else type(row)
        if (types not in ([str, int], [str, type(None)])) if pairs else types is not str:
            raise Corrupt(f"{where}: found {row!r} in a {record['kind']} record")


def _dump(kind: str, version: int = _FORMAT, **fields: object) -> bytes:
    return orjson.dumps({"v": version, "kind": kind, **fields})


class ClaimBook:
    """State of all claims, and how long each owner has been silent. Not thread-safe."""

    def __init__(self, lease_s: float, longest_gap_s: float) -> None:
        """Make an empty book.

        Args:
            lease_s: silence after which another process may claim.
            longest_gap_s: largest part of the time between two observations that counts as silence, as a
                stopped reader cannot know whether the log was available.
        """
        self._lease_s, self._longest_gap_s = lease_s, longest_gap_s
        self._claims: dict[str, Claim] = {}
        self._silent_s: dict[str, float] = {}
        self._alive_since: set[str] = set()  # things with a record of their owner since the last observation
        self._observed_s: float | None = None
        self._living: Mapping[str, Claim] | None = None  # since the last record or observation
        self.changes = 0  # increases when an owner of a claim changes
        self.plan: Plan | None = None  # the newest
        self.loads: dict[str, Load] = {}  # membership lease -> the newest load
        self.later: LaterFormat | None = None  # a record that may be a claim of a later release

    def apply(self, offset: int, record: Mapping[str, Any]) -> None:
        """Apply the next record of the log, parsed."""
        self._living = None
        kind = record["kind"]
        if kind == "claim":
            self._apply_claims(offset, record["owner"], [(record["what"], record["replaces"])])
        elif kind == "claims":
            self._apply_claims(offset, record["owner"], record["things"])
        elif kind == "heartbeat":
            alive = set(record["fences"])
            for thing, claim in self._claims.items():
                if claim.fence in alive:
                    self._mark_alive(thing)
        elif kind == "release":
            self._release(record["what"], record["fence"])
        elif kind == "releases":
            for thing in record["things"]:
                self._release(thing, record["fence"])
        elif kind == "plan":
            self.plan = Plan(record["by"], Fence(record["fence"]), tuple(record["seats"]))
        elif kind == "load":
            self._apply_load(record)

    def restore(self, record: Mapping[str, Any]) -> None:
        """Start from a `state` record; records from its `upto` on are applied afterwards."""
        self._living = None
        for thing, owner, fence, released in record["claims"]:
            self._claims[thing] = Claim(thing, owner, Fence(fence), released)
            self._mark_alive(thing)
        if (plan := record.get("plan")) is not None:
            by, fence, owners = plan
            self.plan = Plan(by, Fence(fence), tuple(owners))
        self.changes += 1

    def observe(self, now_s: float) -> None:
        """Count silence up to this instant of a monotonic clock, at which the log was read to its end."""
        self._living = None
        if self._observed_s is not None:
            passed = min(now_s - self._observed_s, self._longest_gap_s)
            for thing in self._silent_s.keys() - self._alive_since:
                self._silent_s[thing] += passed
        self._alive_since.clear()
        self._observed_s = now_s

    def suspend(self) -> None:
        """Exclude the time until the next observation from all silence, as the log could not be read."""
        self._observed_s = None

    def claim(self, thing: str) -> Claim | None:
        """Return the newest valid claim, released or not; None if there never was one."""
        return self._claims.get(thing)

    def claims(self) -> Mapping[str, Claim]:
        """Return the newest valid claim of each thing."""
        return dict(self._claims)

    def living(self) -> Mapping[str, Claim]:
        """Return the valid claims that are not released, of owners that were not silent for a lease.

        It is the same object until a record or an observation follows: lanes read it for each batch.
        """
        if self._living is None:
            self._living = {t: claim for t, claim in self._claims.items() if not self.claimable(t)}
        return self._living

    def silent_s(self, thing: str) -> float:
        """Return the seconds for which the owner sent no record while the log could be read."""
        return self._silent_s.get(thing, 0.0)

    def claimable(self, thing: str) -> bool:
        """Return whether it may be claimed: it was never claimed or was released, or its lease ran out."""
        claim = self._claims.get(thing)
        return claim is None or claim.released or self._silent_s[thing] >= self._lease_s

    def alive(self, thing: str) -> bool:
        """Return whether it is claimed and not released, and its lease runs."""
        return thing in self._claims and not self.claimable(thing)

    def _apply_claims(self, offset: int, owner: str, things: Iterable[tuple[str, int | None]]) -> None:
        things = list(things)
        for thing, replaces in things:
            current = self._claims.get(thing)
            if replaces != (None if current is None else current.fence):
                return
        for thing, _ in things:
            self._claims[thing] = Claim(thing, owner, Fence(offset))
            self._mark_alive(thing)
        self.changes += 1

    def _release(self, thing: str, fence: int) -> None:
        claim = self._claims.get(thing)
        if claim is not None and claim.fence == fence:
            self._claims[thing] = replace(claim, released=True)
            self.changes += 1

    def _apply_load(self, record: Mapping[str, Any]) -> None:
        """Apply a load if its writer still has its membership lease; a replaced process may still write."""
        claim = self._claims.get(record["by"])
        if claim is not None and claim.fence == record["fence"]:
            slices = tuple(SliceLoad(*row) for row in record["slices"])
            self.loads[claim.thing] = Load(claim.thing, claim.fence, record["bytes"], record["limit"], slices)

    def _mark_alive(self, thing: str) -> None:
        self._silent_s[thing] = 0.0
        self._alive_since.add(thing)
