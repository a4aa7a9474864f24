"""A version store that cannot be written, as when its disk is full: training goes on, says so, and writes
versions again once it can."""

import threading
from pathlib import Path
from typing import cast

from bench.workload import Workload, append, plain_spec
from freshet.apps.metrics import TRAINER_METRICS
from freshet.apps.pipeline import Pipeline
from freshet.cli.status import as_text
from freshet.errors import Unavailable
from freshet.observability.metrics import readings
from freshet.testing.conditions import wait_until
from freshet.testing.faults import Faulty
from freshet.versions import VersionStore
from tests.fixtures.trainers import own_trainer

ROWS = 1_024
FULL = "versions/0000000001: cannot write: No space left on device"


def test_unwritten_versions_are_reported_and_training_goes_on(tmp_path: Path) -> None:
    pipeline = Pipeline(plain_spec("", 'version_interval = "100ms"'), tmp_path, 2)
    rows = Workload(rows=ROWS, cardinality=100).arrays()
    versions = Faulty(pipeline.versions)
    training = own_trainer(pipeline.context, pipeline.rows, cast(VersionStore, versions), lanes=1)
    seen = threading.Event()  # the second write waits until the test has read the state after the first
    versions.script("put", nth=1, error=Unavailable(FULL))
    versions.script("put", nth=2, error=Unavailable(FULL), before=lambda: seen.wait(60))
    thread = threading.Thread(target=training.run)
    thread.start()
    appended = 0

    def learns() -> None:
        nonlocal appended
        appended += append(pipeline, rows)
        wait_until("all is trained on", lambda: training.status()["samples"] == appended, within_s=60)

    def failed(times: int) -> bool:
        learns()
        return bool(training.status()["versions_failed"] >= times)

    def written() -> bool:
        learns()
        return bool(training.status()["version"] > 0)

    try:
        wait_until("a version could not be written", lambda: failed(1), within_s=60)
        full = dict(training.status())
        seen.set()
        wait_until("the next one could not either", lambda: failed(2), within_s=60)
        wait_until("a version is written", written, within_s=60)
        well = dict(training.status())
    finally:
        seen.set()
        training.stop()
        thread.join()
        pipeline.close()

    assert full["version_error"] == FULL
    assert readings(TRAINER_METRICS, full)["freshet_trainer_versions_failed"] == {(): 1}
    assert (well["versions_failed"], well["version_error"]) == (2, "")
    assert _shown(full).count(FULL) == 1
    assert "could be written" not in _shown(well)


def _shown(figures: dict[str, object]) -> str:
    """As `freshet status` prints it."""
    service = dict.fromkeys(("state", "pid", "port", "up_s", "restarts", "memory_mb", "reason", "last_exit"))
    versions = {"newest": None}
    trainer = {**service, "figures": figures}
    return as_text({"folder": "run", "services": {"trainer": trainer}, "versions": versions})
