"""What the members of a model say of themselves, wherever they run."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx

from freshet.config.spec.topics import Topics
from freshet.log import EventLog
from freshet.log.records import newest
from freshet.types import TopicPartition
from tests.system import audit
from tests.system.waiting import wait_until

__all__ = ["Members", "read_to", "role_of"]


class Members(ABC):
    """Processes by names such as `joiner-0`, and what all of them together have come to."""

    names: Sequence[str]

    def __init__(self) -> None:
        self._client = httpx.Client(timeout=2)

    @abstractmethod
    def url(self, name: str) -> str:
        """Where a process answers."""

    def close(self) -> None:
        """Ask no more."""
        self._client.close()

    def status(self, name: str) -> dict[str, Any]:
        """What a process says of itself; empty while it does not answer."""
        try:
            answer = self._client.get(f"{self.url(name)}/status")
            found: dict[str, Any] = answer.json()
        except (httpx.HTTPError, ValueError):
            return {}
        return found or {"answers": answer.status_code}

    def of(self, role: str) -> list[str]:
        """Names of a role."""
        return [name for name in self.names if role_of(name) == role]

    def joined(self) -> dict[str, Any]:
        """Figures of all joiners together; empty while one does not answer."""
        said = [self.status(name) for name in self.of("joiner")]
        if not all("ledger" in one for one in said):
            return {}
        return {"ledger": _summed([one["ledger"] for one in said]), "lag": [one["lag"] for one in said]}

    def applied(self) -> dict[int, int]:
        """{partition: offset} that the dense weights of the first rank that answers have come to."""
        return next(filter(None, map(self.applied_by, self.of("trainer"))), {})

    def applied_by(self, trainer: str) -> dict[int, int]:
        """{partition: offset} that the dense weights of a rank have come to; empty if it does not answer."""
        return {int(p): n for p, n in self.status(trainer).get("applied", {}).items()}

    def drain(self, log: EventLog, topics: Topics, folder: Path, impressions: int) -> None:
        """Wait until the windows of so many impressions are decided, and all samples are in a version."""

        def decided() -> bool:
            said = self.joined()
            if not said:
                return False
            events = said["ledger"]["events"]
            if events["impressions"] + events["impressions_late"] < impressions:
                return False
            return not any(counts["pending"] for counts in said["ledger"]["labels"].values())

        wait_until("all windows are decided", decided, within_s=120)
        wait_until(
            "all samples are trained on",
            lambda: self.applied() == read_to(log, topics.samples),
            within_s=120,
        )

        def in_a_version() -> bool:
            return audit.applied_by_newest_version(folder) == read_to(log, topics.samples)

        wait_until("a version has learned from all samples", in_a_version, within_s=60)


def role_of(name: str) -> str:
    """The role of a process."""
    return name.rpartition("-")[0]


def read_to(log: EventLog, topic: str) -> dict[int, int]:
    """{partition: offset behind its last record}; markers of transactions come after it."""
    ends = {}
    for p in range(log.topics()[topic].partitions):
        last = newest(log, TopicPartition(topic, p), 1)
        ends[p] = last[-1][0] + 1 if last else log.bounds(TopicPartition(topic, p)).start
    return ends


def _summed(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Nested counts, added up."""
    total: dict[str, Any] = {}
    for key in parts[0]:
        values = [part[key] for part in parts]
        total[key] = _summed(values) if isinstance(values[0], Mapping) else sum(values)
    return total
