"""The codecs of a link: as set, fp32 on one host, else by what the link carries.

Slow links compress, fast ones do not, and none flaps.
"""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from freshet.wires.codecs import RowCodec
from freshet.wires.link_codecs import (
    BUSY,
    EXACT,
    HOLD_S,
    LADDER,
    CodecChoice,
    CodecCost,
    Goodput,
    LinkCodecs,
    LinkController,
    LinkLoad,
    costs_of,
)

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
    assert (codecs.rows, codecs.gradients) == (RowCodec.INT8, RowCodec.BF16)
    assert codecs.status()["rows"] == {"codec": "int8", "why": "as set"}
    assert (LinkCodecs(EXACT, same_host=False).rows) is RowCodec.FP32


def test_on_one_host_auto_is_fp32_without_probes() -> None:
    codecs = LinkCodecs(AUTO, same_host=True)
    assert not codecs.is_measured
    assert (codecs.rows, codecs.gradients) == (RowCodec.FP32, RowCodec.FP32)
    assert codecs.status()["gradients"] == {"codec": "fp32", "why": "the peer is on this host"}


def test_between_hosts_auto_begins_with_int8_then_follows() -> None:
    codecs = LinkCodecs(AUTO, same_host=False)
    assert (codecs.rows, codecs.gradients) == (RowCodec.INT8, RowCodec.INT8)
    carried(codecs, FAST)
    assert (codecs.rows, codecs.gradients) == (RowCodec.FP32, RowCodec.FP32)
    carried(codecs, SLOW, start_s=1000.0)
    assert codecs.rows in {RowCodec.INT8, RowCodec.UINT4}
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


COSTS = (
    CodecCost("fp32", 1.0, 0.0),
    CodecCost("bf16", 0.5, 0.3e-9),
    CodecCost("int8", 0.33, 0.5e-9),
    CodecCost("int4", 0.2, 0.6e-9),
)
COMPUTE_S, VALUES = 0.02, 2_000_000  # of a step: seconds without the link, bytes of values
RATES = st.floats(4.0, 11.0).map(lambda e: 10.0**e)  # bytes a second


def step_s(cost: CodecCost, goodput: float) -> float:
    """Return the seconds of a step that waits for its link."""
    return COMPUTE_S + VALUES * (cost.ratio / goodput + cost.seconds)


def cost_of(name: str) -> CodecCost:
    """Return the cost of a codec by its name."""
    return next(cost for cost in COSTS if cost.name == name)


def settled(controller: LinkController, goodput: float, start_s: float = 0.0, rounds: int = 40) -> str:
    """Return the codec after decisions every 5 s about a link on which every step waits."""
    for i in range(rounds):
        values = VALUES / step_s(cost_of(controller.codec), goodput)
        controller.decide(LinkLoad(goodput, values), start_s + 5.0 * i)
    return controller.codec


@given(RATES)
def test_no_step_is_much_slower_than_with_the_best_codec(goodput: float) -> None:
    chosen = settled(LinkController(COSTS), goodput)
    best = min(step_s(cost, goodput) for cost in COSTS)
    assert step_s(cost_of(chosen), goodput) <= best * (1 + BUSY + 0.01)


@given(RATES, RATES)
def test_a_link_that_changes_gets_the_codec_of_its_new_speed(first: float, second: float) -> None:
    controller = LinkController(COSTS)
    settled(controller, first)
    chosen = settled(controller, second, start_s=1000.0)
    best = min(step_s(cost, second) for cost in COSTS)
    assert step_s(cost_of(chosen), second) <= best * 1.15, "hysteresis may keep a shorter codec"


@given(RATES)
def test_a_steady_link_changes_its_codec_a_few_times_at_most(goodput: float) -> None:
    controller, changes = LinkController(COSTS), 0
    for i in range(200):
        values = VALUES / step_s(cost_of(controller.codec), goodput)
        changes += controller.decide(LinkLoad(goodput, values), 5.0 * i)
    assert changes <= 3


def test_a_fast_link_sends_exact_values_and_recovers_them() -> None:
    controller = LinkController(COSTS)
    assert settled(controller, 12.5e9) == "fp32"
    assert "needs no codec" in controller.reason
    assert settled(controller, 12.5e6, 1000.0) == "int4"
    assert "12.5 MB/s, in fp32" in controller.reason
    assert settled(controller, 12.5e9, 2000.0) == "fp32"


def test_an_idle_link_keeps_its_codec() -> None:
    controller = LinkController(COSTS, first="int8")
    assert not controller.decide(LinkLoad(goodput=12.5e6, values=0.0), 100.0)
    assert controller.codec == "int8"
    assert controller.reason == "it carried nothing lately, at 12.5 MB/s"


def test_a_shorter_codec_is_taken_at_once_a_more_exact_one_later() -> None:
    controller = LinkController(COSTS)
    slow, fast = LinkLoad(12.5e6, 10e6), LinkLoad(12.5e9, 10e6)
    assert controller.decide(slow, 0.0)
    assert controller.codec != "fp32"
    assert not controller.decide(fast, HOLD_S - 1)
    assert controller.decide(fast, HOLD_S + 1)
    assert controller.codec == "fp32"


def test_compression_that_costs_what_it_saves_does_not_start() -> None:
    slow_codecs = [CodecCost(c.name, c.ratio, 2e-9 * (i > 0)) for i, c in enumerate(COSTS)]
    controller = LinkController(slow_codecs)
    controller.decide(LinkLoad(1e9, 100e6), 0.0)
    assert controller.codec == "fp32"
    assert "cost what they save" in controller.reason


def test_keys_that_no_codec_shortens_do_not_start_one() -> None:
    controller = LinkController(COSTS)
    controller.decide(LinkLoad(1e8, 1e5, rest=50e6), 0.0)
    assert controller.codec == "fp32", "values are a fiftieth of what the link carries"


@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize(("width", "scalars"), [(16, 0), (21, 5), (1, 1), (64, 1)])
def test_costs_are_those_of_the_codecs_on_this_machine(width: int, scalars: int, gradients: bool) -> None:
    costs = costs_of(width, scalars, gradients=gradients)
    assert tuple(cost.name for cost in costs) == LADDER
    assert (costs[0].ratio, costs[0].seconds) == (1.0, 0.0)
    assert all(a.ratio >= b.ratio for a, b in itertools.pairwise(costs))
    assert all(0 < cost.seconds < 1e-6 for cost in costs[1:])
