"""A shard and an embedder refuse invalid and hostile frames with a reason, count them, and go on."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from numpy.typing import NDArray

from freshet.batches.frames import RequestHeader, decode_header, flush_frame, gradients_frame, take_frame
from freshet.config.spec.layout import layout_of
from freshet.config.spec.parse import parse_spec
from freshet.errors import BadInput, Corrupt, FreshetError, Mismatch, TooLarge
from freshet.log.sqlite.event_log import SqliteEventLog
from freshet.log.topics import ensure_topics
from freshet.paramserver.server import RowSizes, identity_of, serve_rows
from freshet.rows.grpc.frames import PushedGroup, lookup_frame, push_frame
from freshet.rows.grpc.handles import handle_of
from freshet.rows.service import Push
from freshet.rows.sqlite.row_store import SqliteRowStore
from freshet.rpc.channel import MIB, Transport, method_name, open_channel
from freshet.rpc.errors import failure_of
from freshet.rpc.frames import BadFrame, Frame, Kind, LargeFrame, OtherFrame, Part, decode_frame, encode_frame
from freshet.rpc.pieces import split_message
from freshet.rpc.server import FrameServer
from freshet.testing.contracts.rowservice import BUCKETS, PARTITIONS
from freshet.types import Fence, OffsetRange, TimeMs
from freshet.wires.codecs import RowCodec
from freshet.wires.row_wire import RowWire
from tests.fixtures.embedder import RemoteScene
from tests.fixtures.shards import SPEC, loaded
from tests.integration.hostile import MESSAGES, answers, hostile, sealed

TRANSPORT = Transport(token="sesame-of-the-test", max_message_bytes=MIB)
REFUSALS = (Corrupt, TooLarge, Mismatch, BadInput)
"""Families of what a listener counts as refused; others say what became of a sound request."""

FRAME_REASONS = {"truncated", "oversized", "magic", "version", "crc", "shape"}


def told(answer: bytes | grpc.RpcError) -> type[FreshetError] | str | None:
    """The family of an answer that is a failure; a text if the call, or the listener, broke down."""
    if isinstance(answer, grpc.RpcError):
        return f"a call ended with {answer.code()}: {answer.details()}"
    frame = decode_frame(answer, max_bytes=MIB)
    if frame.kind != Kind.FAILURE:
        return None
    error = failure_of(frame)
    return f"a defect of the listener: {error}" if type(error) is FreshetError else type(error)


def check(families: Counter[type[FreshetError] | str | None], server: FrameServer) -> None:
    """Nothing broke down; nearly all was refused, each of it counted, for reasons of every kind."""
    assert [family for family in families if isinstance(family, str)] == []
    refused = sum(n for family, n in families.items() if family in REFUSALS)
    assert families.total() == MESSAGES
    assert refused > MESSAGES / 2
    assert server.counts.refused.total() == refused
    assert set(server.counts.refused) >= {"truncated", "magic", "version", "crc", "shape"}
    assert set(server.counts.refused) <= FRAME_REASONS


# A shard


@pytest.fixture
def shard(tmp_path: Path) -> Iterator[FrameServer]:
    spec = parse_spec(SPEC)
    log, rows = SqliteEventLog(tmp_path / "log"), SqliteRowStore(tmp_path / "rows.sqlite")
    with ExitStack() as stack:
        stack.callback(log.close)
        stack.callback(rows.close)
        ensure_topics(log, spec)
        made = loaded(log, rows, 10, spec=spec)
        server = FrameServer("127.0.0.1:0", TRANSPORT, identity=identity_of("contract", "hash"))
        groups = layout_of(spec).groups
        widths, states = tuple(g.width for g in groups), tuple(g.state_floats for g in groups)
        serve_rows(server, made, RowSizes(BUCKETS, widths, states))
        server.start()
        stack.callback(server.stop, 0.0)
        yield server


def row_requests(widths: tuple[int, ...]) -> list[bytes]:
    keys, tables = np.arange(1, 6, dtype=np.uint64), np.zeros(5, np.uint8)
    gradients, everything = np.ones((9, widths[0]), np.float32), np.ones(BUCKETS, np.bool_)
    push = Push((OffsetRange(0, 0, 7),), Fence(10), TimeMs(5), (), ())
    rows = [PushedGroup(0, keys, tables, gradients[:5])]
    repeated = [PushedGroup(0, keys, tables, gradients, np.array([1, 2, 1, 4, 1], np.uint32))]
    return [
        lookup_frame(1, [(0, keys, tables)], RowCodec.FP32, create=True),
        lookup_frame(2, [(0, keys, tables)], RowCodec.INT8, create=False),
        lookup_frame(3, [(0, keys, tables)], RowCodec.FP32, create=True, states=True),
        lookup_frame(4, [(0, keys, tables)], RowCodec.FP32, create=True, keep=True),
        lookup_frame(11, [(0, keys, tables)], RowCodec.FP32, create=True, after=push.ranges),
        push_frame(5, push, rows, RowWire(), RowCodec.FP32, everything),
        push_frame(6, push, rows, RowWire(seed=1), RowCodec.INT8, everything),
        push_frame(7, push, rows, RowWire(), RowCodec.FP32, everything, handle_of([(0, keys, tables)])),
        push_frame(8, push, repeated, RowWire(), RowCodec.FP32, everything, handle_of([(0, keys, tables)])),
        push_frame(9, push, repeated, RowWire(), RowCodec.FP32, everything),
        encode_frame(Frame(Kind.REQUEST, 10)),
        *a_piece(),
    ]


def a_piece() -> list[bytes]:
    """The first of a long message, and all of a short one."""
    long = lookup_frame(
        6, [(0, np.arange(99, dtype=np.uint64), np.zeros(99, np.uint8))], RowCodec.FP32, create=True
    )
    numbers, zeros = np.array([48, 0]), np.zeros(48, np.uint8)
    alone: dict[tuple[Part, int], NDArray[Any]] = {(Part.NUMBERS, 0): numbers, (Part.BYTES, 0): zeros}
    return [next(split_message(long, 400)), encode_frame(Frame(Kind.PIECE, 7, sections=alone))]


@pytest.mark.long
def test_a_shard_refuses_hostile_frames_and_lives(
    shard: FrameServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("freshet.paramserver.server.AFTER_S", 0.001)  # pushes of hostile ranges never come
    methods = [method_name("Rows", name) for name in ("Lookup", "Push", "Applied")]
    chance = random.Random(3)
    good = row_requests(tuple(group.width for group in layout_of(parse_spec(SPEC)).groups))
    with open_channel(f"127.0.0.1:{shard.port}", TRANSPORT) as channel:
        messages = sealed(hostile(good, MESSAGES, seed=4), seed=5)
        check(Counter(map(told, answers(channel, lambda _: chance.choice(methods), messages))), shard)
        (lookup,) = answers(channel, lambda _: methods[0], good[:1])
        assert told(lookup) is None


# An embedder


def a_header(fence: int = 10, wait_ms: int = 0) -> RequestHeader:
    return RequestHeader(feed=1, fence=Fence(fence), rank=0, ranks=1, lanes=1, lane=0, wait_ms=wait_ms)


def patient(messages: Iterator[bytes]) -> Iterator[bytes]:
    """Without requests that ask to be answered later, and those of other ranks, which shut later ones out:
    both are a rank's good right."""
    for data in messages:
        try:
            header, _ = decode_header(decode_frame(data, max_bytes=MIB), Kind(data[8]))
        except (BadFrame, LargeFrame, OtherFrame, ValueError, IndexError):
            yield data
        else:
            usual = header.wait_ms <= 5 and header.fence <= 10 and (header.ranks, header.lanes) == (1, 1)
            yield data if usual else data[:-1]


@pytest.mark.long
def test_an_embedder_refuses_hostile_frames_and_lives(tmp_path: Path) -> None:
    log = SqliteEventLog(tmp_path / "log")
    scene = RemoteScene(log)
    embedder = scene.embedder(range(PARTITIONS))
    take, give = method_name("Batches", "Take"), method_name("Batches", "Give")
    gradients = [np.ones((3, 4), np.float32)]
    good = [
        take_frame(1, a_header(), {0: 0, 1: 5}),
        gradients_frame(2, a_header(), {0: 3}, 1, gradients, RowWire(), RowCodec.FP32),
        gradients_frame(3, a_header(), {0: 3}, 1, None, RowWire(), RowCodec.FP32),
        flush_frame(4, a_header(), {0: 3}),
        *a_piece(),
    ]
    chance = random.Random(6)
    try:
        with open_channel(embedder.address, Transport()) as channel:
            messages = patient(sealed(hostile(good, MESSAGES, seed=7), seed=8))
            found = Counter(map(told, answers(channel, lambda _: chance.choice((take, give)), messages)))
            check(found, embedder.server)
            (empty,) = answers(channel, lambda _: take, [take_frame(9, a_header(fence=11), {})])
            assert told(empty) is None
    finally:
        scene.close()
        log.close()
