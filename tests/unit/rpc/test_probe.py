"""Probes of a link, and the monitor that lets links choose their codecs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future

import numpy as np
import pytest

from freshet.errors import Corrupt, Unavailable
from freshet.http.addresses import is_on_this_host
from freshet.rpc.channel import Transport
from freshet.rpc.frames import Frame, Kind, Part, decode_frame, encode_frame
from freshet.rpc.link import Link
from freshet.rpc.probe import PROBE_BYTES, LinkMonitor, LinkProbes, serve_probes
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


class ScriptedLink:
    """A link whose probes take set times, and which carries set bytes besides."""

    address, codecs = "192.0.2.1:7020", LinkCodecs(AUTO, same_host=False)

    def __init__(self, times_s: Sequence[float], others: int = 0) -> None:
        """`others`: bytes in each direction during each probe."""
        self._times, self._others, self._now, self._carried = iter(times_s), others, 0.0, [0, 0]

    def ask(self, _: str, make: Callable[[int], bytes]) -> Future[Frame]:
        probe = decode_frame(make(1), max_bytes=1 << 20)
        self._carried[0] += int(probe.array(Part.NUMBERS, np.int64, (1,))[0]) + self._others
        self._carried[1] += probe.sections[Part.BYTES, 0].nbytes + self._others
        self._now += next(self._times)
        answer: Future[Frame] = Future()
        answer.set_result(Frame(Kind.RESPONSE))
        return answer

    def carried(self) -> tuple[int, int]:
        return self._carried[0], self._carried[1]

    def clock(self) -> float:
        return self._now


def test_a_probe_carries_its_bytes_each_way(link: Link) -> None:
    goodput = LinkProbes().measure(link, 30.0)
    received, sent = link.carried()
    assert PROBE_BYTES <= received < 1.1 * PROBE_BYTES
    assert PROBE_BYTES <= sent < 1.1 * PROBE_BYTES
    assert goodput.up > 0 < goodput.down


def test_goodput_is_bytes_by_the_time_beyond_a_round_trip() -> None:
    link = ScriptedLink([0.011, 0.010, 0.012, 0.030, 0.050])
    goodput = LinkProbes().measure(link, 1.0, link.clock)
    assert goodput.up == pytest.approx(PROBE_BYTES / 0.020)
    assert goodput.down == pytest.approx(PROBE_BYTES / 0.040)


def test_goodput_of_a_busy_link_is_what_it_carries() -> None:
    """Each probe waits 100 ms behind other messages, also those without bytes."""
    probes = LinkProbes(round_trip_s=0.01)
    link = ScriptedLink([0.11, 0.11, 0.11, 0.11, 0.12], others=4 * PROBE_BYTES)
    goodput = probes.measure(link, 1.0, link.clock)
    assert goodput.up == pytest.approx(5 * PROBE_BYTES / 0.10)
    assert goodput.down == pytest.approx(5 * PROBE_BYTES / 0.11)


def test_a_round_trip_that_waited_does_not_make_a_link_fast() -> None:
    link = ScriptedLink([0.11, 0.12, 0.13, 0.10, 0.10])
    goodput = LinkProbes().measure(link, 1.0, link.clock)
    assert goodput.up == goodput.down == pytest.approx(PROBE_BYTES / 0.025)


def test_one_strange_probe_changes_nothing() -> None:
    usual = [0.01, 0.01, 0.01, 0.03, 0.03]
    link = ScriptedLink([*usual, *usual, 0.01, 0.01, 0.01, 0.01, 0.9])
    probes = LinkProbes()
    found = [probes.measure(link, 1.0, link.clock) for _ in range(3)]
    assert found[2].up == pytest.approx(found[0].up)
    assert found[2].down == pytest.approx(found[0].down)


def test_a_probe_that_is_not_answered_is_given_up() -> None:
    class Silent(ScriptedLink):
        def ask(self, _: str, make: Callable[[int], bytes]) -> Future[Frame]:
            return Future()

    with pytest.raises(Unavailable, match="a probe was not answered"):
        LinkProbes().measure(Silent([]), 0.01)


@pytest.mark.parametrize("wanted", [-1, PROBE_BYTES + 1, 2**62])
def test_a_probe_for_too_many_bytes_is_refused(link: Link, wanted: int) -> None:
    numbers = np.array([wanted], np.int64)
    data = Frame(Kind.PROBE, 1, sections={(Part.NUMBERS, 0): numbers, (Part.BYTES, 0): np.zeros(0, np.uint8)})
    with pytest.raises(Corrupt, match="bytes to answer"):
        link.ask("Probe", lambda number: encode_frame(data)).result(60)


def test_the_monitor_lets_a_link_choose(link: Link) -> None:
    monitor = LinkMonitor(lambda: [link], interval_s=0.01)
    before = link.codecs.status()["rows"]
    monitor.start()
    monitor.start()
    try:
        wait_until("measured", lambda: link.codecs.status()["rows"] != before, within_s=60)
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
