from collections.abc import Iterator
from pathlib import Path

import orjson
import pytest

from freshet.console import topic_readers
from freshet.console.topic_readers import Versions
from freshet.log.sqlite.event_log import SqliteEventLog
from freshet.testing.clock import SettableClock
from freshet.types import Append, BytesColumn
from freshet.versions.folder import FolderVersionStore

TOPIC, DAY_S = "toy.versions", 86_400.0


class Scene:
    def __init__(self, folder: Path) -> None:
        self.clock = SettableClock()
        self.log = SqliteEventLog(folder / "log", self.clock)
        self.log.create_topic(TOPIC, partitions=1)
        self.store = FolderVersionStore(folder / "versions")

    def move(self, number: int, by: str, **more: object) -> None:
        record = {"v": 1, "kind": "alias", "alias": "stable", "number": number, "by": by}
        value = orjson.dumps({**record, "time_ms": self.clock.now_ms(), **more})
        writer = self.log.writer()
        writer.append([Append(TOPIC, 0, BytesColumn.of([value]))])
        writer.close()

    def numbers(self, versions: Versions) -> list[int]:
        return [event["number"] for event in versions.events()]

    def versions(self) -> Versions:
        span_ms = round(DAY_S * 1000)
        return Versions(self.store, self.log, TOPIC, span_ms=span_ms, now_ms=self.clock.now_ms())


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    made = Scene(tmp_path)
    yield made
    made.log.close()


def test_versions_of_the_history_alone_are_read(scene: Scene) -> None:
    scene.move(1, "operator", pinned=True)
    scene.clock.advance(2 * DAY_S)
    scene.move(2, "trainer")
    versions = scene.versions()

    assert scene.numbers(versions) == [2]
    assert versions.to_json(None)["pinned"], "an older rollback still pins"
    scene.move(3, "console", pinned=False)
    assert scene.numbers(versions) == [3]
    assert not versions.to_json(None)["pinned"]
    versions.close()


def test_events_beyond_those_of_the_history_are_dropped(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(topic_readers, "POINTS", 3)
    versions = scene.versions()
    for number in range(5):
        scene.move(number, "trainer")

    assert scene.numbers(versions) == [2, 3, 4]
    versions.close()


def test_a_promotion_in_the_history_unpins(scene: Scene) -> None:
    scene.move(1, "operator", pinned=True)
    scene.clock.advance(2 * DAY_S)
    scene.move(2, "operator", pinned=False)
    versions = scene.versions()

    assert scene.numbers(versions) == [2]
    assert not versions.to_json(None)["pinned"]
    versions.close()
