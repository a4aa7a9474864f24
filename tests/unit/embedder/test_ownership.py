import threading
import time
from pathlib import Path

import pytest

from freshet.clock import SYSTEM_CLOCK, Clock
from freshet.coordination.claims import Claims
from freshet.embedder.core import address_of, embedders_of
from freshet.embedder.service import EMBEDDER_METRICS, Embedder, EmbedderAddress
from freshet.errors import Fenced
from freshet.log.sqlite.event_log import SqliteEventLog
from freshet.observability.metrics import readings
from freshet.rpc.channel import Transport
from freshet.rpc.server import FrameServer
from freshet.testing.clock import SettableClock
from freshet.testing.conditions import wait_for
from freshet.testing.contracts.batches import gradients_of
from freshet.testing.contracts.rowservice import PARTITIONS
from tests.fixtures.embedder import IdDecoders, RemoteScene

DEADLINE_S = 60.0
LEASE_S = 0.6


def test_owner_contains_the_address():
    assert address_of("a@10.0.0.1:7021/abc") == "10.0.0.1:7021"
    assert address_of("trainer-17") == ""


class Process:
    """Run an embedder with its own claims in a thread."""

    def __init__(
        self,
        scene: RemoteScene,
        name: str,
        *,
        heartbeat_s: float = 0.1,
        lease_s: float = 8.0,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self.claims = Claims(scene.log, "control", lease_s=lease_s, heartbeat_s=heartbeat_s, clock=clock)
        self.server = FrameServer("127.0.0.1:0", Transport())
        self.embedder = Embedder(
            scene.context(),
            self.claims,
            scene.rows,
            IdDecoders(scene.context(), scene.writer),
            self.server,
            EmbedderAddress(name, "127.0.0.1"),
        )
        self.stop = threading.Event()
        self.error: Exception | None = None
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def _run(self) -> None:
        try:
            self.embedder.run(self.stop)
        except Exception as error:
            self.error = error

    def end(self) -> None:
        self.stop.set()
        self.thread.join()
        self.claims.close()

    @property
    def owned(self) -> list[int]:
        return list(self.embedder.status()["partitions"])


@pytest.fixture
def scene(tmp_path: Path):
    log = SqliteEventLog(tmp_path)
    log.create_topic("control", partitions=1)
    scene = RemoteScene(log)
    yield scene
    scene.close()
    log.close()


def test_embedders_take_partitions_over_during_training(scene):
    for i in range(60):
        scene.append(i % 2, [i])
    watching = Claims(scene.log, "control", lease_s=8.0, heartbeat_s=0.1)
    stream = scene.rank(lambda: embedders_of(watching.living()))

    def train(until: int) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while sum(o[0] for o in scene.rows.applied().values()) < until:
            assert time.monotonic() < deadline, f"rows stand at {scene.rows.applied()}"
            if (batch := stream.next_batch(0, 0.02)) is not None:
                stream.push_gradients(0, batch, gradients_of(batch))

    first = Process(scene, "a")
    wait_for(lambda: first.owned == list(range(PARTITIONS)), DEADLINE_S)
    train(20)
    second = Process(scene, "b")
    wait_for(lambda: (first.owned, second.owned) == ([0], [1]), DEADLINE_S)
    train(40)
    first.end()
    wait_for(lambda: second.owned == [0, 1], DEADLINE_S)
    train(60)

    figures = readings(EMBEDDER_METRICS, second.embedder.status())
    assert figures.keys() == {metric.name for metric in EMBEDDER_METRICS}
    assert figures["freshet_embedder_samples"] != {(): 0}
    second.end()
    watching.close()
    assert first.error is None
    assert second.error is None


def test_embedder_without_its_membership_lease_stops(scene):
    silent = Process(scene, "a", heartbeat_s=1000.0, lease_s=LEASE_S, clock=SettableClock())
    wait_for(lambda: silent.owned == [0, 1], DEADLINE_S)
    heir = Process(scene, "a", lease_s=LEASE_S)
    silent.thread.join(DEADLINE_S)
    assert isinstance(silent.error, Fenced)
    wait_for(lambda: heir.owned == [0, 1], DEADLINE_S)
    heir.end()
    silent.end()
