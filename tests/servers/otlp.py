"""A receiver of OpenTelemetry traces over HTTP, which keeps all spans; a test can have it refuse."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)


@dataclass(frozen=True, slots=True)
class Received:
    """A span as it came."""

    name: str
    service: str
    scope: str
    trace_id: str
    span_id: str
    parent: str
    kind: int
    start_ns: int
    end_ns: int
    attributes: dict[str, Any]
    links: tuple[tuple[str, str], ...]  # (trace id, span id)
    resource: dict[str, Any]
    failed: bool

    @property
    def named(self) -> tuple[str, str]:
        """How links name it."""
        return self.trace_id, self.span_id


@dataclass(slots=True)
class Receiver:
    """What came so far."""

    url: str
    refuses: bool = False  # answers 400 from now on: not taken, and not to be sent again
    requests: int = 0
    headers: dict[str, str] = field(default_factory=dict)  # of the last request
    spans: list[Received] = field(default_factory=list)

    def of(self, *, scope: str = "", name: str = "", trace_id: str = "") -> list[Received]:
        """Spans by who said them, name and trace, in the order of their start."""
        found = [
            one
            for one in self.spans
            if one.scope.endswith(scope) and one.name.startswith(name) and trace_id in ("", one.trace_id)
        ]
        return sorted(found, key=lambda one: one.start_ns)


@contextmanager
def receiver(*, keep: bool = True) -> Iterator[Receiver]:
    """Listen on a free port of this machine until the block ends; `keep` what comes."""
    lock = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            with lock:
                made.requests += 1
                made.headers = {k.lower(): v for k, v in self.headers.items()}
                if keep and not made.refuses:
                    made.spans += _spans(ExportTraceServiceRequest.FromString(body))
            answer = ExportTraceServiceResponse().SerializeToString()
            self.send_response(400 if made.refuses else 200)
            self.send_header("content-type", "application/x-protobuf")
            self.send_header("content-length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, format: str, *args: object) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    made = Receiver(f"http://127.0.0.1:{server.server_port}")
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield made
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _spans(request: ExportTraceServiceRequest) -> list[Received]:
    found = []
    for of in request.resource_spans:
        resource = _plain(of.resource.attributes)
        for scoped in of.scope_spans:
            for span in scoped.spans:
                found.append(
                    Received(
                        span.name,
                        str(resource.get("service.name", "")),
                        scoped.scope.name,
                        span.trace_id.hex(),
                        span.span_id.hex(),
                        span.parent_span_id.hex(),
                        span.kind,
                        span.start_time_unix_nano,
                        span.end_time_unix_nano,
                        _plain(span.attributes),
                        tuple((link.trace_id.hex(), link.span_id.hex()) for link in span.links),
                        resource,
                        span.status.code == span.status.STATUS_CODE_ERROR,
                    )
                )
    return found


def _plain(attributes: Sequence[Any]) -> dict[str, Any]:
    return {one.key: getattr(one.value, one.value.WhichOneof("value")) for one in attributes}
