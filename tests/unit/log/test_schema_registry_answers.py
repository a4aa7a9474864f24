"""A registry's odd answers, from a real HTTP server: each ends within its time, with a reason of ours."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from freshet.config.avro.schema import spell
from freshet.errors import ConfigError, Unavailable
from freshet.log import schema_registry as module
from freshet.log.schema_registry import Access, RestRegistry
from freshet.testing.clock import SettableClock
from tests.servers.odd_registry import UNAVAILABLE, UNUSABLE, Odd, OddRegistry, answer, json_answer

SCHEMA: dict[str, Any] = {"type": "record", "name": "View", "fields": [{"name": "r", "type": "string"}]}
GOOD = json_answer({"schema": json.dumps(SCHEMA)})
ANSWER_S = 0.25


@pytest.fixture
def odd() -> Iterator[OddRegistry]:
    with OddRegistry() as server:
        yield server


@pytest.mark.parametrize("kind", UNAVAILABLE)
def test_an_answer_that_says_nothing_is_waited_for(
    odd: OddRegistry, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    odd.answers[1], words = UNAVAILABLE[kind]
    client = RestRegistry(Access(odd.url), SettableClock())
    if "within" in words:  # a whole answer may take seconds on a busy machine
        monkeypatch.setattr(module, "ANSWER_S", ANSWER_S)
    with pytest.raises(Unavailable, match=words):
        client.get(1)
    monkeypatch.undo()
    odd.answers[1] = GOOD
    assert spell(client.get(1)) == "record View"


@pytest.mark.parametrize("kind", [kind for kind in UNUSABLE if UNUSABLE[kind][1]])
def test_an_answer_without_an_avro_schema_is_refused(odd: OddRegistry, kind: str) -> None:
    odd.answers[1], words = UNUSABLE[kind]
    with pytest.raises((ConfigError, KeyError)) as told:
        RestRegistry(Access(odd.url)).get(1)
    assert words in str(told.value) or isinstance(told.value, KeyError)


def slow(clock: SettableClock, seconds: float, then: Odd) -> Odd:
    """An answer after so long by the client's clock."""

    def write(connection: Any, stop: Any) -> None:
        clock.advance(seconds)
        then(connection, stop)

    return write


def test_many_ids_at_a_slow_registry_hold_up_no_loop() -> None:
    clock = SettableClock()
    nothing = json_answer({"error_code": 40403}, "404 Not Found")
    with OddRegistry(otherwise=slow(clock, 0.2, nothing)) as odd:
        client, pauses, longest_s = RestRegistry(Access(odd.url), clock), 0, 0.0
        ids = list(range(1, 501))
        while ids:  # as a joiner: all again, until all are known or refused
            began_s = clock.monotonic()
            try:
                for schema_id in ids:
                    with pytest.raises(KeyError):
                        client.get(schema_id)
                ids = []
            except Unavailable:
                pauses += 1
                assert pauses < 20, "no progress"
            longest_s = max(longest_s, clock.monotonic() - began_s)
            clock.advance(1.0)
        assert odd.requests == 500
    assert pauses > 0
    assert longest_s < 25.0


def test_a_hanging_registry_is_queried_once_for_all_ids(
    odd: OddRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, requested, response = SettableClock(), list[str](), RestRegistry._response

    def hanging(registry: RestRegistry, url: str, path: str) -> Any:
        requested.append(path)
        try:
            return response(registry, url, path)
        finally:
            clock.advance(5.0)

    monkeypatch.setattr(module, "ANSWER_S", ANSWER_S)
    monkeypatch.setattr(RestRegistry, "_response", hanging)
    odd.otherwise = UNAVAILABLE["silence"][0]
    client = RestRegistry(Access(odd.url), clock)
    for schema_id in range(1, 25):
        with pytest.raises(Unavailable, match="within"):
            client.get(schema_id)
    assert requested == ["/schemas/ids/1"]
    monkeypatch.undo()
    odd.otherwise = GOOD
    clock.advance(5.0)
    assert spell(client.get(1)) == "record View"


def test_many_references_of_a_slow_registry_are_read_once() -> None:
    clock = SettableClock()
    with OddRegistry() as odd:
        count = 200
        whole = {
            "schema": json.dumps(
                {
                    "type": "record",
                    "name": "View",
                    "fields": [{"name": f"f{i}", "type": f"R{i}"} for i in range(count)],
                }
            ),
            "references": [{"name": f"R{i}", "subject": f"r{i}", "version": 1} for i in range(count)],
        }
        odd.answers[1] = json_answer(whole)
        asked = iter(range(count))

        def reference(connection: Any, stop: Any) -> None:
            fixed = {"type": "fixed", "name": f"R{next(asked)}", "size": 2}
            slow(clock, 0.5, json_answer({"schema": json.dumps(fixed)}))(connection, stop)

        odd.otherwise = reference
        client, pauses = RestRegistry(Access(odd.url), clock), 0
        while True:
            try:
                assert spell(client.get(1)) == "record View"
                break
            except Unavailable:
                pauses += 1
                assert pauses < 20, "no progress"
                clock.advance(1.0)
    assert pauses > 0


def test_a_redirect_does_not_show_what_stands_in_its_query(odd: OddRegistry) -> None:
    odd.answers[1] = answer(b"", "301 Moved", more="Location: https://other/x?secret=1\r\n")
    with pytest.raises(Unavailable) as told:
        RestRegistry(Access(odd.url)).get(1)
    assert "secret" not in str(told.value)
