"""The console as a process: routes, threads, lifecycle. Decisions are in `core` and its neighbours."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
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
from freshet.console.browser_headers import HEADERS, SITE_SETTINGS
from freshet.console.collector import Collector, Sources
from freshet.console.instances import Places
from freshet.console.pages import PAGE, read_pages
from freshet.console.services import Services
from freshet.console.tracer import Tracer
from freshet.console.try_it import asked, body_of
from freshet.errors import BadInput, ConfigError, Corrupt, Overloaded, Unavailable
from freshet.http.app import App, Handler
from freshet.http.authenticator import Authenticator
from freshet.http.browser_checks import AllowedSites
from freshet.http.endpoint import Endpoint
from freshet.http.messages import BodyLimits, HttpError, Request, Response, json_response, require_json
from freshet.http.server import HttpListener, run_server
from freshet.observability.audit import Actor, Audit
from freshet.observability.skipped import skipped_status
from freshet.process.lifecycle import LAST_S, join_all
from freshet.process.metrics import service_registry
from freshet.versions.promotions import move, version_to_roll_back_to

__all__ = ["Console", "Sources", "run"]

logger = structlog.get_logger(__name__)

DEFAULT_SPAN_S = 3_600
FRESH: tuple[tuple[bytes, bytes], ...] = ((b"cache-control", b"no-store"),)
START_LOOK_S = 0.05
START_WAIT_S = 10.0
"""How long a page waits for a console that still reads the past back; then it gets 503."""

LARGEST_NUMBER = 1 << 53

READERS = 4
"""Threads that write the past as JSON."""

MOST_TRIES = 4
"""Tries under way at once; each may wait for a server that starts, and one more is told to come again."""

T = TypeVar("T")


class Console:
    """One page and what is behind it. Requests live on one event loop; looking and tracing on threads."""

    def __init__(
        self,
        sources: Sources,
        settings: Settings,
        places: Places,
        sites: AllowedSites,
        authenticator: Authenticator,
        audit: Audit,
        *,
        client_token_file: str = "",
        tokens_asked: bool = False,
        clock: Clock = SYSTEM_CLOCK,
        pages: Path = PAGE,
    ) -> None:
        """`places`: where the services answer. With a `client_token_file` requests are tried by that
        token, for whoever may operate. `tokens_asked`: whether services ask clients for tokens."""
        self._sources, self._settings, self._clock = sources, settings, clock
        self._audit = audit
        self._client_token_file = client_token_file
        self._services = Services(RunFolder(sources.folder), places)
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
            tokens_asked=tokens_asked,
        )
        self._reading = ThreadPoolExecutor(READERS, thread_name_prefix="read")
        self._reads = 0
        self._trying = ThreadPoolExecutor(
            MOST_TRIES, thread_name_prefix="try"
        )  # may wait, and delays nothing
        self._tries = 0
        # One thread, as store and topic must tell of two moves in the same order; of its own, as whoever
        # rolls back waits for nobody who only looks.
        self._moving = ThreadPoolExecutor(1, thread_name_prefix="move")
        self.app = App(
            registry,
            BodyLimits(settings.max_body_bytes, settings.body_timeout_ms / 1e3, settings.max_bodies_bytes),
            headers=HEADERS,
            check=sites.check,
            authenticator=authenticator,
            max_streams=settings.max_streams,
            streams_setting="FRESHET_CONSOLE_MAX_STREAMS",
        )
        self._add_routes(pages)

    def _add_routes(self, pages: Path) -> None:
        routes: tuple[tuple[Endpoint, Handler], ...] = (
            (api.STATE, self._state),
            (api.HISTORY, self._history),
            (api.EVENTS, self._events),
            (api.REQUESTS, self._requests),
            # our token is lent to those only who may do more: they are asked before a body is read
            (replace(api.TRY, scope="operate") if self._client_token_file else api.TRY, self._try),
            (api.PROMOTE, self._promote),
            (api.ROLLBACK, self._rollback),
            (api.READY, self._ready),
            (api.STATUS, self._status),
        )
        for endpoint, handler in routes:
            self.app.route(endpoint, handler)
        for path, page in read_pages(pages).items():

            async def answer(request: Request, page: Any = page) -> Response:
                found: Response = page.answer(request)
                return found

            self.app.route(api.file_at(path), answer)

    def start(self, stop: threading.Event) -> list[threading.Thread]:
        """Start to look and to trace, until `stop` is set."""
        jobs = {"look": self._collector.run, "trace": self._tracer.run}
        threads = [
            threading.Thread(target=job, args=(stop,), name=name, daemon=True) for name, job in jobs.items()
        ]
        for thread in threads:
            thread.start()
        return threads

    def close(self) -> None:
        """Have the threads notice that they are to stop, and take no more work."""
        self._collector.look_soon()
        for pool in (self._reading, self._trying, self._moving):
            pool.shutdown(wait=False, cancel_futures=True)

    # --- what is read

    async def _state(self, _request: Request) -> Response:
        await self._until(lambda: bool(self._board.state), "the first look at the services is under way")
        return Response(200, self._board.state, headers=FRESH)

    async def _history(self, request: Request) -> Response:
        span_s = _asked_for(request, "span_s", DEFAULT_SPAN_S)
        span_ms = min(span_s * 1000, self._settings.history_ms)
        await self._until(self._collector.caught_up.is_set, "the past is being read back")
        body = await self._read(lambda: self._collector.history(span_ms))
        return Response(200, body, headers=FRESH)

    async def _events(self, request: Request) -> StreamingResponse:
        start = _asked_for(request, "from", None)
        if last := request.headers.get(b"last-event-id", b""):
            start = _whole("Last-Event-ID", last.decode("latin-1")) + 1
        await self._until(self._collector.caught_up.is_set, "the past is being read back")
        headers = {"content-type": "text/event-stream", "cache-control": "no-store"}
        return StreamingResponse(self._board.stream(start), headers=headers)

    async def _requests(self, _request: Request) -> Response:
        return await self._read(lambda: json_response(200, self._collector.requests, FRESH))

    # --- what is done

    async def _try(self, request: Request) -> Response:
        require_json(request)
        body = body_of(request.body)
        if self._tries >= MOST_TRIES:
            raise Overloaded(f"{self._tries} requests are being tried; try again", retry_after_s=1)
        self._tries += 1
        try:
            replicas = [one.address for one in self._services.of("inference")]
            return await asyncio.get_running_loop().run_in_executor(
                self._trying, asked, replicas, body, self._client_token_file
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
        """The version named in a body."""
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
                409, "version_damaged", "the version cannot be read; nothing moved", expected="whole weights",
                found=str(error).splitlines()[0], hint="choose another one",
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

    # --- how it is

    async def _ready(self, _request: Request) -> Response:
        if self._collector.caught_up.is_set():
            return json_response(200, {"status": "ready"})
        return json_response(503, {"status": "unready", "reason": "the past is being read back"})

    async def _status(self, _request: Request) -> Response:
        return json_response(200, {"streams": self._board.streams, "skipped": skipped_status()})

    async def _until(self, holds: Callable[[], bool], why: str) -> None:
        """Hold a request back while the console starts: a restart is then a pause to its pages, no error."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + START_WAIT_S
        while not holds():
            if loop.time() > deadline:
                raise Unavailable(f"the console is not ready: {why}")
            await asyncio.sleep(START_LOOK_S)

    async def _read(self, do: Callable[[], T]) -> T:
        """On a thread. As many may wait as pages may be followed, each of which begins so."""
        if self._reads >= self._settings.max_streams:
            raise Overloaded(
                f"{self._reads} questions about the past are under way; try again", retry_after_s=1
            )
        self._reads += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._reading, do)
        finally:
            self._reads -= 1


def _asked_for(request: Request, name: str, otherwise: T) -> int | T:
    """A whole number of the query. Raises BadInput for what is none."""
    given = parse_qs(request.query, max_num_fields=10).get(name)
    return _whole(name, given[-1]) if given else otherwise


def _whole(name: str, text: str) -> int:
    """A whole number below LARGEST_NUMBER, in digits. Raises BadInput for what is none."""
    # its length first: int() refuses thousands of digits with an error of its own
    if not text.isascii() or not text.isdigit() or len(text) > 16 or not int(text) < LARGEST_NUMBER:
        raise BadInput(f"{name}: expected a whole number below 2^53, found {text!r:.60}")
    return int(text)


def run(
    sources: Sources,
    settings: Settings,
    common: Common,
    *,
    places: Places,
    authenticator: Authenticator,
    audit: Audit,
    stop: threading.Event,
    clock: Clock = SYSTEM_CLOCK,
    ready: Callable[[str], None] = lambda url: None,
) -> None:
    """Serve on the calling thread until `stop` is set; streams end then, at once.

    `authenticator` requires tokens for changes, which `audit` records. `ready` is called with the address
    once connections are accepted. Signals are the caller's.

    Raises:
        ConfigError: the port cannot be had.
    """
    left_s = 0.0

    with HttpListener(common, settings.port) as listener:
        console = Console(
            sources,
            settings,
            places,
            AllowedSites(common.bind_address, common.hosts, settings.host, settings=SITE_SETTINGS),
            authenticator,
            audit,
            client_token_file=common.client_token_file,
            tokens_asked=bool(common.tokens_file),
            clock=clock,
        )
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
