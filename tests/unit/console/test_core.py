"""Rates over restarts, levels of lag, health of the system. Plain arithmetic."""

from __future__ import annotations

from typing import Any

import pytest

from freshet.config.spec.parse import parse_spec
from freshet.console.board import links_of, quality_of, wires_of
from freshet.console.core import Edge, Look, Rates, edges_of, health_of, level_of
from freshet.console.history import History
from freshet.console.instances import Service


def look(figures: dict[str, dict[str, Any]], **more: Any) -> Look:
    services = {name: Service(name, name, "ready", "", None, 1, figures=f) for name, f in figures.items()}
    given: dict[str, Any] = {"joined": {}, "ends": {}, "log_served": True, **more}
    return Look(services, **given)


def edge(found: list[Edge], name: str) -> Edge:
    return next(e for e in found if e.name == name)


def test_a_rate_is_the_growth_over_the_last_seconds() -> None:
    rates = Rates(span_s=5)

    assert rates.rate_of("x", 100, 0.0) is None
    assert rates.rate_of("x", 150, 1.0) == 50
    for second in range(2, 20):
        found = rates.rate_of("x", 150 + 10 * (second - 1), float(second))

    assert found == pytest.approx(10), "what was long ago does not count"


def test_a_total_that_falls_is_never_a_negative_rate() -> None:
    rates = Rates()
    rates.rate_of("x", 1_000, 0.0)
    rates.rate_of("x", 1_100, 1.0)

    assert rates.rate_of("x", 3, 2.0) is None
    assert rates.rate_of("x", 13, 3.0) == 10


def test_a_rate_needs_two_known_totals() -> None:
    rates = Rates()
    rates.rate_of("x", 10, 0.0)

    assert rates.rate_of("x", None, 1.0) is None
    assert rates.rate_of("x", 30, 2.0) is None
    assert rates.rate_of("x", 40, 3.0) == 10


@pytest.mark.parametrize(
    ("lag", "rate", "per_s", "level"),
    [
        (None, 5.0, 5.0, "unknown"),
        (0, 0.0, 0.0, "idle"),
        (0, 9.0, 9.0, "ok"),
        (10, 0.0, 0.0, "ok"),  # work that is always in hand
        (150, 100.0, 100.0, "ok"),  # 1.5 s of work
        (500, 100.0, 100.0, "warn"),
        (5_000, 100.0, 100.0, "bad"),
        (500, 0.0, 0.0, "bad"),  # nothing moves
        (500, None, None, "bad"),
    ],
)
def test_a_lag_is_judged_by_the_seconds_of_work_that_wait(lag, rate, per_s, level) -> None:
    assert level_of(lag, rate, per_s, floor=20) == level


def test_edges_know_nothing_of_services_that_do_not_answer() -> None:
    found = edges_of(look({}), Rates(), 0.0)

    assert [e.name for e in found] == [
        "client>gateway", "gateway>joiner", "inference>joiner", "joiner>trainer", "trainer>inference",
        "inference>client",
    ]  # fmt: skip
    assert {e.rate for e in found} == {None}
    assert {e.level for e in found} == {"unknown"}


def test_rates_and_lags_come_from_the_log_and_from_each_service() -> None:
    rates = Rates()

    def at(second: int) -> list[Edge]:
        figures: dict[str, dict[str, Any]] = {
            "gateway": {
                "events": {"action": {"accepted": 10 * second, "refused": 1}, "shown": {"accepted": 0}}
            },
            "trainer": {"samples": 300 * second, "lag_blocks": 4, "shard": {"published_rows": 70 * second}},
            "inference": {"requests": 20 * second, "rows_next": {"0": 90 * second, "1": 0}},
        }
        ends = {"action": 10 * second, "served": 1_000 + 20 * second, "samples": 3, "rows": 100 * second}
        joined = {"action": 10 * second, "served": 500}
        return edges_of(look(figures, ends=ends, joined=joined), rates, float(second))

    at(1)
    found = at(2)

    assert edge(found, "client>gateway").rate == 10
    assert (edge(found, "gateway>joiner").rate, edge(found, "gateway>joiner").lag) == (10, 0)
    assert (edge(found, "inference>joiner").lag, edge(found, "inference>joiner").level) == (540, "bad")
    assert (edge(found, "joiner>trainer").rate, edge(found, "joiner>trainer").lag) == (300, 4)
    assert (edge(found, "trainer>inference").rate, edge(found, "trainer>inference").lag) == (70, 20)
    assert edge(found, "inference>client").rate == 20


def test_without_a_served_log_impressions_come_by_the_gateway() -> None:
    found = edges_of(
        look({}, log_served=False, ends={"served": 7, "action": 5}, joined={"served": 6, "action": 5}),
        Rates(),
        0.0,
    )

    assert edge(found, "gateway>joiner").lag == 1
    assert edge(found, "inference>joiner").level == "idle"


def test_figures_that_are_no_numbers_are_not_known() -> None:
    found = edges_of(look({"trainer": {"samples": "many", "lag_blocks": None, "shard": 3}}), Rates(), 0.0)

    assert edge(found, "joiner>trainer").lag is None


def services(**states: str) -> list[Service]:
    return [Service(n, n, s, "" if s == "ready" else "because", None, 1) for n, s in states.items()]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("states", "health"),
    [
        ({"gateway": "ready", "trainer": "ready"}, "good"),
        ({"gateway": "ready", "trainer": "down"}, "degraded"),
        ({"gateway": "ready", "trainer": "starting"}, "starting"),
        ({"gateway": "down", "trainer": "down", "console": "ready"}, "down"),
        ({"console": "ready"}, "starting"),
    ],
)
def test_health_is_that_of_the_services_without_the_console(states, health) -> None:
    found, notes = health_of(services(**states), [])

    assert found == health
    assert len(notes) == sum(state != "ready" for state in states.values())


def test_a_restarting_service_degrades_the_system() -> None:
    again = [
        Service("trainer", "trainer", "starting", "loading rows", None, 1, restarts=2),
        Service("gateway", "gateway", "ready", "", None, 1),
    ]

    assert health_of(again, []) == ("degraded", ["trainer: loading rows"])


def test_waiting_work_and_problems_of_inference_are_noted() -> None:
    behind = Edge("gateway", "joiner", "events", 1.0, "events/s", 12_000, "records", "bad")
    seen = look({"inference": {"served_log": "disk full", "rows": "", "versions": ""}})

    health, notes = health_of(list(seen.services.values()), [behind])

    assert health == "degraded"
    assert notes == ["joiner: 12,000 records from gateway wait", "inference: disk full"]


@pytest.mark.parametrize(
    ("figures", "said"),
    [
        ({"clock_step_ms": 3_600_000}, "joiner: its wall clock was set by +3,600 s"),
        ({"clock_step_ms": -86_400_000}, "joiner: its wall clock was set by -86,400 s"),
        ({"disputed_ms": {"0": 3_599_000, "3": 3_600_000}}, "joiner: clocks disagree, and 2 partitions wait"),
        (
            {"now_ms": 10**12, "watermark_ms": {"0": 10**12 + 3_600_000, "1": None}},
            "for the next 3,600 s all",
        ),
        ({"now_ms": 10**12, "watermark_ms": {"0": 10**12 - 5_000}}, None),
        ({"clock_step_ms": 0, "disputed_ms": {}, "now_ms": 0, "watermark_ms": {"0": 10**12}}, None),
        ({"clock_step_ms": "x", "disputed_ms": [1], "now_ms": {}, "watermark_ms": {"0": "x"}}, None),
    ],
)
def test_a_wrong_clock_is_noted(figures, said) -> None:
    health, notes = health_of(list(look({"joiner": figures}).services.values()), [])

    assert health == ("degraded" if said else "good")
    assert len(notes) == (1 if said else 0)
    assert said is None or said in notes[0]


# --- several of a role


def fleet(**figures: dict[str, Any]) -> Look:
    """Instances by names such as `gateway_0`; None of figures: it is away."""
    services = {
        name: Service(name, name.partition("_")[0], "ready" if told else "down", "", "h", 1, figures=told)
        for name, told in figures.items()
    }
    return Look(services, {}, {}, log_served=True)


def events(accepted: int) -> dict[str, Any]:
    return {"events": {"action": {"accepted": accepted}}}


def test_rates_of_a_role_are_the_sum_over_its_instances() -> None:
    rates = Rates()
    edges_of(fleet(gateway_0=events(1_000), gateway_1=events(50)), rates, 0.0)

    found = edges_of(fleet(gateway_0=events(1_030), gateway_1=events(70)), rates, 1.0)

    assert edge(found, "client>gateway").rate == 50


def test_a_restarted_instance_changes_no_other_rate() -> None:
    rates = Rates()
    for second in range(3):
        edges_of(fleet(gateway_0=events(30 * second), gateway_1=events(9_000 + 20 * second)), rates, second)

    restarted = edges_of(fleet(gateway_0=events(90), gateway_1=events(5)), rates, 3)
    later = edges_of(fleet(gateway_0=events(120), gateway_1=events(25)), rates, 4)

    assert edge(restarted, "client>gateway").rate == 30
    assert edge(later, "client>gateway").rate == 50


def test_an_instance_that_was_away_adds_nothing_it_did_before() -> None:
    rates = Rates()
    for second in range(3):
        edges_of(fleet(gateway_0=events(30 * second), gateway_1=events(9_000)), rates, second)

    away = edges_of(fleet(gateway_0=events(90), gateway_1={}), rates, 3)
    back = edges_of(fleet(gateway_0=events(120), gateway_1=events(9_400)), rates, 4)
    later = edges_of(fleet(gateway_0=events(150), gateway_1=events(9_420)), rates, 5)

    assert [edge(found, "client>gateway").rate for found in (away, back, later)] == [30, 30, 50]


def test_shards_publish_rows_and_ranks_train_samples() -> None:
    rates = Rates()

    def at(second: int) -> list[Edge]:
        shard = {"shard": {"published_rows": 40 * second}}
        rank = {"samples": 300 * second, "lag_blocks": 5}
        return edges_of(
            fleet(trainer_0=rank, trainer_1=rank, paramserver_0=shard, paramserver_1=shard), rates, second
        )

    at(1)
    found = at(2)

    assert (edge(found, "joiner>trainer").rate, edge(found, "joiner>trainer").lag) == (600, 10)
    assert edge(found, "trainer>inference").rate == 80


def test_the_lag_is_that_of_the_slowest_replica() -> None:
    seen = fleet(inference_0={"rows_next": {"0": 90, "1": 50}}, inference_1={"rows_next": {"0": 70, "1": 60}})
    seen = Look(seen.services, {}, {"rows": 160}, log_served=True)

    assert edge(edges_of(seen, Rates(), 0.0), "trainer>inference").lag == 160 - (70 + 50)


def counts(rows: int, error: float | None) -> dict[str, Any]:
    seconds = {"encode_s": rows * 1e-6, "decode_s": rows * 2e-6}
    return {"rows": rows, "bytes_raw": 72 * rows, "bytes_wire": 24 * rows, "relative_error": error, **seconds}


def test_each_wire_is_counted_at_one_of_its_ends() -> None:
    lookups = {"lookup": {"user": {"uint8": counts(30, 0.01)}}}
    seen = fleet(
        trainer_0={"wires": {"batch": {"user": {"uint8": counts(5, None), "fp32": counts(0, None)}}}},
        trainer_1={"wires": {"batch": {"user": {"uint8": counts(6, 0.002)}}}},
        embedder_0={"wires": {"batch": {"user": {"uint8": counts(11, 0.1)}}, **lookups}},
        paramserver_0={"wires": {**lookups, "publish": {"user": {"fp32": counts(7, None)}}}},
        paramserver_1={},
        embedder_1={"wires": {"batch": "of another release"}},
    )

    found = {wire["wire"]: wire for wire in wires_of(seen)}

    assert [(w, f["rows"], f["bytes_wire"], f["error"]) for w, f in found.items()] == [
        ("batch", 11, 264, 0.002),
        ("lookup", 30, 720, 0.01),
        ("publish", 7, 168, None),
    ]
    assert found["batch"]["codec_s"] == pytest.approx((5 + 6 + 11) * 3e-6), "both ends"


def test_links_say_which_codec_they_use_and_why() -> None:
    seen = fleet(embedder_0={"codecs": {"h:1": {"rows": {"codec": "int8", "why": "busy"}, "gradients": 3}}})

    assert links_of(seen) == [
        {"service": "embedder_0", "address": "h:1", "carries": "rows", "codec": "int8", "why": "busy"}
    ]


def test_a_missing_instance_degrades_the_system_and_is_named() -> None:
    some = [
        Service("inference-0", "inference", "ready", "", "h", 1, figures={"rows": "a page is damaged"}),
        Service("inference-1", "inference", "down", "nothing answers at h:2", "h", 2),
    ]

    assert health_of(some, []) == (
        "degraded",
        ["inference-1: nothing answers at h:2", "inference-0: a page is damaged"],
    )


SHOP = parse_spec("""
name = "shop"
[events]
served = { explode = "items", key = ["request", "items.id"], time = "at:ms" }
action = { key = ["request", "item"], time = "at:ms" }
[labels]
order = { on = "action.kind == 'order'" }
revenue = { on = "action.kind == 'order'", value = "sum(action.price)", given = "order" }
[tables]
small = { dim = 4 }
[features]
hour = { time = "hour", table = "small" }
""")


def test_labels_come_with_their_kind_and_condition() -> None:
    assert quality_of(SHOP, look({}), History(1_000))["labels"] == [
        {"name": "order", "kind": "truth", "given": None},
        {"name": "revenue", "kind": "number", "given": "order"},
    ]
