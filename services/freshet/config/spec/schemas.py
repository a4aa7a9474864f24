"""Avro schemas of a spec's streams, read from their files."""

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


MOST_BYTES = 4 << 20
"""Limit on the size of a spec or schema file. The largest known have a few hundred KiB; a device may be
endless."""


def read_small(path: Path) -> bytes:
    """Read a spec or schema file. Raises OSError if it is unreadable or larger than MOST_BYTES."""
    with path.open("rb") as file:
        content = file.read(MOST_BYTES + 1)
    if len(content) > MOST_BYTES:
        raise OSError(0, f"more than {MOST_BYTES >> 20} MiB")
    return content


@dataclass(frozen=True, slots=True)
class Schemas:
    """The user's schemas, one for each stream."""

    served: Record
    action: Record
    shown: Record | None = None

    def of(self, role: str) -> Record:
        """Return the schema of a stream. Raises KeyError if there is no such stream."""
        found: Record | None = {"served": self.served, "action": self.action, "shown": self.shown}[role]
        if found is None:
            raise KeyError(role)
        return found


def streams_of(spec: Spec) -> Iterator[Stream]:
    """Yield the streams that the spec declares."""
    yield from (s for s in (spec.events.served, spec.events.shown, spec.events.action) if s is not None)


def written_by_us(spec: Spec) -> Spec:
    """Return the spec with format avro for topics of external writers, as a replay writes them."""
    streams = {s.role: replace(s, format="avro") if s.external else s for s in streams_of(spec)}
    return replace(spec, events=replace(spec.events, **streams))


def readers_of(spec: Spec, schemas: Schemas) -> dict[str, Record]:
    """Return the reader schema of each stream, by role; that of served events includes `freshet_served`.

    Raises ConfigError if the array that `explode` names is no array of records.
    """
    found: dict[str, Record] = {stream.role: schemas.of(stream.role) for stream in streams_of(spec)}
    found["served"] = served_schema(schemas.served, spec.events.served.explode)
    return found


def sample_reader(spec: Spec, schemas: Schemas) -> Record:
    """Return the reader schema of samples. Raises ConfigError as `readers_of`."""
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
            "the schema declares the fields of your events; JSON events need one too. "
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
