"""Mutated bodies through a running gateway, by every endpoint: `python -m tests.fuzz.doors --bodies 100000`.

Each body is sent as application/json and as application/x-ndjson over HTTP, and as JSON and JSON_LINES over
gRPC. All four answers must be what tests/fuzz/bodies.py expects, with the same reasons; what is taken must
stand in the log as it was sent, and what is refused among the refused events.
"""

from __future__ import annotations

import argparse
import base64
import http.client
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import grpc
import orjson

from freshet.apps.services import gateway_grpc_listener
from freshet.config.avro.schema import Record, parse_schema
from freshet.config.spec.model import Spec
from freshet.config.spec.parse import parse_spec
from freshet.gateway.service import Gateway, codecs_of, run
from freshet.log import EventLog
from freshet.log.sqlite.event_log import open_url
from freshet.process.ports import lease_ports
from freshet.rpc.public_server import GATEWAY, messages
from freshet.testing.clock import SettableClock
from freshet.types import TopicPartition
from tests.fixtures.serving import running, settings
from tests.fuzz.bodies import Event, events_of, mutated, random_body

AT_ONCE, CHUNK = 48, 2_000
"""Bodies under way at once, so that appends are shared; and bodies that are made before they are sent."""
NOW_MS, MOST_AHEAD_MS = 1_000_000, 60_000
SPEC = parse_spec("""
name = "fuzz"
[events]
served = { topic = "served", schema = "s.avsc", key = ["request", "item"], time = "ts:ms" }
action = { topic = "action", schema = "a.avsc", key = ["request", "item"], time = "ts:ms", format = "json" }
[join]
max_ahead = "1m"
[labels]
click = { on = "action.note == 'x'", window = "2m" }
[tables]
t = { dim = 4 }
[features]
hour = { time = "hour", table = "t" }
""")
FIELDS = [
    {"name": "request", "type": "string"},
    {"name": "item", "type": "long"},
    {"name": "ts", "type": "long"},
    {"name": "score", "type": ["null", "double"], "default": None},
    {"name": "note", "type": ["null", "string"], "default": None},
]
SCHEMAS = {
    role: parse_schema({"type": "record", "name": role, "fields": FIELDS}) for role in ("served", "action")
}
M = messages(GATEWAY)
PATHS = {"served": "/v1/impressions", "action": "/v1/actions"}
STREAMS = {"served": 1, "action": 3}
Told = tuple[int, list[tuple[int, str, str, str]]]  # accepted; index, path, expected and found of the refused


class Doors:
    """Sends bodies to each endpoint."""

    def __init__(self, url: str, grpc_port: int, log: EventLog) -> None:
        self._address, self._of_thread = url.partition("://")[2], threading.local()
        self._opened: list[http.client.HTTPConnection] = []
        self._channel = grpc.insecure_channel(f"127.0.0.1:{grpc_port}")
        self._put = self._channel.unary_unary("/freshet.wire.v1.Gateway/Put")
        self._log = log
        self.ways: dict[str, Callable[[str, bytes], Told | None]] = {
            "application/json": lambda role, body: self._posted("application/json", role, body),
            "application/x-ndjson": lambda role, body: self._posted("application/x-ndjson", role, body),
            "gRPC JSON": lambda role, body: self._called(1, role, body),
            "gRPC JSON_LINES": lambda role, body: self._called(2, role, body),
        }

    def close(self) -> None:
        """Close the connections."""
        for connection in self._opened:
            connection.close()
        self._channel.close()

    def _connection(self) -> http.client.HTTPConnection:
        """The calling thread's own."""
        if not hasattr(self._of_thread, "http"):
            self._of_thread.http = http.client.HTTPConnection(self._address)
            self._opened.append(self._of_thread.http)
        made: http.client.HTTPConnection = self._of_thread.http
        return made

    def _posted(self, kind: str, role: str, body: bytes) -> Told | None:
        connection = self._connection()
        connection.request("POST", PATHS[role], body, {"content-type": kind})
        answer = connection.getresponse()
        told = orjson.loads(answer.read())
        if answer.status == 400:
            return None
        assert answer.status == (422 if "refused" in told else 202), (answer.status, told)
        refused = [(r["index"], r["path"], r["expected"], r["found"]) for r in told.get("refused", ())]
        return told["accepted"], refused

    def _called(self, encoding: int, role: str, body: bytes) -> Told | None:
        asked = M.PutRequest(id=1, stream=STREAMS[role], encoding=encoding, body=body)
        try:
            told = M.PutResponse.FromString(self._put(asked.SerializeToString(), timeout=60))
        except grpc.RpcError as error:
            if error.code() is grpc.StatusCode.INVALID_ARGUMENT:
                return None
            raise
        return len(told.offsets), [(r.index, r.path, r.expected, r.found) for r in told.refused]

    def compare(self, role: str, body: bytes) -> Counter[str]:
        """Send a body to each endpoint. Raises AssertionError where two disagree, or one and the rules."""
        events = expected(role, body)
        told = {way: send(role, body) for way, send in self.ways.items()}
        first = next(iter(told.values()))
        assert all(other == first for other in told.values()), (body, told)
        if not events:
            assert first is None, (body, first)
            return Counter({"bodies without events": 1})
        assert first is not None, body
        taken = [event.text for event in events if event.taken]
        refused = [i for i, event in enumerate(events) if not event.taken]
        assert (first[0], [index for index, *_ in first[1]]) == (len(taken), refused), (body, first)
        return Counter(
            {
                "events taken": len(taken),
                "events refused": len(refused),
                "bodies with both": bool(taken and refused),
            }
        )

    def values(self, topic: str) -> Counter[bytes]:
        """The values of all records of a topic."""
        found: Counter[bytes] = Counter()
        for p in range(self._log.topics()[topic].partitions):
            reader = self._log.reader()
            reader.assign({TopicPartition(topic, p): 0})
            while batches := list(reader.poll(100_000, 0)):
                for _, records in batches:
                    found.update(records.values)
            reader.close()
        return found


def expected(role: str, body: bytes) -> list[Event]:
    """The events of a body; a topic of JSON takes fields that the schema does not have."""
    return events_of(body, NOW_MS + MOST_AHEAD_MS, others=role == "action")


@contextmanager
def opened(folder: Path, spec: Spec = SPEC, schemas: Mapping[str, Record] = SCHEMAS) -> Iterator[Doors]:
    """A gateway of this spec with a log in this folder, and connections to it."""
    [port], clock = lease_ports(1), SettableClock(NOW_MS)
    made = settings(gateway_grpc_port=str(port))
    log = open_url(f"sqlite:{folder}/log")

    def target(stop: threading.Event, ready: Callable[[str], None]) -> None:
        codecs = codecs_of(spec, schemas, log, clock)
        build = partial(Gateway, spec, log, codecs, made.gateway, clock=clock)
        grpc_listener = gateway_grpc_listener(made.gateway, made.common)
        port = made.gateway.port
        run(build, port, made.common, stop=stop, ready=ready, grpc_listener=grpc_listener)

    with running(target) as (url, _):
        doors = Doors(url, port, log)
        try:
            yield doors
        finally:
            doors.close()
    log.close()


def fuzz(doors: Doors, bodies: int, seed: Any) -> Counter[str]:
    """Compare so many random bodies, then what the log holds of them. Raises AssertionError."""
    random, counts = Random(seed), Counter[str]()
    taken: dict[str, Counter[bytes]] = {"served": Counter(), "action": Counter()}
    refused = Counter[bytes]()
    ways = len(doors.ways)
    with ThreadPoolExecutor(AT_ONCE) as pool:
        for first in range(0, bodies, CHUNK):
            roles = ["action" if n % 2 else "served" for n in range(first, min(bodies, first + CHUNK))]
            made = [mutated(random, random_body(random), random_body(random)) for _ in roles]
            for role, body, seen in zip(roles, made, pool.map(doors.compare, roles, made), strict=True):
                counts += seen
                for event in expected(role, body):
                    (taken[role] if event.taken else refused)[event.text] += ways
    assert doors.values("action") == taken["action"], "a topic of JSON holds the events as they were sent"
    assert doors.values("served").total() == taken["served"].total()
    letters: Counter[bytes] = Counter()
    for letter, times in doors.values("fuzz.refused").items():
        letters[base64.b64decode(orjson.loads(letter)["value"])] += times
    assert letters == refused, "refused events are kept byte for byte"
    return counts


def main() -> None:
    """Fuzz, and say what was seen."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--bodies", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder, opened(Path(folder)) as doors:
        counts = fuzz(doors, options.bodies, options.seed)
        ways = ", ".join(doors.ways)
    print(f"{options.bodies} bodies, seed {options.seed}, each by {ways}")
    for what, n in counts.most_common():
        print(f"  {n:9} {what}")
    print(f"no disagreement, in {time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
