"""Which embedder owns which partitions of samples, and where it is reached."""

from __future__ import annotations

from collections.abc import Mapping

from freshet.clock import Clock
from freshet.coordination.claim_rules import Claim
from freshet.coordination.claims import Claims
from freshet.coordination.partition_assignment import Shares

__all__ = ["address_of", "embedders_of", "shares_of"]

SEAT, PARTITION = "embedder", "partition"


def address_of(owner: str) -> str:
    """host:port of an owner `name@host:port/life`; empty if it names none."""
    _, at, rest = owner.partition("@")
    return rest.rpartition("/")[0] if at else ""


def embedders_of(living: Mapping[str, Claim]) -> dict[int, str]:
    """{partition: host:port of the embedder that owns it}."""
    return {
        int(what.removeprefix(f"{PARTITION}:")): address_of(claim.owner)
        for what, claim in living.items()
        if what.startswith(f"{PARTITION}:") and address_of(claim.owner)
    }


def shares_of(claims: Claims, name: str, owner: str, partitions: int, clock: Clock) -> Shares:
    """The partitions of one embedder; `owner` is `name@host:port/life`, unique to this process."""
    return Shares(claims, SEAT, PARTITION, name, owner, partitions, clock)
