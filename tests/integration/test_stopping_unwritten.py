"""The row store is away while a process stops: it says so and leaves all the same, so that who comes next
need wait for no lease."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import pytest
from structlog.testing import capture_logs

from bench.workload import Workload, append, plain_spec
from freshet.apps.pipeline import Pipeline
from freshet.apps.trainer import TrainerProcess
from freshet.clock import SYSTEM_CLOCK
from freshet.coordination.assignment import slices_of
from freshet.coordination.claims import Claims
from freshet.errors import Unavailable
from freshet.paramserver.service import ParamServer, ShardAddress
from freshet.rows.store import RowStore, StoreServer
from freshet.rpc.channel import MIB, Transport
from freshet.testing.conditions import wait_until
from tests.fixtures.trainers import own_trainer

WITHIN_S = 60.0


class Closing:
    """A row store on servers that refuses flushes and claims on request, or does not answer."""

    def __init__(self, store: RowStore) -> None:
        self._store, self.away, self.hangs = store, False, False
        self.asked_for: set[str] = set()  # what hangs, or has
        self.answers = threading.Event()

    def flush(self, *given: Any, **named: Any) -> Any:
        self._wait("flush")
        return self._store.flush(*given, **named)

    def claim(self, *given: Any, **named: Any) -> Any:
        self._wait("claim")
        return self._store.claim(*given, **named)

    def servers(self) -> Sequence[StoreServer]:
        self._wait("servers")
        return []

    def _wait(self, what: str) -> None:
        if self.hangs:
            self.asked_for.add(what)
            assert self.answers.wait(2 * WITHIN_S)
        if self.away:
            raise Unavailable("the row store is away")

    def __getattr__(self, name: str) -> object:
        return getattr(self._store, name)


@pytest.fixture
def pipeline(tmp_path: Path) -> Iterator[Pipeline]:
    made = Pipeline(plain_spec("", 'flush_interval = "1h"'), tmp_path, 2)
    yield made
    made.close()


def assert_free(pipeline: Pipeline, what: str) -> None:
    """It was released: a claim of it need not wait until the former owner was silent for a lease."""
    claims = Claims(pipeline.log, pipeline.topics.control, lease_s=10 * WITHIN_S)
    try:
        claims.acquire(what, "successor", SYSTEM_CLOCK.monotonic() + WITHIN_S)
    finally:
        claims.close()


@pytest.fixture
def rows(pipeline: Pipeline) -> Iterator[Closing]:
    made = Closing(pipeline.rows)
    yield made
    made.answers.set()


def trainer(pipeline: Pipeline, rows: Closing, drain_s: float | None = None) -> TrainerProcess:
    return own_trainer(pipeline.context, cast(RowStore, rows), pipeline.versions, lanes=1, drain_s=drain_s)


def shard(pipeline: Pipeline, rows: Closing | RowStore, name: str = "a") -> ParamServer:
    return ParamServer(
        pipeline.context,
        cast(RowStore, rows),
        ShardAddress(name, "127.0.0.1", 0),
        Transport(max_message_bytes=MIB),
    )


def learn(pipeline: Pipeline, training: TrainerProcess) -> None:
    appended = append(pipeline, Workload(rows=1_024, cardinality=100).arrays())
    wait_until("it learns", lambda: training.status()["samples"] == appended, within_s=WITHIN_S)


def test_a_trainer_releases_its_claims_without_a_last_flush(pipeline: Pipeline, rows: Closing) -> None:
    training = trainer(pipeline, rows)
    thread = threading.Thread(target=training.run)
    with capture_logs() as said:
        thread.start()
        learn(pipeline, training)
        rows.away = True
        training.stop()
        thread.join(WITHIN_S)

    assert not thread.is_alive()
    assert reasons(said, "not everything was flushed") == {"the row store is away"}
    assert_trainer_left(pipeline)


def test_a_trainer_whose_last_flush_hangs_ends_within_its_drain(pipeline: Pipeline, rows: Closing) -> None:
    training = trainer(pipeline, rows, drain_s=0.1)
    thread = threading.Thread(target=training.run)
    with capture_logs() as said:
        thread.start()
        learn(pipeline, training)
        rows.hangs = True
        training.stop()
        thread.join(WITHIN_S)

    assert not thread.is_alive()
    [reason] = reasons(said, "not everything was flushed")
    assert "has not answered within 1.0 s" in reason
    assert_trainer_left(pipeline)


@pytest.mark.parametrize(
    ("hangs", "told"),
    [(False, "the row store is away"), (True, "no answer of the row store or the log within")],
    ids=["says so", "hangs"],
)
def test_a_shard_releases_claims_and_port_without_a_last_flush(
    pipeline: Pipeline, rows: Closing, hangs: bool, told: str
) -> None:
    server, stop = shard(pipeline, rows), threading.Event()
    drain_s = 1.0 if hangs else 20.0
    thread = threading.Thread(target=server.run, args=(stop,), kwargs={"drain_s": drain_s}, daemon=True)
    with capture_logs() as said:
        thread.start()
        slices = list(slices_of(pipeline.spec.buckets))
        wait_until("it serves", lambda: set(server.manager.slices) == set(slices), within_s=WITHIN_S)
        rows.away, rows.hangs = True, hangs
        stop.set()
        thread.join(WITHIN_S)

    assert not thread.is_alive()
    [reason] = reasons(said, "not everything was flushed and released")
    assert told in reason
    assert_free(pipeline, slices[0])
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", server.server.port))


def test_a_shard_in_a_hanging_round_ends_within_its_drain(
    pipeline: Pipeline, rows: Closing, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("freshet.paramserver.service.LAST_S", 10.0)
    server, stop = shard(pipeline, rows), threading.Event()
    rows.away = rows.hangs = True
    thread = threading.Thread(target=server.run, args=(stop,), kwargs={"drain_s": 1.0}, daemon=True)
    with capture_logs() as said:
        thread.start()
        asked = {"claim", "servers"}
        wait_until("it claims slices, and looks", lambda: rows.asked_for == asked, within_s=WITHIN_S)
        stop.set()
        thread.join(WITHIN_S)

    assert not thread.is_alive()
    [reason] = reasons(said, "not everything was flushed and released")
    assert "no answer of the row store or the log within" in reason
    assert not [line for line in said if line["event"].startswith("not closed in time")]
    assert_free(pipeline, next(iter(slices_of(pipeline.spec.buckets))))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", server.server.port))


def test_a_shard_with_a_hanging_release_ends_within_its_drain(pipeline: Pipeline, rows: Closing) -> None:
    slices = list(slices_of(pipeline.spec.buckets))
    leaver, heir = shard(pipeline, rows), shard(pipeline, pipeline.rows, "b")
    stops = threading.Event(), threading.Event()
    threads = [
        threading.Thread(target=server.run, args=(stop,), kwargs={"drain_s": drain_s}, daemon=True)
        for server, stop, drain_s in zip((leaver, heir), stops, (1.0, WITHIN_S), strict=True)
    ]
    for thread in threads:
        thread.start()
    wait_until("both serve", lambda: all(shared(s, len(slices)) for s in (leaver, heir)), within_s=WITHIN_S)
    rows.away = rows.hangs = True
    with capture_logs() as said:
        stops[0].set()
        threads[0].join(WITHIN_S)
    assert not threads[0].is_alive()
    assert rows.asked_for - {"servers"} == {"flush"}  # at times it requests the list of servers, too
    [reason] = reasons(said, "not everything was flushed and released")
    assert "no answer of the row store or the log within" in reason

    wait_until("the other serves all", lambda: len(heir.manager.slices) == len(slices), within_s=WITHIN_S)
    stops[1].set()
    threads[1].join(WITHIN_S)
    assert not threads[1].is_alive()


def shared(server: ParamServer, slices: int) -> bool:
    return len(server.manager.slices) == slices / 2


def reasons(said: Sequence[Mapping[str, Any]], event: str) -> set[str]:
    return {line["reason"] for line in said if line["event"] == event}


def assert_trainer_left(pipeline: Pipeline) -> None:
    for what in (next(iter(slices_of(pipeline.spec.buckets))), "partition:0", "trainer:0"):
        assert_free(pipeline, what)
