"""Probes: what a link can carry, in bytes a second each way, by messages of zeros.

A probe shares the connection with everything else, and waits in its queues. So what the link carried until
the answer is counted, not the probe's bytes alone, and the time is taken beyond the shortest round trip ever
seen without bytes: one that waited in a queue says nothing of the link. Both are those of BBR (Cardwell et
al. 2016, "BBR: Congestion-Based Congestion Control").
"""

from __future__ import annotations

import math
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import structlog
from numpy.typing import NDArray

from freshet.errors import FreshetError, Unavailable
from freshet.http.addresses import address_of, is_on_this_host
from freshet.rpc.frames import BadFrame, Frame, Kind, Part, encode_frame
from freshet.rpc.server import FrameServer
from freshet.wires.link_codecs import CodecChoice, Goodput, LinkCodecs

log = structlog.get_logger("freshet.wires")

METHOD = "Probe"

PROBE_BYTES = 256 << 10
"""20 ms on 100 Mbit/s; above the window that TCP begins with."""

LEAST_S = 1e-5
"""Shorter transfers are noise of the clock."""

ROUND_TRIPS = 3
"""Round trips without bytes of a probe."""

LEAST_SHARE = 0.25
"""A probe's bytes take at least this share of its time: the shortest round trip may have waited too."""

KEPT_PROBES = 3
"""Probes of which the median counts: a message may arrive whole while a probe is under way."""


def serve_probes(server: FrameServer, service: str) -> None:
    """Register the method by which clients of a service probe their link."""
    server.add_stream(service, METHOD, _answer)


def _answer(frame: Frame) -> bytes:
    if frame.kind != Kind.PROBE:
        raise BadFrame(f"expected a frame PROBE, found kind {frame.kind}", "shape")
    (wanted,) = frame.array(Part.NUMBERS, np.int64, (1,)).tolist()
    if not 0 <= wanted <= PROBE_BYTES:
        raise BadFrame(f"probe: expected 0 to {PROBE_BYTES} bytes to answer, found {wanted}", "shape")
    zeros = np.zeros(wanted, np.uint8)
    return encode_frame(Frame(Kind.RESPONSE, frame.id, sections={(Part.BYTES, 0): zeros}))


def probe_frame(frame_id: int, up: int, down: int) -> bytes:
    """Encode a probe that carries `up` bytes, and whose answer carries `down`."""
    sections: dict[tuple[Part, int], NDArray[Any]] = {
        (Part.NUMBERS, 0): np.array([down], np.int64),
        (Part.BYTES, 0): np.zeros(up, np.uint8),
    }
    return encode_frame(Frame(Kind.PROBE, frame_id, sections=sections))


class ProbedLink(Protocol):
    """A link with codecs that its traffic chooses."""

    address: str
    codecs: LinkCodecs

    def ask(self, method: str, make: Callable[[int], bytes]) -> Future[Frame]:
        """Send a request; see `freshet.rpc.link.Link`."""

    def carried(self) -> tuple[int, int]:
        """Return the bytes received and sent since its creation."""


@dataclass(slots=True)
class LinkProbes:
    """The last probes of a link. For one thread."""

    round_trip_s: float = math.inf  # the shortest
    found: deque[Goodput] = field(default_factory=lambda: deque(maxlen=KEPT_PROBES))

    def measure(
        self, link: ProbedLink, timeout_s: float, clock: Callable[[], float] = time.perf_counter
    ) -> Goodput:
        """Probe the link each way; returns the median of the last probes, of two the lower.

        Raises Unavailable if a probe is not answered in time.
        """

        def seconds(up: int, down: int) -> float:
            began = clock()
            answer = link.ask(METHOD, lambda number: probe_frame(number, up, down))
            try:
                answer.result(timeout_s)
            except TimeoutError:
                raise Unavailable(f"a probe was not answered within {timeout_s} s") from None
            return clock() - began

        self.round_trip_s = min(self.round_trip_s, *(seconds(0, 0) for _ in range(ROUND_TRIPS)))
        rates = []
        for way, up, down in ((1, PROBE_BYTES, 0), (0, 0, PROBE_BYTES)):
            before = link.carried()[way]
            took_s = seconds(up, down)
            bytes_s = max(took_s - self.round_trip_s, LEAST_SHARE * took_s, LEAST_S)
            rates.append((link.carried()[way] - before) / bytes_s)
        self.found.append(Goodput(*rates))
        return Goodput(
            statistics.median_low(one.up for one in self.found),
            statistics.median_low(one.down for one in self.found),
        )


INTERVAL_S = 5.0
"""Seconds between two probes of a link: two messages of PROBE_BYTES, less than 1 % of 100 Mbit/s."""

FIRST_S = 1.0
"""Seconds of traffic after which a new link chooses for the first time."""

ANSWER_S = 5.0
"""Seconds after which a probe is given up; the codec stays as it is."""


def codecs_of(address: str, choice: CodecChoice) -> LinkCodecs:
    """Return the codecs of a new link to `host:port`."""
    return LinkCodecs(choice, same_host=is_on_this_host(address_of(address).host))


class LinkMonitor:
    """Probes links to other hosts in a thread, and lets each choose its codecs."""

    def __init__(self, links: Callable[[], Iterable[ProbedLink]], interval_s: float = INTERVAL_S) -> None:
        """`links` returns the present links; those on this host, or with set codecs, are not probed."""
        self._links, self._interval_s = links, interval_s
        self._probes: dict[ProbedLink, LinkProbes] = {}
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the thread once; cheap."""
        with self._lock:
            if self._thread is None and not self._stop.is_set():
                self._thread = threading.Thread(target=self._run, name="link-monitor", daemon=True)
                self._thread.start()

    def stop(self) -> None:
        """End the thread; it may still wait for an answer. Idempotent."""
        self._stop.set()

    def look(self) -> None:
        """Probe each link once and choose its codecs."""
        links = list(self._links())
        self._probes = {link: self._probes.get(link) or LinkProbes() for link in links}
        for link in links:
            if not link.codecs.is_measured or self._stop.is_set():
                continue
            try:
                goodput = self._probes[link].measure(link, ANSWER_S)
            except FreshetError:
                continue  # requests report a broken link
            if link.codecs.decide(goodput, *link.carried(), time.monotonic()):
                for way, choice in link.codecs.status().items():
                    log.info(
                        "codec of a link",
                        address=link.address,
                        carries=way,
                        codec=choice["codec"],
                        reason=choice["why"],
                    )

    def _run(self) -> None:
        self.look()  # before there is traffic: its round trips do not wait
        wait_s = min(FIRST_S, self._interval_s)
        while not self._stop.wait(wait_s):
            self.look()
            wait_s = self._interval_s
