"""How the gateway ends: requests are finished or refused, and a start that fails leaves nothing."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
from structlog.testing import capture_logs

from freshet.errors import ConfigError
from freshet.gateway.service import Gateway, codecs_of, run
from freshet.log.sqlite.event_log import open_url
from freshet.process.lifecycle import KILL_AFTER_S
from freshet.testing.conditions import wait_for
from tests.fixtures.gateway import SCHEMAS, SPEC, Running, action, gateway, start
from tests.fixtures.serving import settings

__all__ = ["gateway", "start"]  # fixtures


def test_a_stop_finishes_what_was_begun(gateway: Running) -> None:
    gateway.gate.open.clear()
    answers: list[httpx.Response] = []
    thread = threading.Thread(target=lambda: answers.append(gateway.send("actions", action())))
    thread.start()
    assert gateway.gate.begun.wait(60)
    gateway.stop.set()
    gateway.gate.open.set()
    thread.join(60)

    assert answers[0].status_code == 202
    assert len(gateway.records("app.actions")) == 1


def test_requests_that_a_stop_ends_get_503(start: Callable[..., Running]) -> None:
    gateway = start(common_drain="1s")
    gateway.gate.open.clear()
    answers: list[httpx.Response | httpx.TransportError] = []

    def send() -> None:
        try:
            answers.append(gateway.send("actions", action()))
        except httpx.TransportError as error:
            answers.append(error)

    thread = threading.Thread(target=send)
    with capture_logs() as said:
        thread.start()
        assert gateway.gate.begun.wait(60)
        gateway.stop.set()
        thread.join(60)
        ended = gateway.ended.wait(1 + KILL_AFTER_S)  # while the append still hangs
    gateway.gate.open.set()

    [answer] = answers
    assert isinstance(answer, httpx.Response)
    assert answer.status_code == 503
    assert ended
    [stopped] = [line for line in said if line["event"] == "gateway stopped"]
    assert (stopped["events_cut_off"], stopped["append_left"]) == (1, True)


class Refused:
    """A listener whose address cannot be had."""

    async def start(self) -> None:
        raise ConfigError("grpc", "address", 1, "a port that is free")

    async def serve(self, stop: threading.Event, drain_s: float) -> None:
        raise AssertionError("it was not started")


def test_a_gateway_that_cannot_listen_leaves_no_thread(tmp_path: Path) -> None:
    log, made, before = open_url(f"sqlite:{tmp_path}/log"), settings(), set(threading.enumerate())
    codecs = codecs_of(SPEC, SCHEMAS, log)
    with pytest.raises(ConfigError):
        run(
            lambda: Gateway(SPEC, log, codecs, made.gateway),
            made.gateway.port,
            made.common,
            stop=threading.Event(),
            grpc_listener=lambda _: Refused(),
        )

    wait_for(lambda: not set(threading.enumerate()) - before)
    log.close()
