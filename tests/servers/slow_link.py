"""A link of chosen delay in front of a server: what is sent either way arrives so much later, in order.

    python -m tests.servers.slow_link 127.0.0.2:7020 127.0.0.1:7020 --delay-ms 5

Listens at the first address, which is another of this host's own, for the server at the second; one that is
told to advertise 127.0.0.2 is then reached through the link by all who ask who owns what. Prints `ready`.
Delay is one way: the round trip is twice that. Only time is added: as many bytes a second as the two ends
bring about, up to 64 MiB on their way. Segments are not lost, and a sender sees no window fill up.
"""

from __future__ import annotations

import argparse
import contextlib
import queue
import socket
import threading
import time

__all__ = ["SlowLink"]

PIECE = 1 << 18
PIECES = 256
"""On their way in one direction of a connection: 64 MiB."""


class SlowLink:
    """Carries connections until it is closed. Threads wait here, not an event loop: those of Python look at
    the clock by the millisecond, which is the delay."""

    def __init__(self, at: tuple[str, int], to: tuple[str, int], delay_s: float) -> None:
        """Listen at `at`, whose port may be 0."""
        self._to, self._delay_s = to, delay_s
        self._listener = socket.create_server(at)
        self.port: int = self._listener.getsockname()[1]
        self._connections: list[socket.socket] = []
        self._workers: list[threading.Thread] = []
        self._thread = threading.Thread(target=self._accept, name="slow-link", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Cut every connection and listen no more."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes who accepts
        self._listener.close()
        self._thread.join()
        for connection in self._connections:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        for worker in self._workers:
            worker.join()
        for connection in self._connections:
            connection.close()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            try:
                far = socket.create_connection(self._to)
            except OSError:
                near.close()
                continue
            self._connections += [near, far]
            for source, sink in ((near, far), (far, near)):
                source.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self._carry(source, sink)

    def _carry(self, source: socket.socket, sink: socket.socket) -> None:
        """One direction of a connection, in two threads."""
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
                    if not data:
                        break
                    sink.sendall(data)
            with contextlib.suppress(OSError):
                sink.shutdown(socket.SHUT_WR)
            while way.qsize() or data:  # a sender must not wait for who is gone
                _, data = way.get()

        for work in (take, give):
            worker = threading.Thread(target=work, name="slow-link", daemon=True)
            self._workers.append(worker)
            worker.start()


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
