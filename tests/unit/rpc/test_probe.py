"""Probes of a link, and the monitor that lets links choose their codecs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future

import numpy as np
import pytest

from freshet.errors import Corrupt, Unavailable
from freshet.http.addresses import is_on_this_host
from freshet.rpc.channel import Transport
from freshet.rpc.frames import Frame, Kind, Part, encode_frame
from freshet.rpc.link import Link
from freshet.rpc.probe import PROBE_BYTES, LinkMonitor, measure_goodput, serve_probes
from freshet.rpc.server import FrameServer
from freshet.testing.conditions import wait_until
from freshet.wires.link_codecs import CodecChoice, LinkCodecs

PLAIN = Transport()
AUTO = CodecChoice("auto", "auto", 16)


@pytest.fixture
def link() -> Iterator[Link]:
    """Returns a link to a listener that answers probes, as if to another host."""
    server = FrameServer("127.0.0.1:0", PLAIN)
    serve_probes(server, "Test")
    server.start()
    codecs = LinkCodecs(AUTO, same_host=False)
    made = Link(f"127.0.0.1:{server.port}", PLAIN, "Test", (), codecs, in_flight_bytes=1 << 20)
    try:
        yield made
    finally:
        made.close()
        server.stop(0.0)


def test_a_probe_carries_its_bytes_each_way(link: Link) -> None:
    goodput = measure_goodput(link.ask, 30.0)
    received, sent = link.carried()
    assert PROBE_BYTES <= received < 1.1 * PROBE_BYTES
    assert PROBE_BYTES <= sent < 1.1 * PROBE_BYTES
    assert goodput.up > 0 < goodput.down


def test_goodput_is_bytes_by_the_time_beyond_a_round_trip() -> None:
    times = iter([0.0, 0.011, 1.0, 1.010, 2.0, 2.012, 3.0, 3.030, 4.0, 4.050])

    def ask(_: str, make: Callable[[int], bytes]) -> Future[Frame]:
        make(1)
        answer: Future[Frame] = Future()
        answer.set_result(Frame(Kind.RESPONSE))
        return answer

    goodput = measure_goodput(ask, 1.0, lambda: next(times))
    assert goodput.up == pytest.approx(PROBE_BYTES / 0.020)
    assert goodput.down == pytest.approx(PROBE_BYTES / 0.040)


def test_a_probe_that_is_not_answered_is_given_up() -> None:
    with pytest.raises(Unavailable, match="a probe was not answered"):
        measure_goodput(lambda _, make: Future(), 0.01)


@pytest.mark.parametrize("wanted", [-1, PROBE_BYTES + 1, 2**62])
def test_a_probe_for_too_many_bytes_is_refused(link: Link, wanted: int) -> None:
    numbers = np.array([wanted], np.int64)
    data = Frame(Kind.PROBE, 1, sections={(Part.NUMBERS, 0): numbers, (Part.BYTES, 0): np.zeros(0, np.uint8)})
    with pytest.raises(Corrupt, match="bytes to answer"):
        link.ask("Probe", lambda number: encode_frame(data)).result(30.0)


def test_the_monitor_lets_a_link_choose(link: Link) -> None:
    monitor = LinkMonitor(lambda: [link], interval_s=0.01)
    before = link.codecs.status()["rows"]
    monitor.start()
    monitor.start()
    try:
        wait_until("measured", lambda: link.codecs.status()["rows"] != before, within_s=30.0)
    finally:
        monitor.stop()
    assert "MB/s" in link.codecs.status()["rows"]["why"]


def test_a_link_that_is_broken_keeps_its_codec(link: Link) -> None:
    monitor = LinkMonitor(lambda: [link])
    link.close()
    monitor.look()
    assert link.codecs.status()["rows"]["codec"] == "int8"


def test_links_on_this_host_are_not_probed(link: Link) -> None:
    link.codecs = LinkCodecs(AUTO, same_host=True)
    LinkMonitor(lambda: [link]).look()
    assert link.carried() == (0, 0)


def test_this_host_is_known_by_its_addresses() -> None:
    assert is_on_this_host("127.0.0.1")
    assert is_on_this_host("127.0.0.2")
    assert is_on_this_host("localhost")
    assert not is_on_this_host("192.0.2.1")
    assert not is_on_this_host("no-such-host.invalid")
