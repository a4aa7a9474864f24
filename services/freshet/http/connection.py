"""One connection of a client: which requests go which way, and when it is closed on the client."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import sys
import termios
from collections.abc import Callable
from typing import Any, Protocol, cast

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from freshet.errors import Unavailable
from freshet.http.app import App
from freshet.http.request import header_map
from freshet.http.responses import HttpError, Response, error_response
from freshet.http.routes import TakerRoute
from freshet.http.tls_listener import Connected

__all__ = ["Connection", "kept_by_kernel"]

FIRST_BYTE_TIMEOUT_S = 10.0
"""A connection that has not sent a request's head by then is closed: idle ones would use up descriptors."""

HEAD_TIMEOUT_S = 10.0
"""From a head's first bytes to its last; and for what comes after an answer, such as the rest of a body that
was refused. A byte now and then would else hold the connection for ever."""

HEAD_BYTES = 64 << 10
"""Of a head that comes in pieces, beyond the first."""

MOST_PIPELINED = 16
"""Requests that wait behind the one that is being answered; a read of 256 KB may hold thousands, which take a
hundred times their bytes. With the last of them the connection is closed, and the client asks anew."""

STALLED_S = 30.0
"""A connection whose client takes nothing of what waits for it for so long is cut off. What waits, and the
descriptor, would else stay for as long as the client does: a close waits until the rest is sent."""

CLOSE = (b"connection", b"close")


class HasFileno(Protocol):
    """A socket, as transports show it."""

    def fileno(self) -> int:
        """Its descriptor."""


class _Taken:
    """A request that was handed to `App.take`: to uvicorn, this connection's cycle until it is answered."""

    message_event = asyncio.Event()  # uvicorn sets it when the connection goes; nobody waits for it here

    def __init__(self, answer: Callable[[_Taken, Response], None]) -> None:
        self._answer = answer
        self.response_complete = self.disconnected = False
        self.keep_alive = True  # False once the server stops

    def is_gone(self) -> bool:
        """Whether the client went away."""
        return self.disconnected

    def reply(self, response: Response) -> None:
        """Give the answer, unless one was given: the drain may be over before the handler is done."""
        if not self.response_complete:
            self.response_complete = True
            self._answer(self, response)


class _Way:
    """A connection's transport, as requests that go uvicorn's way see it: closed behind the body."""

    def __init__(self, connection: Connection) -> None:
        self.write = connection.transport.write
        self.is_closing = connection.transport.is_closing
        self.close = connection.close_behind_the_body


class Connection(HttpToolsProtocol, Connected):
    """Hands requests that arrive whole to the routes that take them, past ASGI: a task, its events and a
    scope cost more than all that the gateway does for one event. Whatever else comes goes uvicorn's way.

    Closes connections whose requests do not come, or too slowly, or are none, whose client stops reading, and
    those that are too many. Nothing that comes after the decision to close is looked at.
    """

    takers: App
    most_connections = 0
    counted = False  # from before its handshake
    _running: Any = None  # the cycle that is being answered; uvicorn's own `cycle` is the newest
    _ended = False  # what else comes is dropped
    _way: _Way | None = None  # set while connected
    _lingers = False  # the last answer was given before its request's body was whole
    _route: TakerRoute | None = None  # of the request that is being read, while it may be taken
    _body = b""
    _first: asyncio.TimerHandle | None = None  # looks once whether a first request has begun
    _stalled: asyncio.TimerHandle | None = None  # runs while more waits to be sent than buffers should hold
    _in_head = False  # a head has begun and is not whole
    _head_bytes = 0  # of it, beyond the first piece
    _late: asyncio.TimerHandle | None = None  # runs while something comes that is no request yet

    # --- what comes

    def data_received(self, data: bytes) -> None:
        """Parse it, unless the connection is about to be closed."""
        if self._is_over():
            return
        super().data_received(data)
        if self._is_over():
            return
        if self._route is not None:  # its body has not come whole: there are deadlines for that in ASGI's way
            self._go_uvicorns_way()
        cycle: Any = self.cycle
        idle = self.timeout_keep_alive_task is None and (cycle is None or cycle.response_complete)
        if self._in_head or idle:
            self._expect_head(len(data))
        elif self._late is not None:
            self._stop_waiting()

    def on_message_begin(self) -> None:
        """The first bytes of a request."""
        super().on_message_begin()
        self._in_head = True

    def on_headers_complete(self) -> None:
        """Decide which way the request goes."""
        self._in_head = False
        if self._is_over():
            return
        cycle: Any = self.cycle  # uvicorn types it as always set; it is None until the first request
        if len(self.pipeline) >= MOST_PIPELINED:
            self.takers.counts.cut_off("too_many_pipelined")
            self._ended = True
            cycle.keep_alive = False  # closed behind the answer to the newest that waits
            return
        parser = self.parser
        route = self.takers.routes.taker_of(parser.get_method(), self.url)
        if (
            route is not None
            and (cycle is None or cycle.response_complete)
            and parser.should_keep_alive()
            and not parser.should_upgrade()
            and not self.expect_100_continue
            and not self.flow.write_paused
        ):
            self._route, self._body = route, b""
        else:
            super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Some of its body."""
        if self._is_over():
            return
        if self._route is None:
            super().on_body(body)
        else:
            self._body = self._body + body if self._body else body

    def on_message_complete(self) -> None:
        """It is whole."""
        if self._is_over():
            return
        route = self._route
        if route is not None and self.takers.takes(len(self._body)):
            self._route = None
            self._take(route)
            return
        if route is not None:
            self._go_uvicorns_way()
        super().on_message_complete()
        if self._lingers:
            self.transport.close()
            self._expect_close()

    def _go_uvicorns_way(self) -> None:
        self._route = None
        super().on_headers_complete()
        if self._body:
            super().on_body(self._body)

    def _start_asgi_task(self, cycle: Any, app: Any) -> None:
        self._running = cycle
        cycle.transport = self._way
        super()._start_asgi_task(cycle, app)

    def _take(self, route: TakerRoute) -> None:
        taken = _Taken(self._answer)
        self._running = taken
        self.cycle = cast(Any, taken)
        peer = self.client[0] if self.client else ""
        self.takers.take(route, header_map(self.headers), self._body, peer, taken.reply, taken.is_gone)

    # --- what is answered

    def _answer(self, taken: _Taken, response: Response) -> None:
        if taken.disconnected or self.transport.is_closing():
            return
        closing = not taken.keep_alive or CLOSE in response.headers
        self.transport.write(self._bytes_of(response, *([CLOSE] if closing else [])))
        if closing:
            self.transport.close()
        self.on_response_complete()

    def _bytes_of(self, response: Response, *more: tuple[bytes, bytes]) -> bytes:
        headers = [h for h in self.takers.headers_of(response) if h not in more]
        head = b"".join([b"%s: %s\r\n" % header for header in (*headers, *more)])
        return b"%s%s\r\n%s" % (STATUS_LINE[response.status], head, response.body)

    def close_behind_the_body(self) -> None:
        """Close, but first take in and drop what is still to come of the body that was answered.

        The kernel resets a connection that is closed while bytes of it are unread. Clients that send a whole
        body before they read, as those of Python do, would never see why it was refused. What comes has
        `HEAD_TIMEOUT_S`.
        """
        if self._running is self.cycle and self._running.more_body and not self._is_over():
            self._lingers = True
            if self.transport.can_write_eof():  # not with TLS; the client sees at once that no more comes
                self.transport.write_eof()
        else:
            self.transport.close()

    def on_response_complete(self) -> None:
        """An answer was written; the next request may begin."""
        super().on_response_complete()
        if self.transport.is_closing():
            self._expect_close()

    def cut_off(self) -> None:
        """Answer what was taken and is not answered yet: the server's drain is over."""
        self.pipeline.clear()
        if isinstance(self._running, _Taken):
            self._running.keep_alive = False
            self._running.reply(error_response(Unavailable("the server is stopping; send it again")))

    # --- its beginning and its end

    def connection_made(self, transport: Any) -> None:
        """Count it, and give it some time to ask something."""
        super().connection_made(transport)
        self.connected = True
        self._way = _Way(self)
        self.takers = takers = cast(App, self.config.app)
        if not self.counted:
            takers.counts.connections += 1
        if takers.counts.connections > self.most_connections:
            self._refuse(_TOO_MANY, "too_many")
            return
        self._first = self.loop.call_later(FIRST_BYTE_TIMEOUT_S, self._expect_request)

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell whoever is answering here, and keep nothing."""
        if self._stalled is not None:
            self._stalled.cancel()
        if self._first is not None:
            self._first.cancel()
        self._stop_waiting()
        self.takers.counts.connections -= 1
        self._let_go()
        super().connection_lost(exc)
        # What knows this connection is let go of: else it stays for the garbage collector, or a timer, with
        # thousands of others where each request has its own.
        self._unset_keepalive_if_required()
        self.cycle = self._running = cast(Any, None)
        self._way = None

    def shutdown(self) -> None:
        """Close once what is being answered is: the server stops."""
        super().shutdown()
        if self.transport.is_closing():
            self._expect_close()

    def send_400_response(self, msg: str) -> None:
        """What came is no HTTP; uvicorn's name and its parser's words."""
        self._refuse(_MALFORMED, "malformed")

    def _refuse(self, error: HttpError, why: str) -> None:
        """Close the connection; say why, unless an answer is under way that this would garble."""
        self._stop_waiting()
        if self.transport.is_closing():
            return
        self.takers.counts.cut_off(why)
        if self._may_answer():
            self.transport.write(self._bytes_of(error.response(), CLOSE))
        self._ended = True
        self._let_go()
        self.transport.close()
        self._expect_close()

    def _may_answer(self) -> bool:
        """Whether nothing is being answered, or only the request that is still being read."""
        running = self._running
        if self._lingers:
            return False
        if running is None or running.response_complete:
            return True
        return running is self.cycle and not isinstance(running, _Taken) and (
            running.more_body and not running.response_started
        )  # fmt: skip

    def _let_go(self) -> None:
        """Whoever is to answer here need not any more. uvicorn tells the newest request alone."""
        self.pipeline.clear()
        running = self._running
        if running is not None and not running.response_complete:
            running.disconnected = True
            running.message_event.set()

    def _is_over(self) -> bool:
        return self._ended or self.transport.is_closing()

    # --- requests that come too slowly

    def _expect_request(self) -> None:
        cycle: Any = self.cycle
        if cycle is None and self._late is None and not self.transport.is_closing():
            self.takers.counts.cut_off("no_request")
            self.transport.close()

    def _expect_head(self, size: int) -> None:
        """Have a head, or the rest of what was refused, come to an end in time."""
        if self._late is None:
            self._late = self.loop.call_later(HEAD_TIMEOUT_S, self._too_late)
            return
        if self._in_head:
            self._head_bytes += size
            if self._head_bytes > HEAD_BYTES:
                self._refuse(_HEAD_TOO_LARGE, "head_too_large")

    def _stop_waiting(self) -> None:
        if self._late is not None:
            self._late.cancel()
        self._late, self._head_bytes = None, 0

    def _too_late(self) -> None:
        self._refuse(_HEAD_LATE, "head_late" if self._in_head else "body_late")

    # --- answers that are not read

    def pause_writing(self) -> None:
        """More waits to be sent than buffers should hold."""
        super().pause_writing()
        self._look_again(self._unread())

    def resume_writing(self) -> None:
        """The client reads again."""
        super().resume_writing()
        if self._stalled is not None:
            self._stalled.cancel()

    def timeout_keep_alive_handler(self) -> None:
        """Nothing was asked for a while; if the last answer still waits, its client does not read."""
        if self.leaves_unread:
            self.takers.counts.cut_off("not_read")
            self.transport.abort()
        else:
            super().timeout_keep_alive_handler()

    @property
    def leaves_unread(self) -> bool:
        """Whether something waits to be sent; that may be little, for which nobody is told to pause."""
        return bool(self.transport.get_write_buffer_size())

    def _expect_close(self) -> None:
        """Have a close come to an end: it waits until all is sent, and the client may not read."""
        if self._stalled is not None:
            self._stalled.cancel()
        self._look_again(self._unread())

    def _look_again(self, unread: int) -> None:
        self._stalled = self.loop.call_later(STALLED_S, self._expect_reading, unread)

    def _expect_reading(self, before: int) -> None:
        unread = self._unread()
        if unread < before:
            self._look_again(unread)
        else:
            self.takers.counts.cut_off("not_read")
            self.transport.abort()

    def _unread(self) -> int:
        """Bytes that the client has not taken: ours, and those that the kernel keeps for it (some MB)."""
        ours = self.transport.get_write_buffer_size()
        return ours + kept_by_kernel(self.transport.get_extra_info("socket"))


def kept_by_kernel(socket: HasFileno | None) -> int:
    """Bytes that were sent and not taken; 0 of a connection that is going, of which TLS has no socket."""
    queued = bytearray(4)
    with contextlib.suppress(OSError, ValueError):
        if socket is not None:
            fcntl.ioctl(socket.fileno(), termios.TIOCOUTQ, queued)
    return int.from_bytes(queued, sys.byteorder)


_MALFORMED = HttpError(
    400, "malformed", "this is no HTTP/1.1 request", expected="a request as of RFC 9112",
    found="bytes that the parser does not take",
)  # fmt: skip
_HEAD_LATE = HttpError(
    408, "head_timeout", "the request did not arrive in time",
    expected=f"a whole head within {HEAD_TIMEOUT_S:g} s", found="a part of it",
)  # fmt: skip
_HEAD_TOO_LARGE = HttpError(
    431, "head_too_large", "the request's head is too large", expected=f"about {HEAD_BYTES} bytes at most",
    found="more",
)  # fmt: skip
_TOO_MANY = HttpError(
    503, "connections", "too many connections are open", expected="fewer at once",
    hint="use connections again; FRESHET_COMMON_MAX_CONNECTIONS allows more",
    headers=((b"retry-after", b"5"),),
)  # fmt: skip
