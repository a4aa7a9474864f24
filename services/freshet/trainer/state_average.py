"""Averaging: ranks that step alone make their dense states one (mode `async`; PROTOCOL 14, 15).

Between two averagings a rank learns from its own partitions only. At an averaging each array becomes the mean
over the ranks, weighted by the samples that each has learned from since the last one, and the union of the
vectors becomes that of all ranks. Local SGD (Stich 2019) averages weights; the optimiser's moments follow
them here, as each rank has seen gradients of its own samples only.

Means are computed in float64 in the order of the ranks, and travel in the state's own types. Large arrays
(float32) take two phases: a rank gets its part of them from all others, and sends all the mean of that part.
Each rank computes the other means itself, from the states of all. So all have equal bits.

With `rounded`, tensors that Adam steps travel as `AdamCodec` encodes them, in both phases. All other arrays
are sent whole: tensors shorter than a group, biases by label, buffers of networks.

Letters: n ranks, L labels, d floats of the large arrays, K consecutive units of a codec, G groups of S = 256
parameters of tensors that Adam steps.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from freshet.errors import Corrupt
from freshet.model import STARTED, DenseModel, MergeRule, MergesState, NamesMoments, State
from freshet.trainer.gradient_sums import CountingCollectives, ring_bytes
from freshet.trainer.process_group import ProcessGroup
from freshet.trainer.reducers import Collectives
from freshet.trainer.reducers.group_codecs import HEAD_BYTES
from freshet.trainer.reducers.levels import MOST_LEVELS, TINY, LevelCodec
from freshet.trainer.state_sync import MODEL, VECTOR, DenseState, pack_arrays, unpack_arrays
from freshet.types import F32, F64, U8

__all__ = ["GROUP", "AdamCodec", "average"]

ROWS = "rows"
Tensor = tuple[str, str, str]
"""Names of a tensor's weights, first and second moment."""

GROUP = LevelCodec.group
FRESH = 1.122462048309373
"""2^(1/6), the factor between the codes of the first value of a v: 254 of them cover 42 powers of two."""
SAME, LARGEST = 128, 255
"""Codes of a v that equals its base, and of the largest first value; code 0 is 0."""
_FALL = 1 / np.cumprod([1.0] + [FRESH] * LARGEST)  # fractions of the largest by LARGEST - code


class StateCodec(Protocol):
    """Encodes the units of an averaging, such as floats or groups of parameters."""

    unit_bytes: int

    def __len__(self) -> int:
        """Return the number of units."""

    def encode(self, values: F32 | F64, first: int) -> U8:
        """Encode (K, …) values of the units from `first` on as (K, unit_bytes) bytes."""

    def decode(self, packed: U8, first: int) -> F64:
        """Decode (N,) bytes, whole units from `first` on, as (K, …) values."""


class WholeFloats:
    """The `StateCodec` of float32 that travel as they are."""

    unit_bytes = 4

    def __init__(self, size: int) -> None:
        self._size = size

    def __len__(self) -> int:
        return self._size

    def encode(self, values: F32 | F64, first: int) -> U8:
        """Return the (K, 4) bytes of (K,) values as float32."""
        return values.astype(np.float32, copy=False).view(np.uint8).reshape(-1, self.unit_bytes)

    def decode(self, packed: U8, first: int) -> F64:
        """Return the (K,) values of (N,) bytes."""
        return packed.view(np.float32).astype(np.float64)


class AdamCodec:
    """Encodes the weights and moments of an averaging in about three bytes a parameter.

    Groups of 256 parameters are encoded beside their state of the last averaging, the *base*, which all ranks
    have:

    | array | what is encoded | code |
    |---|---|---|
    | weights w | w - base | one of 127 levels of the group's largest, and a sign |
    | first moment m | m / √v | the same |
    | second moment v | v / base | a power of a factor that the group's largest change determines |
    | v where base is 0 | v / the group's largest of these | a power of 2^(-1/6) |

    Each is rounded to one of the two nearest codes at random, so that its expectation is the value. Nothing
    is carried to the next averaging.

    Errors. Adam steps by m / √v, and the v of a group differ by many powers of ten. In levels of the largest
    v the others would become 0, and a 127th of the largest m would be hundreds of steps of a parameter with a
    small v. So v has a relative error of at most c^(1/127) - 1, where c is the largest ratio by which a v of
    the group has changed since the last averaging: 0.6 % if one has doubled, 6 % if one is a thousand times
    as large. m is off by at most a 127th of the group's largest |m| / √v, in units of its own √v; Adam keeps
    |m| / √v below 7.3. The first value of a v is off by up to 12 %, once. If every v were sent like that,
    rounding at random would add up such errors over the 1,000 steps that v remembers, and rounding to nearest
    would stop its decay, which is 1.6 % in 16 steps.

    A v of 0 stays 0, and its m becomes 0. Other v are at least 2^-126, and first ones at least 2^-42 of the
    group's largest. A group with a value that is not finite, or with a negative v, decodes as NaN.

    Decoding adds, multiplies, divides and takes square roots, which IEEE 754 defines to the bit, so that
    unlike processors decode equal bits; encoding needs no such care.

    In (G, 3, S) the order is w, m, v.
    """

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


def average(state: DenseState, group: ProcessGroup, rows: int, step: int, *, rounded: bool = False) -> None:
    """Replace the dense state of all ranks by one, bit-identical on all of them.

    Args:
        state: of this rank; its flush point is the last averaging.
        group: all its ranks call `average`.
        rows: samples that this rank has learned from since the last averaging; without any it sends no state.
        step: of the rank that has made the most steps.
        rounded: send the tensors that Adam steps in about three bytes a parameter, not twelve.

    Raises:
        RankLost: a rank did not answer; go back to the flush point.
        Corrupt: another rank's report cannot be decoded.
    """
    assert state.flush_point is not None, "the state of the last averaging"
    base = state.flush_point.model
    rules, mine = _rules_of(state.model, base), state.model.state() if rows else {}
    tensors = _rounded_tensors(state.model, base) if rounded else ()
    adam = {name for tensor in tensors for name in tensor}
    other = [name for name in sorted(base) if name not in adam]
    large = [name for name in other if rules[name] == "mean" and base[name].dtype == np.float32]
    small = [name for name in base if name not in adam and name not in large]
    report: dict[str, NDArray[Any]] = {ROWS: np.array([rows], np.int64), VECTOR: state.ledger.to_array()}
    report |= {f"{MODEL}{name}": mine[name] for name in small if rows}
    reports = [unpack_arrays(part) for part in group.exchange(pack_arrays(report))]
    try:
        learned = np.array([part[ROWS][0] for part in reports], np.float64)
        vectors = [part[VECTOR].tolist() for part in reports]
        arrays = {name: [part[f"{MODEL}{name}"] for part in reports if part[ROWS][0]] for name in small}
    except KeyError as error:
        raise Corrupt(f"expected the state of another rank, it has no array {error}") from error
    if learned.any():
        shares = _shares(learned[learned > 0], arrays.get(STARTED, ()))
        merged = {name: _merged(rules[name], base[name], parts, shares) for name, parts in arrays.items()}
        began, counted = time.perf_counter(), CountingCollectives(group)
        codecs: list[StateCodec] = [
            WholeFloats(sum(base[name].size for name in large)),
            AdamCodec(_groups(base, tensors), step * group.size + group.rank),
        ]
        own = [_flat(mine, large), _groups(mine, tensors)] if rows else None
        flat, groups = _means_in_parts(counted, codecs, own, learned / learned.sum())
        merged |= _from_flat(flat, base, large) | _from_groups(groups, base, tensors)
        whole = ring_bytes(flat.nbytes + sum(base[name].nbytes for name in adam), group.size)
        coding_s = time.perf_counter() - began - counted.waited_s
        state.sums.count("int8" if rounded else "fp32", whole if rows else whole // 2, counted.sent, coding_s)
        state.model.load_state(merged)
        state.sums.carry = None  # each rank that learned has added it to its own first step
    for vector in vectors:
        state.ledger.raise_to(vector)
    state.progress.steps = step


def _means_in_parts(
    group: Collectives, codecs: Sequence[StateCodec], own: Sequence[F32] | None, shares: F64
) -> list[F32]:
    """Return the mean over the ranks in the units of each codec, of which each rank computes a part.

    Args:
        group: all its ranks call this.
        codecs: equal on all ranks but for random rounding.
        own: values of this rank for each codec; None if it has no share.
        shares: (n,) weights of the ranks.

    Raises:
        RankLost: a rank did not answer.
        Corrupt: another rank sent bytes of another length.
    """
    bounds = [[len(codec) * rank // group.size for rank in range(group.size + 1)] for codec in codecs]
    lengths = [
        [codec.unit_bytes * (b[rank + 1] - b[rank]) for codec, b in zip(codecs, bounds, strict=True)]
        for rank in range(group.size)
    ]
    firsts, mine = [b[group.rank] for b in bounds], lengths[group.rank]
    parts = [np.empty(0, np.uint8)] * group.size
    if own is not None:
        encoded = [codec.encode(values, 0) for codec, values in zip(codecs, own, strict=True)]
        for rank in range(group.size):
            cut = [e[b[rank] : b[rank + 1]].ravel() for e, b in zip(encoded, bounds, strict=True)]
            parts[rank] = np.concatenate(cut)
    received = group.all_to_all(parts, [sum(mine) * bool(share) for share in shares])
    totals: list[Any] = [0.0] * len(codecs)
    for share, part in zip(shares, received, strict=True):
        if share > 0:
            for i, one in enumerate(_split(part, mine)):
                totals[i] = totals[i] + codecs[i].decode(one, firsts[i]) * share
    own_part = [codec.encode(totals[i], firsts[i]).ravel() for i, codec in enumerate(codecs)]
    found = group.all_gather(np.concatenate(own_part), [sum(length) for length in lengths])
    means = [
        [codecs[i].decode(one, bounds[i][rank]).astype(np.float32) for i, one in enumerate(parts)]
        for rank, parts in enumerate(map(_split, found, lengths))
    ]
    return [np.concatenate(parts) for parts in zip(*means, strict=True)]


def _split(data: U8, lengths: Sequence[int]) -> list[U8]:
    """Return the parts of (N,) bytes with these lengths. Raises Corrupt if they are not N bytes together."""
    if len(data) != sum(lengths):
        raise Corrupt(f"expected {sum(lengths)} bytes of another rank's state, found {len(data)}")
    return np.split(data, np.cumsum(lengths)[:-1])


def _rounded_tensors(model: DenseModel, base: State) -> Sequence[Tensor]:
    """Return the tensors that may be rounded; one shorter than a group would take no fewer bytes."""
    tensors = model.adam_tensors if isinstance(model, NamesMoments) else ()
    return [tensor for tensor in tensors if base[tensor[0]].size >= GROUP]


def _flat(state: State, names: Sequence[str]) -> F32:
    """Return the (d,) floats of arrays."""
    return np.concatenate([*(state[name].ravel() for name in names), np.empty(0, np.float32)])


def _from_flat(flat: F32, base: State, names: Sequence[str]) -> dict[str, F32]:
    """Return the arrays of `_flat`."""
    ends = np.cumsum([base[name].size for name in names], dtype=np.int64)
    parts = np.split(flat, ends)[: len(names)]
    return {name: part.reshape(base[name].shape) for name, part in zip(names, parts, strict=True)}


def _groups(state: State, tensors: Sequence[Tensor]) -> F32:
    """Return (G, 3, S) of tensors; none shares a group with another, and zeros fill its last one."""
    parts = [np.empty((0, 3, GROUP), np.float32)]
    for tensor in tensors:
        padded = [np.pad(state[name].ravel(), (0, -state[name].size % GROUP)) for name in tensor]
        parts.append(np.stack([array.reshape(-1, GROUP) for array in padded], axis=1))
    return np.concatenate(parts)


def _from_groups(groups: F32, base: State, tensors: Sequence[Tensor]) -> dict[str, F32]:
    """Return the arrays of `_groups`."""
    arrays, at = {}, 0
    for tensor in tensors:
        shape, size = base[tensor[0]].shape, base[tensor[0]].size
        stop = at - (-size // GROUP)
        for i, name in enumerate(tensor):
            arrays[name] = groups[at:stop, i].reshape(-1)[:size].reshape(shape)
        at = stop
    return arrays


def _rules_of(model: DenseModel, state: State) -> dict[str, MergeRule]:
    """Return the rule of each array: by default the mean of floats, and the largest of integers."""
    own: Mapping[str, MergeRule] = model.merges if isinstance(model, MergesState) else {}
    return {
        name: own.get(name, "mean" if np.issubdtype(array.dtype, np.floating) else "max")
        for name, array in state.items()
    }


def _shares(rows: F64, started: Sequence[NDArray[Any]]) -> dict[MergeRule, F64]:
    """Return the weights of the ranks in a mean: (n,), and for arrays of started labels (n, L).

    Args:
        rows: (n,) samples of each rank that has learned.
        started: (L,) of each of them: 1 for a label that has its starting values; empty without such labels.
    """
    plain = rows / rows.sum()
    shares: dict[MergeRule, F64] = {"mean": plain}
    if len(started):
        counted = rows[:, None] * (np.stack(started) > 0)
        total = counted.sum(0)
        shares["started"] = np.where(total > 0, counted / np.where(total > 0, total, 1.0), plain[:, None])
    return shares


def _merged(
    rule: MergeRule,
    base: NDArray[Any],
    parts: Sequence[NDArray[Any]],
    shares: Mapping[MergeRule, F64],
) -> NDArray[Any]:
    """Merge an array of the ranks that have learned, all of the shape of `base`, of the last averaging."""
    if rule == "max":
        largest: NDArray[Any] = np.maximum.reduce(parts)
        return largest
    if rule == "moments":
        columns = _merged_moments(base.reshape(-1, 3), [part.reshape(-1, 3) for part in parts])
        return columns.reshape(base.shape)
    total = np.zeros(base.shape)
    for i, part in enumerate(parts):
        if rule == "sum":
            total += part.astype(np.float64) - base
            continue
        share = shares[rule][i]
        share = share.reshape(share.shape + (1,) * (base.ndim - share.ndim))
        total += np.where(share > 0, part * share, 0.0)  # what has no share may be NaN
    return (total + base if rule == "sum" else total).astype(base.dtype)


def _merged_moments(base: F64, parts: Sequence[F64]) -> F64:
    """Merge (D, 3) counts, means and Σ (x - mean)², of which each part contains the values of `base`.

    Chan, Golub and LeVeque 1979: their formula takes `base` out of a part, and adds what remains.
    """
    old_n, old_mean, old_squares = base.T
    n, mean, squares = base.T.copy()
    for part_n, part_mean, part_squares in (part.T for part in parts):
        new_n = part_n - old_n
        away = (part_mean - old_mean) * part_n / np.maximum(new_n, 1)  # the mean of the new values - old_mean
        new_squares = part_squares - old_squares - away * away * old_n * new_n / np.maximum(part_n, 1)
        total = n + new_n
        apart, share = old_mean + away - mean, new_n / np.maximum(total, 1)
        mean += apart * share
        squares += np.maximum(new_squares, 0.0) + apart * apart * n * share
        n = total
    return np.stack([n, mean, squares], axis=1)


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
