"""The version store: dense weights with their manifest, and the aliases that point at them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

__all__ = ["ALIASES", "Aliases", "Manifest", "Version", "VersionStore"]

ALIASES = ("candidate", "stable", "canary")


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a version says of itself; stored as JSON beside the weights."""

    number: int  # 0, 1, 2, …; 0 holds the initial weights
    model: str
    spec_hash: str
    created_ms: int
    step: int  # optimiser steps taken
    applied: Mapping[int, int]  # dense `applied`: {partition of samples: next offset}
    log_id: str  # of `samples`
    event_time_ms: int  # newest event time learned from
    measures: Mapping[str, Any]  # progressive measures when it was written
    fence: int  # of the trainer's seat
    sha256: str  # of the weights file
    verdict: str = "pending"  # "promoted", "held" or "pending"
    reason: str = ""  # why it was held or promoted, for people
    transforms: Mapping[str, Sequence[float | None]] = field(default_factory=dict)  # see spec.outcomes


@dataclass(frozen=True, slots=True, eq=False)
class Version:
    """A manifest with its tensors: weights, optimiser state, hedge state, running statistics, state of the
    measures."""

    manifest: Manifest
    tensors: Mapping[str, NDArray[Any]]
    __hash__ = None  # type: ignore[assignment]


class Aliases(dict[str, int]):
    """{alias: number of its version}. An alias that was never set is absent, and so is one that cannot be
    read."""

    def __init__(
        self, pointed: Mapping[str, int] | None = None, damaged: Mapping[str, str] | None = None
    ) -> None:
        """Take what each alias points at, and of those that cannot be read why not."""
        super().__init__(pointed or {})
        self.damaged: Mapping[str, str] = dict(damaged or {})


class VersionStore(Protocol):
    """Versions of one model. Thread-safe; written by the trainer, read by many."""

    def put(self, manifest: Manifest, tensors: Mapping[str, NDArray[np.generic]]) -> Manifest:
        """Store a version durably; `sha256` is filled in. A reader sees all of it or nothing.

        Raises ValueError if the number exists, Unavailable if it could not be written.
        """

    def numbers(self) -> Sequence[int]:
        """Numbers of the stored versions, rising; a version may still be damaged. Entries that are no
        versions are left out, counted and logged."""

    def manifest(self, number: int) -> Manifest:
        """One manifest. Raises KeyError if there is none, Corrupt if it does not parse."""

    def get(self, number: int, prefixes: Sequence[str] = ()) -> Version:
        """A version with all tensors, or those whose names start with one of `prefixes`.

        Raises KeyError, or Corrupt if the weights do not match their sha256.
        """

    def judge(self, number: int, verdict: str, reason: str) -> Manifest:
        """Record the gate's verdict in the manifest (atomic replacement)."""

    def aliases(self) -> Aliases:
        """Where each alias points; an alias never set is absent. One that cannot be read is absent, too, and
        in `damaged`: readers go on with the others, and `point` sets it anew.

        Raises Unavailable if the store cannot be reached.
        """

    def point(self, alias: str, number: int) -> None:
        """Move an alias, durably and atomically. Raises KeyError for an unknown version, ValueError for an
        unknown alias."""

    def delete(self, number: int) -> None:
        """Delete a version that no alias points at. Raises ValueError if one does."""

    def close(self) -> None:
        """Free what the store holds. Idempotent."""
