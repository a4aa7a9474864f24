"""The compressed all-reduce in two phases, with error feedback in both: `TwoPhase`.

The gradient is cut into groups; each rank owns about an n-th of them. A step does this, in the terms of
1-bit Adam (Tang et al., 2102.02888, section 4):

    each rank:   h = x + e_w;  send each owner its groups of encode(h);  e_w = h - decode(encode(h))
    each owner:  t = sum of the ranks' decoded groups, in rank order, + e_s;  send all ranks encode(t);
                 e_s = t - decode(encode(t))
    each rank:   the result is decode(encode(t)) of all owners

All ranks decode the same bytes, so they get the same bits. What the results have not delivered is e_w of all
ranks and e_s of all owners: sum of results + residuals = sum of gradients.

Letters: d floats of a gradient, n ranks, G groups, S floats of a group.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from freshet.errors import Corrupt
from freshet.trainer.reducers import Collectives
from freshet.trainer.reducers.group_codecs import GroupCodec
from freshet.types import F32, U8


class TwoPhase:
    """A `Reducer` that sends a codec's bytes, to the owners of groups and from them to all ranks."""

    def __init__(self, codec: GroupCodec, size: int) -> None:
        """`size`: d."""
        self.codec, self.size = codec, size
        self.groups = -(-size // codec.group)
        self._sent = self._zeros(0, self.groups)  # e_w
        self._owned: F32 = self._sent[:0]  # e_s
        self._place: tuple[int, int] | None = None  # rank and ranks of the residuals

    def reduce(self, group: Collectives, gradient: F32) -> None:
        """Replace this rank's (d,) gradient by the sum over the ranks, as far as this step delivers it.

        A group with a value that is not finite becomes NaN in the sum; its residuals stay as they were.

        Raises:
            RankLost: a rank does not answer; residuals are void, so call `reset`.
            Corrupt: a rank sent bytes of another length.
            ValueError: ranks joined or left while there were residuals.
        """
        bounds = self._settle(group)
        first, stop = bounds[group.rank], bounds[group.rank + 1]
        values = self._zeros(0, self.groups)
        values.reshape(-1)[: self.size] = gradient
        packed, self._sent = self._encode(values, self._sent, 0)
        parts = [packed[bounds[j] : bounds[j + 1]].reshape(-1) for j in range(group.size)]
        received = group.all_to_all(parts, [parts[group.rank].nbytes] * group.size)
        total = self._zeros(first, stop)
        for part in received:
            total += self._decode(part, first, stop)
        mine, self._owned = self._encode(total, self._owned, first)
        found = group.all_gather(mine.reshape(-1), [part.nbytes for part in parts])
        for j, part in enumerate(found):
            result = self._decode(part, bounds[j], bounds[j + 1]).reshape(-1)
            start = bounds[j] * self.codec.group
            gradient[start : start + len(result)] = result[: self.size - start]

    def flush(self, group: Collectives) -> F32:
        """Return the (d,) sum over the ranks of all that `reduce` has not delivered, and forget it.

        Raises RankLost if a rank does not answer.
        """
        rest = self.undelivered(group)
        self.reset()
        group.reduce([rest])
        return rest

    def undelivered(self, group: Collectives) -> F32:
        """Return this rank's (d,) part of all that `reduce` has not delivered; the parts' sum is the whole.

        Raises ValueError if ranks joined or left while there were residuals.
        """
        bounds = self._settle(group)
        rest = self._sent.copy()
        rest[bounds[group.rank] : bounds[group.rank + 1]] += self._owned
        return rest.reshape(-1)[: self.size]

    def reset(self) -> None:
        """Forget residuals."""
        self._sent.fill(0)
        self._owned.fill(0)

    def rescale(self, factors: F32) -> None:
        """Multiply residuals by (d,) factors, as those of later gradients are in other units."""
        padded = self._zeros(0, self.groups)
        padded.reshape(-1)[: self.size] = factors
        self._sent *= padded
        if self._place is not None:
            rank, ranks = self._place
            bounds = self._bounds(ranks)
            self._owned *= padded[bounds[rank] : bounds[rank + 1]]

    def _settle(self, group: Collectives) -> Sequence[int]:
        """Return (n + 1,) where the groups of each owner start, and allocate residuals of own groups."""
        bounds = self._bounds(group.size)
        place = (group.rank, group.size)
        if place != self._place:
            if self._owned.any() or self._sent.any():
                raise ValueError(f"expected a flush before rank {self._place} of ranks becomes {place}")
            self._owned = self._zeros(bounds[group.rank], bounds[group.rank + 1])
            self._place = place
        return bounds

    def _bounds(self, ranks: int) -> Sequence[int]:
        return [self.groups * j // ranks for j in range(ranks + 1)]

    def _encode(self, values: F32, residual: F32, first: int) -> tuple[U8, F32]:
        """Encode values + residual, (G, S) in groups from `first` on.

        Returns the bytes, and what they leave out: the next residual, in the memory of `values`.
        """
        values += residual
        packed = self.codec.encode(values, self._real(first, first + len(values)))
        values -= self._decode(packed.reshape(-1), first, first + len(values))
        broken = np.isnan(values[:, 0])  # all of a group that is not finite
        values[broken] = residual[broken]
        return packed, values

    def _decode(self, part: U8, first: int, stop: int) -> F32:
        """Decode groups [first, stop) as (stop - first, S) floats, padding as 0."""
        expected = (stop - first) * self.codec.group_bytes
        if len(part) != expected:
            raise Corrupt(f"expected {expected} bytes of groups [{first}, {stop}), found {len(part)}")
        values = self.codec.decode(part.reshape(stop - first, self.codec.group_bytes))
        values.reshape(-1)[self._real(first, stop) :] = 0
        return values

    def _real(self, first: int, stop: int) -> int:
        """Return how many floats of groups [first, stop) are no padding."""
        return min(stop * self.codec.group, self.size) - min(first * self.codec.group, self.size)

    def _zeros(self, first: int, stop: int) -> F32:
        return np.zeros((stop - first, self.codec.group), np.float32)
