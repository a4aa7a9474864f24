"""Where recorded events come from: known data sets, files of events, topics. A piece at a time, as JSON lines
a stream."""

from __future__ import annotations

import gzip
import heapq
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import orjson

from freshet.errors import BadInput, ConfigError
from freshet.recordings import retail
from freshet.spec.avro import Record
from freshet.spec.model import TimeField
from freshet.types import BytesColumn

__all__ = ["ONLINE_RETAIL", "AvroRecords", "Piece", "Role", "events_of_files", "online_retail"]

Role = Literal["served", "shown", "action"]

ONLINE_RETAIL = Path(__file__).parent / "online_retail" / "freshet.toml"
"""The spec of the retail stream."""

EVENTS_FILE = "online_retail_ii_events.csv.gz"
PIECE_EVENTS = 2_000
UNIT_MS = {"s": 1000.0, "ms": 1.0, "us": 0.001}


@dataclass(frozen=True, slots=True, eq=False)
class AvroRecords:
    """Events of one stream that are Avro already, all written by one schema."""

    role: Role
    schema: Record
    payloads: BytesColumn  # without framing


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """Events that follow each other, newline-delimited JSON by stream; impressions come before their
    actions."""

    lines: Mapping[Role, bytes]
    events: int
    records: Sequence[AvroRecords] = ()  # beside the lines, or instead of them


def online_retail(path: Path, seed: int = 0) -> Iterator[Piece]:
    """The retail stream from its csv, or from the folder that holds it; see `freshet.recordings.retail`."""
    file = path / EVENTS_FILE if path.is_dir() else path
    if not file.is_file():
        raise ConfigError("replay", "PATH", str(path), f"the file {EVENTS_FILE}, or the folder that holds it")
    for day in retail.slices(retail.read_lines(file), seed):
        yield Piece({"served": day.impressions, "action": day.actions}, day.requests + day.lines)


def events_of_files(files: Mapping[Role, Path], times: Mapping[Role, TimeField]) -> Iterator[Piece]:
    """Events from files, one a stream, merged by event time: .jsonl(.gz), .csv(.gz) or .parquet.

    Columns of csv and parquet are named by the paths of the fields (`user.id`); an empty cell is no value.

    Args:
        files: by stream; each in order of time.
        times: by stream, the path of the time field and its unit; streams may differ.

    Raises BadInput, naming file and row, for what is no event or has no time.
    """
    heads = {role: _timed(path, times[role]) for role, path in files.items()}
    gathered: dict[Role, list[bytes]] = {}
    count = 0
    for _, role, event in heapq.merge(*(_tagged(role, events) for role, events in heads.items())):
        gathered.setdefault(role, []).append(event)
        count += 1
        if count == PIECE_EVENTS:
            yield Piece({r: b"\n".join(events) for r, events in gathered.items()}, count)
            gathered, count = {}, 0
    if count:
        yield Piece({r: b"\n".join(events) for r, events in gathered.items()}, count)


def _tagged(role: Role, events: Iterator[tuple[float, bytes]]) -> Iterator[tuple[float, Role, bytes]]:
    return ((time, role, event) for time, event in events)


def _timed(path: Path, time: TimeField) -> Iterator[tuple[float, bytes]]:
    for number, event in enumerate(_events(path), 1):
        found: Any = event
        for part in time.path.split("."):
            found = found.get(part) if isinstance(found, dict) else None
        at_ms = _ms(found, time.unit)
        if at_ms is None:
            wanted = "ISO 8601 text" if time.unit == "iso" else f"a number of {time.unit}"
            raise BadInput(
                f"{path}, event {number}: expected a time at {time.path!r} ({wanted}), found {found!r}"
            )
        yield at_ms, orjson.dumps(event)


def _ms(found: Any, unit: str) -> float | None:
    """A time in ms since 1970, None for what is none; without an offset it is UTC."""
    if unit == "iso":
        try:
            moment = datetime.fromisoformat(found)
        except (TypeError, ValueError):
            return None
        return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp() * 1000
    if isinstance(found, bool) or not isinstance(found, int | float):
        return None
    return float(found) * UNIT_MS[unit]


def _events(path: Path) -> Iterator[dict[str, Any]]:
    name = path.name.removesuffix(".gz")
    if name.endswith((".csv", ".parquet")):
        from freshet.recordings.files import batches  # noqa: PLC0415 - pyarrow is slow to import

        for batch in batches(path):
            yield from (_nested(row) for row in batch.to_pylist())
        return
    opened = gzip.open if path.suffix == ".gz" else open
    with opened(path, "rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                event = orjson.loads(line)
            except orjson.JSONDecodeError as error:
                raise BadInput(f"{path}:{number}: expected a JSON object, found {error}") from None
            if not isinstance(event, dict):
                raise BadInput(f"{path}:{number}: expected a JSON object, found {str(event)[:60]}")
            yield event


def _nested(row: Mapping[str, Any]) -> dict[str, Any]:
    """A flat row as the object that its columns' paths describe; cells without value are left out."""
    event: dict[str, Any] = {}
    for path, value in row.items():
        if value is None:
            continue
        at = event
        *parents, last = path.split(".")
        for part in parents:
            at = at.setdefault(part, {})
        at[last] = value.isoformat() if hasattr(value, "isoformat") else value
    return event
