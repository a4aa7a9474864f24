"""Existing topics: their events fit the spec, are learned from, and cross the bridge without loss."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from zlib import crc32

import fastavro
import orjson
import pytest
from click.testing import CliRunner

from freshet.apps.local import local
from freshet.cli import cli
from freshet.client import Ack, EventsRefused, Receipt
from freshet.config.spec import load_spec
from freshet.errors import BadInput, TooLarge, Unavailable
from freshet.testing.conditions import wait_until
from tests.fixtures.commands import status
from tests.fixtures.example_scripts import EXAMPLES, example

FOLDER = EXAMPLES / "own-topics"
SPEC = load_spec(FOLDER / "freshet.toml")
shop = example("own-topics", "shop")
bridge = example("own-topics", "bridge")
RESULTS = fastavro.schema.load_schema(str(FOLDER / "results.avsc"))


@dataclass(frozen=True)
class Sent:
    """A message as a Kafka client gives it."""

    place: tuple[str, int]
    number: int
    at_ms: int
    content: bytes | None

    def topic(self) -> str:
        return self.place[0]

    def partition(self) -> int:
        return self.place[1]

    def offset(self) -> int:
        return self.number

    def timestamp(self) -> tuple[int, int]:
        return 1, self.at_ms

    def value(self) -> bytes | None:
        return self.content


def topics_of_the_shop(pages: int, partitions: int = 2) -> dict[tuple[str, int], list[Sent]]:
    """What the shop's topics hold, by partition."""
    topics: dict[tuple[str, int], list[Sent]] = {}
    for at_ms, stream, event in sorted(shop.Shop().pages(pages), key=lambda e: e[0]):
        request = str(event.get("requestId") or event["req"])
        place = (shop.TOPICS[stream], crc32(request.encode()) % partitions)
        value = shop.framed(event, RESULTS) if stream == "served" else json.dumps(event).encode()
        held = topics.setdefault(place, [])
        held.append(Sent(place, len(held), at_ms, value))
    return topics


@dataclass
class Scripted:
    """A consumer that gives one partition after the other, as a real one does with a backlog."""

    topics: Mapping[tuple[str, int], Sequence[Sent]]
    stop: threading.Event
    committed: dict[tuple[str, int], int] = field(default_factory=dict)
    given: dict[tuple[str, int], int] = field(default_factory=dict)
    held: Collection[tuple[str, int]] = ()
    at_end: bool = False

    def consume(self, messages: int, timeout_s: float) -> tuple[list[Sent], list[tuple[str, int]]]:
        for place, held in self.topics.items():
            start = self.given.get(place, self.committed.get(place, 0))
            if start < len(held) and place not in self.held:
                self.given[place] = min(start + messages, len(held))
                return list(held[start : start + messages]), []
        if self.at_end:  # what was read to the end has been sent by now
            self.stop.set()
        self.at_end = True
        return [], list(self.topics)

    def places(self) -> Collection[tuple[str, int]]:
        return list(self.topics)

    def hold(self, places: Collection[tuple[str, int]]) -> None:
        self.held = places

    def commit(self, next_offsets: Mapping[tuple[str, int], int]) -> None:
        self.committed |= next_offsets


class Door:
    """A gateway that accepts the events that the test names."""

    def __init__(self, *failures: Exception) -> None:
        self.failures, self.taken = list(failures), dict[str, list[Any]]()

    def impressions(self, events: Sequence[Any]) -> Receipt:
        return self._take("served", events)

    def shown(self, events: Sequence[Any]) -> Receipt:
        return self._take("shown", events)

    def actions(self, events: Sequence[Any]) -> Receipt:
        return self._take("action", events)

    def _take(self, role: str, events: Sequence[Any]) -> Receipt:
        if self.failures:
            raise self.failures.pop(0)
        self.taken.setdefault(role, []).extend(events)
        return Receipt(tuple(Ack(role, 0, n) for n, _ in enumerate(events)))


def schema_of(schema_id: int) -> Any:
    if schema_id != shop.SCHEMA_ID:
        raise BadInput(f"the registry has no schema {schema_id}")
    return bridge.as_stored(json.loads((FOLDER / "results.avsc").read_text()))


def bridged(
    topics: Mapping[tuple[str, int], Sequence[Sent]], door: Any, schemas: Callable[[int], Any] = schema_of
) -> tuple[Scripted, list[str]]:
    stop, told = threading.Event(), list[str]()
    source = Scripted(topics, stop)
    bridge.Bridge(SPEC, source, door, schemas, stop, told.append).run()
    return source, told


def test_events_with_names_of_their_own_are_learned_from(tmp_path: Path) -> None:
    shop.write_files(tmp_path, pages=3_000)
    arguments = ["replay", "files", str(FOLDER / "freshet.toml"), "--direct", "--lanes", "1", "--json"]
    for option, stream in (("impressions", "served"), ("shown", "shown"), ("actions", "action")):
        arguments += [f"--{option}", str(tmp_path / shop.FILES[stream])]

    outcome = json.loads(CliRunner().invoke(cli, arguments, catch_exceptions=False).stdout)

    assert outcome["ledger"]["events"]["actions_orphan"] == 0
    assert outcome["ledger"]["labels"]["click"]["not_shown"] > 0
    assert outcome["labels"]["click"]["auc"] > 0.55
    assert outcome["labels"]["revenue"]["n"] == outcome["labels"]["order"]["n"] > 0


def test_the_bridge_sends_each_event_once_with_the_spec_s_fields() -> None:
    topics = topics_of_the_shop(200)
    door = Door()

    source, _ = bridged(topics, door)

    assert source.committed == {place: len(held) for place, held in topics.items()}
    assert len(door.taken["served"]) == 200
    assert sum(map(len, door.taken.values())) == sum(map(len, topics.values()))
    assert set(door.taken["action"][0]) == {"uuid", "kind", "req", "product", "amount", "happenedAt"} - (
        {"amount"} if door.taken["action"][0]["kind"] == "click" else set()
    )
    assert isinstance(door.taken["served"][0]["servedAt"], int)


def test_a_backlog_is_bridged_by_time_for_any_read_order() -> None:
    door = Door()

    bridged(topics_of_the_shop(200, partitions=4), door)

    times = [event["servedAt"] for event in door.taken["served"]]
    assert times == sorted(times)


def test_nothing_is_committed_before_the_gateway_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bridge, "AWAY_PAUSE_S", 0.0)
    topics = topics_of_the_shop(20)
    commits: list[int] = []
    door = Door(*(Unavailable("away") for _ in range(5)))

    class Watched(Scripted):
        def commit(self, next_offsets: Mapping[tuple[str, int], int]) -> None:
            commits.append(len(door.failures))
            super().commit(next_offsets)

    stop = threading.Event()
    source = Watched(topics, stop)
    bridge.Bridge(SPEC, source, door, schema_of, stop, lambda line: None).run()

    assert set(commits) == {0}
    assert source.committed == {place: len(held) for place, held in topics.items()}


def test_what_the_gateway_refuses_does_not_stop_the_topic() -> None:
    refusal = EventsRefused("no", Receipt((), ({"index": 0, "path": "", "expected": "", "found": ""},)))

    source, told = bridged(topics_of_the_shop(20), Door(refusal))

    assert all(source.committed.values())
    assert told == ["served: no"]


class Encoding(Door):
    """A gateway behind the client, which refuses what JSON lacks; and behind a limit of bytes."""

    limit = 200_000

    def _take(self, role: str, events: Sequence[Any]) -> Receipt:
        try:
            body = json.dumps(events, allow_nan=False)
        except ValueError as error:
            raise BadInput(str(error)) from None
        if len(body) > self.limit:
            raise TooLarge("413")
        return super()._take(role, events)


@pytest.mark.parametrize(("rank", "sku"), [(math.nan, ""), (-math.inf, ""), (1.0, "x" * 200_000)])
def test_one_event_that_cannot_be_sent_does_not_stop_the_topic(rank: float, sku: str) -> None:
    text = (FOLDER / "results.avsc").read_text().replace('"rank", "type": "int"', '"rank", "type": "float"')
    writer = fastavro.parse_schema(json.loads(text))
    pages = [event for _, stream, event in shop.Shop().pages(3) if stream == "served"]
    pages[1]["results"][0]["rank"] = rank
    pages[1]["results"][0]["product"]["sku"] += sku
    place = ("search.results", 3)
    held = [Sent(place, n, n, shop.framed(page, writer)) for n, page in enumerate(pages)]
    door = Encoding()

    source, _ = bridged({place: held}, door, lambda schema_id: bridge.as_stored(writer))

    assert source.committed == {place: 3}
    first, refused, last = door.taken["served"]
    assert [first["requestId"], last["requestId"]] == [pages[0]["requestId"], pages[2]["requestId"]]
    assert refused["undecodable"].startswith("search.results 3:1: ")
    assert held[1].content is not None
    assert held[1].content[:65_536].hex() == refused["bytes"]


def test_a_gateway_that_takes_nothing_ends_the_bridge() -> None:
    class Closed(Door):
        def _take(self, role: str, events: Sequence[Any]) -> Receipt:
            raise BadInput("401: no valid token")

    stop = threading.Event()
    source = Scripted(topics_of_the_shop(20), stop)

    with pytest.raises(BadInput, match="401"):
        bridge.Bridge(SPEC, source, Closed(), schema_of, stop, lambda line: None).run()

    assert source.committed == {}


@pytest.mark.parametrize(
    "value",
    [b"", b"\0\0", b"plain", b"\0\0\0\0\x07x", b"\0" + shop.SCHEMA_ID.to_bytes(4, "big") + b"\xff" * 9],
)
def test_an_undecodable_message_is_sent_on_with_its_offset(
    value: bytes,
) -> None:
    place = ("search.results", 3)
    door = Door()

    bridged({place: [Sent(place, 0, 0, value)]}, door)

    [event] = door.taken["served"]
    assert event["undecodable"].startswith("search.results 3:0: ")
    assert event["bytes"] == value.hex()


def test_a_tombstone_is_passed_over() -> None:
    place = ("shop.events", 0)

    source, _ = bridged({place: [Sent(place, 0, 0, None)]}, Door())

    assert source.committed == {place: 1}


def test_a_request_that_is_too_large_is_sent_in_halves() -> None:
    topics = topics_of_the_shop(40, partitions=1)

    class Small(Door):
        def _take(self, role: str, events: Sequence[Any]) -> Receipt:
            if len(events) > 7:
                raise BadInput("413")
            return super()._take(role, events)

    door = Small()
    bridged(topics, door)

    assert len(door.taken["served"]) == 40


@pytest.fixture
def registry_url() -> Iterator[str]:
    """A schema registry with the shop's one schema."""

    class Answers(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            found = self.path == f"/schemas/ids/{shop.SCHEMA_ID}"
            body = {"schema": (FOLDER / "results.avsc").read_text()} if found else {"error_code": 40403}
            self.send_response(200 if found else 404)
            self.end_headers()
            self.wfile.write(orjson.dumps(body))

        def log_message(self, format: str, *arguments: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Answers)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_registry_says_who_wrote_a_message_and_is_waited_for(registry_url: str) -> None:
    find = bridge.registry(registry_url)

    assert find(shop.SCHEMA_ID) is find(shop.SCHEMA_ID)
    with pytest.raises(BadInput, match="no schema 7"):
        find(7)
    with pytest.raises(Unavailable):
        bridge.registry("http://127.0.0.1:9")(7)


@pytest.mark.system
def test_what_crosses_the_bridge_twice_counts_once(tmp_path: Path) -> None:
    topics = topics_of_the_shop(100)
    sent = sum(map(len, topics.values()))
    with local(SPEC, folder=tmp_path / "run", ready_s=120) as system:
        for _ in range(2):  # the second bridge finds no commit of the first
            bridged(topics, system.client)
        wait_until("all is joined", lambda: status(system, "joiner").get("events") == 2 * sent, within_s=60)
        events = status(system, "joiner")["ledger"]["events"]

    actions = sum(len(held) for place, held in topics.items() if place[0] == shop.TOPICS["action"])
    assert events["impressions"] == 100 * shop.RESULTS == events["impressions_repeated"]
    assert events["actions_matched"] == actions == events["actions_repeated"]
    assert events["actions_orphan"] == events["shown_orphan"] == 0
