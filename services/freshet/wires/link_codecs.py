"""The codecs of one link to a peer: as set, or chosen by what the link carries."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from freshet.wires.codecs import RowCodec, gradients_codec, rows_codec
from freshet.wires.link_controller import CodecCost, LinkController, LinkLoad, costs_of

AUTO = "auto"
"""The setting that leaves the choice to the link."""


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
