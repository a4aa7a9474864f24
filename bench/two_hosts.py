"""Two hosts on one machine: network namespaces joined by a link of a chosen rate and delay.

It stands in for `tc netem`, which not every kernel has. Each namespace has a TUN device; a process of its own
carries packets between the two, each after the time that the rate gives its bytes, and the delay. No packet
is lost, and a sender's TCP finds a queue without end. Needs root, `ip` (iproute2) and /dev/net/tun.
"""

from __future__ import annotations

import argparse
import ctypes
import fcntl
import os
import select
import shutil
import struct
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

MTU = 9000
"""Jumbo frames: at 100 Mbit/s the link then takes a twentieth of a core; with 1,500 bytes a third."""
DEVICE = "slow0"
NEAR_HOST, FAR_HOST = "10.213.0.1", "10.213.0.2"
TCP_HEADER_BYTES = 52
"""IPv4 20, TCP 20 and its timestamps 12, of every packet."""

_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
_CLONE_NEWNET = 0x40000000
_QUEUED_PACKETS = 10_000


def missing() -> str | None:
    """Return what this machine lacks, or None."""
    if os.geteuid() != 0:
        return "network namespaces need root: run it by sudo"
    if shutil.which("ip") is None:
        return "network namespaces need `ip`: apt-get install iproute2"
    if not Path("/dev/net/tun").exists():
        return "a link between network namespaces needs /dev/net/tun: modprobe tun"
    return None


@dataclass(frozen=True, slots=True)
class TwoHosts:
    """Two namespaces that a link joins."""

    near: str
    far: str


def enter(namespace: str) -> tuple[str, ...]:
    """Return the words before a command that run it in a namespace."""
    return ("ip", "netns", "exec", namespace)


@contextmanager
def two_hosts(rate_mbit: float, delay_ms: float) -> Iterator[TwoHosts]:
    """Join two new hosts; the block's end removes them, and whatever runs there loses its network.

    Args:
        rate_mbit: of each direction, in Mbit/s; 0: as fast as the carrying process.
        delay_ms: one way.
    """
    hosts = TwoHosts(f"freshet-near-{os.getpid()}", f"freshet-far-{os.getpid()}")
    with ExitStack() as stack:
        for name in (hosts.near, hosts.far):
            _ip("netns", "add", name)
            stack.callback(_ip, "netns", "del", name)
        words = [sys.executable, "-m", "bench.two_hosts", hosts.near, hosts.far]
        words += ["--rate-mbit", str(rate_mbit), "--delay-ms", str(delay_ms)]
        carrier = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
        stack.callback(carrier.wait)
        stack.callback(carrier.terminate)
        assert carrier.stdout is not None
        if carrier.stdout.readline() != "ready\n":
            raise RuntimeError("the link did not start; it says why above")
        yield hosts


def device_bytes() -> tuple[int, int, int, int] | None:
    """Return (bytes received, packets, bytes sent, packets) of this host's device; None on a usual host."""
    for line in Path("/proc/thread-self/net/dev").read_text().splitlines():
        name, _, counts = line.partition(":")
        if name.strip() == DEVICE:
            of = list(map(int, counts.split()))
            return of[0], of[1], of[8], of[9]
    return None


class Direction:
    """The packets that are under way in one direction."""

    def __init__(self, source: int, sink: int, rate_mbit: float, delay_ms: float) -> None:
        """Source, sink: descriptors that give and take one packet a call, without waiting."""
        self._source, self._sink = source, sink
        self._byte_s, self._delay_s = (8e-6 / rate_mbit if rate_mbit else 0.0), delay_ms / 1000
        self._free_at = 0.0  # when the last packet has left
        self._packets: deque[tuple[float, bytes]] = deque()

    def take(self, now: float) -> None:
        """Take all packets that wait at the source."""
        while True:
            try:
                packet = os.read(self._source, MTU)
            except BlockingIOError:
                return
            self._free_at = max(self._free_at, now) + len(packet) * self._byte_s
            self._packets.append((self._free_at + self._delay_s, packet))

    def give(self, now: float) -> float | None:
        """Send the packets that are due; returns when the next one is, or None."""
        while self._packets and self._packets[0][0] <= now:
            os.write(self._sink, self._packets.popleft()[1])
        return self._packets[0][0] if self._packets else None


def carry(directions: Sequence[Direction], sources: Sequence[int]) -> None:
    """Carry packets until the process ends."""
    while True:
        now = time.monotonic()
        due = [at for direction in directions if (at := direction.give(now)) is not None]
        wait_s = max(0.0, min(due) - time.monotonic()) if due else None
        select.select(sources, [], [], wait_s)
        now = time.monotonic()
        for direction in directions:
            direction.take(now)


def _open_device(namespace: str, host: str) -> int:
    """Create the device of a namespace; returns its descriptor, which is usable from any."""
    libc = ctypes.CDLL(None, use_errno=True)
    with (
        Path("/proc/thread-self/ns/net").open() as own,
        Path("/run/netns", namespace).open() as other,
    ):
        if libc.setns(other.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter the namespace {namespace}")
        device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH22x", DEVICE.encode(), _IFF_TUN | _IFF_NO_PI))
        if libc.setns(own.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "cannot return from a namespace")
    _ip("-n", namespace, "addr", "add", f"{host}/24", "dev", DEVICE)
    mtu, queue = str(MTU), str(_QUEUED_PACKETS)
    _ip("-n", namespace, "link", "set", DEVICE, "mtu", mtu, "txqueuelen", queue, "up")
    _ip("-n", namespace, "link", "set", "lo", "up")
    return device


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


def main() -> None:
    """Join two namespaces until killed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("near")
    parser.add_argument("far")
    parser.add_argument("--rate-mbit", type=float, default=0.0)
    parser.add_argument("--delay-ms", type=float, default=0.0)
    of = parser.parse_args()
    near, far = _open_device(of.near, NEAR_HOST), _open_device(of.far, FAR_HOST)
    print("ready", flush=True)
    directions = [Direction(a, b, of.rate_mbit, of.delay_ms) for a, b in ((near, far), (far, near))]
    carry(directions, (near, far))


if __name__ == "__main__":
    main()
