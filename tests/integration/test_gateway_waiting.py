"""Requests that wait for the log together: each has its own answer; too many are turned away."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import httpx
import orjson
import pytest

from freshet.errors import Unavailable
from freshet.testing.conditions import wait_for
from tests.fixtures.gateway import Running, action, gateway, ranked, start

__all__ = ["gateway", "start"]  # fixtures


def test_requests_of_one_append_get_answers_of_their_own(gateway: Running) -> None:
    gateway.gate.open.clear()
    bodies = [ranked(1), ranked(2, ts="noon"), [ranked(3), ranked(4)], {"request_id": 5}, ranked(6)]
    with ThreadPoolExecutor(len(bodies) + 1) as threads:
        first = threads.submit(gateway.send, "impressions", ranked(0))
        assert gateway.gate.begun.wait(60)
        answers = [threads.submit(gateway.send, "impressions", body) for body in bodies]
        gateway.gate.open.set()

    assert first.result().status_code == 202
    assert [a.result().status_code for a in answers] == [202, 422, 202, 422, 202]
    places = {(p, o): key for p, o, key, _ in gateway.records("feed.ranked")}
    told = [[places[k["partition"], k["offset"]] for k in a.result().json()["acks"]] for a in answers]
    assert told == [[b"1"], [], [b"3", b"4"], [], [b"6"]]


def test_requests_that_fit_are_accepted_when_all_are_too_many(
    start: Callable[..., Running],
) -> None:
    gateway = start(gateway_queue_events="3")
    gateway.gate.open.clear()
    with ThreadPoolExecutor(3) as threads:
        first = threads.submit(gateway.send, "actions", action(0))
        assert gateway.gate.begun.wait(60)
        two = [threads.submit(gateway.send, "actions", [action(i), action(i + 10)]) for i in (1, 2)]
        wait_for(lambda: httpx.get(f"{gateway.url}/status").json()["events_waiting"] == 3)
        gateway.gate.open.set()

    assert first.result().status_code == 202
    assert [t.result().status_code for t in two] in ([202, 202], [202, 429], [429, 202])
    taken = 1 + 2 * [t.result().status_code for t in two].count(202)
    assert len(gateway.records("app.actions")) == taken


def test_a_full_queue_is_429_with_retry_after(start: Callable[..., Running]) -> None:
    gateway = start(gateway_queue_events="1")
    gateway.gate.open.clear()
    first: list[httpx.Response] = []
    thread = threading.Thread(target=lambda: first.append(gateway.send("actions", action(1))))
    thread.start()
    assert gateway.gate.begun.wait(60)

    refused = gateway.send("actions", action(2))
    gateway.gate.open.set()
    thread.join(60)

    assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
    assert first[0].status_code == 202


def test_while_the_log_fails_the_gateway_is_not_ready(gateway: Running) -> None:
    assert httpx.get(f"{gateway.url}/health/ready").status_code == 200
    gateway.gate.error = Unavailable("disk full")

    answer = gateway.send("actions", action())

    assert answer.status_code == 503
    assert "disk full" in answer.json()["error"]["message"]
    assert httpx.get(f"{gateway.url}/health/ready").status_code == 503
    assert httpx.get(f"{gateway.url}/health/live").status_code == 200

    gateway.gate.error = None
    assert gateway.send("actions", action()).status_code == 202
    assert httpx.get(f"{gateway.url}/health/ready").status_code == 200


@pytest.mark.parametrize("body", [orjson.dumps(action(2)), b"{"], ids=["good", "no JSON"])
def test_a_closed_connection_keeps_no_other_from_its_answer(gateway: Running, body: bytes) -> None:
    """It asks, asks once more, and sends what is no HTTP, all in one packet, while an append is under way."""
    gateway.gate.open.clear()
    head = f"POST /v1/actions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n".encode()
    sent = head + body + b"GET /h HTTP/1.1\r\nhost: x\r\n\r\n" + b"\x00bad\r\n\r\n"
    port = int(gateway.url.rpartition(":")[2])
    with ThreadPoolExecutor(4) as threads:
        first = threads.submit(gateway.send, "actions", action(1))
        assert gateway.gate.begun.wait(60)
        others = []
        for request in (3, 4):  # before and behind it
            before = gateway.waiting()
            others.append(threads.submit(gateway.send, "actions", action(request)))
            gateway.wait_for_more_than(before)
            if request == 3:
                for _ in range(3):
                    with socket.create_connection(("127.0.0.1", port), timeout=10) as client:
                        client.sendall(sent)
                        while client.recv(1_000):
                            pass
        gateway.gate.open.set()
        assert [asked.result().status_code for asked in (first, *others)] == [202] * 3
    assert gateway.send("actions", action(5)).status_code == 202
    assert httpx.get(f"{gateway.url}/health/ready").status_code == 200
