"""Errors on our gRPC streams: a FAILURE frame says which family, why, and what the caller needs to go on.

A failure answers one request; the stream stays. Errors of the connection itself are gRPC's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from freshet.errors import (
    BadInput,
    Corrupt,
    DataLost,
    Fenced,
    FreshetError,
    Mismatch,
    Overloaded,
    Refused,
    TooLarge,
    Unavailable,
)
from freshet.rpc.frames import BadFrame, Frame, Kind, Part, encode_frame

__all__ = ["failure_frame", "failure_of"]

_FAMILIES: Mapping[int, type[FreshetError]] = {
    1: Unavailable,
    4: Fenced,
    5: Mismatch,
    6: Corrupt,
    7: TooLarge,  # before its family: the first that fits is told
    8: BadInput,
    9: DataLost,
    255: FreshetError,
}
_OVERLOADED, _REFUSED, _OTHER = 2, 3, 255


def failure_frame(error: BaseException, frame_id: int) -> bytes:
    """The answer to a request that failed; `flags` names the family."""
    text = np.frombuffer((str(error) or repr(error)).encode(), np.uint8)
    sections: dict[tuple[Part, int], NDArray[Any]] = {(Part.TEXT, 0): text}
    family = _OTHER
    if isinstance(error, Overloaded):
        family = _OVERLOADED
        sections[Part.REALS, 0] = np.array([error.retry_after_s], np.float64)
    elif isinstance(error, Refused):
        family = _REFUSED
        offsets = np.array(sorted(error.applied.items()), np.int64).reshape(-1, 2)
        sections[Part.APPLIED, 0] = offsets
    else:
        family = next((n for n, made in _FAMILIES.items() if isinstance(error, made)), _OTHER)
    return encode_frame(Frame(Kind.FAILURE, frame_id, flags=family, sections=sections))


def failure_of(frame: Frame) -> FreshetError:
    """The error that a FAILURE frame tells of. Raises BadFrame if it lacks what its family needs."""
    text = frame.text()
    if frame.flags == _OVERLOADED:
        retry_after_s = float(frame.array(Part.REALS, np.float64, (1,))[0])
        return Overloaded(text, retry_after_s if 0 <= retry_after_s <= 60 else 1.0)
    if frame.flags == _REFUSED:
        return Refused(text, dict(frame.array(Part.APPLIED, np.int64, (None, 2)).tolist()))
    made = _FAMILIES.get(frame.flags)
    if made is None:
        raise BadFrame(f"failure: expected a family that we know, found {frame.flags}: {text}", "shape")
    return made(text)
