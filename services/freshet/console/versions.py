"""Stored versions as the page shows them, and what happened to them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from freshet.console.history import parsed, version_event
from freshet.console.topic_follower import Follower
from freshet.errors import FreshetError
from freshet.log import EventLog
from freshet.types import TopicPartition
from freshet.versions import Manifest, VersionStore
from freshet.versions.promotions import PEOPLE

__all__ = ["Versions"]

SHOWN = 20
"""Newest versions that are listed; what aliases point at is listed with them."""

READ_AT_ONCE = 5_000


class Versions:
    """Follows the version store and its topic. Used by one thread."""

    def __init__(self, store: VersionStore, log: EventLog, topic: str) -> None:
        self._store = store
        self._follower = Follower(log, TopicPartition(topic, 0))
        self._manifests: dict[int, Manifest] = {}
        self.pinned = False

    def events(self) -> Sequence[Mapping[str, Any]]:
        """What became of versions since the last call: {time_ms, number, what, reason, by}."""
        found: list[Mapping[str, Any]] = []
        while True:
            records, anew = self._follower.read(READ_AT_ONCE)
            if anew:
                self.pinned, self._manifests = False, {}
            for _, value in records:
                record = parsed(value)
                if record is None:
                    continue
                if record["kind"] == "alias" and record.get("by") in PEOPLE:
                    self.pinned = bool(record.get("pinned"))
                event = version_event(record)
                if event is not None:
                    found.append(event)
            if not records and not anew:
                return found

    def to_json(self, serving: int | None) -> dict[str, Any]:
        """Aliases, and the newest versions first. Raises Unavailable as the store does."""
        aliases = dict(self._store.aliases())
        numbers = list(self._store.numbers())
        chosen = sorted({*numbers[-SHOWN:], *(n for n in aliases.values() if n in numbers)}, reverse=True)
        self._manifests = {n: m for n, m in self._manifests.items() if n in chosen}
        listed = [self._listed(number, aliases) for number in chosen]
        return {"serving": serving, "aliases": aliases, "pinned": self.pinned, "list": listed}

    def close(self) -> None:
        """Close the reader; the store is the caller's."""
        self._follower.close()

    def _listed(self, number: int, aliases: Mapping[str, int]) -> dict[str, Any]:
        names = sorted(alias for alias, target in aliases.items() if target == number)
        try:
            manifest = self._manifest(number)
        except (FreshetError, KeyError, FileNotFoundError) as error:
            reason = f"its manifest cannot be read: {error}"
            return {"number": number, "created_ms": None, "step": None, "verdict": None, "reason": reason,
                    "aliases": names, "measures": {}}  # fmt: skip
        return {
            "number": number,
            "created_ms": manifest.created_ms,
            "step": manifest.step,
            "verdict": manifest.verdict,
            "reason": manifest.reason,
            "aliases": names,
            "measures": manifest.measures,
        }

    def _manifest(self, number: int) -> Manifest:
        known = self._manifests.get(number)
        if known is None or known.verdict == "pending":
            known = self._manifests[number] = self._store.manifest(number)
        return known
