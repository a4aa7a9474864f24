"""The console over real sockets and a real log, beside services with scripted answers."""

from __future__ import annotations

import base64
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest

from freshet.config.settings import RunFolder
from freshet.console.collector import Collector
from freshet.console.instances import local_places
from freshet.console.served_events import ServedSample
from freshet.console.service import MOST_TRIES, READERS
from freshet.console.services import BUSY_S, Services
from freshet.testing.clock import SettableClock
from freshet.testing.conditions import wait_until
from freshet.versions.promotions import Pin, Pins
from tests.integration.console_world import TOKEN, Console, ConsoleWorld, Fake, acting, now_ms


@pytest.fixture
def world(tmp_path: Path) -> Iterator[ConsoleWorld]:
    made = ConsoleWorld(tmp_path / "run")
    yield made
    made.close()


@pytest.fixture
def console(world: ConsoleWorld) -> Iterator[Console]:
    with world.console() as made:
        yield made


def edge(state: dict[str, Any], name: str) -> dict[str, Any]:
    return next(e for e in state["edges"] if f"{e['from']}>{e['to']}" == name)


def metrics(console: Console) -> str:
    return console.client.get("/metrics").text


# --- reads


def test_a_run_without_anything_yet_is_shown_as_such(console: Console) -> None:
    wait_until("all answer", lambda: console.state()["health"] == "good", within_s=60)
    state = console.state()

    assert (state["v"], state["model"], state["health"]) == (1, "news", "good")
    assert [s["name"] for s in state["services"]] == ["gateway", "joiner", "trainer", "inference"]
    assert state["asking"] == {"scheme": "http", "token": False, "certificate": False}
    assert state["freshness_ms"] is None
    assert state["trace"] is None
    assert state["versions"] == {"serving": None, "aliases": {}, "pinned": False, "list": []}
    assert state["dead_letters"] == {"refused": 0, "joiner": 0, "newest": []}
    assert state["simulator"] is None
    assert all(t["rows"] is None for t in state["tables"])
    assert console.history()["windows"] == []
    assert console.client.get("/api/requests").json() == []


def test_the_state_says_that_clients_need_tokens(tmp_path: Path) -> None:
    """It shows commands to copy."""
    world = ConsoleWorld(tmp_path / "run")
    (tmp_path / "tokens").write_text("")
    with world.console(common_tokens_file=str(tmp_path / "tokens")) as console:
        assert console.state()["asking"] == {"scheme": "http", "token": True, "certificate": False}
    world.close()


def test_the_state_names_the_token_file(tmp_path: Path) -> None:
    world = ConsoleWorld(tmp_path / "run")
    with world.console() as console:
        assert console.state()["token_file"] == str(tmp_path / "run/state/console.token")
    with world.console(console_token_file="/run/freshet/console/console.token") as console:
        assert console.state()["token_file"] == "/run/freshet/console/console.token"
    world.close()


def test_answers_of_services_are_shown(world: ConsoleWorld, console: Console) -> None:
    world.fakes["inference"].answers["/status"] = (200, {"version": 4, "freshness_ms": 250, "requests": 9})
    world.fakes["trainer"].answers["/status"] = (
        200,
        {
            "rows": {"reader": 12},
            "row_bytes": {"reader": 768},
            "evicted": {"reader": 3},
            "bytes": 1_000,
            "open": [{"x": 1}],
        },
    )

    def are_shown() -> bool:  # figures of both: one may have been queried before it had them
        state = console.state()
        return (state["freshness_ms"], state["rows_bytes"]) == (250, 1_000)

    wait_until("the figures are shown", are_shown, within_s=60)
    state = console.state()

    assert state["versions"]["serving"] == 4
    assert state["tables"][0] == {"table": "reader", "rows": 12, "bytes": 768, "evicted": 3}
    assert state["quality"]["open"] == [{"x": 1}]


def test_a_dead_service_degrades_the_system_until_it_is_back(world: ConsoleWorld, console: Console) -> None:
    wait_until("all answer", lambda: console.state()["health"] == "good", within_s=60)
    world.fakes["joiner"].stop()
    state: dict[str, Any] = {}

    def is_noticed() -> bool:
        state.update(console.state())
        down = [s["name"] for s in state["services"] if s["state"] == "down"]
        return down == ["joiner"] and state["health"] == "degraded"

    wait_until("it is noticed", is_noticed, within_s=60)
    assert any(note.startswith("joiner: nothing answers at 127.0.0.1:") for note in state["notes"])

    world.fakes["joiner"].start()
    wait_until("it is noticed", lambda: console.state()["health"] == "good", within_s=60)


def test_a_busy_service_keeps_its_last_snapshot(tmp_path: Path) -> None:
    busy, clock, fake = threading.Event(), SettableClock(), Fake()
    fake.answers["/status"] = (200, {"samples": 7})
    fake.start()
    services = Services(RunFolder(tmp_path), local_places({"trainer": fake.port}, {}), clock)
    wait_until("it answers", lambda: services.look()["trainer"].state == "ready", within_s=60)

    fake.before["/status"] = lambda: assert_in_time(busy)
    seen = services.look()["trainer"]
    assert (seen.state, seen.figures) == ("ready", {"samples": 7})

    clock.advance(BUSY_S)

    def counts_as_gone() -> bool:
        return "nothing answers" in services.look()["trainer"].reason

    wait_until("it counts as gone", counts_as_gone, within_s=60)
    seen = services.look()["trainer"]
    assert (seen.state, seen.figures) == ("down", {})

    busy.set()
    wait_until("it answers", lambda: services.look()["trainer"].state == "ready", within_s=60)
    services.close()
    fake.stop()


def test_services_are_queried_though_the_run_state_is_damaged(tmp_path: Path) -> None:
    fake, folder = Fake(), RunFolder(tmp_path).create()
    fake.start()
    services = Services(folder, local_places({"trainer": fake.port}, {}))
    state = folder.state / "services.json"
    state.mkdir()  # as unreadable as a file that one has no right to, also for root
    wait_until("it answers", lambda: services.look()["trainer"].state == "ready", within_s=60)

    state.rmdir()
    state.write_text("no json")
    wait_until("it answers", lambda: services.look()["trainer"].state == "ready", within_s=60)
    services.close()
    fake.stop()


def test_a_simulator_of_another_run_is_not_shown(tmp_path: Path) -> None:
    fake = Fake()
    fake.start()
    services = Services(RunFolder(tmp_path), local_places({}, {"simulator": fake.port}))
    fake.answers["/status"] = (200, {"folder": str(tmp_path / "another")})
    assert services.look() == {}

    fake.answers["/status"] = (200, {"folder": str(tmp_path.resolve())})
    wait_until("it is shown", lambda: "simulator" in services.look(), within_s=60)
    assert services.look()["simulator"].state == "ready"
    services.close()
    fake.stop()


def assert_in_time(event: threading.Event) -> None:
    assert event.wait(60)


def test_a_service_that_is_not_ready_says_why(world: ConsoleWorld, console: Console) -> None:
    world.fakes["trainer"].answers["/health/ready"] = (503, {"reason": "loading rows"})

    wait_until("it is shown", lambda: console.state()["notes"] == ["trainer: loading rows"], within_s=60)

    assert console.state()["health"] == "starting"


def test_malformed_answers_do_not_stop_the_looks(world: ConsoleWorld, console: Console) -> None:
    world.fakes["trainer"].answers["/status"] = (200, [{"samples": "many"}])
    world.fakes["inference"].answers["/status"] = (200, {"rows_next": 3, "version": "x", "requests": {}})
    before = console.state()["now_ms"]

    wait_until("it looks on", lambda: console.state()["now_ms"] > before + 200, within_s=60)

    assert edge(console.state(), "joiner>trainer")["lag"] is None


def test_all_dead_is_down_and_the_console_answers_on(world: ConsoleWorld, console: Console) -> None:
    for fake in world.fakes.values():
        fake.stop()

    wait_until("it is noticed", lambda: console.state()["health"] == "down", within_s=60)

    assert len(console.state()["notes"]) == 4


def test_lags_are_read_from_the_log_while_the_joiner_is_dead(world: ConsoleWorld, console: Console) -> None:
    world.write(world.topics.joiner, {"kind": "commit", "next": {"served": 1, "action": 0}})
    for _ in range(5):
        world.serve("u1", ["a1"])

    wait_until("the lag is shown", lambda: edge(console.state(), "inference>joiner")["lag"] == 4, within_s=60)


def test_the_past_survives_a_restart_of_the_console(world: ConsoleWorld) -> None:
    world.put_version(0)
    world.measure({}, {"of": "training"})
    with world.console() as first:
        wait_until("vitals are written", lambda: len(first.history()["vitals"]) >= 1, within_s=60)
    with world.console(console_vitals="1h") as first:
        before = first.history()
    with world.console(console_vitals="1h") as second:
        after = second.history()

    assert len(before["windows"]) == 2
    assert len(before["vitals"]) >= 1
    assert {k: after[k] for k in ("windows", "vitals")} == {k: before[k] for k in ("windows", "vitals")}
    assert [v["what"] for v in after["versions"]] == ["promoted"]
    assert after["next"] >= before["next"]


def _look_on(console: Console) -> None:
    """Until the clicks are there, and a few more rounds of writing down are over."""
    wait_until("clicks are there", lambda: len(console.history()["clicks"]) == 3, within_s=60)
    enough = console.history()["next"] + 3
    wait_until("some time has gone", lambda: console.history()["next"] >= enough, within_s=60)


def test_clicks_are_recorded_once_across_restarts(world: ConsoleWorld) -> None:
    slates = {s: {"impressions": 10, "clicks": 2} for s in ("model", "random", "best")}
    now = now_ms() // 5_000 * 5_000
    windows = [{"start_ms": now - 5_000 * i, "stop_ms": now - 5_000 * (i - 1), **slates} for i in (3, 2, 1)]
    world.fakes["simulator"] = world.fakes.pop("gateway")  # any service of that name will do
    drifts = [{"time_ms": now, "what": "tastes turn"}]
    said = {"seed": 7, "rate": 100, "windows": windows, "drifts": drifts}
    world.fakes["simulator"].answers["/status"] = (200, said)
    for _ in range(2):
        with world.console() as console:
            _look_on(console)
            history, state = console.history(), console.state()

    assert [c["model"]["impressions"] for c in history["clicks"]] == [10, 10, 10]
    assert [d["what"] for d in history["drifts"]] == ["tastes turn"]
    assert state["simulator"]["seed"] == 7


def test_served_requests_can_be_sent_again_without_added_fields(
    world: ConsoleWorld, console: Console
) -> None:
    world.serve("u7", ["a1", "a2"])
    wait_until("it is seen", lambda: len(console.client.get("/api/requests").json()) == 1, within_s=60)

    (request,) = console.client.get("/api/requests").json()

    assert request["context"] == {"reader": "u7"}, "the id and the time are filled in anew"
    assert request["candidates"] == [{"article": a, "topic": "art", "age_s": 5.0} for a in ("a1", "a2")]


def test_a_served_event_that_cannot_be_read_hides_nothing_else(world: ConsoleWorld, console: Console) -> None:
    def seen() -> int:
        return len(console.client.get("/api/requests").json())

    world.serve("u7", ["a1"])
    wait_until("the first is seen", lambda: seen() == 1, within_s=60)
    for broken in (b"\0\0\0\0\1", b"\0\0\0\0\1\x10", b"not framed", b"\0\0\0\x63\0"):
        world.append(world.topics.served, broken)
    world.serve("u8", ["a2"])

    wait_until("the last is seen", lambda: seen() == 2, within_s=60)
    counted = "freshet_console_unreadable_total 4.0"
    wait_until("they are counted", lambda: counted in metrics(console), within_s=60)
    assert not [n for n in console.state()["notes"] if "served events" in n]


def test_a_failed_part_is_noted_and_the_rest_is_shown(
    world: ConsoleWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ServedSample, "look", lambda self: 1 // 0)
    world.put_version(3)
    with world.console() as console:
        wait_until("a look is shown", lambda: bool(console.state()["notes"]), within_s=60)
        state = console.state()

    assert any("served events: failed (ZeroDivisionError)" in note for note in state["notes"])
    assert [v["number"] for v in state["versions"]["list"]] == [3]
    assert [s["name"] for s in state["services"]] == ["gateway", "joiner", "trainer", "inference"]


def test_dead_letters_are_shown_in_words(world: ConsoleWorld, console: Console) -> None:
    why = {"topic": "news.actions", "path": "ts", "expected": "long", "found": "text"}
    event = base64.b64encode(b'{"ts": "now"}').decode()
    world.write(world.topics.refused, {"kind": "refused", "time_ms": now_ms(), "value": event, **why})
    world.write(
        world.topics.dead_letters,
        {"kind": "dead-letter", "time_ms": now_ms(), "reason": "late", "bytes": "AAEC"},
    )
    wait_until("they are shown", lambda: len(console.state()["dead_letters"]["newest"]) == 2, within_s=60)

    letters = console.state()["dead_letters"]
    by = {letter["from"]: letter for letter in letters["newest"]}

    assert (letters["refused"], letters["joiner"]) == (1, 1)
    assert by["gateway"]["reason"] == "ts: expected long, found text"
    assert by["gateway"]["text"] == '{"ts": "now"}'
    assert by["joiner"]["text"] == "3 bytes: 00 01 02"


# --- events


def records(events: Iterator[dict[str, str]], kind: str, count: int) -> list[int]:
    """Offsets of the next records of a kind."""
    found: list[int] = []
    while len(found) < count:
        each = next(events)
        assert each.get("event") != "reset", "a reset"
        if each.get("event") == "record" and orjson.loads(each["data"])["kind"] == kind:
            found.append(int(each["id"]))
    return found


def test_a_page_follows_without_loss_or_repeat(world: ConsoleWorld) -> None:
    with world.console(console_vitals="1h") as console:
        start = console.history()["next"]
        written = [world.measure({}) for _ in range(3)]
        with console.events(start) as events:
            seen = records(events, "window", 3)
        written += [world.measure({}) for _ in range(3)]  # while the page is away
        with console.events(start, last_id=seen[-1]) as events:
            seen += records(events, "window", 3)

    assert seen == written


def test_a_page_goes_on_after_the_console_was_restarted(world: ConsoleWorld) -> None:
    with world.console(console_vitals="1h") as console, console.events() as events:
        first = world.measure({})
        assert records(events, "window", 1) == [first]
    second = world.measure({})
    with world.console(console_vitals="1h") as console, console.events(last_id=first) as events:
        assert records(events, "window", 1) == [second]


def test_states_come_by_themselves(console: Console) -> None:
    with console.events() as events:
        states = [
            orjson.loads(e["data"]) for e in (next(events) for _ in range(20)) if e.get("event") == "state"
        ]

    assert len(states) >= 3
    times = [s["now_ms"] for s in states]
    assert times == sorted(set(times))


def test_more_pages_than_allowed_are_refused_with_a_hint(world: ConsoleWorld) -> None:
    with world.console(console_max_streams="1") as console, console.events() as events:
        next(events)
        refused = httpx.get(console.url + "/api/events")

    assert refused.status_code == 503
    assert "FRESHET_CONSOLE_MAX_STREAMS" in refused.json()["error"]["hint"]


def test_a_page_that_never_reads_delays_no_other(world: ConsoleWorld, console: Console) -> None:
    host, port = httpx.URL(console.url).host, httpx.URL(console.url).port
    assert port is not None
    with socket.create_connection((host, port)) as sleeper:
        sleeper.sendall(b"GET /api/events HTTP/1.1\r\nHost: localhost\r\n\r\n")
        wait_until("it is connected", lambda: console.state()["console"]["streams"] == 1, within_s=60)
        with console.events() as events:
            assert records(events, "vitals", 2)
    wait_until("it is gone", lambda: console.state()["console"]["streams"] == 0, within_s=60)


def test_pages_that_come_together_get_one_history(world: ConsoleWorld) -> None:
    with world.console(console_vitals="1h") as console:
        world.measure(*({"label": f"label{n}"} for n in range(20)))
        wait_until("it is read", lambda: len(console.history()["windows"]) == 20, within_s=60)
        with ThreadPoolExecutor(20) as pages:
            histories = list(pages.map(lambda _: console.history(), range(60)))
        assert all(len(h["windows"]) == 20 for h in histories)
        last = world.measure({"label": "another"})

        def newer() -> bool:
            found = console.history()
            return bool(found["next"] == last + 1 and len(found["windows"]) == 21)

        wait_until("what comes later is in later histories", newer, within_s=60)
        assert console.history(span_s=1)["next"] == last + 1


def test_events_of_versions_before_the_start_are_sent(world: ConsoleWorld) -> None:
    with world.console(console_vitals="1h") as console, console.events() as events:
        first = world.measure({})
        assert records(events, "window", 1) == [first]
    world.put_version(1, "held")
    with world.console(console_vitals="1h") as console, console.events(last_id=first) as events:
        told = next(e for e in events if e.get("event") in ("version", "reset"))

    assert told["event"] == "version"
    assert orjson.loads(told["data"])["number"] == 1


# --- actions


def test_a_version_is_promoted_and_the_gate_goes_on(world: ConsoleWorld, console: Console) -> None:
    for number, verdict in enumerate(("promoted", "held")):
        world.put_version(number, verdict)
    world.versions.point("stable", 0)

    answer = console.change("promote", number=1)

    assert answer.status_code == 200
    assert (answer.json()["number"], answer.json()["by"], answer.json()["pinned"]) == (1, "console", False)
    assert world.versions.aliases()["stable"] == 1
    wait_until("it is shown", lambda: console.state()["versions"]["aliases"] == {"stable": 1}, within_s=60)

    def told() -> bool:  # by the verdict's record, which follows the alias
        return bool(console.history()["versions"][-1]["what"] == "moved")

    wait_until("history tells it", told, within_s=60)


def test_a_rollback_serves_the_last_promoted_and_holds_the_gate(
    world: ConsoleWorld, console: Console
) -> None:
    for number, verdict in enumerate(("promoted", "promoted", "held", "promoted")):
        world.put_version(number, verdict)
    world.versions.point("stable", 3)

    answer = console.change("rollback")

    assert answer.json()["number"] == 1
    assert world.versions.aliases()["stable"] == 1
    wait_until("the pin is shown", lambda: console.state()["versions"]["pinned"], within_s=60)
    pins = Pins(world.log, world.topics.versions)
    assert pins.pin() == Pin(1)
    console.change("promote", number=3)
    assert pins.pin() is None
    pins.close()


def test_a_version_that_is_not_there_or_damaged_moves_nothing(world: ConsoleWorld, console: Console) -> None:
    world.put_version(0)
    world.put_version(1)
    world.versions.point("stable", 0)
    weights = world.folder / "versions" / "0000000001" / "weights.safetensors"
    weights.write_bytes(b"damage")

    missing, nothing_older = console.change("promote", number=77), console.change("rollback")
    damaged = console.change("promote", number=1)

    assert (missing.status_code, missing.json()["error"]["expected"]) == (404, "a stored version (0 to 1)")
    assert (nothing_older.status_code, nothing_older.json()["error"]["code"]) == (404, "no_such_version")
    assert damaged.status_code == 409
    assert world.versions.aliases() == {"stable": 0}


def test_without_the_token_nothing_is_moved(world: ConsoleWorld, console: Console) -> None:
    world.put_version(0)
    none = console.client.post("/api/promote", json={"number": 0})
    wrong = console.change("promote", token="x" * len(TOKEN), number=0)
    form = console.client.post(
        "/api/promote", content=b'{"number": 0}',
        headers={"authorization": f"Bearer {TOKEN}", "content-type": "text/plain"},
    )  # fmt: skip
    elsewhere = console.client.post(
        "/api/promote",
        json={"number": 0},
        headers={"authorization": f"Bearer {TOKEN}", "origin": "http://evil.example"},
    )
    rebound = console.client.get("/api/state", headers={"host": "evil.example"})

    assert [a.status_code for a in (none, wrong, form, elsewhere, rebound)] == [401, 401, 415, 403, 403]
    assert all(a.json()["error"]["message"] for a in (none, wrong, form, elsewhere, rebound))
    assert world.versions.aliases() == {}


BODIES = (
    *(b"[]", b"{", b'{"number": "1"}', b'{"number": true}', b'{"number": -1}', b'{"nr": 1}', b"null"),
    *(b'{"number": 1e30}', b'{"number": 1.5}', b'{"number": "../0"}', b'{"number": [0]}', b'{"number": {}}'),
)


def test_a_body_that_is_not_understood_moves_nothing(world: ConsoleWorld, console: Console) -> None:
    world.put_version(0)
    headers = {"authorization": f"Bearer {TOKEN}", "content-type": "application/json"}

    wrong = [(verb, body) for verb in ("promote", "rollback") for body in BODIES]
    wrong.append(("promote", b""))  # a rollback may leave the number out
    answers = [console.client.post(f"/api/{verb}", content=body, headers=headers) for verb, body in wrong]

    assert {a.status_code for a in answers} == {400}
    assert world.versions.aliases() == {}


def test_a_body_that_is_too_large_is_refused_before_it_is_read(console: Console) -> None:
    answer = console.client.post(
        "/api/try", content=b"x" * (2 << 20), headers={"content-type": "application/json"}
    )

    assert answer.status_code == 413


def try_one(console: Console) -> httpx.Response:
    return console.client.post("/api/try", json={"candidates": [{}]})


def test_trying_a_request_logs_and_explores_nothing(world: ConsoleWorld, console: Console) -> None:
    ranked = {"request_id": "r", "items": [], "version": 3}
    world.fakes["inference"].answers["/v1/rank"] = (200, ranked)

    answer = console.client.post("/api/try", json={"context": {"reader": "u"}, "candidates": [{}], "k": 1})

    assert (answer.status_code, answer.json()) == (200, ranked)
    sent = {"context": {"reader": "u"}, "candidates": [{}], "k": 1, "dry_run": True, "explain": True}
    assert world.fakes["inference"].sent == [("/v1/rank", sent)]


def test_refusals_of_inference_pass_and_dry_run_stays_on(world: ConsoleWorld, console: Console) -> None:
    world.fakes["inference"].answers["/v1/rank"] = (400, {"error": {"code": "bad_input"}})

    refused = console.client.post("/api/try", json={"candidates": []})
    wet = console.client.post("/api/try", json={"candidates": [{}], "dry_run": False})

    assert (refused.status_code, refused.json()) == (400, {"error": {"code": "bad_input"}})
    assert wet.status_code == 400
    assert "dry_run" in wet.json()["error"]["message"]
    assert len(world.fakes["inference"].sent) == 1


def test_waiting_tries_are_few_and_delay_nothing_else(world: ConsoleWorld, console: Console) -> None:
    begun, release = threading.Semaphore(0), threading.Event()

    def wait() -> None:
        begun.release()
        assert release.wait(60)

    world.fakes["inference"].before["/v1/rank"] = wait
    world.fakes["inference"].answers["/v1/rank"] = (200, {"items": []})
    with ThreadPoolExecutor(MOST_TRIES) as pages:
        tries = [pages.submit(try_one, console) for _ in range(MOST_TRIES)]
        for _ in tries:
            assert begun.acquire(timeout=60)
        try:
            one_more = try_one(console)
            assert console.history()["next"] >= 0
            assert console.change("promote", number=99).status_code == 404
        finally:
            release.set()
        answers = [each.result(60) for each in tries]

    assert (one_more.status_code, one_more.headers["retry-after"]) == (429, "1")
    assert {a.status_code for a in answers} == {200}
    assert try_one(console).status_code == 200


def test_readers_are_bounded_and_delay_no_rollback(
    world: ConsoleWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, release = threading.Semaphore(0), threading.Event()

    def slow(_: Collector, span_ms: int) -> bytes:
        begun.release()
        assert release.wait(60)
        return b"{}"

    monkeypatch.setattr(Collector, "history", slow)
    with world.console(console_max_streams="6") as console, ThreadPoolExecutor(7) as pages:
        asked = [pages.submit(console.client.get, "/api/history") for _ in range(7)]
        for _ in range(READERS):
            assert begun.acquire(timeout=60)
        try:
            [refused] = [each.result() for each in wait(asked, 10, FIRST_COMPLETED).done]
            others = console.client.get("/api/requests")
            moved = console.change("rollback", number=99)
        finally:
            release.set()
        answers = [each.result(60).status_code for each in asked]
        again = console.client.get("/api/requests")

    assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
    assert (others.status_code, again.status_code) == (429, 200)
    assert moved.status_code == 404, "it was looked up, while all who read wait"
    assert sorted(answers) == [200] * 6 + [429]


@pytest.mark.parametrize("last_id", ["9" * 5_000, "-1", "abc", "٣", str(1 << 53)])
def test_a_last_event_id_that_is_none_of_ours_is_refused(console: Console, last_id: str) -> None:
    answer = console.client.get("/api/events", headers={b"Last-Event-ID": last_id.encode()})

    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "bad_input")
    assert "Last-Event-ID: expected a whole number" in answer.json()["error"]["message"]


# --- the page


def test_every_answer_has_the_headers_that_shut_the_page_off(console: Console) -> None:
    for path in ("/", "/api/state", "/nowhere", "/api/promote"):
        headers = console.client.get(path).headers
        assert "default-src 'none'" in headers["content-security-policy"], path
        assert headers["x-content-type-options"] == "nosniff", path
        assert headers["referrer-policy"] == "no-referrer", path


def test_the_page_is_sent_once_and_then_only_if_it_changed(console: Console) -> None:
    first = console.client.get("/")
    again = console.client.get("/", headers={"if-none-match": first.headers["etag"]})

    assert first.headers["content-type"] == "text/html; charset=utf-8"
    assert (again.status_code, again.content) == (304, b"")


PATHS = (
    *("/static/../service.py", "/static/..%2fservice.py", "/static/%2e%2e/service.py", "/static//etc/passwd"),
    *("/static/index.html%00.js", "/static/", "/../state/console.token", "/static/VENDORED.md"),
    "/static/../../../../etc/passwd",
)


def test_no_path_leads_out_of_the_page(console: Console) -> None:
    for path in PATHS:
        target = httpx.URL(console.url).copy_with(raw_path=path.encode())
        assert console.client.send(httpx.Request("GET", target)).status_code == 404, path


# --- an action on its way


STAGES = ["logged", "joined", "trained", "published", "served"]


def test_an_action_is_followed_through_all_stages_in_order(world: ConsoleWorld, console: Console) -> None:
    trainer, inference = world.fakes["trainer"], world.fakes["inference"]
    trainer.answers["/progress"] = (
        200,
        {"applied": {"0": 0}, "published": {"applied": {"0": 0}, "rows_next": {}}},
    )
    inference.answers["/status"] = (200, {"rows_next": {"0": 0}})

    def learn(end: int) -> None:
        published = {"applied": {"0": end}, "rows_next": {"0": 5}}
        trainer.answers["/progress"] = (200, {"applied": {"0": end}, "published": published})
        inference.answers["/status"] = (200, {"rows_next": {"0": 5}})

    with acting(world, learn):
        wait_until("a trace is shown", lambda: console.state()["trace"] is not None, within_s=60)
        trace = console.state()["trace"]

    assert [s["stage"] for s in trace["stages"]] == STAGES
    times = [s["ms"] for s in trace["stages"]]
    assert times == sorted(times)
    assert trace["failed"] is None
