"""The codecs of a link: as set, fp32 on one host, else by what the link carries."""

from __future__ import annotations

import math

import pytest

from freshet.wires.codecs import RowCodec
from freshet.wires.link_codecs import EXACT, CodecChoice, Goodput, LinkCodecs

AUTO = CodecChoice("auto", "auto", 21, 5)
FAST, SLOW = Goodput(12.5e9, 12.5e9), Goodput(12.5e6, 12.5e6)


def carried(codecs: LinkCodecs, goodput: Goodput, *, seconds: int = 100, start_s: float = 0.0) -> None:
    """Let a link carry 20 MB/s of values each way for a while, with a decision every 5 s."""
    whole = 0
    for second in range(0, seconds, 5):
        codecs.count_rows(100_000_000)
        codecs.count_gradients(100_000_000)
        whole += 110_000_000
        codecs.decide(goodput, whole, whole, start_s + second)


def test_set_codecs_stay_whatever_a_link_carries() -> None:
    codecs = LinkCodecs(CodecChoice("int8", "bf16"), same_host=False)
    assert not codecs.is_measured
    assert not codecs.decide(SLOW, 0, 0, 1.0)
    assert (codecs.rows, codecs.gradients) == (RowCodec.UINT8, RowCodec.BF16)
    assert codecs.status()["rows"] == {"codec": "int8", "why": "as set"}
    assert (LinkCodecs(EXACT, same_host=False).rows) is RowCodec.FP32


def test_on_one_host_auto_is_fp32_without_probes() -> None:
    codecs = LinkCodecs(AUTO, same_host=True)
    assert not codecs.is_measured
    assert (codecs.rows, codecs.gradients) == (RowCodec.FP32, RowCodec.FP32)
    assert codecs.status()["gradients"] == {"codec": "fp32", "why": "the peer is on this host"}


def test_between_hosts_auto_begins_with_int8_then_follows() -> None:
    codecs = LinkCodecs(AUTO, same_host=False)
    assert (codecs.rows, codecs.gradients) == (RowCodec.UINT8, RowCodec.INT8)
    carried(codecs, FAST)
    assert (codecs.rows, codecs.gradients) == (RowCodec.FP32, RowCodec.FP32)
    carried(codecs, SLOW, start_s=1000.0)
    assert codecs.rows in {RowCodec.UINT8, RowCodec.UINT4}
    assert codecs.gradients in {RowCodec.INT8, RowCodec.INT4}
    assert "12.5 MB/s" in codecs.status()["rows"]["why"]
    carried(codecs, FAST, start_s=2000.0)
    assert codecs.status()["rows"]["codec"] == "fp32", "the link has recovered"


def test_each_direction_has_a_codec_of_its_own() -> None:
    codecs = LinkCodecs(AUTO, same_host=False)
    carried(codecs, Goodput(up=12.5e6, down=12.5e9))
    assert codecs.rows is RowCodec.FP32
    assert codecs.gradients.bits <= 8


def test_the_first_decision_has_no_interval_yet() -> None:
    codecs = LinkCodecs(AUTO, same_host=False)
    codecs.count_rows(1 << 30)
    assert not codecs.decide(FAST, 0, 0, 5.0)
    assert not codecs.decide(FAST, 0, 0, 5.0), "the same moment"


@pytest.mark.parametrize("shapes", [[], [(21, 5), (1, 1)]])
def test_codecs_are_timed_by_the_widest_row(shapes: list[tuple[int, int]]) -> None:
    choice = CodecChoice.of("auto", "auto", shapes)
    assert (choice.width, choice.scalars) == max(shapes, default=(1, 0))
    assert math.isfinite(sum(LinkCodecs(choice, same_host=False).rows.bits for _ in range(2)))
