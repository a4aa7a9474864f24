"""Weights and Adam's moments in about three bytes a parameter, for averagings: `AdamCodec`.

Groups of 256 parameters are encoded beside their state of the last averaging, the *base*, which all ranks
have:

| array | what is encoded | code |
|---|---|---|
| weights w | w - base | one of 127 levels of the group's largest, and a sign |
| first moment m | m / √v | the same |
| second moment v | v / base | a power of a factor that the group's largest change determines |
| v where base is 0 | v / the group's largest of these | a power of 2^(-1/6) |

Each is rounded to one of the two nearest codes at random, so that its expectation is the value. Nothing is
carried to the next averaging.

Errors. Adam steps by m / √v, and the v of a group differ by many powers of ten. In levels of the largest v
the others would become 0, and a 127th of the largest m would be hundreds of steps of a parameter with a
small v. So v has a relative error of at most c^(1/127) - 1, where c is the largest ratio by which a v of
the group has changed since the last averaging: 0.6 % if one has doubled, 6 % if one is a thousand times as
large. m is off by at most a 127th of the group's largest |m| / √v, in units of its own √v; Adam keeps |m| /
√v below 7.3. The first value of a v is off by up to 12 %, once. If every v were sent like that, rounding at
random would add up such errors over the 1,000 steps that v remembers, and rounding to nearest would stop
its decay, which is 1.6 % in 16 steps.

A v of 0 stays 0, and its m becomes 0. Other v are at least 2^-126, and first ones at least 2^-42 of the
group's largest. A group with a value that is not finite, or with a negative v, decodes as NaN.

Decoding adds, multiplies, divides and takes square roots, which IEEE 754 defines to the bit, so that unlike
processors decode equal bits; encoding needs no such care.

Letters: G groups, K consecutive ones, S = 256 parameters of a group; in (G, 3, S) the order is w, m, v.
"""

from __future__ import annotations

import math

import numpy as np

from freshet.trainer.reducers.group_codecs import HEAD_BYTES
from freshet.trainer.reducers.levels import MOST_LEVELS, TINY, LevelCodec
from freshet.types import F32, F64, U8

__all__ = ["GROUP", "AdamCodec"]

GROUP = LevelCodec.group
FRESH = 1.122462048309373
"""2^(1/6), the factor between the codes of the first value of a v: 254 of them cover 42 powers of two."""
SAME, LARGEST = 128, 255
"""Codes of a v that equals its base, and of the largest first value; code 0 is 0."""
_FALL = 1 / np.cumprod([1.0] + [FRESH] * LARGEST)  # fractions of the largest by LARGEST - code


class AdamCodec:
    """Encodes the groups of one averaging."""

    _V_BYTES, _LEVEL_BYTES = 2 * HEAD_BYTES + GROUP, HEAD_BYTES + GROUP
    unit_bytes = _V_BYTES + 2 * _LEVEL_BYTES

    def __init__(self, base: F32, seed: int) -> None:
        """`base`: (G, 3, S) at the last averaging; `seed`: of random rounding, another on each rank."""
        self._base = base
        self._levels = LevelCodec(seed, MOST_LEVELS)
        self._random = np.random.Generator(np.random.SFC64([seed, 1]))

    def __len__(self) -> int:
        return len(self._base)

    def encode(self, values: F32 | F64, first: int) -> U8:
        """Encode (K, 3, S) values of the groups from `first` on as (K, unit_bytes) bytes."""
        w, m, v = np.moveaxis(values.astype(np.float64), 1, 0)
        w_base, _, v_base = np.moveaxis(self._base[first : first + len(values)], 1, 0)
        packed = _encode_v(v, v_base, self._random)
        root = np.sqrt(_decode_v(packed, v_base))
        with np.errstate(over="ignore", invalid="ignore"):  # values that are not finite
            steps = np.divide(m, root, out=m * 0.0, where=root != 0).astype(np.float32)
            moved = (w - w_base).astype(np.float32)
            parts = [packed, *(self._levels.encode(part, part.size) for part in (steps, moved))]
        return np.concatenate(parts, axis=1)

    def decode(self, packed: U8, first: int) -> F64:
        """Decode (N,) bytes, whole groups from `first` on, as (K, 3, S) values."""
        packed = packed.reshape(-1, self.unit_bytes)
        w_base, _, v_base = np.moveaxis(self._base[first : first + len(packed)], 1, 0)
        of_v, of_m, of_w = np.split(packed, [self._V_BYTES, self._V_BYTES + self._LEVEL_BYTES], axis=1)
        with np.errstate(over="ignore", invalid="ignore"):
            v = _decode_v(of_v, v_base)
            return np.stack(
                [
                    w_base.astype(np.float64) + self._levels.decode(of_w),
                    np.sqrt(v) * self._levels.decode(of_m),
                    v,
                ],
                axis=1,
            )


def _encode_v(v: F64, base: F32, rng: np.random.Generator) -> U8:
    """Encode (G, S) second moments as (G, 2 × HEAD_BYTES + S) bytes: growth, largest, codes."""
    fresh = base < TINY
    largest = np.maximum(np.where(fresh, v, 0).max(axis=1, keepdims=True), TINY).astype("<f4")
    with np.errstate(divide="ignore", invalid="ignore"):
        logs = np.log(np.maximum(v, TINY)) - np.log(np.where(fresh, largest, base).astype(np.float64))
    sound = ((v >= 0) & np.isfinite(logs)).all(axis=1, keepdims=True)
    logs = np.where(sound, logs, 0.0)
    most = np.abs(np.where(fresh, 0.0, logs)).max(axis=1, keepdims=True)
    growth = np.expm1(most * (1 + 1e-6) / MOST_LEVELS).astype("<f4")
    step = np.where(fresh, math.log(FRESH), np.log1p(growth.astype(np.float64)))
    places = np.divide(logs, step, out=np.zeros_like(logs), where=step > 0)
    below = np.floor(places)
    # between the two nearest codes at random, so that the expectation of v, not of its logarithm, is v
    chance = np.expm1((places - below) * step) / np.expm1(np.where(step > 0, step, 1.0))
    codes = below + (rng.random(v.shape) < chance) + np.where(fresh, LARGEST, SAME)
    codes = np.where(sound & (v == 0), 0, codes.clip(1, LARGEST)).astype(np.uint8)
    heads = np.where(sound, np.concatenate([growth, largest], axis=1), np.float32(np.nan)).astype("<f4")
    return np.concatenate([heads.view(np.uint8), codes], axis=1)


def _decode_v(packed: U8, base: F32) -> F64:
    """Decode the bytes of `_encode_v` as (G, S) second moments."""
    heads = np.ascontiguousarray(packed[:, : 2 * HEAD_BYTES]).view("<f4").astype(np.float64)
    codes = packed[:, 2 * HEAD_BYTES :].astype(np.intp)
    factors = np.repeat(1.0 + heads[:, :1], SAME + 1, axis=1)
    factors[:, :1] = 1.0 + 0.0 * heads[:, :1]  # 1, or NaN for a group that is not finite
    np.multiply.accumulate(factors, axis=1, out=factors)
    powers = np.take_along_axis(factors, np.abs(codes - SAME), axis=1)
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):  # heads of a broken rank
        grown = base * np.where(codes < SAME, 1 / powers, powers)
        values = np.where(base < TINY, heads[:, 1:] * _FALL[LARGEST - codes], grown)
    found: F64 = np.where(codes == 0, 0.0, values)
    return found
