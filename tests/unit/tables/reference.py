"""Reference of rows in numpy: initial values and update rules, in the native core's order of steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from freshet.types import F32, U32

MASK = 0xFFFF_FFFF_FFFF_FFFF
GOLDEN = 0x9E3779B97F4A7C15
f = np.float32


def mix(x: int) -> int:
    """The finaliser of splitmix64 with Stafford's constants, variant 13."""
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def initial_values(seed: int, table: int, key: int, width: int, init: float, start: int = 0) -> F32:
    """Floats [start, start + width) of a new row: uniform in ± init."""
    stream = mix(mix((mix((seed + GOLDEN) & MASK) + (table + 1) * GOLDEN) & MASK) ^ key)
    values = []
    for j in range(start, start + width):
        both = mix((stream + (j // 2 + 1) * GOLDEN) & MASK)
        half = both >> 32 if j % 2 else both & 0xFFFF_FFFF
        values.append(f((half >> 8) - (1 << 23)) * (f(init) * f(2.0**-23)))
    return np.array(values, np.float32)


def squared_sum(x: F32) -> np.float32:
    """Lane j adds floats j, j + 16, ...; then lanes are halved."""
    lanes = np.zeros(16, np.float32)
    for i in range(0, len(x), 16):
        piece = x[i : i + 16]
        lanes[: len(piece)] += piece * piece
    for half in (8, 4, 2, 1):
        lanes = lanes[:half] + lanes[half : 2 * half]
    return np.float32(lanes[0])


MOST_SUM, MOST_VALUE = np.finfo(np.float32).max, np.uint32(0x7F7F0000).view(np.float32)
TINY = np.finfo(np.float32).smallest_subnormal


def add_square(total: F32 | np.float32, squared: F32 | np.float32) -> F32:
    """Add squared gradients to their sum, which stays finite."""
    return np.asarray(np.minimum(total + squared, MOST_SUM))


def bounded(x: F32 | np.float32) -> F32:
    """Limit values to those of bf16, whose largest no rounding takes to infinity."""
    return np.asarray(np.clip(x, -MOST_VALUE, MOST_VALUE))


def above_zero(p: Mapping[str, float], name: str) -> np.float32:
    """Return a divisor, which float32 must not round to 0."""
    return f(p[name]) or TINY


def sgd(p: Mapping[str, float], w: F32, state: F32, g: F32) -> None:
    w -= f(p["lr"]) * g


def adagrad(p: Mapping[str, float], w: F32, state: F32, g: F32) -> None:
    """Duchi et al. 2011, eq. 1, diagonal."""
    state[:] = add_square(state, g * g)
    w -= f(p["lr"]) * g / (np.sqrt(state) + above_zero(p, "eps"))


def rowwise_adagrad(p: Mapping[str, float], w: F32, state: F32, g: F32) -> None:
    """One accumulator a row, the mean of its squared gradient: Mudigere et al. 2021, §4."""
    state[0] = add_square(state[0], squared_sum(g) / f(len(g)))
    w -= bounded(f(p["lr"]) / (np.sqrt(state[0]) + above_zero(p, "eps"))) * g


def rowwise_rmsprop(p: Mapping[str, float], w: F32, state: F32, g: F32) -> None:
    """Hinton's lecture 6e of 2012, with one mean a row."""
    decay = f(p["decay"])
    state[0] = add_square(decay * state[0], (f(1) - decay) * (squared_sum(g) / f(len(g))))
    w -= bounded(f(p["lr"]) / (np.sqrt(state[0]) + above_zero(p, "eps"))) * g


def adam(p: Mapping[str, float], w: F32, state: F32, g: F32) -> None:
    """Kingma and Ba 2015, algorithm 1; `state`: steps, means, mean squares."""
    n = len(w)
    b1, b2 = f(p["beta1"]), f(p["beta2"])
    state[0] += 1
    c1 = f(1.0 - power(float(b1), int(state[0])))
    c2 = f(1.0 - power(float(b2), int(state[0])))
    m, q = state[1 : n + 1], state[n + 1 :]
    m[:] = b1 * m + (f(1) - b1) * g
    q[:] = add_square(b2 * q, (f(1) - b2) * g * g)
    w[:] = bounded(w - f(p["lr"]) * (m / c1) / (np.sqrt(q / c2) + above_zero(p, "eps")))


def power(beta: float, t: int) -> float:
    """beta^t by squaring, low bit first."""
    result = 1.0
    while t:
        if t & 1:
            result *= beta
        t >>= 1
        beta *= beta
    return result


def ftrl(p: Mapping[str, float], w: F32, state: F32, g: F32) -> None:
    """McMahan et al. 2013, algorithm 1; `state`: z, sums of squares."""
    n = len(w)
    z, total = state[:n], state[n:]
    lr, beta, l1, l2 = above_zero(p, "lr"), *(f(p[name]) for name in ("beta", "l1", "l2"))
    after = add_square(total, g * g)
    root = np.sqrt(after)
    sigma = bounded(((root - np.sqrt(total)) / lr).astype(np.float32))
    z[:] = bounded(z + (g - sigma * w))
    total[:] = after
    moved = -(z - np.copysign(l1, z)) / ((beta + root) / lr + l2)
    w[:] = np.where(np.abs(z) <= l1, f(0), bounded(moved))


COUNT_BUCKETS = 12
MOST_STEPS = 2**24


def count_bucket(steps: int) -> int:
    """0, 1, 2-3 steps and so on by powers of two of one more; the last bucket has no end."""
    return min((steps + 1).bit_length() - 1, COUNT_BUCKETS - 1)


def count(p: Mapping[str, float], w: F32, state: F32, g: F32) -> None:
    """How often the row was stepped by a gradient that is not above 0; `state`: steps."""
    state[0] = min(state[0] + (g[0] <= 0), MOST_STEPS)
    w[:] = f(count_bucket(int(state[0])) / 32)


def first_state(name: str, p: Mapping[str, float], w: F32) -> F32:
    """Return the state of a new row."""
    n = len(w)
    if name == "ftrl":
        z = bounded(-w * (f(p["beta"]) / above_zero(p, "lr") + f(p["l2"])) - np.copysign(f(p["l1"]), w))
        return np.concatenate([np.where(w == 0, f(0), z), np.zeros(n, np.float32)]).astype(np.float32)
    floats = {
        "sgd": 0,
        "adagrad": n,
        "rowwise_adagrad": 1,
        "rowwise_rmsprop": 1,
        "adam": 1 + 2 * n,
        "count": 1,
    }[name]
    return np.full(floats, p.get("initial_accumulator", 0.0), np.float32)


Step = Callable[[Mapping[str, float], F32, F32, F32], None]
STEPS: dict[str, Step] = {
    "sgd": sgd,
    "adagrad": adagrad,
    "rowwise_adagrad": rowwise_adagrad,
    "rowwise_rmsprop": rowwise_rmsprop,
    "adam": adam,
    "ftrl": ftrl,
    "count": count,
}


def to_bf16(x: F32) -> F32:
    """Round to the nearest bf16, ties to even, as float32."""
    bits = x.view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) & np.uint32(0xFFFF0000)
    return rounded.view(np.float32)


def noise(key: int, steps: int, width: int) -> U32:
    """Return the noise that decides the rounding of each float in a row's step."""
    seed = np.uint32(((key ^ (key >> 32)) + steps % 65536 * 0x85EBCA6B) & 0xFFFF_FFFF)
    x = seed + np.arange(width, dtype=np.uint32) * np.uint32(0x9E3779B9)
    x = (x ^ (x >> np.uint32(16))) * np.uint32(0x7FEB352D)
    x = (x ^ (x >> np.uint32(15))) * np.uint32(0x846CA68B)
    return x ^ (x >> np.uint32(16))


def to_bf16_by_chance(x: F32, key: int, steps: int) -> F32:
    """bf16 below or above, by the noise of the row's step, as float32."""
    bits = x.view(np.uint32) + (noise(key, steps, len(x)) & np.uint32(0xFFFF))
    return (bits & np.uint32(0xFFFF0000)).view(np.float32)
