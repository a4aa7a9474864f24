"""What a wire counts, and that bytes counted are bytes sent."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from freshet.observability.metrics import readings
from freshet.rpc.frames import Frame, Kind, Part, add_values, decode_frame, encode_frame, read_values
from freshet.types import F32
from freshet.wires.codecs import RowCodec
from freshet.wires.row_wire import CHECK_EVERY, WIRE_METRICS, RowWire, RowWires, wires_status

MAX_BYTES = 1 << 20


def some_rows(n: int = 50, width: int = 21) -> F32:
    return np.random.default_rng(2).normal(size=(n, width)).astype(np.float32)


@pytest.mark.parametrize("codec", RowCodec)
def test_counted_bytes_are_those_in_the_frame(codec: RowCodec) -> None:
    sender, receiver = RowWire([5], seed=1), RowWire([5])
    values = some_rows()
    sections: dict[tuple[Part, int], NDArray[Any]] = {}
    add_values(sections, 0, values, sender, codec)
    frame = decode_frame(encode_frame(Frame(Kind.ROWS, 1, codec, sections=sections)), max_bytes=MAX_BYTES)
    out = np.empty_like(values)
    read_values(frame, 0, out, receiver)

    ((_, name), sent), ((_, got_name), got) = *sender.counts().items(), *receiver.counts().items()
    assert name == got_name == codec.name.lower()
    assert sent.bytes_wire == got.bytes_wire == frame.sections[Part.VALUES, 0].nbytes
    assert sent.bytes_raw == got.bytes_raw == values.nbytes
    assert (sent.rows, got.rows) == (50, 50)
    assert sent.encode_s > 0 == sent.decode_s
    assert got.decode_s > 0 == got.encode_s


def test_the_error_is_measured_now_and_then() -> None:
    wire = RowWire(seed=3)
    assert wire.counts() == {}
    for _ in range(CHECK_EVERY + 1):
        wire.pack(0, some_rows(), RowCodec.INT8)
    (counts,) = wire.counts().values()
    assert counts.relative_error == pytest.approx(0.008, abs=0.003)


def test_rows_that_are_not_finite_or_zero_have_no_error() -> None:
    for value in (np.nan, 0.0):
        wire = RowWire()
        wire.pack(0, np.full((3, 16), value, np.float32), RowCodec.UINT8)
        (counts,) = wire.counts().values()
        assert counts.relative_error is None


def test_a_codec_may_change_between_two_arrays() -> None:
    wire = RowWire()
    for codec in (RowCodec.FP32, RowCodec.UINT4):
        wire.pack(0, some_rows(), codec)
    assert {codec for _, codec in wire.counts()} == {"fp32", "uint4"}


def test_status_and_metrics_name_wire_tables_and_codec() -> None:
    wires = RowWires.of([5, 0])
    wires.rows.pack(0, some_rows(), RowCodec.UINT8)
    wires.rows.pack(1, some_rows(width=1), RowCodec.UINT8)
    wires.gradients.pack(0, some_rows(7), RowCodec.INT8)
    status = wires_status({"lookup": wires.rows, "push": wires.gradients}, ["user,item", "pair"])

    assert status["lookup"]["pair"].keys() == {"bf16"}, "one float is no shorter in integers"
    assert status["push"]["user,item"]["int8"]["rows"] == 7
    found = readings(WIRE_METRICS, status)
    assert found["freshet_wire_rows"]["lookup", "user,item", "uint8"] == 50
    assert found["freshet_wire_bytes"]["push", "user,item", "int8"] == 7 * (2 * 5 + 2 + 16)
    assert 0 < found["freshet_wire_relative_error"]["lookup", "user,item", "uint8"] < 0.01
