"""Metrics of joiner and trainer."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

from freshet.apps.metrics import JOINER_METRICS, TRAINER_METRICS
from freshet.joiner.commit import EventCounts, Ledger
from freshet.joiner.service import JoinerStatus
from freshet.observability.metrics import readings
from freshet.paramserver.shard import ShardCounts

JOINED = JoinerStatus(
    events=5,
    samples=2,
    commits=1,
    newest_ms=1_050,
    watermark_ms={},
    lag={},
    room={},
    payload_bytes=0,
    ids=0,
    ledger=Ledger.empty(["click"]),
    counts=EventCounts.of(["served", "action"]),
)
TRAINED: dict[str, Any] = {
    "samples": 9,
    "steps": 2,
    "lag_blocks": 0,
    "refused": {},
    "stage_seconds": {},
    "event_time_ms": 1_050,
    "version": 1,
    "versions_failed": 0,
    "measures": {"served": {"click": {"n": 9.0, "calibration": 1.5}}},
    "lately": {"served": {"click": {"n": 4.0, "calibration": 0.9, "auc": None}}, "random": {}},
}


def test_newest_sample_is_missing_before_the_first() -> None:
    assert readings(JOINER_METRICS, JOINED)["freshet_joiner_newest_sample_ms"] == {(): 1_050}
    assert "freshet_joiner_newest_sample_ms" not in readings(JOINER_METRICS, replace(JOINED, newest_ms=None))


def test_outcomes_and_dead_letters_start_at_zero() -> None:
    counts = EventCounts.of(["served", "action"])
    counts.add({"impressions": 4, "actions_late": 2}, {"action": {"no_schema": 1}})

    figures = readings(JOINER_METRICS, replace(JOINED, counts=counts))

    outcomes, dead_letters = figures["freshet_joiner_outcomes"], figures["freshet_joiner_dead_letters"]
    assert {key: n for key, n in outcomes.items() if n} == {("served", "new"): 4, ("action", "late"): 2}
    assert outcomes["action", "matched"] == outcomes["shown", "late"] == outcomes["served", "repeated"] == 0
    assert {key: n for key, n in dead_letters.items() if n} == {("action", "no_schema"): 1}
    assert dead_letters["served", "unreadable"] == 0


def test_measures_are_overall_and_of_the_last_windows() -> None:
    figures = readings(TRAINER_METRICS, TRAINED)

    assert figures["freshet_trainer_quality"] == {
        ("served", "click", "n"): 9.0,
        ("served", "click", "calibration"): 1.5,
    }
    assert figures["freshet_trainer_quality_lately"] == {
        ("served", "click", "n"): 4.0,
        ("served", "click", "calibration"): 0.9,
    }


def test_trainer_with_rows_reports_flushes() -> None:
    counts = ShardCounts(flushes=7, flushes_failed=2)
    held = {
        "rows": {},
        "evicted": {},
        "row_bytes": {},
        "bytes": 0,
        "shard": asdict(counts),
        "store": {"created": 5, "evicted": 1, "not_finite": 0, "not_admitted": 3},
        "unwritten_s": 31.5,
    }

    figures = readings(TRAINER_METRICS, TRAINED | held)

    assert figures["freshet_shard_flushes"] == {(): 7}
    assert figures["freshet_shard_flushes_failed"] == {(): 2}
    assert figures["freshet_shard_unwritten_seconds"] == {(): 31.5}
    assert not [name for name in readings(TRAINER_METRICS, TRAINED) if name.startswith("freshet_shard")]
