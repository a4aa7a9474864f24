"""What every version store checks, and weights to bytes and back: an adapter is then only a place to keep
them."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import safetensors
import safetensors.numpy
from numpy.typing import NDArray

from freshet.errors import Corrupt
from freshet.versions import ALIASES, Manifest, Version

__all__ = ["MOST_DIGITS", "check_alias", "check_number", "check_verdict", "pack", "unpack"]

MOST_DIGITS = 18
"""Of a version's number."""

_VERDICTS = ("pending", "promoted", "held")


def check_number(number: int) -> None:
    """Raises ValueError if this cannot be a version's number."""
    if not 0 <= number < 10**MOST_DIGITS:
        raise ValueError(
            f"a version's number is 0 or more, with {MOST_DIGITS} digits at most, found {number}"
        )


def check_verdict(verdict: str) -> None:
    """Raises ValueError if this is no verdict."""
    if verdict not in _VERDICTS:
        raise ValueError(f"a verdict is one of {', '.join(_VERDICTS)}, found {verdict!r}")


def check_alias(alias: str) -> None:
    """Raises ValueError if there is no such alias."""
    if alias not in ALIASES:
        raise ValueError(f"an alias is one of {', '.join(ALIASES)}, found {alias!r}")


def pack(tensors: Mapping[str, NDArray[np.generic]]) -> tuple[bytes, str]:
    """Tensors as a safetensors file, and its sha256 in hexadecimal."""
    weights = safetensors.numpy.save({name: np.ascontiguousarray(t) for name, t in tensors.items()})
    return weights, hashlib.sha256(weights).hexdigest()


def unpack(manifest: Manifest, weights: bytes, prefixes: Sequence[str], where: str) -> Version:
    """A version from its file, with the tensors whose names start with one of `prefixes` (none: all).

    Raises:
        Corrupt: it is not the file that was written; named by `where`.
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
