"""DCT for data parallelism (Gupta et al., 2010.08899): ranks send the values above a threshold alone.

The rest stays as residual, and is added to the next gradient. Ours differs from the paper in these:

- The paper keeps a segment's threshold for thousands of steps. As a gradient's scale drifts, so does the
  share that is sent. Here a servo moves the threshold at each step towards the share that is wanted; outside
  [eta / 2, 4 eta] the largest values are selected exactly.
- Ranks select exactly at different steps, so that they do not all wait for that.
- Sums need no parameter server: each rank gets the frames of all, and adds them in rank order, so the result
  is bit-identical.
- Values are int8 or fp16 with a scale; their rounding error is residual too (`sparse_frame`).

Letters: d floats of a gradient, n ranks, N floats of a segment.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from freshet.trainer.reducers import Collectives
from freshet.trainer.reducers.sparse_frame import Part, Values, decode_frame, encode_frame, quantized
from freshet.types import F32, I64

SHARE = 0.05
"""eta of `train.reduce`: 4 ranks send 15 times fewer bytes than fp32 for an AUC of 0.0009 less; with 0.01
they send 42 times fewer for 0.0018 less (`bench.reducers --steps 3000`)."""
SMALL = 256
"""Floats of a segment up to which all of it is sent: a selection would save nothing."""
GAIN, SLOWEST, FASTEST = 0.1, 0.8, 1.25
"""The servo: threshold *= clamp((share / eta)^GAIN, SLOWEST, FASTEST)."""
LEAST, MOST = 0.5, 4.0
"""Shares, in eta, outside which the values are selected exactly."""
LARGEST = 2.0**126
"""Values from here on count as not finite: code × scale could overflow."""
LAST_EARLY = 512
"""Exact selections happen at steps 1, 2, 4, … up to this one, then every `refresh_steps`."""


@dataclass(slots=True)
class Segment:
    """A tensor of the gradient, which has a threshold of its own."""

    start: int
    stop: int
    threshold: float = 0.0


class Dct:
    """A `Reducer` that sends about a share of eta of each segment in a step."""

    def __init__(
        self, ends: Sequence[int], share: float, values: Values = Values.INT8, refresh_steps: int = 1000
    ) -> None:
        """`ends`: where each segment ends, rising, the last at d; `share`: eta."""
        starts = [0, *ends[:-1]]
        self.segments = [Segment(a, b) for a, b in zip(starts, ends, strict=True)]
        self.sizes = [segment.stop - segment.start for segment in self.segments]
        self.share, self.values, self.refresh_steps = share, values, refresh_steps
        self.residual: F32 = np.zeros(ends[-1], np.float32)
        self.steps = 0

    def reduce(self, group: Collectives, gradient: F32) -> None:
        """Replace this rank's (d,) gradient by the sum over the ranks, as far as this step delivers it.

        A segment with a value that is not finite, or beyond 2^126, becomes NaN in the sum; its residual
        stays as it was.

        Raises:
            RankLost: a rank does not answer; residuals are void, so call `reset`.
            Corrupt: a rank sent bytes that are no frame of these segments.
        """
        self.steps += 1
        exact = self._is_exact(group)
        whole = gradient + self.residual
        parts = [self._part(segment, whole[segment.start : segment.stop], exact) for segment in self.segments]
        for segment, part in zip(self.segments, parts, strict=True):
            if not np.isnan(part.scale):
                rest = whole[segment.start : segment.stop]
                rest[part.indexes] -= part.values()
                self.residual[segment.start : segment.stop] = rest
        frames = group.all_gather(encode_frame(parts, self.sizes, self.values))
        gradient.fill(0)
        for frame in frames:
            for segment, part in zip(self.segments, decode_frame(frame, self.sizes), strict=True):
                values = gradient[segment.start : segment.stop]
                if np.isnan(part.scale):
                    values.fill(np.nan)
                else:
                    values[part.indexes] += part.values()

    def flush(self, group: Collectives) -> F32:
        """Return the (d,) sum over the ranks of all that `reduce` has not delivered, and forget it.

        Raises RankLost if a rank does not answer.
        """
        rest = self.residual.copy()
        self.reset()
        group.reduce([rest])
        return rest

    def reset(self) -> None:
        """Forget residuals; thresholds stay, as they are no part of a gradient."""
        self.residual.fill(0)

    def _is_exact(self, group: Collectives) -> bool:
        if self.steps <= LAST_EARLY:
            return self.steps & (self.steps - 1) == 0
        offset = self.refresh_steps * group.rank // group.size
        return (self.steps + offset) % self.refresh_steps == 0

    def _part(self, segment: Segment, values: F32, exact: bool) -> Part:
        """Select and round what is sent of a segment's (N,) values."""
        if not np.all(np.abs(values) < LARGEST):
            return Part(np.empty(0, np.int64), np.empty(0, self.values.dtype), np.nan)
        if len(values) <= SMALL:
            indexes: I64 = np.arange(len(values))
        else:
            indexes = self._select(segment, np.abs(values), exact)
        return quantized(values[indexes], indexes, self.values)

    def _select(self, segment: Segment, sizes: F32, exact: bool) -> I64:
        """Return the rising indexes of the values of (N,) absolute `sizes` to send; move the threshold."""
        wanted = self.share * len(sizes)
        count = max(1, round(wanted))
        if not exact:
            chosen = np.flatnonzero(sizes >= segment.threshold)
            exact = not LEAST * wanted <= len(chosen) <= MOST * max(wanted, 1.0)
        if exact:
            largest = np.argpartition(sizes, len(sizes) - count)[len(sizes) - count :]
            segment.threshold = float(sizes[largest].min())
            chosen = np.sort(largest[sizes[largest] > 0])
        else:
            pace = (len(chosen) / wanted) ** GAIN
            segment.threshold *= min(max(pace, SLOWEST), FASTEST)
        return chosen
