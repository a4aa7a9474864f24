"""The choice of a link's codec: the most exact one that does not keep the link busy.

The idea of AdaTopK (FusionLLM, 2410.12707): compress on slow links only, by the goodput of each. Ours
chooses from a ladder of codecs instead of a top-k ratio, and counts the processor's time as well: a link is
*busy* for the share of time in which it sends values, or in which its ends encode and decode them. So
compression that costs more than it saves never starts, and ends when a link becomes faster.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from freshet.types import F32
from freshet.wires.codecs import (
    RowCodec,
    RowFormat,
    format_for,
    gradients_codec,
    pack_rows,
    rows_codec,
    unpack_rows,
)

LADDER = ("fp32", "bf16", "int8", "int4")
"""From exact to short."""

BUSY = 0.05
"""Share of time for which a link may be busy before it compresses: that is all compression could win."""

RELAX = 0.7
"""A more exact codec is taken only if the link is then busy for less than RELAX · BUSY: hysteresis."""

GAIN = 0.9
"""A shorter codec is taken only if the link is then busy for less than GAIN times as long."""

HOLD_S = 10.0
"""Seconds for which a codec is kept before a more exact one is tried; a shorter one is taken at once."""


@dataclass(frozen=True, slots=True)
class CodecCost:
    """What a codec costs for a byte of float32 values."""

    name: str  # as in LADDER
    ratio: float  # bytes sent
    seconds: float  # to encode and decode it


@dataclass(frozen=True, slots=True)
class LinkLoad:
    """What a link carried in the last interval, in one direction."""

    goodput: float  # bytes a second that it can carry
    values: float  # bytes a second of values, as float32
    rest: float = 0.0  # bytes a second of keys, indexes and whatever no codec shortens

    def busy(self, cost: CodecCost) -> float:
        """Return the share of time for which a codec would keep the link busy; above 1: always."""
        sent = self.values * cost.ratio + self.rest
        return sent / self.goodput + self.values * cost.seconds if self.goodput > 0 else math.inf


class LinkController:
    """Chooses the codec of one direction of one link. One thread at a time uses it."""

    def __init__(self, costs: Sequence[CodecCost], first: str = LADDER[0]) -> None:
        """Begin with the codec `first`. `costs`: in the order of LADDER."""
        self._costs = tuple(costs)
        self._at = [cost.name for cost in costs].index(first)
        self._changed_s = -math.inf
        self.reason = "nothing has been measured yet"

    @property
    def codec(self) -> str:
        """The name of the codec to use now."""
        return self._costs[self._at].name

    @property
    def ratio(self) -> float:
        """Bytes sent for a byte of float32 values in the codec of now."""
        return self._costs[self._at].ratio

    def decide(self, load: LinkLoad, now_s: float) -> bool:
        """Choose by what the link carried in the last interval; returns whether the codec changed.

        A link that carried no values keeps its codec: an idle one says nothing of the next hour's traffic.
        `now_s`: a monotonic clock.
        """
        if load.values <= 0:
            self.reason = f"it carried nothing lately, at {_rate(load.goodput)}"
            return False
        busy = [load.busy(cost) for cost in self._costs]
        wanted = next((i for i, share in enumerate(busy) if share <= BUSY), busy.index(min(busy)))
        before = self._at
        if wanted > before and busy[wanted] < GAIN * busy[before]:
            self._at, self._changed_s = wanted, now_s
        elif wanted < before and now_s >= self._changed_s + HOLD_S:
            relaxed = [i for i in range(before) if busy[i] <= RELAX * BUSY or busy[i] < GAIN * busy[before]]
            if relaxed:
                self._at, self._changed_s = min(relaxed, key=lambda i: (busy[i] > BUSY, i)), now_s
        self.reason = self._explain(load, busy)
        return self._at != before

    def _explain(self, load: LinkLoad, busy: Sequence[float]) -> str:
        exact, now, at = self._costs[0], self._costs[self._at], _rate(load.goodput)
        text = f"busy {_percent(busy[self._at])} of the time at {at}"
        if self._at == 0:
            waits = busy[0] > BUSY
            return text + ("; codecs would cost what they save" if waits else "; it needs no codec")
        text += f", in {exact.name} {_percent(busy[0])}"
        return text + f"; encoding and decoding take {_percent(load.values * now.seconds)}"


def _rate(goodput: float) -> str:
    return f"{goodput / 1e6:.3g} MB/s"


def _percent(share: float) -> str:
    return f"{share:.1%}" if share < 0.1 else f"{share:.0%}"


SAMPLE_BYTES = 256 << 10
"""Size of the array by which codecs are timed: it stays in the second-level cache, as a batch's rows do."""

ROUNDS = 5


@lru_cache(maxsize=64)
def costs_of(width: int, scalars: int, *, gradients: bool) -> tuple[CodecCost, ...]:
    """Time the codecs of LADDER on this machine, on rows of `width` floats of which the first are `scalars`.

    Takes about 5 ms, once for each kind of row.
    """
    rows = max(SAMPLE_BYTES // (4 * width), 1)
    values = np.random.default_rng(1).normal(size=(rows, width)).astype(np.float32)
    out = np.empty_like(values)
    costs = []
    for name in LADDER:
        form = format_for(gradients_codec(name) if gradients else rows_codec(name), width, scalars)
        seconds = 0.0
        if form.codec is not RowCodec.FP32:
            seconds = min(_timed(values, form, out) for _ in range(ROUNDS)) / values.nbytes
        costs.append(CodecCost(name, form.row_bytes / (4 * width), seconds))
    return tuple(costs)


def _timed(values: F32, form: RowFormat, out: F32) -> float:
    began = time.perf_counter()
    unpack_rows(pack_rows(values, form, seed=1), form, out)
    return time.perf_counter() - began
