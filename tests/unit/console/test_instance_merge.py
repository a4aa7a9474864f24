"""Figures of several instances of a role, merged by a rule each, also while some are away or start."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from freshet.console.instances import RULES, Service, merged, roles_of


def instance(role: str, i: int, state: str = "ready", /, **figures: Any) -> Service:
    memory = figures.pop("memory_mb", None)
    said: Any = state
    return Service(f"{role}-{i}", role, said, "", "host", 7000 + i, memory_mb=memory, figures=figures)


def of_role(*services: Service) -> dict[str, Any]:
    return dict(merged(services)[services[0].role])


def test_figures_of_one_instance_are_unchanged() -> None:
    figures = {"anything": {"at": "all"}, "lag_blocks": 3}

    assert of_role(instance("trainer", 0, **figures)) == figures


def test_replicas_are_as_good_as_the_worst_of_them() -> None:
    fresh = instance("inference", 0, freshness_ms=200, version=9, rows_next={"0": 50, "1": 7})
    stale = instance("inference", 1, freshness_ms=900, version=8, rows_next={"0": 40, "1": 9})

    assert of_role(fresh, stale) == {"freshness_ms": 900, "version": 8, "rows_next": {"0": 40, "1": 7}}


@pytest.mark.parametrize("state", ["starting", "down"])
def test_a_replica_that_is_not_ready_does_not_count(state: str) -> None:
    ready = instance("inference", 0, freshness_ms=200, version=9, rows_next={"0": 50})
    other = instance("inference", 1, state, freshness_ms=86_400_000, version=1, rows_next={"0": 0})

    assert of_role(other, ready) == {"freshness_ms": 200, "version": 9, "rows_next": {"0": 50}}


def test_while_none_is_ready_all_that_answer_count() -> None:
    starting = instance("inference", 0, "starting", rows_next={"0": 5})

    assert of_role(starting, instance("inference", 1, "down")) == {"rows_next": {"0": 5}}


def test_a_replica_without_a_version_hides_no_other() -> None:
    assert of_role(instance("inference", 0, version=None), instance("inference", 1, version=4)) == {
        "version": 4
    }


def test_shards_hold_the_rows_together() -> None:
    one = instance("paramserver", 0, rows={"user": 5, "item": 1}, row_bytes={"user": 80}, bytes=100)
    two = instance("paramserver", 1, rows={"user": 7}, row_bytes={"user": 20}, evicted={"user": 2}, bytes=60)

    assert of_role(one, two) == {
        "rows": {"user": 12, "item": 1},
        "row_bytes": {"user": 100},
        "evicted": {"user": 2},
        "bytes": 160,
    }


def test_lags_of_ranks_add_up_and_the_leader_gives_measures() -> None:
    ranks = [
        instance("trainer", i, lag_blocks=2 + i, measures={"of": seat}, open=[seat], ranks={"seat": seat})
        for i, seat in enumerate((2, 0, 1))
    ]

    assert of_role(*ranks) == {"lag_blocks": 9, "measures": {"of": 0}, "open": [0]}


def test_a_rank_without_a_lease_does_not_lead() -> None:
    waiting = instance("trainer", 0, measures={"of": "nobody"}, ranks={"seat": -1})
    leading = instance("trainer", 1, measures={"of": "all"}, ranks={"seat": 3})

    assert of_role(waiting, leading)["measures"] == {"of": "all"}


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)


@given(st.sampled_from(sorted(RULES)), st.data())
def test_any_figures_are_merged_without_an_error(role: str, data: st.DataObject) -> None:
    figures = st.fixed_dictionaries({}, optional=dict.fromkeys([*RULES[role], "ranks"], ANYTHING))
    said = data.draw(st.lists(figures, min_size=2, max_size=4))

    merged([instance(role, i, **each) for i, each in enumerate(said)])


@pytest.mark.parametrize(
    ("states", "standing", "ready"),
    [
        (("ready", "ready"), "ready", 2),
        (("ready", "down"), "degraded", 1),
        (("ready", "starting"), "degraded", 1),
        (("starting", "down"), "degraded", 0),
        (("starting", "starting"), "starting", 0),
        (("down", "down"), "down", 0),
    ],
)
def test_a_role_is_down_only_if_none_of_it_answers(
    states: tuple[str, ...], standing: str, ready: int
) -> None:
    services = [instance("gateway", i, state, memory_mb=10.5) for i, state in enumerate(states)]

    assert roles_of(services) == [
        {"role": "gateway", "state": standing, "ready": ready, "of": 2, "memory_mb": 21}
    ]


def test_roles_are_ordered_by_their_first_instances() -> None:
    found = roles_of([instance("joiner", 0, memory_mb=3.0), instance("gateway", 0), instance("joiner", 1)])

    assert [(r["role"], r["of"], r["memory_mb"]) for r in found] == [("joiner", 2, 3), ("gateway", 1, None)]
