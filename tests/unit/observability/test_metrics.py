import pytest
from prometheus_client import CollectorRegistry, generate_latest

from freshet.observability.metrics import Metric, Reading, register

PUSHES = Metric("freshet_shard_pushes", "counter", "pushes", "Pushes applied.")
LAG = Metric("freshet_trainer_lag", "gauge", "blocks", "Blocks not covered yet.", ("partition",))
TIME = Metric("freshet_shard_flush_seconds", "histogram", "seconds", "Time of a flush.", buckets=(0.1, 0.5))


def test_readings_are_taken_when_they_are_scraped() -> None:
    counts: dict[str, Reading] = {PUSHES.name: 3, LAG.name: {("0",): 5, ("1",): 7}}
    registry = CollectorRegistry()
    register(registry, [PUSHES, LAG], lambda: counts)
    counts[PUSHES.name] = 4

    page = generate_latest(registry).decode()

    assert "# HELP freshet_shard_pushes_total Pushes applied." in page
    assert "freshet_shard_pushes_total 4.0" in page
    assert 'freshet_trainer_lag{partition="1"} 7.0' in page


def test_a_metric_without_reading_is_left_out() -> None:
    registry = CollectorRegistry()
    register(registry, [PUSHES, LAG], lambda: {PUSHES.name: 1})
    assert "freshet_trainer_lag" not in generate_latest(registry).decode()


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
