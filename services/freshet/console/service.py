"""The console as a process: routes, threads, lifecycle. Decisions are in pure modules such as `core`."""

from __future__ import annotations

import asyncio
import http.client
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, TypeVar
from urllib.parse import parse_qs

import orjson
import structlog
from starlette.responses import StreamingResponse

from freshet.clock import SYSTEM_CLOCK, Clock
from freshet.config.settings import Common, RunFolder
from freshet.config.settings import Console as Settings
from freshet.config.spec.topics import topics_of
from freshet.console import api
from freshet.console.board import Board
from freshet.console.collector import Collector, Sources
from freshet.console.pages import HEADERS, SITE_SETTINGS, read_pages
from freshet.console.services import Services
from freshet.console.traces import Tracer
from freshet.errors import BadInput, ConfigError, Corrupt, Overloaded, Unavailable
from freshet.http import tls
from freshet.http.addresses import Address
from freshet.http.app import App, Handler
from freshet.http.authenticator import Authenticator
from freshet.http.browser_checks import AllowedSites
from freshet.http.endpoint import Endpoint
from freshet.http.messages import BodyLimits, HttpError, Request, Response, json_response, require_json
from freshet.http.server import HttpListener, run_server
from freshet.http.service_client import whole_body
from freshet.http.token_files import token_headers
from freshet.json_text import kind_of, written
from freshet.observability.audit import Actor, Audit
from freshet.observability.skipped_state import skipped_status
from freshet.process.lifecycle import LAST_S, join_all
from freshet.process.telemetry import service_registry
from freshet.versions.promotions import move, version_to_roll_back_to

__all__ = ["Console", "Sources", "rank_for_page", "rank_request", "run"]

logger = structlog.get_logger(__name__)

DEFAULT_SPAN_S = 3_600
FRESH: tuple[tuple[bytes, bytes], ...] = ((b"cache-control", b"no-store"),)
START_LOOK_S = 0.05
START_WAIT_S = 10.0
"""Time for which a page waits for a console that still reads its past; then it gets 503."""

LARGEST_NUMBER = 1 << 53

READERS = 4
"""Threads that encode the past as JSON."""

MOST_TRIES = 4
"""Concurrent rank requests of pages; each may wait for a server that starts. A further one is refused."""

T = TypeVar("T")


class Console:
    """Routes of the page. Requests run on one event loop; collector and tracer on threads."""

    def __init__(
        self,
        sources: Sources,
        settings: Settings,
        common: Common,
        authenticator: Authenticator,
        audit: Audit,
        *,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        """Start nothing yet. With a client token file in `common`, operators may send rank requests by its
        token."""
        self._sources, self._settings, self._clock = sources, settings, clock
        self._audit = audit
        self._client_token_file = common.client_token_file
        self._services = Services(RunFolder(sources.folder), sources.places)
        self._board = Board()
        self._tracer = Tracer(
            sources.spec,
            topics_of(sources.spec),
            sources.log,
            self._services.of,
            clock,
            settings.trace_ms / 1e3,
        )
        registry = service_registry()
        self._collector = Collector(
            sources,
            settings,
            self._services,
            self._board,
            self._tracer.traces,
            clock,
            registry,
            tokens_required=bool(common.tokens_file),
        )
        self._reading = ThreadPoolExecutor(READERS, thread_name_prefix="read")
        self._reads = 0
        self._trying = ThreadPoolExecutor(MOST_TRIES, thread_name_prefix="try")
        self._tries = 0
        # One thread, as store and topic must have two moves in the same order; a separate one, as a rollback
        # must not wait for readers.
        self._moving = ThreadPoolExecutor(1, thread_name_prefix="move")
        self.app = App(
            registry,
            BodyLimits(settings.max_body_bytes, settings.body_timeout_ms / 1e3, settings.max_bodies_bytes),
            headers=HEADERS,
            check=AllowedSites(
                common.bind_address, common.hosts, settings.host, settings=SITE_SETTINGS
            ).check,
            authenticator=authenticator,
            max_streams=settings.max_streams,
            streams_setting="FRESHET_CONSOLE_MAX_STREAMS",
        )
        self._add_routes()

    def _add_routes(self) -> None:
        routes: tuple[tuple[Endpoint, Handler], ...] = (
            (api.STATE, self._state),
            (api.HISTORY, self._history),
            (api.EVENTS, self._events),
            (api.REQUESTS, self._requests),
            # the console's token serves only operators; the scope is checked before a body is read
            (replace(api.TRY, scope="operate") if self._client_token_file else api.TRY, self._try),
            (api.PROMOTE, self._promote),
            (api.ROLLBACK, self._rollback),
            (api.READY, self._ready),
            (api.STATUS, self._status),
        )
        for endpoint, handler in routes:
            self.app.route(endpoint, handler)
        for path, page in read_pages().items():

            async def answer(request: Request, page: Any = page) -> Response:
                found: Response = page.answer(request)
                return found

            self.app.route(api.file_at(path), answer)

    def start(self, stop: threading.Event) -> list[threading.Thread]:
        """Start collector and tracer, until `stop` is set."""
        jobs = {"look": self._collector.run, "trace": self._tracer.run}
        threads = [
            threading.Thread(target=job, args=(stop,), name=name, daemon=True) for name, job in jobs.items()
        ]
        for thread in threads:
            thread.start()
        return threads

    def close(self) -> None:
        """Wake the threads to stop, and accept no more work."""
        self._collector.look_soon()
        for pool in (self._reading, self._trying, self._moving):
            pool.shutdown(wait=False, cancel_futures=True)

    # --- reads

    async def _state(self, _request: Request) -> Response:
        await self._until(lambda: bool(self._board.state), "the first look at the services is under way")
        return Response(200, self._board.state, headers=FRESH)

    async def _history(self, request: Request) -> Response:
        span_s = _query_number(request, "span_s", DEFAULT_SPAN_S)
        span_ms = min(span_s * 1000, self._settings.history_ms)
        await self._until(self._collector.caught_up.is_set, "the past is being read back")
        body = await self._read(lambda: self._collector.history(span_ms))
        return Response(200, body, headers=FRESH)

    async def _events(self, request: Request) -> StreamingResponse:
        start = _query_number(request, "from", None)
        if last := request.headers.get(b"last-event-id", b""):
            start = _whole("Last-Event-ID", last.decode("latin-1")) + 1
        await self._until(self._collector.caught_up.is_set, "the past is being read back")
        headers = {"content-type": "text/event-stream", "cache-control": "no-store"}
        return StreamingResponse(self._board.stream(start), headers=headers)

    async def _requests(self, _request: Request) -> Response:
        return await self._read(lambda: json_response(200, self._collector.requests, FRESH))

    # --- actions

    async def _try(self, request: Request) -> Response:
        require_json(request)
        body = rank_request(request.body)
        if self._tries >= MOST_TRIES:
            raise Overloaded(f"{self._tries} requests are being tried; try again", retry_after_s=1)
        self._tries += 1
        try:
            replicas = [one.address for one in self._services.of("inference")]
            return await asyncio.get_running_loop().run_in_executor(
                self._trying, rank_for_page, replicas, body, self._client_token_file
            )
        finally:
            self._tries -= 1

    async def _promote(self, request: Request) -> Response:
        number = self._number(request)
        if number is None:
            raise BadInput('expected {"number": N}, the version to promote; found no number')
        return await self._moved(request, lambda: number, pinned=False)

    async def _rollback(self, request: Request) -> Response:
        number = self._number(request)
        store = self._sources.versions
        return await self._moved(
            request, lambda: version_to_roll_back_to(store) if number is None else number, pinned=True
        )

    def _number(self, request: Request) -> int | None:
        """Return the version number of a body, or None."""
        require_json(request)
        try:
            wanted = orjson.loads(request.body or b"{}")
        except orjson.JSONDecodeError as error:
            raise BadInput(f"the body is not JSON: {error}") from None
        if not isinstance(wanted, dict) or wanted.keys() - {"number"}:
            raise BadInput('expected an object with the key "number"')
        number = wanted.get("number")
        if number is not None and (type(number) is not int or not 0 <= number < LARGEST_NUMBER):
            raise BadInput(f"number: expected a version's number, found {number!r:.60}")
        return number

    async def _moved(self, request: Request, number: Callable[[], int], *, pinned: bool) -> Response:
        actor, what = Actor(f"token:{request.token_name}", request.peer), dict[str, object]()

        def do() -> Mapping[str, object]:
            with self._audit.of("rollback" if pinned else "promote", actor, what):
                what["version"] = wanted = number()
                return move(
                    self._sources.versions,
                    self._sources.log,
                    wanted,
                    pinned=pinned,
                    by="console",
                    now_ms=self._clock.now_ms(),
                )

        try:
            record = await asyncio.get_running_loop().run_in_executor(self._moving, do)
        except ConfigError as error:
            raise HttpError(
                404, "no_such_version", str(error).splitlines()[0], expected=error.expected,
                found=error.found, hint=error.hint,
            ) from None  # fmt: skip
        except Corrupt as error:
            raise HttpError(
                409, "version_damaged", "the version cannot be served; nothing moved",
                expected="whole, finite weights", found=str(error).splitlines()[0], hint="choose another one",
            ) from None  # fmt: skip
        logger.info(
            "stable moved",
            version=record["number"],
            pinned=record["pinned"],
            by=record["by"],
            holder=request.token_name,
            client=request.peer,
        )
        self._collector.look_soon()
        return json_response(200, record, FRESH)

    # --- health

    async def _ready(self, _request: Request) -> Response:
        if self._collector.caught_up.is_set():
            return json_response(200, {"status": "ready"})
        return json_response(503, {"status": "unready", "reason": "the past is being read back"})

    async def _status(self, _request: Request) -> Response:
        return json_response(200, {"streams": self._board.streams, "skipped": skipped_status()})

    async def _until(self, holds: Callable[[], bool], why: str) -> None:
        """Delay a request while the console starts, so that a restart is a pause to pages, not an error."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + START_WAIT_S
        while not holds():
            if loop.time() > deadline:
                raise Unavailable(f"the console is not ready: {why}")
            await asyncio.sleep(START_LOOK_S)

    async def _read(self, do: Callable[[], T]) -> T:
        """Run on a thread. As many reads may wait as streams may be open, since each page starts with one."""
        if self._reads >= self._settings.max_streams:
            raise Overloaded(
                f"{self._reads} questions about the past are under way; try again", retry_after_s=1
            )
        self._reads += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._reading, do)
        finally:
            self._reads -= 1


def _query_number(request: Request, name: str, otherwise: T) -> int | T:
    """Return a whole number of the query. Raises BadInput for other text."""
    given = parse_qs(request.query, max_num_fields=10).get(name)
    return _whole(name, given[-1]) if given else otherwise


def _whole(name: str, text: str) -> int:
    """Parse a whole number below LARGEST_NUMBER. Raises BadInput for other text."""
    # the length first: int() raises an error of its own for thousands of digits
    if not text.isascii() or not text.isdigit() or len(text) > 16 or not int(text) < LARGEST_NUMBER:
        raise BadInput(f"{name}: expected a whole number below 2^53, found {text!r:.60}")
    return int(text)


# --- Rank requests of the page: inference neither logs nor explores them.

KEYS = {"context", "candidates", "k"}
TRY_TIMEOUT_S = 10.0
"""Time for all replicas together; a request may wait for a server that starts."""

MOST_REPLICAS = 3
CONNECT_S = 1.0

MOST_BYTES = 16 << 20


def rank_request(body: bytes) -> bytes:
    """Return the rank request for the page's {context, candidates, k}; inference validates the values.

    Raises BadInput for another body.
    """
    try:
        wanted: Any = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise BadInput(f"the body is not JSON: {error}") from None
    if not isinstance(wanted, dict):
        raise BadInput(f"expected an object with context and candidates, found {kind_of(wanted)}")
    unknown = sorted(wanted.keys() - KEYS)
    if unknown:
        raise BadInput(f"expected context, candidates and k, found {unknown[0]!r:.60}")
    return written({**wanted, "dry_run": True, "explain": True}, "the body")


def rank_for_page(addresses: Sequence[Address], body: bytes, token_file: str = "") -> Response:  # nosec B107  # no file
    """Return the answer of the first inference replica that answers. Blocks.

    Raises:
        Unavailable: none answers.
        ConfigError: the token file cannot be read.
    """
    headers = {"content-type": "application/json", **token_headers(token_file)}
    problem = Unavailable("inference: where it answers is not known; is it started?")
    deadline = time.monotonic() + TRY_TIMEOUT_S
    for address in addresses[:MOST_REPLICAS]:
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            break
        try:
            return _post_rank(address, body, headers, left_s)
        except Unavailable as error:
            problem = error
    raise problem


def _post_rank(address: Address, body: bytes, headers: Mapping[str, str], left_s: float) -> Response:
    connection = tls.connection(address.host, address.port, min(CONNECT_S, left_s))
    try:
        connection.connect()
        connection.sock.settimeout(left_s)
        connection.request("POST", "/v1/rank", body, dict(headers))
        answer = connection.getresponse()
        content = whole_body(answer, MOST_BYTES)
    except (OSError, http.client.HTTPException) as error:
        raise Unavailable(f"inference does not answer at {address}: {error}") from None
    finally:
        connection.close()
    return Response(answer.status, content)


def run(
    sources: Sources,
    settings: Settings,
    common: Common,
    *,
    authenticator: Authenticator,
    audit: Audit,
    stop: threading.Event,
    clock: Clock = SYSTEM_CLOCK,
    ready: Callable[[str], None] = lambda url: None,
) -> None:
    """Serve on the calling thread until `stop` is set; streams then end at once.

    Args:
        authenticator: requires tokens of requests that change something.
        audit: records changes.
        ready: called with the address once the listener accepts connections.

    Raises ConfigError if the port cannot be bound. Signals are the caller's.
    """
    left_s = 0.0

    with HttpListener(common, settings.port) as listener:
        console = Console(sources, settings, common, authenticator, audit, clock=clock)
        stop_threads = threading.Event()

        async def main() -> None:
            nonlocal left_s
            left_s = await listener.serve(console.app, stop, ready)

        threads = console.start(stop_threads)
        try:
            run_server(main)
        finally:
            stop_threads.set()
            console.close()
            threads_left = join_all(threads, max(left_s, LAST_S))
            logger.info("console stopped", threads_left=threads_left)
