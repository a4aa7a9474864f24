"""A version's manifest as JSON, and back with every field checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, asdict, fields
from typing import Any

import orjson

from freshet.errors import Corrupt
from freshet.versions import Manifest

__all__ = ["read_manifest", "write_manifest"]

_FORMAT = 1


def write_manifest(manifest: Manifest) -> bytes:
    """JSON, indented for people. A number that is not finite becomes null: JSON has none."""
    record = {"v": _FORMAT, **asdict(manifest)}
    record["applied"] = {str(partition): offset for partition, offset in manifest.applied.items()}
    return orjson.dumps(record, option=orjson.OPT_INDENT_2 | orjson.OPT_SERIALIZE_NUMPY)


def read_manifest(data: bytes, where: str) -> Manifest:
    """Parse a manifest; keys that are not known are ignored. Raises Corrupt, naming `where` and the key."""
    try:
        record = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise Corrupt(f"{where}: expected a manifest in JSON, found {error}") from error
    if not isinstance(record, dict) or record.get("v") != _FORMAT:
        found = record.get("v") if isinstance(record, dict) else type(record).__name__
        raise Corrupt(f"{where}: expected a manifest of format {_FORMAT}, found {found!r}")
    values: dict[str, Any] = {}
    for field in fields(Manifest):
        if field.name in record:
            values[field.name] = _checked(field.name, str(field.type), record[field.name], where)
        elif field.default is MISSING and field.default_factory is MISSING:
            raise Corrupt(f"{where}: the key {field.name!r} is missing")
    return Manifest(**values)


def _checked(name: str, kind: str, value: object, where: str) -> object:
    if name == "applied" and isinstance(value, dict):
        if all(key.isdecimal() and type(offset) is int for key, offset in value.items()):
            return {int(key): offset for key, offset in value.items()}
    elif (
        (kind == "int" and type(value) is int)
        or (kind == "str" and isinstance(value, str))
        or (name == "measures" and isinstance(value, Mapping))
        or (name == "transforms" and isinstance(value, Mapping) and all(map(_outcomes, value.values())))
    ):
        return value
    raise Corrupt(f"{where}: {name} = {value!r}, expected {kind}")


def _outcomes(values: object) -> bool:
    return isinstance(values, list) and all(x is None or type(x) in (int, float) for x in values)
