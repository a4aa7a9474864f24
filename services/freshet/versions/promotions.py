"""Moves of `stable` by an operator: promotion and rollback, recorded in `<model>.versions`, where the
trainer's gate reads whether it may promote.
"""

from __future__ import annotations

from collections.abc import Sequence

import orjson

from freshet.errors import ConfigError, Corrupt
from freshet.log import EventLog
from freshet.model import SERVING_PREFIXES
from freshet.observability.skipped_state import skip
from freshet.types import Append, BytesColumn
from freshet.versions import Manifest, VersionStore
from freshet.versions.weights import not_finite

PEOPLE = ("operator", "console")
"""Sources of moves by operators: the command line and the console. All other moves are the gate's."""

SEE = "see `freshet version list`"


def manifest_of(store: VersionStore, number: int) -> Manifest:
    """Return a version's manifest. Raises ConfigError, with the stored numbers, if there is none."""
    try:
        return store.manifest(number)
    except KeyError:
        raise ConfigError("version", "number", number, _one_of(store.numbers()), SEE) from None


def version_to_roll_back_to(store: VersionStore) -> int:
    """Return the last promoted version before `stable`, but never 0, the untrained model.

    Raises ConfigError, with the stored numbers, if there is none.
    """
    numbers, stable = store.numbers(), store.aliases().get("stable")
    for number in reversed([n for n in numbers if stable is not None and 0 < n < stable]):
        try:
            if store.manifest(number).verdict == "promoted":
                return number
        except (Corrupt, KeyError) as error:
            skip("version", f"version {number}", str(error))
    found = "no older promoted version is stored; 0, the untrained model, does not count"
    raise ConfigError("rollback", "", found, _one_of(numbers), f"name the one to serve; {SEE}")


def _one_of(numbers: Sequence[int]) -> str:
    """Return the words for one of these versions, which increase: `a stored version (0, 5, 31 to 40)`."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][-1] == number - 1:
            runs[-1][1:] = [number]
        else:
            runs.append([number])
    return f"a stored version ({', '.join(' to '.join(map(str, run)) for run in runs) or 'none'})"


def move(
    store: VersionStore, log: EventLog, number: int, *, pinned: bool, by: str, now_ms: int
) -> dict[str, object]:
    """Point `stable` at a version and record the move; returns the record.

    Args:
        store: of the versions.
        log: that holds `<model>.versions`.
        number: the version.
        pinned: whether the gate must not promote until the next move that is not pinned (a rollback).
        by: one of PEOPLE.
        now_ms: wall-clock time.

    Raises:
        ConfigError: there is no such version.
        Corrupt: it cannot be read, or its weights are not finite; `stable` does not move.
        Unavailable: store or log cannot be written; repeating the move is safe.
    """
    manifest = manifest_of(store, number)
    bad = not_finite(store.get(number, SERVING_PREFIXES).tensors)
    if bad is not None:
        raise Corrupt(
            f"version {number}: expected finite weights, found NaN or infinity in {bad}\n"
            f"  no server would load it: name another one, {SEE}"
        )
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
