"""Version store: dense weights with their manifest, and the aliases that point at them."""

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
    """Description of a version, stored as JSON beside the weights."""

    number: int  # 0, 1, 2, …; 0 holds the initial weights
    model: str
    spec_hash: str
    created_ms: int
    step: int  # optimiser steps
    applied: Mapping[int, int]  # dense `applied`: {partition of samples: next offset}
    log_id: str  # of `samples`
    event_time_ms: int  # time of the newest event that was learned
    measures: Mapping[str, Any]  # progressive measures at the time of writing
    fence: int  # of the trainer's membership lease
    sha256: str  # of the weights file
    verdict: str = "pending"  # "promoted", "held" or "pending"
    reason: str = ""  # why it was held or promoted, for operators
    transforms: Mapping[str, Sequence[float | None]] = field(default_factory=dict)  # see spec.outcomes


@dataclass(frozen=True, slots=True, eq=False)
class Version:
    """A manifest with its tensors: weights, and states of optimiser, hedge, statistics and measures."""

    manifest: Manifest
    tensors: Mapping[str, NDArray[Any]]
    __hash__ = None  # type: ignore[assignment]


class Aliases(dict[str, int]):
    """{alias: number of its version}, without aliases that were never set or cannot be read."""

    def __init__(
        self, pointed: Mapping[str, int] | None = None, damaged: Mapping[str, str] | None = None
    ) -> None:
        """Make it from the readable aliases, and the reason for each damaged one."""
        super().__init__(pointed or {})
        self.damaged: Mapping[str, str] = dict(damaged or {})


class VersionStore(Protocol):
    """Versions of one model. Thread-safe; the trainer writes, many processes read."""

    def put(self, manifest: Manifest, tensors: Mapping[str, NDArray[np.generic]]) -> Manifest:
        """Store a version durably, with `sha256` set; returns its manifest. A reader sees all of it or
        nothing.

        Args:
            manifest: with a number that does not exist.
            tensors: by name, of any shape and dtype.

        Raises:
            ValueError: the number exists.
            Unavailable: it could not be written.
        """

    def numbers(self) -> Sequence[int]:
        """Return the numbers of the stored versions, increasing; a version may be damaged. Other entries are
        ignored, counted and logged."""

    def manifest(self, number: int) -> Manifest:
        """Return a version's manifest. Raises KeyError if there is none, Corrupt if it does not parse."""

    def get(self, number: int, prefixes: Sequence[str] = ()) -> Version:
        """Return a version with all tensors, or those with names that start with one of `prefixes`.

        Raises:
            KeyError: there is no such version.
            Corrupt: the weights do not match their sha256.
        """

    def judge(self, number: int, verdict: str, reason: str) -> Manifest:
        """Store the gate's verdict in the manifest, which is replaced atomically; returns it.

        Raises:
            KeyError: there is no such version.
            ValueError: there is no such verdict.
        """

    def aliases(self) -> Aliases:
        """Return the version of each alias, without aliases that were never set. One that cannot be read is
        only in `damaged`; `point` sets it again.

        Raises Unavailable if the store cannot be reached.
        """

    def point(self, alias: str, number: int) -> None:
        """Move an alias, durably and atomically.

        Raises:
            KeyError: there is no such version.
            ValueError: there is no such alias.
        """

    def delete(self, number: int) -> None:
        """Delete a version, if it exists. Raises ValueError if an alias points at it."""

    def close(self) -> None:
        """Release the store's resources. Idempotent."""
