"""Who owns what, decided in the log (PROTOCOL 9): the rules, without I/O.
`freshet.coordination.claims` does the I/O.

Claims, heartbeats and releases are JSON records of a one-partition topic `control`. The fence of a claim
is its record's offset: unique, never going back. A claim names the one that it replaces, and of several
that name the same the first in the log wins; so every reader of the log, at whatever time, comes to the
same owner. One record may claim several things, all of them or none, under one fence.

When a claim may be *made* is each claimer's own judgement: after a release, or after a full lease in
which it could read the log and saw no heartbeat. So nothing expires while the log itself is away, or
while the claimer was stopped.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import orjson

from freshet.errors import Corrupt
from freshet.observability.skipped import skip
from freshet.types import Fence

__all__ = [
    "Claim",
    "ClaimBook",
    "LaterFormat",
    "Load",
    "Plan",
    "SliceLoad",
    "claim_record",
    "claims_record",
    "heartbeat_record",
    "load_record",
    "parse_record",
    "plan_record",
    "read_record",
    "release_record",
    "releases_record",
    "state_record",
]

_FORMAT = 1
_LATER = 2
"""Format of kinds that a reader of format 1 must not ignore: it would take what is claimed for free."""


_ADVICE = frozenset({"heartbeat", "plan", "load"})
"""Kinds by which nothing is owned: a reader may leave out any of them."""

_MOST = 2**63 - 1
"""Of fences and offsets."""

_MOST_LOAD = 2**53
"""Of a load's rates and rows, which are added up as floats."""


class LaterFormat(Corrupt):
    """A record that may be a claim, in a format of a later release. Who skips it takes for free what is
    owned."""


@dataclass(frozen=True, slots=True)
class Claim:
    """The newest valid claim of something."""

    what: str  # names the thing: one of a set that never overlap, such as "partition/3"
    owner: str  # unique to a process's life
    fence: Fence
    released: bool = False


@dataclass(frozen=True, slots=True)
class Plan:
    """Who should own what, as one process advises (PROTOCOL 9: claims are the truth)."""

    by: str  # its seat
    fence: Fence  # of its claim of the seat when it wrote this
    seats: tuple[str, ...]  # of each slice, in order


@dataclass(frozen=True, slots=True)
class SliceLoad:
    """What one slice asks of its owner."""

    slice: int  # its place in a plan
    rate: int  # rows looked up and pushed, a second
    rows: int  # that its owner has stored


@dataclass(frozen=True, slots=True)
class Load:
    """What a shard has to do and to keep, as it tells every few seconds: plans are made by it."""

    by: str  # its seat
    fence: Fence  # of its claim of the seat
    bytes: int  # of memory, of the rows of these slices
    limit: int  # of those bytes; 0: none
    slices: tuple[SliceLoad, ...]  # that it serves


def claim_record(what: str, owner: str, replaces: Fence | None) -> bytes:
    """A claim of `what`, in place of the claim with that fence; None if there was none."""
    return _dump("claim", what=what, owner=owner, replaces=replaces)


def claims_record(owner: str, replaces: Mapping[str, Fence | None]) -> bytes:
    """One claim of several things: all of them or, if one names another than the claim that stands, none."""
    return _dump("claims", _LATER, owner=owner, things=list(replaces.items()))


def heartbeat_record(fences: Iterable[Fence]) -> bytes:
    """The owners of these claims live."""
    return _dump("heartbeat", fences=list(fences))


def release_record(what: str, fence: Fence) -> bytes:
    """Its owner gives the claim up: the next one need not wait."""
    return _dump("release", what=what, fence=fence)


def releases_record(things: Iterable[str], fence: Fence) -> bytes:
    """Its owner gives some of the things up that it claimed at once."""
    return _dump("releases", _LATER, things=list(things), fence=fence)


def plan_record(plan: Plan) -> bytes:
    """Advice on who should own which slice; the last one in the log counts."""
    return _dump("plan", _LATER, by=plan.by, fence=plan.fence, seats=list(plan.seats))


def load_record(load: Load) -> bytes:
    """What a shard has to do; the last one of each seat counts. Who does not know it may ignore it."""
    slices = [[part.slice, part.rate, part.rows] for part in load.slices]
    return _dump("load", by=load.by, fence=load.fence, bytes=load.bytes, limit=load.limit, slices=slices)


def state_record(upto: int, claims: Iterable[Claim], plan: Plan | None) -> bytes:
    """All claims, and the plan, as records below offset `upto` make them, so that those may be trimmed."""
    rows = [[c.what, c.owner, c.fence, c.released] for c in claims]
    advice = None if plan is None else [plan.by, plan.fence, list(plan.seats)]
    return _dump("state", upto=upto, claims=rows, plan=advice)


def parse_record(data: bytes, where: str) -> dict[str, Any]:
    """Parse a record of `control`; unknown kinds and keys are left to the reader to ignore.

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
            "  a later release may own what this one takes for free: upgrade this process"
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
    """As `parse_record`, but a record that does not parse is counted and logged, and None. So is an empty
    value,
    without a count. Every reader of the log leaves out the same records, so all come to the same owners.

    Raises LaterFormat.
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
        and all(isinstance(seat, str) for seat in plan[2])
    ):
        raise Corrupt(f"{where}: expected [by, fence, seats] as plan of a state record, found {plan!r}")


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
    """What the log says about claims, and how long each owner has been silent. Not thread-safe."""

    def __init__(self, lease_s: float, longest_gap_s: float) -> None:
        """Make an empty book.

        Args:
            lease_s: silence after which somebody else may claim.
            longest_gap_s: of the time between two observations at most this counts as silence: what lies
            between
                was not seen.
        """
        self._lease_s, self._longest_gap_s = lease_s, longest_gap_s
        self._claims: dict[str, Claim] = {}
        self._silent_s: dict[str, float] = {}
        self._heard: set[str] = set()  # since the last observation: the time before that is not their silence
        self._observed_s: float | None = None
        self.changes = 0  # of claims: rises when an owner comes or goes
        self.plan: Plan | None = None  # the last one read
        self.loads: dict[str, Load] = {}  # {seat: the last one read}
        self.later: LaterFormat | None = None  # a record that may be a claim of a later release

    def apply(self, offset: int, record: Mapping[str, Any]) -> None:
        """Take in the next record of the log, parsed."""
        kind = record["kind"]
        if kind == "claim":
            self._apply_claims(offset, record["owner"], [(record["what"], record["replaces"])])
        elif kind == "claims":
            self._apply_claims(offset, record["owner"], record["things"])
        elif kind == "heartbeat":
            alive = set(record["fences"])
            for what, claim in self._claims.items():
                if claim.fence in alive:
                    self._hear(what)
        elif kind == "release":
            self._release(record["what"], record["fence"])
        elif kind == "releases":
            for what in record["things"]:
                self._release(what, record["fence"])
        elif kind == "plan":
            self.plan = Plan(record["by"], Fence(record["fence"]), tuple(record["seats"]))
        elif kind == "load":
            self._hear_load(record)

    def restore(self, record: Mapping[str, Any]) -> None:
        """Start from a `state` record; records from its `upto` on are applied after it."""
        for what, owner, fence, released in record["claims"]:
            self._claims[what] = Claim(what, owner, Fence(fence), released)
            self._hear(what)
        if (plan := record.get("plan")) is not None:
            by, fence, seats = plan
            self.plan = Plan(by, Fence(fence), tuple(seats))
        self.changes += 1

    def observe(self, now_s: float) -> None:
        """The log was read to its end at this instant of a monotonic clock."""
        if self._observed_s is not None:
            passed = min(now_s - self._observed_s, self._longest_gap_s)
            for what in self._silent_s.keys() - self._heard:
                self._silent_s[what] += passed
        self._heard.clear()
        self._observed_s = now_s

    def blind(self) -> None:
        """The log could not be read: time until the next observation is nobody's silence."""
        self._observed_s = None

    def claim(self, what: str) -> Claim | None:
        """The newest valid claim, released or not; None if there never was one."""
        return self._claims.get(what)

    def claims(self) -> Mapping[str, Claim]:
        """All of them by name."""
        return dict(self._claims)

    def living(self) -> Mapping[str, Claim]:
        """Those that stand: not released, and their owner not silent for a lease."""
        return {what: claim for what, claim in self._claims.items() if not self.claimable(what)}

    def silent_s(self, what: str) -> float:
        """For how long its owner has said nothing while the log could be read."""
        return self._silent_s.get(what, 0.0)

    def claimable(self, what: str) -> bool:
        """May it be claimed now: nobody has it, it was released, or its owner was silent for a lease."""
        claim = self._claims.get(what)
        return claim is None or claim.released or self._silent_s[what] >= self._lease_s

    def alive(self, what: str) -> bool:
        """Is it claimed, not released, and its owner heard of within a lease."""
        return what in self._claims and not self.claimable(what)

    def _apply_claims(self, offset: int, owner: str, things: Iterable[tuple[str, int | None]]) -> None:
        things = list(things)
        for what, replaces in things:
            current = self._claims.get(what)
            if replaces != (None if current is None else current.fence):
                return
        for what, _ in things:
            self._claims[what] = Claim(what, owner, Fence(offset))
            self._hear(what)
        self.changes += 1

    def _release(self, what: str, fence: int) -> None:
        claim = self._claims.get(what)
        if claim is not None and claim.fence == fence:
            self._claims[what] = replace(claim, released=True)
            self.changes += 1

    def _hear_load(self, record: Mapping[str, Any]) -> None:
        """Of a seat's owner only: what a process still writes that was replaced is of the past."""
        claim = self._claims.get(record["by"])
        if claim is not None and claim.fence == record["fence"]:
            slices = tuple(SliceLoad(*row) for row in record["slices"])
            self.loads[claim.what] = Load(claim.what, claim.fence, record["bytes"], record["limit"], slices)

    def _hear(self, what: str) -> None:
        self._silent_s[what] = 0.0
        self._heard.add(what)
