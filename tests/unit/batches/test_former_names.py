from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from freshet.batches.stream import RunStream
from freshet.log.sqlite.event_log import SqliteEventLog
from freshet.testing.contracts.batches import firsts, gradients_of
from tests.fixtures.embedder import LocalScene


def test_former_names_of_a_stream_warn_and_work(tmp_path: Path) -> None:
    log = SqliteEventLog(tmp_path)
    scene = LocalScene(log)
    scene.append(0, [1, 2])
    stream = scene.stream()

    with pytest.warns(DeprecationWarning, match="call `next_batch`"):
        batch = stream.take(0, 1.0)
    assert batch is not None
    with pytest.warns(DeprecationWarning, match="call `push_gradients`"):
        stream.give_back(0, batch, gradients_of(batch))
    with pytest.warns(DeprecationWarning, match="call `flush`"):
        assert stream.settled(1.0)

    assert firsts(scene.rows.applied())[0] == 1
    stream.close()
    log.close()


def test_former_names_of_a_run_stream_warn_and_work() -> None:
    finished: list[tuple[Any, ...]] = []
    stream: Any = SimpleNamespace(finish_run=lambda *call: finished.append(call))
    run: Any = object()

    with pytest.warns(DeprecationWarning, match="call `finish_run`"):
        RunStream.give_back_run(stream, 0, run, None)
    with pytest.warns(DeprecationWarning, match="call `finish_run`"):
        RunStream.push_run(stream, 1, run, None)

    assert finished == [(0, run, None), (1, run, None)]
