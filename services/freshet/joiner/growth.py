"""Partitions that input topics got in a model's life: how many there are, are joined, and are read by no
joiner."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["Growth"]


@dataclass(frozen=True, slots=True)
class Growth:
    """Partitions of the joined topics when they were last counted."""

    began_with: int  # the spec's `partitions`: those of `samples`, fixed for the model's life
    joined: int  # of each input topic, by the joiners together
    counts: Mapping[str, int]  # topic -> partitions; empty before the first count, or where none can grow
    why: str = ""  # why partitions that all topics have cannot be joined; "": they can

    @property
    def sizes(self) -> set[int]:
        """How many partitions the topics have, or had."""
        return {self.began_with, self.joined, *self.counts.values()}

    @property
    def unread(self) -> Mapping[str, int]:
        """{topic: partitions that no joiner reads}, without topics of which all are read."""
        return {topic: n - self.joined for topic, n in self.counts.items() if n > self.joined}

    @property
    def trouble(self) -> str:
        """What an operator must mend; "" if nothing."""
        if not self.unread:
            return ""
        found = ", ".join(f"{topic} {n}" for topic, n in sorted(self.counts.items()))
        how = self.why or (
            "topics that are joined need one number of partitions: give the others as many, and all are read"
        )
        return (
            f"partitions that no joiner reads: {self.joined} of each topic are joined, found {found}; {how}"
        )

    @property
    def note(self) -> str:
        """What an operator should know; "" while topics are as they were."""
        if self.unread or self.joined <= self.began_with:
            return self.trouble
        return (
            f"the topics grew from {self.began_with} to {self.joined} partitions, and all are joined; "
            "actions on what was served before the growth are orphans where their key's partition changed"
        )

    def to_json(self) -> dict[str, Any]:
        """As `freshet status --json` shows it."""
        return {
            "began_with": self.began_with,
            "joined": self.joined,
            "topics": dict(self.counts),
            "unread": dict(self.unread),
            "note": self.note,
        }
