"""Hot routes, which bypass the router, answer as other routes do, however the bytes arrive."""

from __future__ import annotations

import httpx

from freshet.testing.conditions import wait_for
from tests.unit.http.hot_server import LIMIT, Running, asking, bodies, running_server


def test_a_whole_request_is_answered_with_its_headers(hot_server: Running) -> None:
    answer = httpx.post(f"{hot_server.url}/now", content=b"x")

    assert (answer.status_code, answer.content) == (202, b"now x")
    assert answer.headers["content-type"] == "application/json"


def test_a_body_in_pieces_is_taken_too(hot_server: Running) -> None:
    whole = asking("/now", b"in pieces")
    with hot_server.connect() as client:
        for cut in (1, 30, len(whole) - 3):
            client.sendall(whole[:cut])
            client.sendall(whole[cut:])
            assert bodies(client, 1) == [b"now in pieces"]


def test_a_body_in_chunks_is_taken_too(hot_server: Running) -> None:
    with hot_server.connect() as client:
        client.sendall(
            b"POST /now HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
            b"2\r\nab\r\n3\r\ncde\r\n0\r\n\r\n"
        )
        assert bodies(client, 1) == [b"now abcde"]


def test_an_error_is_answered_as_json(hot_server: Running) -> None:
    answer = httpx.post(f"{hot_server.url}/now", content=b"bad")

    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "bad_input")


def test_a_page_of_another_site_is_refused(hot_server: Running) -> None:
    answer = httpx.post(f"{hot_server.url}/now", content=b"x", headers={"sec-fetch-site": "cross-site"})

    assert answer.status_code == 403


def test_a_body_beyond_the_limit_is_413(hot_server: Running) -> None:
    assert httpx.post(f"{hot_server.url}/now", content=b"x" * (LIMIT + 1)).status_code == 413
    assert httpx.post(f"{hot_server.url}/now", content=b"x" * LIMIT).status_code == 202


def test_a_body_that_does_not_come_is_408() -> None:
    with running_server(body_timeout_s=0.3) as server, server.connect() as client:
        client.sendall(asking("/now", b"all of it")[:-3])
        assert b"408" in client.recv(100)


def test_answers_keep_the_order_of_requests(hot_server: Running) -> None:
    with hot_server.connect() as client:
        client.sendall(
            asking("/later", b"1") + asking("/now", b"2") + asking("/routed", b"3") + asking("/later", b"4")
        )
        hot_server.let_go()
        hot_server.let_go()
        assert bodies(client, 4) == [b"later 1", b"now 2", b"routed 3", b"later 4"]


def test_a_connection_closes_on_the_clients_wish(hot_server: Running) -> None:
    with hot_server.connect() as client:
        client.sendall(asking("/now", b"x", "connection: close"))
        read = b""
        while piece := client.recv(1_000):
            read += piece
    assert read.endswith(b"now x")
    assert b"connection: close" in read


def test_a_client_that_went_away_is_not_answered_and_others_are(hot_server: Running) -> None:
    with hot_server.connect() as client:
        client.sendall(asking("/later", b"x"))
        wait_for(lambda: bool(hot_server.held))
    hot_server.let_go()

    assert httpx.post(f"{hot_server.url}/now", content=b"x").status_code == 202


def test_requests_are_counted_by_route_and_status(hot_server: Running) -> None:
    httpx.post(f"{hot_server.url}/now", content=b"x")
    httpx.post(f"{hot_server.url}/now", content=b"bad")
    text = httpx.get(f"{hot_server.url}/metrics").text

    assert 'freshet_http_requests_total{door="passed",route="/now",status="202"} 1.0' in text
    assert 'freshet_http_requests_total{door="passed",route="/now",status="400"} 1.0' in text
    assert 'freshet_http_request_seconds_count{route="/now"} 2.0' in text


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


def test_requests_open_at_the_end_of_the_drain_get_503(hot_server: Running) -> None:
    with hot_server.connect() as client:
        client.sendall(asking("/later", b"x"))
        wait_for(lambda: bool(hot_server.held))
        hot_server.stop.set()
        assert client.recv(1_000).startswith(b"HTTP/1.1 503")


def test_a_request_knows_whether_its_client_went_away(hot_server: Running) -> None:
    with hot_server.connect() as client:
        client.sendall(asking("/watched", b"x"))
        wait_for(lambda: bool(hot_server.held))
        assert not hot_server.is_gone()

    wait_for(hot_server.is_gone)
    hot_server.let_go()  # the answer is dropped
    assert httpx.post(f"{hot_server.url}/now", content=b"y").text == "now y"
