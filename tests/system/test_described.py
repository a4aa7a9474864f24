"""A whole system, simulated readers included, does what its descriptions say: metrics, topics, routes."""

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from prometheus_client.parser import text_string_to_metric_families

from freshet.adapters import open_eventlog
from freshet.apps.local import Local, local
from freshet.apps.ports import BESIDE, PORT_SETTINGS
from freshet.config.spec import load_spec
from freshet.config.spec.topics import KINDS_OF_TOPICS, topics_of
from freshet.demo import write_spec
from freshet.http.authenticator import AUTH_METRICS
from freshet.http.endpoint import Endpoint
from freshet.observability.metrics import Metric
from freshet.paramserver.service import STORE_METRICS
from freshet.process.ports import lease_ports
from freshet.process.telemetry import PROCESS_METRICS
from freshet.testing.conditions import wait_until
from freshet.types import TopicPartition
from ops.reference.http_page import APIS
from ops.reference.metrics_page import SERVICES

pytestmark = pytest.mark.system

KNOWN_S = 60.0
"""How long until everything that a service counts has happened once: windows close after 12 s."""

ENDPOINTS = {(api.service, e.method, e.path): e for api in APIS for e in api.endpoints}


@dataclass
class World:
    system: Local
    spec_file: Path
    ports: Mapping[str, int]  # of every service, the simulator too

    def ask(self, service: str, path: str, body: bytes | None = None, **headers: str) -> httpx.Response:
        url = f"http://127.0.0.1:{self.ports[service]}{path}"
        if body is None:
            return httpx.get(url, timeout=20)
        kind = {"content-type": "application/json", **{k.replace("_", "-"): v for k, v in headers.items()}}
        return httpx.post(url, content=body, headers=kind, timeout=20)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("described")
    spec_file = write_spec(folder / "spec")
    with local(load_spec(spec_file), folder=folder / "run", console=True, ready_s=120) as system:
        [admin] = lease_ports(1)
        environment = {PORT_SETTINGS[name]: str(port) for name, port in system.ports.items()}
        readers = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "freshet.cli",
                "simulate",
                "--folder",
                str(system.folder),
                "--rate",
                "200",
            ],
            env={**os.environ, **environment, "FRESHET_SIMULATOR_ADMIN_PORT": str(admin)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        made = World(system, spec_file, {**system.ports, "simulator": admin})
        try:
            wait_until("the simulator answers", lambda: answers(made, "simulator"), within_s=90)
            with beside(spec_file, folder / "shared") as ports:
                made.ports = {**made.ports, **ports}
                yield made
        finally:
            readers.terminate()
            readers.wait(60)


@contextmanager
def beside(spec_file: Path, folder: Path) -> Iterator[Mapping[str, int]]:
    """Services that `freshet up` does not start, in a run of their own; {service: port of /metrics}."""
    ports = dict(zip(BESIDE, lease_ports(len(BESIDE)), strict=True))
    started = {}
    for role, port in ports.items():
        own = {f"FRESHET_{role.upper()}_ADMIN_PORT": str(port), f"FRESHET_{role.upper()}_PORT": "0"}
        command = [sys.executable, "-m", "freshet.cli", "run", role, str(spec_file), "--folder", str(folder)]
        started[role] = subprocess.Popen(
            command,
            env={**os.environ, **own},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
    try:
        for role, port in ports.items():
            url = f"http://127.0.0.1:{port}/health/ready"
            wait_until(f"{role} is ready", lambda url=url: says_ready(url), within_s=60)  # type: ignore[misc]
        yield ports
    finally:
        for process in started.values():
            process.terminate()
        for process in started.values():
            process.wait(60)


def answers(world: World, service: str) -> bool:
    return says_ready(f"http://127.0.0.1:{world.ports[service]}/health/ready")


def says_ready(url: str) -> bool:
    try:
        return httpx.get(url, timeout=20).status_code == 200
    except httpx.HTTPError:
        return False


# --- metrics


def exposed(world: World, service: str) -> dict[str, tuple[str, set[str]]]:
    """{name: (kind, names of labels)} of what /metrics shows, but when counters began and the figures that
    Prometheus' own client adds for any process."""
    found = {}
    for family in text_string_to_metric_families(world.ask(service, "/metrics").text):
        labels = {name for sample in family.samples for name in sample.labels} - {"le"}
        if not family.name.endswith("_created") and not family.name.startswith("process_"):
            found[family.name] = (family.type, labels)
    return found


def differing(world: World, service: str, described: tuple[Metric, ...]) -> list[str]:
    found = exposed(world, service)
    told = {metric.name: metric for metric in (*described, *PROCESS_METRICS)}
    if "freshet_process_memory_limit_bytes" not in found:  # no cgroup limits what runs here
        del told["freshet_process_memory_limit_bytes"]
    doors = {metric.name for metric in AUTH_METRICS}
    if not doors & found.keys():  # without tokens or limits there; test_tokens has some
        told = {name: metric for name, metric in told.items() if name not in doors}
    stores = {metric.name for metric in STORE_METRICS}
    if not stores & found.keys():  # of a row store on servers; here it is a folder
        told = {name: metric for name, metric in told.items() if name not in stores}
    lines = [f"{name} is not described" for name in found.keys() - told.keys()]
    lines += [f"{name} is described and not there" for name in told.keys() - found.keys()]
    for name in found.keys() & told.keys():
        kind, labels = found[name]
        if kind != told[name].kind or (labels and labels != set(told[name].labels)):
            lines.append(f"{name}: {kind} with labels {labels}, described as {told[name]}")
    return lines


@pytest.mark.parametrize("service", SERVICES)
def test_each_service_exposes_exactly_its_described_metrics(world: World, service: str) -> None:
    wait_until(
        f"{service} exposes what is described: {differing(world, service, SERVICES[service])}",
        lambda: not differing(world, service, SERVICES[service]),
        within_s=KNOWN_S,
    )


# --- topics


def test_the_log_holds_just_the_topics_that_are_described(world: World) -> None:
    log = open_eventlog(f"sqlite:{world.system.folder / 'log'}")
    try:
        plans = {p.name: (p.partitions, p.retention_ms) for p in topics_of(load_spec(world.spec_file)).plans}
        found = {name: (info.partitions, info.retention_ms) for name, info in log.topics().items()}

        assert found == plans
    finally:
        log.close()


def test_records_in_json_are_of_the_kinds_that_are_described(world: World) -> None:
    refused = {"event_id": 1, "what": []}
    world.ask("gateway", "/v1/actions", orjson.dumps(refused))
    model = load_spec(world.spec_file).name
    told = {kind.name.replace("<model>", model): set(kind.kinds) for kind in KINDS_OF_TOPICS if kind.kinds}

    def found() -> dict[str, set[str]]:
        log = open_eventlog(f"sqlite:{world.system.folder / 'log'}")
        try:
            return {topic: kinds_in(log, topic) for topic in told}
        finally:
            log.close()

    wait_until("measures are written", lambda: "window" in found()[f"{model}.measures"], within_s=KNOWN_S * 3)
    kinds = found()

    assert {topic: kinds[topic] - told[topic] for topic in told} == {topic: set() for topic in told}
    assert kinds[f"{model}.measures"] >= {"window", "vitals"}
    assert kinds[f"{model}.refused"] == {"refused"}
    assert kinds[f"{model}.versions"] >= {"version"}


def kinds_in(log: Any, topic: str) -> set[str]:
    kinds = set()
    for p in range(log.topics()[topic].partitions):
        partition = TopicPartition(topic, p)
        reader = log.reader()
        reader.assign({partition: log.bounds(partition).start})
        for _, records in reader.poll(100_000, 0.0):
            kinds |= {orjson.loads(value)["kind"] for value in records.values}
        reader.close()
    return kinds


# --- routes


def must_be_as_described(endpoint: Endpoint, answer: httpx.Response) -> None:
    """The status is one of those described, the body one of its forms."""
    where = f"{endpoint.method} {endpoint.path}: {answer.status_code} {answer.text[:500]}"
    told = {a.status: a for a in endpoint.answers}
    assert answer.status_code in told, f"not described: {where}"
    kind = answer.headers["content-type"].partition(";")[0]
    bodies = {b.media_type: b for b in told[answer.status_code].bodies}
    body = bodies.get(kind) or bodies.get("*/*")
    assert body is not None, f"{kind} is not described: {where}"
    if body.shape is not None and kind == "application/json":
        errors = [
            f"{list(e.absolute_path)}: {e.message}"
            for e in Draft202012Validator(body.shape).iter_errors(answer.json())
        ]
        assert errors == [], where


def filled(path: str) -> str:
    return path.replace("{model}", "demo").replace("{version}", "0").replace("{file}", "no-such")


READABLE = [
    (service, path)
    for (service, method, path) in ENDPOINTS
    if method == "GET" and path != "/api/events" and service != "admin"
]


@pytest.mark.parametrize(("service", "path"), READABLE)
def test_what_is_read_is_as_described(world: World, service: str, path: str) -> None:
    name = load_spec(world.spec_file).name
    endpoint = ENDPOINTS[service, "GET", path]
    queries = [""]
    if any(p.where == "query" for p in endpoint.parameters):
        queries += ["?topic=x&partition=0&offset=0", "?topic=x&partition=a", "?span_s=x", "?span_s=60"]
    for query in queries:
        answer = world.ask(service, filled(path.replace("{model}", name)) + query)
        if path.startswith("/static/") and answer.status_code == 404:
            continue  # files are routes of their own: App's answer
        must_be_as_described(endpoint, answer)


@pytest.mark.parametrize("path", ["/health/live", "/health/ready", "/status", "/metrics", "/progress"])
@pytest.mark.parametrize("service", ["joiner", "trainer", "simulator"])
def test_admin_ports_answer_as_described(world: World, service: str, path: str) -> None:
    must_be_as_described(ENDPOINTS["admin", "GET", path], world.ask(service, path))


def test_the_states_that_are_streamed_are_as_described(world: World) -> None:
    url = f"http://127.0.0.1:{world.ports['console']}/api/events"
    with httpx.stream("GET", url, timeout=20) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = answer.iter_lines()
        assert any(line == "event: state" for line in lines)
        state = next(line for line in lines if line.startswith("data:"))

    shape = ENDPOINTS["console", "GET", "/api/state"].answers[0].bodies[0].shape
    assert shape is not None
    Draft202012Validator(shape).validate(orjson.loads(state.removeprefix("data:")))


ANYTHING = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False)
    | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4),
    max_leaves=8,
)


def changed(draw: st.DrawFn, value: Any) -> Any:
    """The value with one part of it replaced by anything."""
    if isinstance(value, dict) and value and draw(st.integers(0, 4)):
        key = draw(st.sampled_from(sorted(value)))
        return {**value, key: changed(draw, value[key])}
    if isinstance(value, list) and value and draw(st.integers(0, 4)):
        at = draw(st.integers(0, len(value) - 1))
        return [*value[:at], changed(draw, value[at]), *value[at + 1 :]]
    return draw(ANYTHING)


@pytest.fixture(scope="module")
def requests(world: World) -> dict[tuple[str, str], list[Any]]:
    """Good bodies for each route that takes one."""

    def recent() -> list[Any]:
        found: list[Any] = world.ask("console", "/api/requests").json()
        return found

    wait_until("requests were served", lambda: bool(recent()), within_s=KNOWN_S)
    asked = {key: recent()[0][key] for key in ("context", "candidates")}
    name = load_spec(world.spec_file).name
    inputs = [
        {"name": t["name"], "datatype": "BYTES", "shape": [1], "data": ["u1"]}
        for t in world.ask("inference", f"/v2/models/{name}").json()["inputs"]
        if t["datatype"] == "BYTES" and len(t["shape"]) == 1
    ]
    action = {"event_id": "e1", "request_id": "r1", "item": "i1", "type": "click", "ts": 1}
    return {
        ("inference", "/v1/rank"): [asked, {**asked, "k": 2, "dry_run": True, "explain": True}],
        ("inference", "/v2/models/{model}/infer"): [{"id": "a", "inputs": inputs}],
        ("gateway", "/v1/actions"): [action, [action, action]],
        ("gateway", "/v1/impressions"): [
            {"request_id": "r9", "ts": 1, **asked["context"], "items": asked["candidates"]}
        ],
        ("console", "/api/try"): [asked],
        ("console", "/api/promote"): [{"number": 0}],
        ("console", "/api/rollback"): [{}],
    }


def test_each_route_that_takes_a_body_is_tried(requests: dict[tuple[str, str], list[Any]]) -> None:
    takes = {(s, p) for s, method, p in ENDPOINTS if method == "POST" and "{version}" not in p}

    assert takes - set(requests) == {("gateway", "/v1/shown")}  # the demo's spec has no such stream


def test_good_requests_and_empty_ones_are_answered_as_described(
    world: World, requests: dict[tuple[str, str], list[Any]]
) -> None:
    name = load_spec(world.spec_file).name
    statuses = {}
    for (service, path), bodies in requests.items():
        for what, body in (("good", bodies[-1]), ("empty", {})):
            answer = world.ask(service, filled(path.replace("{model}", name)), orjson.dumps(body))
            must_be_as_described(ENDPOINTS[service, "POST", path], answer)
            statuses[path, what] = answer.status_code

    good = {path: status for (path, what), status in statuses.items() if what == "good"}
    assert good == {
        "/v1/rank": 200,
        "/v2/models/{model}/infer": 200,
        "/v1/actions": 202,
        "/v1/impressions": 202,
        "/api/try": 200,
        "/api/promote": 401,
        "/api/rollback": 401,
    }
    assert all(status >= 400 for (_, what), status in statuses.items() if what == "empty")


@settings(max_examples=60)
@given(data=st.data())
def test_what_is_answered_is_as_described_whatever_is_sent(
    world: World, requests: dict[tuple[str, str], list[Any]], data: st.DataObject
) -> None:
    service, path = data.draw(st.sampled_from(sorted(requests)))
    body: Any = data.draw(st.sampled_from(requests[service, path]))
    how = data.draw(st.sampled_from(["good", "changed", "anything", "bytes"]))
    if how == "changed":
        body = data.draw(st.composite(changed)(body))
    if how == "anything":
        body = data.draw(ANYTHING)
    text = data.draw(st.binary(max_size=20)) if how == "bytes" else orjson_or_text(body)
    name = load_spec(world.spec_file).name

    answer = world.ask(service, filled(path.replace("{model}", name)), text)

    must_be_as_described(ENDPOINTS[service, "POST", path], answer)


def orjson_or_text(value: Any) -> bytes:
    """JSON; integers beyond 64 bits as orjson does not write them."""
    try:
        return orjson.dumps(value)
    except (TypeError, orjson.JSONEncodeError):
        return str(value).encode(errors="replace")
