"""Every service is stopped and started again, one after the other, under load: no client notices."""

from __future__ import annotations

import os
import random
import time
from pathlib import Path

import pytest

from freshet.config.spec import load_spec
from freshet.load.open_loop import Figures
from freshet.testing.conditions import wait_until
from tests.compose.auditing import assert_exact
from tests.compose.loading import Load
from tests.compose.stack import Stack
from tests.fixtures.commands import LEDGER

SEED = random.SystemRandom().randrange(1, 2**31)
EVENTS_PER_S = float(os.environ.get("FRESHET_TEST_EVENTS", "1000"))
RANKS_PER_S = float(os.environ.get("FRESHET_TEST_RANKS", "200"))
ROLLED = (
    "gateway-0", "gateway-1", "inference-0", "inference-1", "joiner-0", "embedder-0", "embedder-1",
    "shard-0", "shard-1", "trainer-0", "console",
)  # fmt: skip
QUIET = 15
"""Seconds before the first and after the last."""

pytestmark = [pytest.mark.compose, pytest.mark.timeout(1_800)]


def test_a_rolling_restart_fails_no_request_and_loses_no_event(stack: Stack, tmp_path: Path) -> None:
    spec = load_spec(LEDGER)
    load = Load(stack.gateway, stack.inference, events=EVENTS_PER_S, ranks=RANKS_PER_S, seed=SEED)
    load.start()
    wait_until("samples are trained on", lambda: sum(stack.applied().values()) > 200, within_s=120)
    wait_until(
        "serving is fresh",
        lambda: all(stack.status(name).get("freshness_ms") for name in stack.of("inference")),
        within_s=60,
    )
    _let_pass(load)
    began = time.monotonic()
    for name in ROLLED:
        at = len(load.parts)
        stopped_s = stack.stop(name)
        back_s = stack.up(name)
        part = load.figures_since(at)
        print(f"{name:12} stopped in {stopped_s:4.1f} s, healthy {back_s:4.1f} s later; {_told(part)}")
    print(f"all of them in {time.monotonic() - began:.0f} s")
    _let_pass(load)
    figures = load.stop()

    for name, lane in figures.items():
        print(f"{name}: {lane.as_json()}")
    assert_exact(stack, spec, tmp_path, load.impressions, load.actions)
    assert {name: lane.failed for name, lane in figures.items()} == {"events": 0, "ranks": 0}


def _let_pass(load: Load) -> None:
    """Some seconds of load on an undisturbed system."""
    at = len(load.parts)
    wait_until("time passes", lambda: len(load.parts) >= at + QUIET, within_s=4 * QUIET)


def _told(part: dict[str, Figures]) -> str:
    said = []
    for name, figures in part.items():
        p99, longest = (
            "-" if waited is None else waited.ms()
            for waited in (figures.latency.percentile(99), figures.latency.longest())
        )
        said.append(
            f"{name} {figures.good} good, {figures.failed} failed, p99 {p99} ms, longest {longest} ms"
        )
    fresh = part["ranks"].freshness
    return "; ".join([*said, f"freshness p50 {fresh.percentile(50)} p99 {fresh.percentile(99)} s"])
