"""The Avro schemas that a spec names, read from their files."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from freshet.config.avro.schema import Record, parse_schema, sample_schema, served_schema
from freshet.config.spec.model import Spec, Stream
from freshet.errors import ConfigError

__all__ = [
    "MOST_BYTES",
    "Schemas",
    "load_schema",
    "load_schemas",
    "read_small",
    "readers_of",
    "sample_reader",
    "streams_of",
    "written_by_us",
]

# --- Small files of people's: specs and schemas.


MOST_BYTES = 4 << 20
"""The largest specs that we know of have a few hundred KiB; what is larger is something else, or endless."""


def read_small(path: Path) -> bytes:
    """The bytes of a file. Raises OSError, also if it is larger than a spec or a schema can be."""
    with path.open("rb") as file:
        content = file.read(MOST_BYTES + 1)
    if len(content) > MOST_BYTES:
        raise OSError(0, f"more than {MOST_BYTES >> 20} MiB")
    return content


@dataclass(frozen=True, slots=True)
class Schemas:
    """The users' schemas, one a stream."""

    served: Record
    action: Record
    shown: Record | None = None

    def of(self, role: str) -> Record:
        """The schema of a stream that the spec has. Raises KeyError."""
        found: Record | None = {"served": self.served, "action": self.action, "shown": self.shown}[role]
        if found is None:
            raise KeyError(role)
        return found


def streams_of(spec: Spec) -> Iterator[Stream]:
    """The streams that the spec declares."""
    yield from (s for s in (spec.events.served, spec.events.shown, spec.events.action) if s is not None)


def written_by_us(spec: Spec) -> Spec:
    """The spec where topics that others alone write are written by us, as a replay of files does."""
    streams = {s.role: replace(s, format="avro") if s.theirs else s for s in streams_of(spec)}
    return replace(spec, events=replace(spec.events, **streams))


def readers_of(spec: Spec, schemas: Schemas) -> dict[str, Record]:
    """What events of each stream are read as, whatever schema they were written by, by role: the spec's
    schema; served events with what our inference server adds.

    Raises ConfigError if the array that `explode` names is no array of records.
    """
    found: dict[str, Record] = {stream.role: schemas.of(stream.role) for stream in streams_of(spec)}
    found["served"] = served_schema(schemas.served, spec.events.served.explode)
    return found


def sample_reader(spec: Spec, schemas: Schemas) -> Record:
    """What samples are read as. Raises ConfigError as `readers_of`."""
    explode = spec.events.served.explode
    return sample_schema(served_schema(schemas.served, explode), explode)


def load_schemas(spec: Spec, where: str = "freshet.toml") -> Schemas:
    """Read the schema of every stream; paths are relative to the spec's folder.

    Raises:
        ConfigError: a stream names no schema, a file cannot be read, or does not hold a record's schema.
    """
    return Schemas(**{s.role: load_schema(spec, s, where) for s in streams_of(spec)})


def load_schema(spec: Spec, stream: Stream, where: str = "freshet.toml") -> Record:
    """Read the schema of one stream. Raises as `load_schemas`."""
    key = f"events.{stream.role}.schema"
    if stream.schema is None:
        raise ConfigError(
            where,
            key,
            None,
            "the path of an .avsc file",
            "the fields of the events are yours: say what they are; JSON events have a schema too. "
            "Only freshet backtest reads files without one",
        )
    path = Path(spec.folder) / stream.schema
    try:
        text = read_small(path)
    except (OSError, ValueError) as error:  # ValueError: a null character in the path
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(
            where, key, stream.schema, "a file that can be read", f"{path}: {reason}"
        ) from error
    return parse_schema(text, str(path))
