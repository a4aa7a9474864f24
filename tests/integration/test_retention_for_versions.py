"""Retention keeps the samples that a restart's dense weights lack, though rows have them (PROTOCOL 12)."""

from pathlib import Path
from typing import cast

from bench.workload import Workload, append, plain_spec
from freshet.apps.metrics import TRAINER_METRICS
from freshet.apps.pipeline import Pipeline
from freshet.clock import SYSTEM_CLOCK
from freshet.errors import Unavailable
from freshet.log.sqlite.event_log import SqliteEventLog
from freshet.observability.metrics import readings
from freshet.testing.clock import SettableClock
from freshet.testing.faults import Faulty
from freshet.types import TopicPartition
from freshet.versions import VersionStore
from tests.fixtures.trainers import own_trainer

ROWS, WEEK_AND_DAY_MS = 1_024, 8 * 86_400_000


def remove_old(folder: Path) -> None:
    """Remove what retention allows in eight days; that of samples is a week."""
    later = SqliteEventLog(folder / "log", SettableClock(SYSTEM_CLOCK.now_ms() + WEEK_AND_DAY_MS))
    while later.enforce_retention():
        pass
    later.close()


def test_samples_after_the_last_stored_version_are_kept(tmp_path: Path) -> None:
    pipeline = Pipeline(plain_spec('kind = "linear"', ids=2), tmp_path, 1)
    rows = Workload(rows=ROWS, cardinality=50).arrays()
    at = TopicPartition(pipeline.topics.samples, 0)
    versions = Faulty(pipeline.versions)

    def trained(store: object) -> int:
        training = own_trainer(pipeline.context, pipeline.rows, cast(VersionStore, store), lanes=1)
        training.run_to_the_end()
        assert training.ledger.applied[0] == pipeline.log.bounds(at).end
        return training.trainer.progress.samples

    try:
        append(pipeline, rows)
        assert trained(pipeline.versions) == ROWS
        stored, end = pipeline.versions.numbers()[-1], pipeline.log.bounds(at).end
        append(pipeline, rows)
        versions.script("put", nth=1, times=1_000, error=Unavailable("No space left on device"))
        assert trained(versions) == ROWS, "rows are stored further than any version"
        assert pipeline.versions.numbers()[-1] == stored

        remove_old(tmp_path)

        assert pipeline.log.bounds(at).start == end, "a restart needs no older ones"
        restarted = own_trainer(pipeline.context, pipeline.rows, pipeline.versions, lanes=1)
        assert readings(TRAINER_METRICS, restarted.status())["freshet_trainer_room_blocks"]["0",] == 0
        restarted.run_to_the_end()
        assert restarted.trainer.progress.samples == ROWS
        assert restarted.retention_margin()["0"] > 0, "the pin moves with the version"
        remove_old(tmp_path)
        assert pipeline.log.bounds(at).start == pipeline.log.bounds(at).end
    finally:
        pipeline.close()
