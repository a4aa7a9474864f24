"""The gRPC service `Rows` of a shard, on any row service that knows its buckets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np

from freshet.observability.tracing import within
from freshet.rows.grpc.frames import (
    Described,
    GroupKeys,
    applied_frame,
    described_frame,
    lookup_of,
    push_of,
    pushed_frame,
    rows_frame,
    span_of,
)
from freshet.rows.service import KeyGroup, Push, RowStates
from freshet.rpc.frames import BadFrame, Frame
from freshet.rpc.server import FrameServer
from freshet.types import F32, Bucket

__all__ = ["ROWS", "HeldRows", "identity_of", "serve_rows"]

ROWS = "Rows"


class HeldRows(Protocol):
    """A row service for some of a model's buckets."""

    def lookup(
        self,
        groups: Sequence[KeyGroup],
        out: Sequence[F32],
        *,
        create: bool = True,
        states: RowStates | None = None,
    ) -> None:
        """As `RowService.lookup`; out: (U, S) float32 for each group."""

    def push(self, push: Push) -> bool:
        """As `RowService.push`."""

    def applied(self) -> Mapping[int, Sequence[int]]:
        """As `RowService.applied`, for the owned buckets."""

    def held(self) -> Sequence[Bucket]:
        """The owned buckets, rising."""


def identity_of(model: str, spec_hash: str) -> dict[str, str]:
    """Return the metadata by which peers compare model and spec."""
    return {"freshet-model": model, "freshet-spec": spec_hash}


def serve_rows(server: FrameServer, rows: HeldRows, described: Described) -> None:
    """Register the methods of `Rows` with a gRPC server."""
    served = _Rows(rows, described, server)
    server.add_stream(ROWS, "Lookup", served.lookup)
    server.add_stream(ROWS, "Push", served.push)
    server.add_call(ROWS, "Applied", served.applied)
    server.add_call(ROWS, "Describe", served.describe)


class _Rows:
    def __init__(self, rows: HeldRows, described: Described, server: FrameServer) -> None:
        self._rows, self._described, self._server = rows, described, server

    def lookup(self, frame: Frame) -> bytes:
        span = span_of(frame)
        if span is None:
            return self._lookup(frame)
        with within(span):
            return self._lookup(frame)

    def _lookup(self, frame: Frame) -> bytes:
        groups, create, with_states = lookup_of(frame, self._described.buckets)
        widths = self._described.widths
        if any(g.group >= len(widths) for g in groups):
            raise BadFrame(f"lookup: expected store groups below {len(widths)}", "shape")
        with self._server.reserve_answer(self._answer_bytes(groups, with_states=with_states)):
            return self._lookup_rows(frame, groups, create=create, with_states=with_states)

    def _answer_bytes(self, groups: Sequence[GroupKeys], *, with_states: bool) -> int:
        """Size of the answer's rows and states, reserved before they are allocated."""
        widths, states = self._described.widths, self._described.states
        floats = sum(
            len(g.keys) * (widths[g.group] + (states[g.group] if with_states else 0)) for g in groups
        )
        return 4 * floats

    def _lookup_rows(
        self, frame: Frame, groups: Sequence[GroupKeys], *, create: bool, with_states: bool
    ) -> bytes:
        widths = self._described.widths
        out = {g.group: np.empty((len(g.keys), widths[g.group]), np.float32) for g in groups}
        key_groups = [KeyGroup(g.group, g.keys, g.tables, g.bucket_starts) for g in groups]
        if not with_states:
            self._rows.lookup(key_groups, list(out.values()), create=create)
            return rows_frame(frame.id, out, frame.codec)
        floats = self._described.states
        state_rows = {g.group: np.empty((len(g.keys), floats[g.group]), np.float32) for g in groups}
        states = RowStates(list(state_rows.values()))
        self._rows.lookup(key_groups, list(out.values()), create=create, states=states)
        return rows_frame(frame.id, out, frame.codec, state_rows, states.known)

    def push(self, frame: Frame) -> bytes:
        request = push_of(frame, self._described.buckets, self._described.widths)
        groups = [KeyGroup(g.group, g.keys, g.tables, g.bucket_starts) for g in request.groups]
        ranges, fence, clock_ms = request.ranges, request.fence, request.clock_ms
        push = Push(ranges, fence, clock_ms, groups, request.gradients, request.owned, span_of(frame))
        return pushed_frame(frame.id, self._rows.push(push))

    def applied(self, frame: Frame) -> bytes:
        held = self._rows.held()  # first: a bucket added in between is missing here, and sent next time
        return applied_frame(frame.id, self._rows.applied(), held)

    def describe(self, frame: Frame) -> bytes:
        return described_frame(frame.id, self._described)
