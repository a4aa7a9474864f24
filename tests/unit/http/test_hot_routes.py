"""Hot routes, which bypass the router and reply by a callback."""

from __future__ import annotations

import httpx

from freshet.testing.conditions import wait_for
from tests.unit.http.hot_server import Running, asking, bodies, running_server


def test_a_whole_request_is_answered_with_its_headers(hot_server: Running) -> None:
    answer = httpx.post(f"{hot_server.url}/now", content=b"x")

    assert (answer.status_code, answer.content) == (202, b"now x")
    assert answer.headers["content-type"] == "application/json"


def test_answers_keep_the_order_of_requests(hot_server: Running) -> None:
    with hot_server.connect() as client:
        client.sendall(
            asking("/later", b"1") + asking("/now", b"2") + asking("/routed", b"3") + asking("/later", b"4")
        )
        hot_server.let_go()
        hot_server.let_go()
        assert bodies(client, 4) == [b"later 1", b"now 2", b"routed 3", b"later 4"]


def test_a_stop_waits_for_an_answer_and_then_closes() -> None:
    with running_server(drain_s=20) as server, server.connect() as client:
        client.sendall(asking("/later", b"x"))
        wait_for(lambda: bool(server.held))
        server.stop.set()
        wait_for(server.is_closed)
        server.let_go()
        read = b""
        while piece := client.recv(1_000):
            read += piece
    assert read.startswith(b"HTTP/1.1 202")
    assert b"connection: close" in read


def test_a_request_knows_whether_its_client_went_away(hot_server: Running) -> None:
    with hot_server.connect() as client:
        client.sendall(asking("/watched", b"x"))
        wait_for(lambda: bool(hot_server.held))
        assert not hot_server.is_gone()

    wait_for(hot_server.is_gone)
    hot_server.let_go()  # the answer is dropped
    assert httpx.post(f"{hot_server.url}/now", content=b"y").text == "now y"
