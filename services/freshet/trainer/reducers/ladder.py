"""The reducer that follows the links between ranks: whole gradients, or rounded ones where that pays.

It times the sums of real steps with each codec of `LADDER`, and takes the most exact one with which a step
takes at most `SLACK` longer than with the fastest. So the time to encode and decode, the links of all ranks
and their number are counted as they are, and a codec that costs more than it saves is not taken. The idea is
that of AdaTopK (FusionLLM, 2410.12707), where a controller picks a top-k ratio for each link by its
bandwidth; a sum has one codec for all links, as every rank waits for the slowest.

The codec changes at flush points only, when no rank has a residual. Rank 0 decides, and the others learn its
choice with the flush; the codec is part of the dense state, so a rank that joins has it too.

Letters: d floats of a gradient.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from freshet.trainer.reducers import Collectives, PlainReducer, Reducer
from freshet.trainer.reducers.group_codecs import IntegerCodec
from freshet.trainer.reducers.two_phase import TwoPhase
from freshet.types import F32

LADDER = ("fp32", "int8", "int4")
"""From exact to short. bf16 saves half of what int8 saves, and int8 with its residuals costs no AUC either;
dct has no momentum and needs Adam, so it is another optimiser: no one gets it unasked."""

SLACK = 0.05
"""Part of a step that a more exact codec may cost."""

RELAX = 0.7
"""A codec more exact than the present one is taken only within RELAX · SLACK: hysteresis."""

MOST_STEPS, LEAST_STEPS, PROBE_S = 16, 3, 0.5
"""Timed steps of a probe of one codec: MOST_STEPS, or fewer once they took PROBE_S, but LEAST_STEPS."""

EVERY_S, SHARE = 30.0, 0.02
"""Seconds between two rounds of probes; longer if slower codecs would cost more than SHARE of the time."""

CHANGED, SOONER = 1.5, 0.1
"""If the time of a sum changes by the ratio CHANGED, the next round comes after SOONER of this time."""


@dataclass(slots=True)
class Times:
    """Seconds of timed steps with one codec."""

    sums: list[float] = field(default_factory=list)
    steps: list[float] = field(default_factory=list)  # from the end of one sum to that of the next

    def add(self, sum_s: float, step_s: float) -> None:
        """Add a step; the newest count, so that a change of the links shows."""
        if self.enough:
            del self.sums[0], self.steps[0]
        self.sums.append(sum_s)
        self.steps.append(step_s)

    @property
    def enough(self) -> bool:
        """Whether a median of these means something."""
        return len(self.sums) >= (LEAST_STEPS if sum(self.steps) >= PROBE_S else MOST_STEPS)

    @property
    def sum_s(self) -> float:
        """Seconds of a sum."""
        return statistics.median(self.sums)

    @property
    def rest_s(self) -> float:
        """Seconds of a step besides its sum."""
        return max(statistics.median(self.steps) - self.sum_s, 0.0)

    @property
    def is_slack(self) -> bool:
        """Whether a sum takes so little of a step that no codec can win."""
        return self.sum_s <= SLACK * statistics.median(self.steps)


class LadderReducer:
    """A `Reducer` that takes a codec of `LADDER`, and changes it when it is flushed."""

    def __init__(self, size: int, clock: Callable[[], float] = time.perf_counter) -> None:
        """Begin with whole gradients. `size`: d; `clock`: seconds."""
        self._reducers: tuple[Reducer, ...] = (
            PlainReducer(),
            TwoPhase(IntegerCodec(8), size),
            TwoPhase(IntegerCodec(4), size),
        )
        self._clock = clock
        self._at = self._chosen = 0  # the codec in use, and the one of the last round of probes
        self._place: tuple[int, int] | None = None  # rank and ranks
        self._ended: float | None = None  # the last sum; None: the next is not timed
        self._times = Times()  # with the codec in use
        self._probed: dict[int, Times] = {}  # of this round of probes
        self._probing = True
        self._rounded = clock()  # the end of the last round
        self._pause = 0.0  # between two rounds
        self._sum_s = 0.0  # with the chosen codec, in the last round
        self.reason = "nothing has been measured yet"

    @property
    def codec(self) -> str:
        """The codec in use."""
        return LADDER[self._at]

    @property
    def flush_due(self) -> bool:
        """Whether rank 0 wants a flush, at which the codec may change."""
        if not self._times.enough or self._probing:
            return self._times.enough
        same = self._sum_s / CHANGED <= self._times.sum_s <= self._sum_s * CHANGED
        return self._clock() >= self._rounded + self._pause * (1.0 if same else SOONER)

    def reduce(self, group: Collectives, gradient: F32) -> None:
        """Replace this rank's (d,) gradient by the sum over the ranks, as far as this step delivers it.

        Raises RankLost, Corrupt and ValueError as the codec's own reducer does.
        """
        if self._place != (group.rank, group.size):
            self._place = (group.rank, group.size)
            self._probe_anew()
        began = self._clock()
        self._reducers[self._at].reduce(group, gradient)
        ended, before = self._clock(), self._ended
        self._ended = ended
        if before is not None:  # neither the first sum with a codec, which allocates, nor one after a flush
            self._times.add(ended - began, ended - before)

    def flush(self, group: Collectives) -> F32:
        """Return the (d,) sum over the ranks of all that `reduce` has not delivered, and forget it.

        Changes the codec if rank 0 wants that. Raises RankLost.
        """
        rest = self._reducers[self._at].flush(group)
        codec = np.zeros(1)
        if group.rank == 0:
            codec[0] = self._next_codec() if self.flush_due else self._at
        else:
            self.reason = "rank 0 chose it, and says why"
        group.reduce([codec])
        self._change_to(int(codec[0]))
        self._ended = None
        return rest

    def reset(self) -> None:
        """Forget residuals, and what was timed: a rank was lost, or this one has joined."""
        for reducer in self._reducers:
            reducer.reset()
        self._probe_anew()

    def state(self) -> Mapping[str, NDArray[Any]]:
        """Return the place of the codec in LADDER."""
        return {"codec": np.array([self._at])}

    def load_state(self, state: Mapping[str, NDArray[Any]]) -> None:
        """Load what `state` returned, and forget residuals."""
        self.reset()
        self._change_to(min(max(int(state["codec"][0]), 0), len(LADDER) - 1))

    def _change_to(self, codec: int) -> None:
        if codec != self._at:
            self._at, self._times, self._ended = codec, Times(), None

    def _probe_anew(self) -> None:
        self._probing, self._probed, self._times, self._ended = True, {}, Times(), None

    def _next_codec(self) -> int:
        """Return the codec to use from now on: the next to be probed, or the one that the probes favour."""
        now = self._clock()
        if not self._probing:
            self._probing, self._probed = True, {}
        self._probed[self._at] = self._times
        missing = [codec for codec in range(len(LADDER)) if codec not in self._probed]
        if missing and not (0 in self._probed and self._probed[0].is_slack):
            return missing[0]
        self._choose()
        self._probing, self._rounded = False, now
        least = min(times.sum_s for times in self._probed.values())
        cost = sum(len(times.sums) * (times.sum_s - least) for times in self._probed.values())
        self._pause = max(EVERY_S, cost / SHARE)
        return self._chosen

    def _choose(self) -> None:
        """Choose the codec that the probes favour, and say why."""
        sums = {codec: times.sum_s for codec, times in self._probed.items()}
        rest, least = statistics.median(times.rest_s for times in self._probed.values()), min(sums.values())
        allowed = SLACK * (rest + least)
        self._chosen = min(
            codec
            for codec, s in sums.items()
            if s - least <= allowed * (RELAX if codec < self._chosen else 1.0)
        )
        self._sum_s = sums[self._chosen]
        self.reason = f"a sum takes {_ms(self._sum_s)} of a step of {_ms(rest + self._sum_s)}"
        if self._chosen:
            self.reason += f", in fp32 {_ms(sums[0])}" if 0 in sums else ""
        else:
            self.reason += (
                "; it needs no codec" if len(sums) < len(LADDER) else "; codecs would not save a twentieth"
            )


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"
