"""A start that fails or is stopped leaves nothing open: claims are released, listeners and files closed."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest
from structlog.testing import capture_logs

from bench.workload import plain_spec
from freshet.adapters import open_eventlog
from freshet.apps import embedder, pipeline, services, trainer
from freshet.apps.pipeline import Pipeline
from freshet.apps.remote_sources import FromEmbedders, Wire
from freshet.clock import SYSTEM_CLOCK
from freshet.config.settings import Settings, load_settings
from freshet.config.spec import load_spec
from freshet.coordination.assignment import slices_of
from freshet.coordination.claims import Claims
from freshet.errors import ConfigError, Mismatch
from freshet.log import EventLog
from freshet.log.topics import ensure_topics
from freshet.paramserver.service import ParamServer, ShardAddress
from freshet.rpc.channel import MIB, Transport
from tests.fixtures.trainers import rank_of, trainer_of

SPEC_FILE = Path(__file__).parents[1] / "system" / "ledger" / "freshet.toml"
SPEC = load_spec(SPEC_FILE)
TRANSPORT = Transport(max_message_bytes=MIB)
WITHIN_S, CLAIM_WAIT_S = 60.0, 600.0
"""A stopped start ends in the first time, one that waits for another owner's claim in the second one."""


@pytest.fixture
def world(tmp_path: Path) -> Iterator[Pipeline]:
    made = Pipeline(plain_spec("", ""), tmp_path, 2)
    yield made
    made.close()


def fails(*_given: Any, **_named: Any) -> NoReturn:
    raise Mismatch("of another model")


def claims_threads() -> list[threading.Thread]:
    """Those that send heartbeats."""
    return [thread for thread in threading.enumerate() if thread.name.startswith("claims ")]


def start_trainer(world: Pipeline) -> None:
    trainer_of(world, lanes=1)


def start_rank(world: Pipeline) -> None:
    rank_of(world, FromEmbedders, Wire(TRANSPORT))


def start_embedder(world: Pipeline) -> None:
    embedder.EmbedderProcess(world.context, load_settings())


@pytest.mark.parametrize(
    ("start", "broken"),
    [
        (start_trainer, (trainer, "restore_state")),
        (start_rank, (trainer, "restore_state")),
        (start_embedder, (embedder, "Embedder")),
    ],
    ids=["trainer", "rank", "embedder"],
)
def test_a_start_that_fails_sends_no_heartbeats(
    world: Pipeline,
    monkeypatch: pytest.MonkeyPatch,
    start: Callable[[Pipeline], None],
    broken: tuple[Any, str],
) -> None:
    before = claims_threads()
    monkeypatch.setattr(*broken, fails)
    with pytest.raises(Mismatch):
        start(world)

    assert claims_threads() == before


def test_a_trainer_that_fails_to_start_releases_its_claims(
    world: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trainer, "restore_state", fails)
    with pytest.raises(Mismatch):
        start_trainer(world)

    claims = Claims(world.log, world.topics.control, lease_s=300.0)  # silence alone would not do
    claims.acquire("trainer:0", "next", SYSTEM_CLOCK.monotonic() + WITHIN_S)
    claims.close()


def test_a_shard_whose_port_is_taken_sends_no_heartbeats(world: Pipeline) -> None:
    before = claims_threads()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        place = ShardAddress("a", *taken.getsockname())
        with pytest.raises(ConfigError, match="port"):
            ParamServer(world.context, world.rows, place, TRANSPORT)

    assert claims_threads() == before


@pytest.mark.parametrize("role", ["trainer", "paramserver", "inference"])
def test_a_store_that_cannot_be_opened_leaves_the_log_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, role: str
) -> None:
    module = trainer if role == "trainer" else services
    closed = closings(module, monkeypatch)
    monkeypatch.setattr(module, "open_rowstore", fails)
    with capture_logs() as said, pytest.raises(Mismatch):
        services.RUNNERS[role](SPEC, settings_in(tmp_path), threading.Event())

    assert closed == ["log"]
    assert [line for line in said if "not closed" in line["event"]] == []


def test_a_pipeline_that_fails_leaves_its_log_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    closed = closings(pipeline, monkeypatch)
    monkeypatch.setattr(pipeline, "open_rowstore", fails)
    with pytest.raises(Mismatch):
        Pipeline(plain_spec("", ""), tmp_path, 2)

    assert closed == ["log"]


@pytest.mark.parametrize(
    ("role", "held"), [("trainer", list(slices_of(SPEC.buckets))), ("paramserver", ["shard:a"])]
)
def test_a_stopped_start_ends_its_wait_for_a_claim(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, role: str, held: list[str]
) -> None:
    monkeypatch.setattr("freshet.apps.batch_sources.CLAIM_WAIT_S", CLAIM_WAIT_S)
    monkeypatch.setattr("freshet.paramserver.service.JOIN_TIMEOUT_S", CLAIM_WAIT_S)
    made = settings_in(tmp_path)
    log = open_eventlog(made.common.log_url)
    other = Claims(log, ensure_topics(log, SPEC).control)
    other.acquire_all(held, "another", SYSTEM_CLOCK.monotonic() + WITHIN_S)
    stop = threading.Event()
    failures: list[BaseException] = []

    def run() -> None:
        try:
            services.RUNNERS[role](SPEC, made, stop)
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=run)
    with capture_logs() as said:
        thread.start()
        stop.set()
        thread.join(WITHIN_S)
    alive = thread.is_alive()
    other.close()
    thread.join()
    log.close()

    assert not alive
    assert failures == []
    [line] = [line for line in said if line["event"] == "stopped during the start"]
    assert f"stopped while {held[0]} is held by another" in line["reason"]


def settings_in(folder: Path) -> Settings:
    ports = {f"FRESHET_{role}_{kind}": "0" for role in ("TRAINER", "PARAMSERVER") for kind in ("ADMIN_PORT",)}
    more = {"FRESHET_PARAMSERVER_PORT": "0", "FRESHET_PARAMSERVER_NAME": "a"}
    made = load_settings(ports | more, run_folder=folder / "run")
    made.common.run.create()
    return made


def closings(module: Any, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Grows by "log" whenever an event log that the module has opened is closed."""
    closed: list[str] = []

    def opened(url: str) -> EventLog:
        log = open_eventlog(url)
        close = log.close

        def watched() -> None:
            closed.append("log")
            close()

        monkeypatch.setattr(log, "close", watched)
        return log

    monkeypatch.setattr(module, "open_eventlog", opened)
    return closed
