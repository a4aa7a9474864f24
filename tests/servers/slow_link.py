"""A link of chosen delay in front of a server: bytes arrive so much later both ways, in order. It can fail
in both ways of links: connections are reset, or bytes are lost in silence.

    python -m tests.servers.slow_link 127.0.0.2:7020 127.0.0.1:7020 --delay-ms 5

Listens at the first address, which is another of this host's own, for the server at the second; one that
advertises 127.0.0.2 is then reached through the link by all clients of the shard map. Prints `ready`.
Delay is one way: the round trip is twice that. Only time is added: as many bytes a second as the two ends
bring about, up to 64 MiB on their way. Segments are not lost, and a sender sees no window fill up.
"""

from __future__ import annotations

import argparse
import contextlib
import queue
import socket
import struct
import threading
import time
from collections.abc import Callable

PIECE = 1 << 18
PIECES = 256
"""On their way in one direction of a connection: 64 MiB."""


class SlowLink:
    """Carries connections until it is closed. Threads wait here, not an event loop: Python's read the clock
    by the millisecond, which is the delay."""

    def __init__(self, at: tuple[str, int], to: tuple[str, int], delay_s: float) -> None:
        """Listen at `at`, whose port may be 0."""
        self._to, self._delay_s = to, delay_s
        self._listener = socket.create_server(at)
        self.port: int = self._listener.getsockname()[1]
        self._resets = threading.Event()
        self._asks, self._answers = threading.Event(), threading.Event()  # set: what is sent arrives
        self._lock = threading.Lock()
        self._connections: set[_Connection] = set()
        self.mend()
        self._thread = threading.Thread(target=self._accept, name="slow-link", daemon=True)
        self._thread.start()

    def reset(self) -> None:
        """Reset every connection, and each that is made from now on."""
        with self._lock:
            self._resets.set()
            carried = list(self._connections)
        for connection in carried:
            connection.reset()

    def lose(self, *, asks: bool = True, answers: bool = True) -> None:
        """Bytes to the server, or from it, are lost in silence; ends of connections
        are lost too, and new connections are made in which it is the same.

        What was sent arrives when the link is mended: a sender's TCP sends it again until then.
        """
        if asks:
            self._asks.clear()
        if answers:
            self._answers.clear()

    def mend(self) -> None:
        """Carry again."""
        self._resets.clear()
        self._asks.set()
        self._answers.set()

    def close(self) -> None:
        """Cut every connection and listen no more."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes who accepts
        self._listener.close()
        self._thread.join()
        self.mend()
        with self._lock:
            carried = list(self._connections)
        for connection in carried:
            connection.end()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            if self._resets.is_set():
                _reset(near)
                continue
            try:
                far = socket.create_connection(self._to)
            except OSError:
                near.close()
                continue
            connection = _Connection(near, far, self._delay_s, self._forget)
            with self._lock:
                self._connections.add(connection)
            connection.start(self._asks, self._answers)
            if self._resets.is_set():  # meanwhile
                connection.reset()

    def _forget(self, connection: _Connection) -> None:
        with self._lock:
            self._connections.discard(connection)


class _Connection:
    """One connection, carried by two threads each way until both ways have ended."""

    def __init__(
        self, near: socket.socket, far: socket.socket, delay_s: float, ended: Callable[[_Connection], None]
    ) -> None:
        self._near, self._far, self._delay_s, self._ended = near, far, delay_s, ended
        self._lock = threading.Lock()
        self._ways = 2  # that have not ended
        self._workers: list[threading.Thread] = []

    def start(self, asks: threading.Event, answers: threading.Event) -> None:
        """Carry; each way while its event is set."""
        for source, sink, arrives in ((self._near, self._far, asks), (self._far, self._near, answers)):
            source.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._carry(source, sink, arrives)
        for worker in self._workers:
            worker.start()

    def reset(self) -> None:
        """Both ends see that it was reset."""
        _reset(self._near)
        _reset(self._far)

    def end(self) -> None:
        """Both ends see its end; returns when nothing is carried any more."""
        for end in (self._near, self._far):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        for worker in self._workers:
            worker.join()

    def _carry(self, source: socket.socket, sink: socket.socket, arrives: threading.Event) -> None:
        """One way, in two threads."""
        way: queue.Queue[tuple[float, bytes]] = queue.Queue(PIECES)

        def take() -> None:
            data = b"begun"
            while data:
                try:
                    data = source.recv(PIECE)
                except OSError:
                    data = b""
                way.put((time.monotonic() + self._delay_s, data))

        def give() -> None:
            with contextlib.suppress(OSError):
                while True:
                    due, data = way.get()
                    time.sleep(max(0.0, due - time.monotonic()))
                    arrives.wait()
                    if not data:
                        break
                    sink.sendall(data)
            with contextlib.suppress(OSError):
                sink.shutdown(socket.SHUT_WR)
            while data:  # a sender must not wait for who is gone
                _, data = way.get()
            self._one_way_ended()

        self._workers += [
            threading.Thread(target=work, name="slow-link", daemon=True) for work in (take, give)
        ]

    def _one_way_ended(self) -> None:
        with self._lock:
            self._ways -= 1
            if self._ways:
                return
        self._near.close()
        self._far.close()
        self._ended(self)


def _reset(end: socket.socket) -> None:
    """Close with a reset instead of an end. Who waits to receive holds the socket: woken first."""
    with contextlib.suppress(OSError):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        end.shutdown(socket.SHUT_RD)
    end.close()


def main() -> None:
    """Carry until killed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("at")
    parser.add_argument("to")
    parser.add_argument("--delay-ms", type=float, default=0.0)
    told = parser.parse_args()
    SlowLink(_address(told.at), _address(told.to), told.delay_ms / 1000)
    print("ready", flush=True)
    threading.Event().wait()


def _address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    return host, int(port)


if __name__ == "__main__":
    main()
