import pytest
from prometheus_client import CollectorRegistry, generate_latest

from freshet.runtime.metrics import Metric, Reading, markdown_of, register

PUSHES = Metric("freshet_shard_pushes", "counter", "pushes", "Pushes applied.")
LAG = Metric("freshet_trainer_lag", "gauge", "blocks", "Blocks not covered yet.", ("partition",))


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


def test_the_docs_name_what_prometheus_shows() -> None:
    assert markdown_of([LAG, PUSHES]).splitlines()[2:] == [
        "| `freshet_shard_pushes_total` | counter | pushes | – | Pushes applied. |",
        "| `freshet_trainer_lag` | gauge | blocks | partition | Blocks not covered yet. |",
    ]
