"""A run as the console sees it: a log, versions, and fakes in the place of services."""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import orjson

from freshet.config.avro.schema import served_schema
from freshet.config.spec import load_spec
from freshet.config.spec.schemas import load_schemas
from freshet.console.instances import Places, local_places
from freshet.console.service import Sources, run
from freshet.features import JsonTranscoder
from freshet.http.authenticator import Authenticator, RateLimits
from freshet.http.token_files import CONSOLE_HINT, TokenFile, console_entry
from freshet.log.schema_ids import SchemaRegistry
from freshet.log.sqlite.event_log import open_url as open_log
from freshet.log.topics import ensure_topics
from freshet.observability.audit import Audit
from freshet.types import Append, BytesColumn, TopicPartition
from freshet.versions import Manifest
from freshet.versions.folder import FolderVersionStore
from tests.fixtures.serving import EXAMPLES, running, settings

SPEC = load_spec(EXAMPLES / "quickstart" / "freshet.toml")
SCHEMAS = load_schemas(SPEC)
TOKEN = "the-token-of-this-test"
SERVICES = ("gateway", "joiner", "trainer", "inference")


@dataclass
class Fake:
    """A service with scripted answers, which keeps the requests."""

    answers: dict[str, tuple[int, Any]] = field(
        default_factory=lambda: {"/health/ready": (200, {}), "/status": (200, {})}
    )
    before: dict[str, Callable[[], None]] = field(default_factory=dict)  # path -> called before its answer
    sent: list[tuple[str, Any]] = field(default_factory=list)
    shown: list[str | None] = field(default_factory=list)  # authorization of each request
    server: ThreadingHTTPServer | None = None
    port: int = 0

    def start(self) -> None:
        fake = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._answer(self.path)

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                fake.shown.append(self.headers["authorization"])
                fake.sent.append((self.path, orjson.loads(body)))
                self._answer(self.path)

            def _answer(self, path: str) -> None:
                fake.before.get(path, lambda: None)()
                code, content = fake.answers.get(path, (404, {}))
                body = orjson.dumps(content)
                self.send_response(code)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", self.port), Handler)
        self.port = self.server.server_address[1]
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()

    def stop(self) -> None:
        if self.server is not None:
            self.server.shutdown()
            self.server.server_close()
            self.server = None


class ConsoleWorld:
    """A run folder with four fakes beside it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "state").mkdir(parents=True)
        self.log = open_log(f"sqlite:{folder}/log")
        self.topics = ensure_topics(self.log, SPEC)
        self.versions = FolderVersionStore(folder / "versions")
        self.writer = self.log.writer()
        self.fakes = {name: Fake() for name in SERVICES}
        for fake in self.fakes.values():
            fake.start()
        schema = served_schema(SCHEMAS.served, SPEC.events.served.explode)
        schema_id = SchemaRegistry(self.log).register(schema)
        self._encoder = JsonTranscoder(schema, schema_id=schema_id, ignore_unknown=True)

    def close(self) -> None:
        for fake in self.fakes.values():
            fake.stop()
        self.writer.close()
        self.log.close()

    @contextmanager
    def console(self, places: Places | None = None, **variables: str) -> Iterator[Console]:
        """Run the console on a thread, polling the four fakes or the given places frequently."""
        quick = {
            "console_port": "0",
            "console_poll": "50ms",
            "console_vitals": "200ms",
            "console_trace": "100ms",
        }
        made = settings(**{**quick, **variables})
        token_file = Path(made.console.token_file) if made.console.token_file else None
        local = local_places({name: fake.port for name, fake in self.fakes.items()}, {})
        sources = Sources(SPEC, self.folder, self.log, self.versions, places or local, token_file)
        audit = Audit(self.folder / "audit.jsonl")

        def target(stop: threading.Event, ready: Callable[[str], None]) -> None:
            run(
                sources,
                made.console,
                made.common,
                authenticator=Authenticator(
                    TokenFile(file) if (file := made.common.tokens_file) else None,
                    more=[console_entry(TOKEN)],
                    hint=CONSOLE_HINT,
                    on_refused=audit.on_refused,
                    limits=RateLimits(trusted_proxies=made.common.trusted_proxies),
                ),
                audit=audit,
                stop=stop,
                ready=ready,
            )

        with closing(audit), running(target) as (url, stop), httpx.Client(base_url=url, timeout=20) as client:
            yield Console(url, stop, client)

    # --- records of services

    def append(self, topic: str, *values: bytes, partition: int = 0) -> int:
        """Records, one after the other; returns the first's offset."""
        return self.writer.append([Append(topic, partition, BytesColumn.of(values))])[0]

    def write(self, topic: str, *records: Mapping[str, Any], partition: int = 0) -> int:
        """JSON records of ours."""
        return self.append(topic, *(orjson.dumps({"v": 1, **r}) for r in records), partition=partition)

    def measure(self, *windows: Mapping[str, Any]) -> int:
        """Windows of the measures, closed now unless they say more."""
        now = now_ms()
        window = {"kind": "window", "of": "served", "start_ms": now - 5_000, "stop_ms": now, "label": "click",
                  "segment": None, "value": None, "measures": {"n": 10.0}}  # fmt: skip
        return self.write(self.topics.measures, *({**window, **w} for w in windows))

    def serve(self, reader: str, articles: list[str]) -> None:
        """Append the records of an answered request."""
        served = {"version": 1, "score": 0.5, "predictions": [0.5], "propensity": 1.0, "explored": False}
        items = [{"article": a, "topic": "art", "age_s": 5.0, "freshet_served": served} for a in articles]
        event = {"request_id": uuid.uuid4().hex, "ts": now_ms(), "reader": reader, "items": items}
        made = self._encoder.column(BytesColumn.of([orjson.dumps(event)]))
        assert not made.bad, made.bad
        self.append(self.topics.served, *made.records)

    def put_version(self, number: int, verdict: str = "promoted") -> None:
        manifest = Manifest(number, SPEC.name, "hash", now_ms(), 10 * number, {0: 0}, "log", 0,
                            {"served": {"click": {"auc": 0.7}}}, 1, "")  # fmt: skip
        self.versions.put(manifest, {"w": np.zeros(2, np.float32)})
        self.versions.judge(number, verdict, "because")
        told = {"number": number, "reason": "because", "time_ms": now_ms()}
        held = {"kind": "verdict", "verdict": "held"}
        moved = {"kind": "alias", "alias": "stable", "by": "trainer"}
        self.write(self.topics.versions, {**told, **(moved if verdict == "promoted" else held)})

    def ends(self, topic: str) -> int:
        return self.log.bounds(TopicPartition(topic, 0)).end


@dataclass(frozen=True)
class Console:
    """A console that runs."""

    url: str
    stop: threading.Event
    client: httpx.Client

    def state(self) -> dict[str, Any]:
        found: dict[str, Any] = self.client.get("/api/state").raise_for_status().json()
        return found

    def history(self, **query: int) -> dict[str, Any]:
        found: dict[str, Any] = self.client.get("/api/history", params=query).raise_for_status().json()
        return found

    def change(self, what: str, token: str = TOKEN, **body: Any) -> httpx.Response:
        return self.client.post(f"/api/{what}", json=body, headers={"authorization": f"Bearer {token}"})

    @contextmanager
    def events(
        self, start: int | None = None, last_id: int | None = None
    ) -> Iterator[Iterator[dict[str, str]]]:
        """Server-sent events as a browser reads them."""
        query = {} if start is None else {"from": start}
        headers = {} if last_id is None else {"last-event-id": str(last_id)}
        with self.client.stream("GET", "/api/events", params=query, headers=headers, timeout=20) as answer:
            answer.raise_for_status()
            assert answer.headers["content-type"] == "text/event-stream"
            yield _events(answer.iter_lines())


def _events(lines: Iterator[str]) -> Iterator[dict[str, str]]:
    fields: dict[str, str] = {}
    for line in lines:
        if not line and fields:
            yield fields
            fields = {}
        elif line and not line.startswith(":"):
            name, _, value = line.partition(": ")
            fields[name] = value


@contextmanager
def acting(world: ConsoleWorld, learn: Callable[[int], None]) -> Iterator[None]:
    """Append and join actions repeatedly; call `learn` with the end of samples each time."""
    ended = threading.Event()

    def happen() -> None:
        while not ended.is_set():  # the tracer takes one that comes while it waits
            offset = world.append(world.topics.action, b"an action")
            world.write(world.topics.joiner, {"kind": "commit", "next": {"action": offset + 1}})
            learn(world.ends(world.topics.samples))
            ended.wait(0.05)

    thread = threading.Thread(target=happen)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def now_ms() -> int:
    return time.time_ns() // 1_000_000
