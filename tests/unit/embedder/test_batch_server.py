"""The batch server of an embedder: its connections and streams may end between any two steps of a request."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from freshet.batches.frames import USED, RequestHeader, batch_of, gradients_frame, take_frame
from freshet.batches.stream import TrainBatch
from freshet.embedder.batch_builder import Slot
from freshet.embedder.pipeline import BatchPipeline
from freshet.embedder.service import BatchServer
from freshet.errors import Unavailable
from freshet.log.sqlite.event_log import SqliteEventLog
from freshet.rpc.channel import MIB
from freshet.rpc.frames import decode_frame
from freshet.testing.conditions import wait_for
from freshet.testing.contracts.batches import gradients_of
from freshet.testing.contracts.rowservice import PARTITIONS
from freshet.wires.codecs import RowCodec
from tests.fixtures.embedder import FENCE, RemoteScene, ServedEmbedder

WAIT_MS = 20_000

End = Callable[[BatchServer], None]

ENDS: dict[str, End] = {
    "connection": lambda batches: batches.leave(0, 1),
    "stream": BatchServer.renew,
    "server": BatchServer.close,
}


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[RemoteScene]:
    log = SqliteEventLog(tmp_path)
    scene = RemoteScene(log)
    yield scene
    scene.close()
    log.close()


def header(feed: int, lane: int = 0, lanes: int = 1) -> RequestHeader:
    return RequestHeader(feed, FENCE, 0, 1, lanes, lane, WAIT_MS)


def take(embedder: ServedEmbedder, of: RequestHeader) -> tuple[int, TrainBatch] | None:
    request = decode_frame(take_frame(1, of, dict.fromkeys(range(PARTITIONS), 0)), max_bytes=MIB)
    answer = decode_frame(embedder.batches.take(request, set()), max_bytes=MIB)
    return batch_of(answer, embedder.batches._names, embedder.batches.wires.rows)


def give(embedder: ServedEmbedder, of: RequestHeader, batch_id: int, batch: TrainBatch) -> bytes:
    wire = embedder.batches.wires.gradients
    data = gradients_frame(1, of, {}, batch_id, gradients_of(batch, 1.0), wire, RowCodec.FP32)
    frame = decode_frame(data, max_bytes=MIB)
    assert frame.flags == USED
    return embedder.batches.give(frame)


def test_closed_server_opens_no_stream(scene: RemoteScene) -> None:
    scene.append(0, [1])
    embedder = scene.embedder(range(PARTITIONS))
    assert take(embedder, header(1)) is not None
    embedder.batches.close()

    with pytest.raises(Unavailable, match=r"this embedder is stopping"):
        take(embedder, header(2))

    assert (embedder.batches.stream(), embedder.batches.ranks()) == (None, 1)


def test_status_is_read_while_a_stream_closes(scene: RemoteScene, monkeypatch: pytest.MonkeyPatch) -> None:
    embedder = scene.embedder(range(PARTITIONS))
    assert take(embedder, replace(header(1), wait_ms=0)) is None
    gate, close = threading.Event(), BatchPipeline.close
    monkeypatch.setattr(BatchPipeline, "close", lambda stream: (gate.wait(60), close(stream)))
    with ThreadPoolExecutor(2) as threads:
        closed = threads.submit(embedder.batches.close)
        wait_for(lambda: embedder.batches.stream() is None)
        try:
            assert threads.submit(embedder.batches.ranks).result(60) == 1
        finally:
            gate.set()
        closed.result(60)


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize(
    ("part", "step"), [(BatchPipeline, "push_gradients"), (Slot, "copy_gradients")], ids=["queue", "copy"]
)
def test_end_while_gradients_arrive_loses_no_sample(
    scene: RemoteScene, monkeypatch: pytest.MonkeyPatch, part: type, step: str, end: str
) -> None:
    for i in range(3):
        scene.append(0, [i])
    embedder = scene.embedder(range(PARTITIONS), 1, 1)
    first = take(embedder, header(1))
    assert first is not None
    continued = getattr(part, step)

    def ended(*arguments: object) -> object:
        monkeypatch.setattr(part, step, continued)
        ENDS[end](embedder.batches)
        return continued(*arguments)

    monkeypatch.setattr(part, step, ended)
    give(embedder, header(1), *first)

    if end == "server":
        return
    learned: list[int] = []
    while len(learned) < 3:
        taken = [take(embedder, header(2)) for _ in range(min(2, 3 - len(learned)))]  # as many as permits
        for one in taken:
            assert one is not None
            learned += one[1].sample_ids.tolist()
            give(embedder, header(2), *one)
    assert learned == [0, 1, 2]
    stream = embedder.batches.stream()
    assert stream is not None
    assert stream.flush(60)
    assert scene.rows.applied()[0] == [3]
    slots = stream._prefetching[0]._slots
    assert len(set(map(id, slots))) == len(slots), "two batches would share the memory of one"


def test_gradients_without_memory_end_the_embedder(
    scene: RemoteScene, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene.append(0, [1])
    embedder = scene.embedder(range(PARTITIONS))
    taken = take(embedder, header(1))
    assert taken is not None

    def refuse(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(Slot, "copy_gradients", refuse)
    with pytest.raises(MemoryError):
        give(embedder, header(1), *taken)

    assert isinstance(embedder.batches.failed, MemoryError), "the lane would wait for the batch for ever"


@pytest.mark.parametrize("end", ENDS)
def test_end_while_a_batch_is_taken_loses_no_sample(
    scene: RemoteScene, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    scene.append(0, [1])
    embedder = scene.embedder(range(PARTITIONS))
    find = BatchPipeline.next_batch_of

    def ended(*arguments: object) -> object:
        monkeypatch.setattr(BatchPipeline, "next_batch_of", find)
        found = find(*arguments)  # type: ignore[arg-type]
        ENDS[end](embedder.batches)
        return found

    monkeypatch.setattr(BatchPipeline, "next_batch_of", ended)
    with pytest.raises(Unavailable, match=r"replaced"):
        take(embedder, header(1))

    if end != "server":
        again = take(embedder, header(2))
        assert again is not None
        assert again[1].sample_ids.tolist() == [1]


def test_request_of_a_replaced_stream_uses_its_lanes(
    scene: RemoteScene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The new stream has more lanes: their numbers mean nothing to the former one."""
    embedder = scene.embedder([1])
    connect = BatchServer._connect

    def replaced(*arguments: object) -> object:
        monkeypatch.setattr(BatchServer, "_connect", connect)
        found = connect(*arguments)  # type: ignore[arg-type]
        embedder.own([0, 1])
        connect(*arguments)  # type: ignore[arg-type]
        return found

    monkeypatch.setattr(BatchServer, "_connect", replaced)

    assert take(embedder, header(1, lane=1, lanes=2)) is None
    assert embedder.batches.failed is None
