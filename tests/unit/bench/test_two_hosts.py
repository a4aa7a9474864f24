"""The rate and the delay of a link between two hosts."""

import os

import pytest

from bench.two_hosts import MTU, Direction


@pytest.fixture
def pipes():
    """Returns (source to write to, Direction's source, its sink, sink to read from)."""
    (source, into), (out, sink) = os.pipe2(os.O_DIRECT | os.O_NONBLOCK), os.pipe2(os.O_DIRECT | os.O_NONBLOCK)
    yield into, source, sink, out
    for end in (source, into, out, sink):
        os.close(end)


def test_packets_leave_at_the_rate_and_arrive_after_the_delay(pipes):
    into, source, sink, out = pipes
    direction = Direction(source, sink, rate_mbit=8.0, delay_ms=5.0)  # 1 byte a microsecond
    for size in (1000, 2000):
        os.write(into, b"x" * size)

    direction.take(now=10.0)

    assert direction.give(now=10.0059) == pytest.approx(10.006)
    assert direction.give(now=10.0061) == pytest.approx(10.008)
    assert len(os.read(out, MTU)) == 1000
    assert direction.give(now=10.0081) is None
    assert len(os.read(out, MTU)) == 2000


def test_an_idle_link_saves_up_nothing(pipes):
    into, source, sink, _ = pipes
    direction = Direction(source, sink, rate_mbit=8.0, delay_ms=0.0)
    os.write(into, b"x" * 1000)
    direction.take(now=100.0)
    assert direction.give(now=100.0) == pytest.approx(100.001)


def test_without_a_rate_only_the_delay_counts(pipes):
    into, source, sink, _ = pipes
    direction = Direction(source, sink, rate_mbit=0.0, delay_ms=1.0)
    os.write(into, b"x" * 1000)
    direction.take(now=1.0)
    assert direction.give(now=1.0) == pytest.approx(1.001)
