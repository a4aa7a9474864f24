"""What a person does to `stable`: promote a version, or roll back and stay there. Written down in
`<model>.versions`, from which the trainer's gate knows whether it may go on promoting.
"""

from __future__ import annotations

import orjson

from freshet.errors import ConfigError, Corrupt
from freshet.log import EventLog
from freshet.observability.skipped import skip
from freshet.types import Append, BytesColumn
from freshet.versions import Manifest, VersionStore

__all__ = ["PEOPLE", "manifest_of", "move", "version_to_roll_back_to"]

PEOPLE = ("operator", "console")
"""Who moves `stable` for a person: the command line and the console. Everybody else asks the gate."""

SEE = "see `freshet version list`"


def manifest_of(store: VersionStore, number: int) -> Manifest:
    """A version's manifest. Raises ConfigError, with the numbers there are, if it is not stored."""
    try:
        return store.manifest(number)
    except KeyError:
        numbers = list(store.numbers())
        found = f"{numbers[0]} to {numbers[-1]}" if numbers else "none"
        raise ConfigError("version", "number", number, f"a stored version ({found})", SEE) from None


def version_to_roll_back_to(store: VersionStore) -> int:
    """The last promoted version before `stable`. Raises ConfigError if none is stored."""
    stable = store.aliases().get("stable")
    older = [n for n in store.numbers() if stable is not None and n < stable]
    for number in reversed(older):
        try:
            if store.manifest(number).verdict == "promoted":
                return number
        except (Corrupt, KeyError) as error:
            skip("version", f"version {number}", str(error))
    raise ConfigError("rollback", "", "no older promoted version is stored", "a version number", SEE)


def move(
    store: VersionStore, log: EventLog, number: int, *, pinned: bool, by: str, now_ms: int
) -> dict[str, object]:
    """Point `stable` at a version, and write down who did it; returns that record.

    Args:
        pinned: the gate promotes nothing until the next move that is not pinned (a rollback).
        by:     one of PEOPLE.

    Raises:
        ConfigError: there is no such version.
        Corrupt: it cannot be read; `stable` stays where it is.
        Unavailable: store or log cannot be written; moving again is safe.
    """
    manifest = manifest_of(store, number)
    store.get(number)  # a version that cannot be read must not be pointed at
    store.point("stable", number)
    record: dict[str, object] = {
        "v": 1,
        "kind": "alias",
        "alias": "stable",
        "number": number,
        "by": by,
        "pinned": pinned,
        "time_ms": now_ms,
    }
    writer = log.writer()
    try:
        writer.append([Append(f"{manifest.model}.versions", 0, BytesColumn.of([orjson.dumps(record)]))])
    finally:
        writer.close()
    return record
