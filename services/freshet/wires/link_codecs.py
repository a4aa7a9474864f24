"""The codecs of one link to a peer: as set, or chosen by what the link carries.

A link that chooses takes the most exact codec that does not keep it busy. The idea of AdaTopK (FusionLLM,
2410.12707): compress on slow links only, by the goodput of each. Ours chooses from a ladder of codecs instead
of a top-k ratio, and counts the processor's time as well: a link is *busy* for the share of time in which it
sends values, or in which its ends encode and decode them. So compression that costs more than it saves never
starts, and ends when a link becomes faster.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

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

AUTO = "auto"
"""The setting that leaves the choice to the link."""

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

SAMPLE_BYTES = 256 << 10
"""Size of the array by which codecs are timed: it stays in the second-level cache, as a batch's rows do."""

ROUNDS = 5


@dataclass(frozen=True, slots=True)
class CodecChoice:
    """The settings of a client's links, and the rows that they carry."""

    rows: str = "fp32"  # to the client: a codec of `wires.codecs`, or AUTO
    gradients: str = "fp32"  # from the client
    width: int = 1  # floats of the widest row, by which codecs are timed
    scalars: int = 0  # floats of it before its vector

    @classmethod
    def of(cls, rows: str, gradients: str, shapes: Sequence[tuple[int, int]]) -> CodecChoice:
        """Return the choice for store groups with these (floats of a row, floats before its vector)."""
        return cls(rows, gradients, *max(shapes, default=(1, 0)))


EXACT = CodecChoice()
"""Rows and gradients in fp32."""


@dataclass(slots=True)
class LinkTraffic:
    """What a link carried since its creation."""

    rows_raw: int = 0  # bytes of rows that came, as float32
    gradients_raw: int = 0  # bytes of gradients that went, as float32
    received: int = 0  # bytes of all messages
    sent: int = 0


@dataclass(frozen=True, slots=True)
class Goodput:
    """What a link can carry: bytes a second in each direction, as probes found them."""

    up: float
    down: float


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


class LinkCodecs:
    """Chooses the codecs of one link. Thread-safe; `decide` is for one thread."""

    def __init__(self, choice: CodecChoice, *, same_host: bool) -> None:
        """Begin with fp32 on this host, with int8 to another one, until `decide` knows better."""
        self._choice, self._same_host = choice, same_host
        self.traffic = LinkTraffic()
        self._before, self._before_s = LinkTraffic(), float("nan")
        self._lock = threading.Lock()
        self._rows = self._controller(choice.rows, gradients=False)
        self._gradients = self._controller(choice.gradients, gradients=True)

    @property
    def rows(self) -> RowCodec:
        """The codec in which to ask for rows."""
        return rows_codec(self._name(self._choice.rows, self._rows))

    @property
    def gradients(self) -> RowCodec:
        """The codec in which to send gradients."""
        return gradients_codec(self._name(self._choice.gradients, self._gradients))

    @property
    def is_measured(self) -> bool:
        """Whether a direction is chosen by `decide`."""
        return self._rows is not None or self._gradients is not None

    @property
    def saves_bytes(self) -> bool:
        """Whether bytes are worth work at both ends: not if the link chooses and the peer is on this host."""
        return not (self._same_host and AUTO in {self._choice.rows, self._choice.gradients})

    def count_rows(self, raw_bytes: int) -> None:
        """Count rows that came: their bytes as float32."""
        with self._lock:
            self.traffic.rows_raw += raw_bytes

    def count_gradients(self, raw_bytes: int) -> None:
        """Count gradients that went: their bytes as float32."""
        with self._lock:
            self.traffic.gradients_raw += raw_bytes

    def decide(self, goodput: Goodput, received: int, sent: int, now_s: float) -> bool:
        """Choose codecs by the traffic since the last call; returns whether one changed.

        Args:
            goodput: what the link can carry now.
            received: bytes of all messages that came since the link's creation.
            sent: bytes of all messages that went.
            now_s: a monotonic clock.
        """
        with self._lock:
            now = replace(self.traffic, received=received, sent=sent)
        before, seconds = self._before, now_s - self._before_s
        self._before, self._before_s = now, now_s
        if not seconds > 0:  # the first call, or the same moment
            return False
        rows, gradients = now.rows_raw - before.rows_raw, now.gradients_raw - before.gradients_raw
        changed = False
        for controller, rate, values, whole in (
            (self._rows, goodput.down, rows, received - before.received),
            (self._gradients, goodput.up, gradients, sent - before.sent),
        ):
            if controller is not None:
                rest = max(0.0, whole - values * controller.ratio) / seconds
                changed |= controller.decide(LinkLoad(rate, values / seconds, rest), now_s)
        return changed

    def status(self) -> dict[str, Any]:
        """Return codec and reason of each direction, for `freshet status`."""
        return {
            "rows": self._described(self._choice.rows, self._rows),
            "gradients": self._described(self._choice.gradients, self._gradients),
        }

    def _controller(self, setting: str, *, gradients: bool) -> LinkController | None:
        if setting != AUTO or self._same_host:
            return None
        costs: tuple[CodecCost, ...] = costs_of(self._choice.width, self._choice.scalars, gradients=gradients)
        return LinkController(costs, first="int8")

    def _name(self, setting: str, controller: LinkController | None) -> str:
        if controller is not None:
            return controller.codec
        return "fp32" if setting == AUTO else setting

    def _described(self, setting: str, controller: LinkController | None) -> dict[str, str]:
        why = "as set" if setting != AUTO else "the peer is on this host"
        if controller is not None:
            why = controller.reason
        return {"codec": self._name(setting, controller), "why": why}


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
            seconds = min(_timed(values, form, out, int(gradients)) for _ in range(ROUNDS)) / values.nbytes
        costs.append(CodecCost(name, form.row_bytes / (4 * width), seconds))
    return tuple(costs)


def _timed(values: F32, form: RowFormat, out: F32, seed: int) -> float:
    began = time.perf_counter()
    unpack_rows(pack_rows(values, form, seed), form, out)
    return time.perf_counter() - began


def _rate(goodput: float) -> str:
    return f"{goodput / 1e6:.3g} MB/s"


def _percent(share: float) -> str:
    return f"{share:.1%}" if share < 0.1 else f"{share:.0%}"
