"""Checks and encodings that all version stores share: manifests as JSON, tensors as safetensors."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, asdict, fields
from typing import Any

import numpy as np
import orjson
import safetensors
import safetensors.numpy
from numpy.typing import NDArray

from freshet.errors import Corrupt
from freshet.versions import ALIASES, Manifest, Version

__all__ = [
    "check_alias",
    "check_number",
    "check_verdict",
    "pack",
    "read_manifest",
    "unpack",
    "write_manifest",
]

_FORMAT = 1


def write_manifest(manifest: Manifest) -> bytes:
    """Encode a manifest as indented JSON. A number that is not finite becomes null, as JSON has none."""
    record = {"v": _FORMAT, **asdict(manifest)}
    record["applied"] = {str(partition): offset for partition, offset in manifest.applied.items()}
    return orjson.dumps(record, option=orjson.OPT_INDENT_2 | orjson.OPT_SERIALIZE_NUMPY)


def read_manifest(data: bytes, where: str, number: int | None = None) -> Manifest:
    """Parse a manifest; unknown keys are ignored.

    Raises:
        Corrupt: it does not parse, or is not that of version `number`; names `where` and the key.
    """
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
    if number is not None and values["number"] != number:
        raise Corrupt(f"{where}: expected the manifest of version {number}, found {values['number']}")
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


MOST_DIGITS = 18
"""Largest number of digits of a version's number."""

_VERDICTS = ("pending", "promoted", "held")


def check_number(number: int) -> None:
    """Raise ValueError if this cannot be a version's number."""
    if not 0 <= number < 10**MOST_DIGITS:
        raise ValueError(
            f"a version's number is 0 or more, with {MOST_DIGITS} digits at most, found {number}"
        )


def check_verdict(verdict: str) -> None:
    """Raise ValueError if this is no verdict."""
    if verdict not in _VERDICTS:
        raise ValueError(f"a verdict is one of {', '.join(_VERDICTS)}, found {verdict!r}")


def check_alias(alias: str) -> None:
    """Raise ValueError if there is no such alias."""
    if alias not in ALIASES:
        raise ValueError(f"an alias is one of {', '.join(ALIASES)}, found {alias!r}")


def contiguous(tensors: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """Return tensors of any shape, each in C order: safetensors writes an array's memory as it lies.

    A scalar keeps its shape, unlike with `np.ascontiguousarray`.
    """
    return {name: np.asarray(tensor, order="C") for name, tensor in tensors.items()}


def pack(tensors: Mapping[str, NDArray[np.generic]]) -> tuple[bytes, str]:
    """Encode tensors of any shape and dtype as a safetensors file; returns its bytes and sha256 in hex."""
    weights = safetensors.numpy.save(contiguous(tensors))
    return weights, hashlib.sha256(weights).hexdigest()


def unpack(manifest: Manifest, weights: bytes, prefixes: Sequence[str], where: str) -> Version:
    """Decode a version, with the tensors of names that start with one of `prefixes` (none: all).

    Raises:
        Corrupt: the bytes are not those that were written; the message names `where`.
    """
    found = hashlib.sha256(weights).hexdigest()
    if found != manifest.sha256:
        raise Corrupt(
            f"{where}: expected sha256 {manifest.sha256}, found {found}, {len(weights)} bytes\n"
            "  it was changed after it was written: use another version, and delete this one"
        )
    try:
        tensors: Mapping[str, NDArray[Any]] = safetensors.numpy.load(weights)
    except (safetensors.SafetensorError, KeyError, ValueError) as error:
        raise Corrupt(f"{where}: expected safetensors with numpy types, found {error}") from error
    return Version(
        manifest, {n: t for n, t in tensors.items() if not prefixes or n.startswith(tuple(prefixes))}
    )


def not_finite(tensors: Mapping[str, Any]) -> str | None:
    """Return the name of the first tensor that holds NaN or infinity, or None."""
    return next(
        (n for n, t in tensors.items() if t.dtype.kind == "f" and not np.isfinite(t).all()),
        None,
    )
