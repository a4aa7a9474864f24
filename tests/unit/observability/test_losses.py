"""Shares of events from which nothing is learned: their counts and spans."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from freshet.apps.results import Outcome, outcome_text
from freshet.cli.status import as_text
from freshet.console.core import Look, health_of, losses_of
from freshet.console.instances import Service
from freshet.joiner.commit import EVENT_COUNTERS, Ledger
from freshet.observability.losses import INFERENCE_FIGURES, JOINER_FIGURES, Recent, counted, losses_text

COUNTS = st.fixed_dictionaries({name: st.integers(0, 10**9) for name in (*EVENT_COUNTERS, "refused")})
NOTHING_LOST = {"impressions", "impressions_repeated", "actions_matched", "actions_again", "actions_repeated",
                "actions_no_label", "shown_matched", "shown_repeated"}  # fmt: skip


def test_every_outcome_of_an_event_counts_as_lost_or_learned() -> None:
    lost = {name for figure in JOINER_FIGURES for name in figure.lost}
    assert lost | NOTHING_LOST == {*EVENT_COUNTERS, "refused"}
    assert not lost & NOTHING_LOST


@given(COUNTS)
def test_a_share_is_a_part_of_its_whole(counts: dict[str, int]) -> None:
    for one in counted(JOINER_FIGURES, counts).values():
        assert 0 <= one["lost"] <= one["of"]
        assert one["share"] is None if not one["of"] else 0 <= one["share"] <= 1


def test_losses_are_counted_over_five_minutes() -> None:
    recent = Recent()
    assert recent.take({"n": 100}, 0.0) == {"n": 0}  # earlier counts are not of the last five minutes
    for second in range(1, 1_000):
        grown = recent.take({"n": 100 + second}, float(second))
        assert min(second, 300) <= grown["n"] <= 310


def ledger(**events: int) -> dict[str, Any]:
    return {**Ledger.empty(["click"]).to_json(), "events": {**dict.fromkeys(EVENT_COUNTERS, 0), **events}}


def test_a_replay_reports_its_losses_in_text_and_json() -> None:
    counts = ledger(impressions=10, actions_matched=6, actions_orphan=2)
    outcome = Outcome(10, 1.0, 1, {"click": {"auc": 0.5}}, {}, counts)

    assert "lost: orphans: 2 of 8 (25.0%) since the beginning" in outcome_text(outcome)
    assert outcome.as_json()["losses"]["unmatched"] == {"lost": 2, "of": 8, "share": 0.25}
    whole = Outcome(10, 1.0, 1, {}, {}, ledger(impressions=10))
    assert "lost: nothing" in outcome_text(whole)
    assert "losses" not in Outcome(10, 1.0, 1, {}, {}).as_json()  # a backtest joins nothing


def test_the_status_has_recent_and_all_losses() -> None:
    lately = counted(JOINER_FIGURES, {"actions_matched": 1, "actions_orphan": 1})
    unlogged = counted(INFERENCE_FIGURES, {"unlogged": 3, "logged": 1})
    services = {
        "joiner": service("joiner", {"events": 2, "losses": {"recent": lately, "begun": lately}}),
        "inference": service("inference", {"version": 1, "losses": {"recent": unlogged}}),
    }
    versions: dict[str, Any] = {"newest": None, "aliases": {}}
    text = as_text({"services": services, "versions": versions})
    assert "lost      unmatched: 1 of 2 (50.0%) in the last 5 min; 1 of 2 (50.0%) since the beginning" in text
    assert "lost      unlogged: 3 of 4 (75.0%) in the last 5 min: served events were not logged" in text


def service(role: str, figures: dict[str, Any]) -> dict[str, Any]:
    return {"role": role, "address": "a", "state": "ready", "reason": "", "figures": figures}


def test_the_console_adds_the_losses_of_all_joiners_up() -> None:
    services = {}
    for name, lost in (("joiner-0", 1), ("joiner-1", 2)):
        recent = counted(JOINER_FIGURES, {"actions_matched": 7, "actions_orphan": lost})
        services[name] = seen(name, {"losses": {"recent": recent}})
    services["joiner-2"] = seen("joiner-2", {"losses": {"recent": {"unmatched": "odd"}}})
    losses = losses_of(Look(services, {}, {}, log_served=True))
    assert {"figure": "unmatched", "lost": 3, "of": 17} in losses


def test_many_orphans_and_misplaced_keys_degrade_the_health() -> None:
    few = counted(JOINER_FIGURES, {"actions_matched": 1, "actions_orphan": 49})
    many = counted(JOINER_FIGURES, {"actions_matched": 100, "actions_orphan": 50})
    trouble = {"trouble": {"t": "records of t are placed by CRC32"}}

    assert health_of([seen("joiner", {"losses": {"recent": few}})], []) == ("good", [])
    health, notes = health_of([seen("joiner", {"losses": {"recent": many}, "placing": trouble})], [])
    assert health == "degraded"
    assert notes == [
        "joiner: records of t are placed by CRC32",
        "joiner: 50 of 150 actions of the last 5 minutes found no impression",
    ]
    assert health_of([seen("joiner", {"losses": 5, "placing": {"trouble": {"t": 5}}})], []) == ("good", [])


def seen(name: str, figures: dict[str, Any]) -> Service:
    return Service(name=name, role="joiner", state="ready", reason="", host=None, port=None, figures=figures)


def test_nothing_lost_is_no_line() -> None:
    assert losses_text(counted(JOINER_FIGURES, {"impressions": 9}), None) == []
