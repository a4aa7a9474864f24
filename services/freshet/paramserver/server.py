"""The gRPC service `Rows` of a shard, on any row service that knows its buckets, and its load by slice.

S slices (of a row in `lookup`), B buckets, U keys.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from freshet.errors import Unavailable
from freshet.observability.tracing import within
from freshet.rows.grpc.frames import (
    after_of,
    applied_frame,
    forgotten_frame,
    keeps_keys,
    lookup_of,
    push_of,
    pushed_frame,
    rows_frame,
    span_of,
)
from freshet.rows.grpc.handles import KeptKeys, KeysForgottenError
from freshet.rows.service import KeyGroup, Push, RowService, RowStates
from freshet.rpc.frames import BadFrame, Frame
from freshet.rpc.probe import serve_probes
from freshet.rpc.server import FrameServer
from freshet.types import F32, F64, I64, U32, Bucket, OffsetRange
from freshet.wires.row_wire import RowWires

ROWS = "Rows"

AFTER_S = 1.0
"""Longest wait of a lookup for pushes, which are sent at the same time: one that is lost comes after more."""


@dataclass(frozen=True, slots=True)
class RowSizes:
    """Buckets and row sizes of a model, by which requests are checked and memory for answers is reserved."""

    buckets: int
    widths: tuple[int, ...]  # floats of a row, by store group
    states: tuple[int, ...]  # floats of its optimiser state, by store group


class OwnedRows(RowService, Protocol):
    """A row service for some of a model's buckets."""

    def owned(self) -> Sequence[Bucket]:
        """The owned buckets, rising."""


class LoadMeter:
    """Rows looked up and pushed, by slice. Thread-safe: numpy holds the GIL for arrays this short.

    Each group of a lookup or push costs one numpy call, about a microsecond.
    """

    def __init__(self, buckets: int, slices: int) -> None:
        """Start at zero; `slices` must divide `buckets`."""
        self._step = buckets // slices
        self._starts: I64 = np.zeros(slices + 1, np.int64)  # start offsets of the slices, summed over groups
        self._read = (0.0, self.rows)

    def count(self, bucket_starts: U32) -> None:
        """Add a group's `bucket_starts`, shape (B + 1,) uint32: where each bucket's keys start."""
        self._starts += bucket_starts[:: self._step]

    @property
    def rows(self) -> I64:
        """(S,) int64 rows looked up and pushed so far."""
        return np.diff(self._starts)

    def rates(self, now_s: float) -> F64:
        """Return (S,) float64 rows per second since the last call, or since the start."""
        (before_s, before), rows = self._read, self.rows
        self._read = (now_s, rows)
        rates: F64 = (rows - before) / max(now_s - before_s, 1e-3)
        return rates


class MeteredRows:
    """Rows of a shard as its clients see them: metered, and without new rows while memory is full."""

    def __init__(self, rows: OwnedRows, meter: LoadMeter, full: Callable[[], str | None]) -> None:
        """Serve `rows`; `full` returns the reason why no row may be added, or None."""
        self._rows, self._meter, self._full = rows, meter, full
        self.refused = 0  # lookups

    def lookup(
        self,
        groups: Sequence[KeyGroup],
        out: Sequence[F32],
        *,
        create: bool = True,
        states: RowStates | None = None,
    ) -> None:
        """As `RowService.lookup`; out: (U, S) float32 for each group.

        Raises Unavailable if `create` is set while memory is full: training waits and loses nothing. Pushes
        are still accepted.
        """
        if create:
            self._check_memory()
        self._rows.lookup(groups, out, create=create, states=states)
        self._count(groups)

    def push(self, push: Push) -> bool:
        """As `RowService.push`."""
        applied = self._rows.push(push)
        self._count(push.groups)
        return applied

    def applied(self) -> Mapping[int, Sequence[int]]:
        """As `RowService.applied`."""
        return self._rows.applied()

    def owned(self) -> Sequence[Bucket]:
        """The owned buckets, rising."""
        return self._rows.owned()

    def _check_memory(self) -> None:
        if (reason := self._full()) is not None:
            self.refused += 1
            raise Unavailable(reason)

    def _count(self, groups: Sequence[KeyGroup]) -> None:
        for group in groups:
            self._meter.count(group.bucket_starts)


def identity_of(model: str, spec_hash: str) -> dict[str, str]:
    """Return the metadata by which peers compare model and spec."""
    return {"freshet-model": model, "freshet-spec": spec_hash}


def serve_rows(
    server: FrameServer, rows: OwnedRows, sizes: RowSizes, scalars: Sequence[int] = ()
) -> RowWires:
    """Register the methods of `Rows` with a gRPC server; returns the wires of their rows.

    `scalars`: of each store group the floats of a row before its vector (`Layout.scalars`).
    """
    wires = RowWires.of(scalars)
    served = _Rows(rows, sizes, server, wires)
    server.add_stream(ROWS, "Lookup", served.lookup)
    server.add_stream(ROWS, "Push", served.push)
    serve_probes(server, ROWS)
    server.add_call(ROWS, "Applied", served.applied)
    return wires


class _Rows:
    def __init__(self, rows: OwnedRows, sizes: RowSizes, server: FrameServer, wires: RowWires) -> None:
        self._rows, self._sizes, self._server, self._wires = rows, sizes, server, wires
        self._kept = KeptKeys()
        self._pushed = threading.Condition()  # a push is answered

    def lookup(self, frame: Frame) -> bytes:
        span = span_of(frame)
        if span is None:
            return self._lookup(frame)
        with within(span):
            return self._lookup(frame)

    def _lookup(self, frame: Frame) -> bytes:
        groups, create, with_states = lookup_of(frame, self._sizes.buckets)
        widths = self._sizes.widths
        if any(g.group >= len(widths) for g in groups):
            raise BadFrame(f"lookup: expected store groups below {len(widths)}", "shape")
        if after := after_of(frame):
            self._await_pushes(after)
        sums = 4 * sum(len(g.lists) * widths[g.group] for g in groups if g.lists is not None)
        rows = self._answer_bytes(groups, with_states=with_states)
        with self._server.reserve_answer(rows), self._reserve(sums):
            answer = self._lookup_rows(frame, groups, create=create, with_states=with_states)
        if keeps_keys(frame):
            self._kept.add(groups)
        return answer

    def _answer_bytes(self, groups: Sequence[KeyGroup], *, with_states: bool) -> int:
        """Size of the answer's rows and states, reserved before they are allocated."""
        widths, states = self._sizes.widths, self._sizes.states
        floats = sum(
            len(g.keys) * (widths[g.group] + (states[g.group] if with_states else 0)) for g in groups
        )
        return 4 * floats

    def _reserve(self, size: int) -> AbstractContextManager[None]:
        """Reserve bytes, if any, beside those of an answer; raises as `reserve_answer` does."""
        return self._server.reserve_answer(size) if size else nullcontext()

    def _lookup_rows(
        self, frame: Frame, groups: Sequence[KeyGroup], *, create: bool, with_states: bool
    ) -> bytes:
        widths = self._sizes.widths
        out = {g.group: np.empty((len(g.keys), widths[g.group]), np.float32) for g in groups}
        if not with_states:
            self._rows.lookup(groups, list(out.values()), create=create)
            for g in groups:
                if g.lists is not None:
                    out[g.group] = g.lists.looked_up(out[g.group])
            return rows_frame(frame.id, out, self._wires.rows, frame.codec)
        floats = self._sizes.states
        state_rows = {g.group: np.empty((len(g.keys), floats[g.group]), np.float32) for g in groups}
        states = RowStates(list(state_rows.values()))
        self._rows.lookup(groups, list(out.values()), create=create, states=states)
        return rows_frame(frame.id, out, self._wires.rows, frame.codec, state_rows, states.known)

    def push(self, frame: Frame) -> bytes:
        try:
            push = push_of(
                frame,
                self._sizes.buckets,
                self._sizes.widths,
                self._wires.gradients,
                self._kept.find,
            )
        except KeysForgottenError:
            return forgotten_frame(frame.id)
        widths = self._sizes.widths
        spread = 4 * sum(len(g.keys) * widths[g.group] for g in push.groups if g.lists is not None)
        with self._reserve(spread):
            applied = self._rows.push(_with_row_gradients(push))
        with self._pushed:
            self._pushed.notify_all()
        return pushed_frame(frame.id, applied)

    def _await_pushes(self, ranges: Sequence[OffsetRange]) -> None:
        """Wait until all owned buckets have applied these ranges. Raises Unavailable after AFTER_S."""

        def is_applied() -> bool:
            applied = self._rows.applied()
            return all(min(applied.get(r.partition, ()), default=r.stop) >= r.stop for r in ranges)

        with self._pushed:
            if not self._pushed.wait_for(is_applied, AFTER_S):
                raise Unavailable(f"pushes that a lookup waits for were not applied within {AFTER_S:g} s")

    def applied(self, frame: Frame) -> bytes:
        held = self._rows.owned()  # first: a bucket added in between is missing here, and sent next time
        return applied_frame(frame.id, self._rows.applied(), held)


def _with_row_gradients(push: Push) -> Push:
    """Return the push with a gradient of each row, summed over its occurrences in lists."""
    if all(group.lists is None for group in push.groups):
        return push
    gradients = [
        given if group.lists is None else group.lists.row_gradients(given, len(group.keys))
        for group, given in zip(push.groups, push.gradients, strict=True)
    ]
    return replace(push, groups=[replace(group, lists=None) for group in push.groups], gradients=gradients)
