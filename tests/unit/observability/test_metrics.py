from dataclasses import dataclass, replace

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from freshet.observability.metrics import Metric, readings, register

PUSHES = Metric("freshet_shard_pushes", "counter", "pushes", "Pushes applied.")
LAG = Metric("freshet_trainer_lag", "gauge", "blocks", "Blocks not covered yet.", ("partition",))
TIME = Metric("freshet_shard_flush_seconds", "histogram", "seconds", "Time of a flush.", buckets=(0.1, 0.5))


@dataclass
class Status:
    pushes: int
    blocks: dict[int, int | None]


BLOCKS = Metric("freshet_shard_room", "gauge", "blocks", "Blocks by partition.", ("partition",), at="blocks")


def page_of(registry: CollectorRegistry) -> str:
    return generate_latest(registry).decode()


def test_a_status_is_read_at_each_scrape() -> None:
    status = {"pushes": 3, "lag": {0: 5, 1: 7}}
    registry = CollectorRegistry()
    register(registry, [PUSHES, LAG], lambda: status)
    status["pushes"] = 4

    page = page_of(registry)

    assert "# HELP freshet_shard_pushes_total Pushes applied." in page
    assert "freshet_shard_pushes_total 4.0" in page
    assert 'freshet_trainer_lag{partition="1"} 7.0' in page


def test_figures_without_a_value_are_left_out() -> None:
    assert readings([PUSHES, LAG], {"pushes": 1, "lag": None}) == {PUSHES.name: {(): 1.0}}
    assert readings([BLOCKS], Status(1, {0: 5, 1: None})) == {BLOCKS.name: {("0",): 5.0}}
    assert readings([replace(PUSHES, absent=0)], {}) == {PUSHES.name: {(): 0.0}}


def test_nothing_is_exposed_before_there_is_a_status() -> None:
    registry = CollectorRegistry()
    register(registry, [replace(PUSHES, absent=0)], lambda: None)

    assert not page_of(registry)


def test_a_place_is_a_path_or_a_function() -> None:
    quality = Metric("freshet_trainer_quality", "gauge", "1", "Measures.", ("of", "label"), at="run.measures")
    pairs = replace(quality, at=lambda status: {("served", "click"): len(status["run"])})
    status = {"run": {"measures": {"served": {"click": 0.5, "buy": None}}}}

    assert readings([quality], status) == {quality.name: {("served", "click"): 0.5}}
    assert readings([pairs], status) == {quality.name: {("served", "click"): 1.0}}


def test_a_collection_counts_as_its_length() -> None:
    assert readings([PUSHES], {"pushes": ["a", "b"]}) == {PUSHES.name: {(): 2.0}}


def test_a_status_without_an_attribute_is_an_error() -> None:
    with pytest.raises(AttributeError, match="lag"):
        readings([LAG], Status(1, {}))


def test_a_name_that_is_taken_is_refused() -> None:
    registry = CollectorRegistry()
    register(registry, [PUSHES], dict)
    with pytest.raises(ValueError, match="freshet_shard_pushes"):
        register(registry, [PUSHES], dict)


@pytest.mark.parametrize("name", ["pushes", "freshet_Pushes", "freshet_pushes_total", "freshet_"])
def test_a_bad_name_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="named freshet_"):
        Metric(name, "counter", "pushes", "Pushes.")


def test_a_descriptor_makes_the_metric_that_it_describes() -> None:
    registry = CollectorRegistry()
    PUSHES.counter(registry).inc(2)
    LAG.gauge(registry).labels("3").set(5)
    Metric("freshet_shard_rows", "gauge", "rows", "Rows.").gauge(registry, lambda: 11)
    TIME.histogram(registry).observe(0.3)

    page = generate_latest(registry).decode()

    assert "freshet_shard_pushes_total 2.0" in page
    assert 'freshet_trainer_lag{partition="3"} 5.0' in page
    assert "freshet_shard_rows 11.0" in page
    assert 'freshet_shard_flush_seconds_bucket{le="0.5"} 1.0' in page


def test_a_descriptor_makes_no_other_kind_than_it_describes() -> None:
    for make in (PUSHES.gauge, PUSHES.histogram, LAG.counter):
        with pytest.raises(ValueError, match="is described as a"):
            make(CollectorRegistry())
    with pytest.raises(ValueError, match="cannot be read"):
        register(CollectorRegistry(), [TIME], dict)


def test_a_metric_knows_its_name_in_prometheus() -> None:
    assert (PUSHES.exposed, LAG.exposed) == ("freshet_shard_pushes_total", "freshet_trainer_lag")
