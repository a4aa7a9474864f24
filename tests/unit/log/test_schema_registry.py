"""Odd answers of a schema registry and odd external records are refused with a reason, and do no more."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from freshet.config.avro.schema import Record, Written, parse_schema, spell
from freshet.config.spec.parse import parse_spec
from freshet.errors import ConfigError, Unavailable
from freshet.features import hash_text
from freshet.joiner.decoder import SpecDecoder
from freshet.joiner.plan import join_plan
from freshet.log.schema_registry import Access, RestRegistry
from freshet.testing.clock import SettableClock
from freshet.types import BytesColumn, Records
from tests.servers.odd_registry import SCHEMA, SPEC


class Answering:
    """An HTTP server that answers every request alike."""

    def __init__(self) -> None:
        self.status, self.body, self.cut, self.requests = 200, b"", 0, 0
        answering = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                answering.requests += 1
                self.send_response(answering.status)
                self.send_header("Content-Length", str(len(answering.body) + answering.cut))
                self.end_headers()
                self.wfile.write(answering.body)

            def log_message(self, format: str, *args: object) -> None:
                pass

        self._server = HTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@pytest.fixture(scope="module")
def answering() -> Iterator[Answering]:
    answering = Answering()
    yield answering
    answering.close()


def got(answering: Answering, status: int, body: bytes, cut: int = 0) -> Written:
    answering.status, answering.body, answering.cut = status, body, cut
    return RestRegistry(Access(answering.url)).get(1)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
LIKELY = st.fixed_dictionaries(
    {},
    optional={
        "schema": st.just(json.dumps(SCHEMA)) | JSON,
        "schemaType": st.sampled_from(["AVRO", "JSON"]) | JSON,
        "references": JSON | st.lists(st.fixed_dictionaries({"subject": JSON, "version": JSON}), max_size=2),
        "error_code": st.sampled_from([40403, 404]) | JSON,
    },
)


@example(200, json.dumps({"schema": json.dumps(SCHEMA), "references": 5}).encode())
@example(200, json.dumps({"schema": 5}).encode())
@example(404, b'{"error_code": []}')
@given(
    st.sampled_from([200, 200, 200, 301, 400, 404, 500]),
    st.binary(max_size=40) | (JSON | LIKELY).map(lambda answer: json.dumps(answer).encode()),
)
def test_any_answer_is_a_schema_or_an_error_of_ours(answering: Answering, status: int, body: bytes) -> None:
    try:
        found = got(answering, status, body)
    except (KeyError, ConfigError, Unavailable):
        return
    assert status == 200
    assert spell(found) == "record View"


def test_a_schema_is_read(answering: Answering) -> None:
    assert spell(got(answering, 200, json.dumps({"schema": json.dumps(SCHEMA)}).encode())) == "record View"


def test_an_answer_that_is_cut_off_is_no_answer(answering: Answering) -> None:
    with pytest.raises(Unavailable):
        got(answering, 200, json.dumps({"schema": json.dumps(SCHEMA)}).encode(), cut=5)


def test_only_a_not_found_of_the_api_means_no_schema(answering: Answering) -> None:
    with pytest.raises(KeyError):
        got(answering, 404, b'{"error_code": 40403}')
    for body in (b'{"error_code": 404}', b"<html>", b"[]"):
        with pytest.raises(Unavailable):
            got(answering, 404, body)


def test_an_id_beyond_the_api_is_not_requested(answering: Answering) -> None:
    answering.status, answering.body = 404, b'{"error_code": 404}'  # as of a server that cannot read the id
    before = answering.requests
    with pytest.raises(KeyError):
        RestRegistry(Access(answering.url)).get(0xFFFF_FFFF)
    assert answering.requests == before


def test_what_is_no_schema_is_not_kept_for_one(answering: Answering) -> None:
    registry = RestRegistry(Access(answering.url), SettableClock())
    answering.status, answering.body, answering.cut = 200, b'{"status": "starting"}', 0
    with pytest.raises(Unavailable, match="is this a schema registry"):
        registry.get(1)
    answering.body = json.dumps({"schema": json.dumps(SCHEMA)}).encode()
    assert spell(registry.get(1)) == "record View"


def test_a_schema_is_known_though_one_registry_lags(answering: Answering) -> None:
    answering.status, answering.body, answering.cut = (
        200,
        json.dumps({"schema": json.dumps(SCHEMA)}).encode(),
        0,
    )
    behind = Answering()
    try:
        behind.status, behind.body = 404, b'{"error_code": 40403}'
        assert spell(RestRegistry(Access(f"{behind.url},{answering.url}")).get(1)) == "record View"
    finally:
        behind.close()


@pytest.mark.parametrize("lagging_first", [True, False])
def test_no_schema_only_if_every_registry_has_none(answering: Answering, lagging_first: bool) -> None:
    answering.status, answering.body, answering.cut = 500, b"{}", 0
    behind = Answering()
    try:
        behind.status, behind.body = 404, b'{"error_code": 40403}'
        urls = [behind.url, answering.url] if lagging_first else [answering.url, behind.url]
        registry = RestRegistry(Access(",".join(urls)), SettableClock())
        with pytest.raises(Unavailable, match=answering.url):
            registry.get(1)
        answering.status, answering.body = 200, json.dumps({"schema": json.dumps(SCHEMA)}).encode()
        assert spell(registry.get(1)) == "record View"
        answering.status, answering.body = behind.status, behind.body
        with pytest.raises(KeyError):
            registry.get(2)
    finally:
        behind.close()


def test_a_secret_of_two_lines_is_refused_and_not_shown(answering: Answering, tmp_path: Path) -> None:
    (tmp_path / "token").write_text("first\nsecond\n")
    with pytest.raises(Unavailable, match="one line") as found:
        RestRegistry(Access(answering.url, token_file=str(tmp_path / "token"))).get(1)
    assert "first" not in str(found.value)
    assert "second" not in str(found.value)


@pytest.mark.parametrize("url", ["http://[::1", "http://a:b", "http://a:0", "ftp://a", "http://u:p@a", ""])
def test_a_malformed_address_is_refused_at_once(url: str) -> None:
    with pytest.raises(ConfigError, match="FRESHET_REGISTRY_URL"):
        Access(url)


class Fixed:
    """Schema 1 of others, and ours."""

    def get(self, schema_id: int, came_s: float | None = None) -> Record:
        if schema_id != 1:
            raise KeyError(schema_id)
        return parse_schema(SCHEMA)

    def register(self, schema: Written) -> int:
        return 1


def records(values: list[bytes]) -> Records:
    n = len(values)
    return Records(np.arange(n), np.zeros(n, np.int64), BytesColumn.of([b""] * n), BytesColumn.of(values), n)


GOOD = b"\x02x\x02"
RECORDS = st.lists(
    st.binary(max_size=12)
    | st.sampled_from([b"\0\0\0\0\1" + GOOD, GOOD, b"\0\0\0\0\1", b"\0\0\0\0", b"\1\0\0\0\1" + GOOD, b""])
    | st.binary(max_size=8).map(lambda tail: b"\0\0\0\0\1" + tail),
    max_size=12,
)


@given(RECORDS)
def test_every_external_record_is_an_event_or_refused(values: list[bytes]) -> None:
    spec = parse_spec(SPEC)
    decoder = SpecDecoder(
        spec, join_plan(spec, hash_text), Fixed(), {"action": parse_schema(SCHEMA)}, Fixed()
    )
    framed, bare = decoder.served(records(values)), decoder.actions(records(values))

    outcomes: list[tuple[Any, Any]] = [(framed[0].offsets[framed[0].events], framed[1])]
    outcomes.append((bare[0].offsets, bare[1]))
    for taken, refused in outcomes:
        assert sorted([*taken.tolist(), *refused.rows]) == list(range(len(values)))
        assert all(refused.reasons)
    good = [i for i, value in enumerate(values) if value == b"\0\0\0\0\1" + GOOD]
    assert set(good) <= set(outcomes[0][0].tolist())
    assert {i for i, value in enumerate(values) if value == GOOD} <= set(outcomes[1][0].tolist())
