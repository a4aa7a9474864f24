"""Moves of `stable` by an operator: promotion and rollback, recorded in `<model>.versions`, where the
trainer's gate reads whether it may promote.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeGuard

import orjson

from freshet.errors import ConfigError, Corrupt
from freshet.log import EventLog
from freshet.log.records import newest
from freshet.model import SERVING_PREFIXES
from freshet.observability.skipped_state import skip
from freshet.types import Append, BytesColumn, TopicPartition
from freshet.versions import Manifest, VersionStore
from freshet.versions.weights import MOST_DIGITS, not_finite

PEOPLE = ("operator", "console")
"""Sources of moves by operators: the command line and the console. All other moves are the gate's."""

SEE = "see `freshet version list`"

_NEWEST = 100
"""Newest records among which one of the trainer's moves is found: a version is up to four records."""


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


@dataclass(frozen=True, slots=True)
class Pin:
    """A version at which `stable` must stay until an operator promotes one."""

    number: int  # of the version that an operator rolled back to

    @property
    def reason(self) -> str:
        """The reason for which the gate may not promote."""
        return (
            f"an operator rolled back to version {self.number}; "
            "`freshet version promote NUMBER` lets the gate go on"
        )


class Pins:
    """The pin of `stable`, from the alias moves in `<model>.versions`; an operator's last move decides.

    The topic is never trimmed. So the trainer writes what it has read (`known`) into its own moves, and a
    reader that is far behind begins there; a topic without such a record is read whole. One thread uses it.
    """

    def __init__(self, log: EventLog, topic: str) -> None:
        self._log = log
        self._at = TopicPartition(topic, 0)
        self._next = log.bounds(self._at).start
        self._reader = log.reader()
        self._reader.assign({self._at: self._next})
        self._pin: Pin | None = None
        self._stable: int | None = None

    def pin(self) -> Pin | None:
        """Read new alias moves and return the pin; None if the gate may promote."""
        end = self._log.bounds(self._at).end
        if end - self._next > _NEWEST:
            self._skip_ahead()
        while self._next < end:
            for _, records in self._reader.poll(1000, 1.0):
                for offset, value in zip(records.offsets.tolist(), records.values, strict=True):
                    self._read_move(value, f"{self._at} at offset {offset}")
                self._next = records.next_offset
        return self._pin

    def close(self) -> None:
        """Close the reader."""
        self._reader.close()

    @property
    def stable(self) -> int | None:
        """The target of the newest move of `stable` that `pin` has read; None if there was none."""
        return self._stable

    def known(self) -> dict[str, int | None]:
        """Return what the records before `upto` have decided, for the key `pins` of a move by the trainer."""
        pinned = None if self._pin is None else self._pin.number
        return {"upto": self._next, "stable": self._stable, "pinned": pinned}

    def _skip_ahead(self) -> None:
        """Take over `pins` of one of the newest records, and read on at its `upto`."""
        for offset, value in newest(self._log, self._at, _NEWEST):
            try:
                pins = orjson.loads(value)["pins"]
                upto, stable, pinned = pins["upto"], pins["stable"], pins["pinned"]
            except (ValueError, KeyError, TypeError):
                continue  # another record, or a damaged one
            valid = type(upto) is int and all(n is None or _is_number(n) for n in (stable, pinned))
            if valid and self._next < upto <= offset:
                self._next, self._stable = upto, stable
                self._pin = None if pinned is None else Pin(pinned)
        self._reader.assign({self._at: self._next})

    def _read_move(self, value: bytes | None, where: str) -> None:
        if not value:
            return
        try:
            record = orjson.loads(value)
        except orjson.JSONDecodeError as error:
            skip("versions", where, f"{where}: expected a record in JSON, found {value[:60]!r}: {error}")
            return
        if not isinstance(record, dict) or not isinstance(record.get("kind"), str):
            skip("versions", where, f"{where}: expected an object with `kind`, found {value[:60]!r}")
            return
        if record["kind"] != "alias" or record.get("alias") != "stable":
            return
        number, by = record.get("number"), record.get("by")
        if not _is_number(number) or not isinstance(by, str):
            skip("versions", where, f"{where}: expected `number` and `by` of an alias, found {value[:120]!r}")
            return
        self._stable = number
        if by in PEOPLE:
            self._pin = Pin(number) if record.get("pinned") is True else None


def _is_number(value: object) -> TypeGuard[int]:
    return type(value) is int and 0 <= value < 10**MOST_DIGITS
