from collections.abc import Iterator
from pathlib import Path

import pytest

from freshet.log.sqlite.event_log import SqliteEventLog
from freshet.rpc.pieces import MIN_LIMIT_BYTES
from freshet.testing.contracts.batches import BatchStreamContract, Scene
from tests.fixtures.embedder import LocalScene, PipelinedScene, RemoteScene


class TestDirectPipeline(BatchStreamContract):
    @pytest.fixture
    def scene(self, tmp_path: Path) -> Iterator[Scene]:
        log = SqliteEventLog(tmp_path)
        yield LocalScene(log)
        log.close()


class TestPrefetchingPipeline(BatchStreamContract):
    answers_at_once = False

    @pytest.fixture
    def scene(self, tmp_path: Path) -> Iterator[Scene]:
        log = SqliteEventLog(tmp_path)
        yield PipelinedScene(log)
        log.close()


class TestPrefetchingPipelineWithReadMyWrites(BatchStreamContract):
    answers_at_once = False

    @pytest.fixture
    def scene(self, tmp_path: Path) -> Iterator[Scene]:
        log = SqliteEventLog(tmp_path)
        yield PipelinedScene(log, read_my_writes=True)
        log.close()


class TestRemoteStreamWithReadMyWrites(BatchStreamContract):
    answers_at_once = False

    @pytest.fixture
    def scene(self, tmp_path: Path) -> Iterator[Scene]:
        log = SqliteEventLog(tmp_path)
        scene = RemoteScene(log, read_my_writes=True)
        yield scene
        scene.close()
        log.close()


class TestRemoteStream(BatchStreamContract):
    answers_at_once = False

    @pytest.fixture
    def scene(self, tmp_path: Path) -> Iterator[Scene]:
        log = SqliteEventLog(tmp_path)
        scene = RemoteScene(log)
        yield scene
        scene.close()
        log.close()


class TestRemoteStreamInPieces(BatchStreamContract):
    """Nearly every message is longer than one may be."""

    answers_at_once = False

    @pytest.fixture
    def scene(self, tmp_path: Path) -> Iterator[Scene]:
        log = SqliteEventLog(tmp_path)
        scene = RemoteScene(log, read_my_writes=True, max_message_bytes=MIN_LIMIT_BYTES)
        yield scene
        scene.close()
        log.close()
