"""A schema registry in a process of its own, with the parts of Confluent's REST API by which schemas are
registered and found. What it holds is gone when it ends.

`python -m tests.servers.schema_registry PORT AUTHORIZATION` serves at 127.0.0.1; a request without that
Authorization header is refused, if it is not empty. It answers `/requested` with the paths of all GETs.
"""

from __future__ import annotations

import json
import os
import re
import sys
import urllib.request
from collections.abc import Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from freshet.process.ports import lease_ports
from tests.servers.processes import Process


class SchemaRegistryServer:
    """The server; stopped or killed, it starts anew at the same port, without schemas."""

    def __init__(self, folder: Path, authorization: str = "") -> None:
        [self.port] = lease_ports(1)
        self._authorization = authorization
        root = Path(__file__).parents[2]
        self._process = Process(
            [sys.executable, "-m", "tests.servers.schema_registry", str(self.port), authorization],
            folder / "registry.log",
            {**os.environ, "PYTHONPATH": f"{root}{os.pathsep}{root / 'services'}"},
        )

    @property
    def url(self) -> str:
        """Where clients connect to."""
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Start it and wait until it serves."""
        self._process.start(lambda said: "serving" in said, within_s=60)

    def kill(self) -> None:
        """SIGKILL. Idempotent."""
        self._process.kill()

    def requests(self, path: str) -> int:
        """How often a path was requested since the start."""
        with urllib.request.urlopen(f"{self.url}/requested", timeout=30) as answer:
            requested: list[str] = json.load(answer)
        return requested.count(path)

    def register(
        self, subject: str, schema: Any, references: Sequence[Mapping[str, Any]] = (), kind: str = "AVRO"
    ) -> int:
        """Add a version of a subject; the schema's id."""
        body = {"schema": json.dumps(schema), "schemaType": kind, "references": list(references)}
        request = urllib.request.Request(
            f"{self.url}/subjects/{subject}/versions",
            json.dumps(body).encode(),
            {
                "Content-Type": "application/vnd.schemaregistry.v1+json",
                "Authorization": self._authorization,
            },
        )
        with urllib.request.urlopen(request, timeout=30) as answer:
            made: int = json.load(answer)["id"]
        return made

    def __enter__(self) -> SchemaRegistryServer:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()


class _Handler(BaseHTTPRequestHandler):
    authorization = ""
    schemas: dict[int, dict[str, Any]] = {}  # noqa: RUF012 - one server a process
    subjects: dict[str, list[int]] = {}  # noqa: RUF012
    requested: list[str] = []  # noqa: RUF012

    def do_GET(self) -> None:
        if self.path == "/requested":
            self._answer(200, self.requested)
            return
        self.requested.append(self.path)
        if not self._let_in():
            return
        if found := re.fullmatch(r"/schemas/ids/(\d+)", self.path):
            held = self.schemas.get(int(found[1]))
            if held is None:
                self._answer(404, {"error_code": 40403, "message": f"Schema {found[1]} not found"})
            else:  # as Confluent's: Avro is not named, no references are none at all
                self._answer(200, {k: v for k, v in held.items() if v not in ("AVRO", [])})
        elif found := re.fullmatch(r"/subjects/([^/]+)/versions/(\d+)", self.path):
            versions = self.subjects.get(found[1], [])
            if not 1 <= int(found[2]) <= len(versions):
                self._answer(404, {"error_code": 40402, "message": "Version not found."})
            else:
                schema_id = versions[int(found[2]) - 1]
                about = {"subject": found[1], "version": int(found[2]), "id": schema_id}
                self._answer(200, {**self.schemas[schema_id], **about})
        else:
            self._answer(404, {"error_code": 404, "message": "HTTP 404 Not Found"})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        found = re.fullmatch(r"/subjects/([^/]+)/versions", self.path)
        if found is None or not self._let_in():
            return
        schema_id = next((i for i, held in self.schemas.items() if held == body), len(self.schemas) + 100_001)
        self.schemas[schema_id] = body
        self.subjects.setdefault(found[1], []).append(schema_id)
        self._answer(200, {"id": schema_id})

    def _let_in(self) -> bool:
        if self.authorization and self.headers.get("Authorization") != self.authorization:
            self._answer(401, {"error_code": 40101, "message": "Unauthorized"})
            return False
        return True

    def _answer(self, status: int, body: dict[str, Any] | list[str]) -> None:
        text = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/vnd.schemaregistry.v1+json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, format: str, *args: object) -> None:
        print(f"{format % args}".replace('"', ""), flush=True)


def main() -> None:
    """Serve until ended."""
    port, _Handler.authorization = int(sys.argv[1]), sys.argv[2]
    with ThreadingHTTPServer(("127.0.0.1", port), _Handler) as server:
        print("serving", flush=True)
        server.serve_forever()


if __name__ == "__main__":
    main()
