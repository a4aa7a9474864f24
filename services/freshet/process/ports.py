"""TCP ports: the process that holds one, read from /proc for error messages, and leases of free ones."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import socket
from collections.abc import Iterable, Iterator
from pathlib import Path

from freshet.errors import ConfigError
from freshet.http.addresses import Address

_LISTEN = "0A"

_SERVER_PORTS = range(15_000, 32_000)
"""Below the ports that Linux and others give to clients, from 32,768 on."""

_leases: dict[int, int] = {}
"""{port: file descriptor of a UDP socket bound to that number}. No service uses UDP, so the kernel keeps one
list of leases for all processes, and ends those of a process that is killed."""


def owner_of_port(port: int, proc: Path = Path("/proc")) -> str | None:
    """Return `port 7000 is held by process 123 (python -m ...)`, or None if the owner is unknown."""
    inodes = set(_listeners(port, proc))
    if not inodes:
        return None
    for process in proc.iterdir():
        if not process.name.isdigit():
            continue
        if _holds(process, inodes):
            return f"port {port} is held by process {process.name} ({_command(process)[:120]})"
    return f"port {port} is held by a process of another user"


def cannot_listen(where: str, host: str, port: int, setting: str, error: OSError) -> ConfigError:
    """Build the error of a failed bind: it names `setting` if the port is at fault, or the address."""
    at, why = str(Address(host, port)), error.strerror or str(error)
    if isinstance(error, socket.gaierror) or error.errno not in (errno.EADDRINUSE, errno.EACCES):
        hint = "FRESHET_COMMON_BIND_ADDRESS names it; 127.0.0.1 is loopback alone, 0.0.0.0 every address"
        return ConfigError(where, "bind_address", host, f"an address of this machine ({why})", hint)
    if error.errno == errno.EACCES:
        expected = f"a port that this user may take, such as one above 1023 ({why})"
        return ConfigError(where, "port", at, expected, f"choose another with {setting}")
    hint = owner_of_port(port) or f"choose another with {setting}"
    return ConfigError(where, "port", at, f"a free port ({why})", hint)


def _holds(process: Path, inodes: set[str]) -> bool:
    try:
        handles = list((process / "fd").iterdir())
    except OSError:
        return False  # it has ended, or belongs to another user
    for handle in handles:
        with contextlib.suppress(OSError):  # the process has closed it meanwhile
            if os.readlink(handle) in inodes:
                return True
    return False


def _command(process: Path) -> str:
    try:
        command = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return "it has just ended"
    return "".join(c if c.isprintable() else "?" for c in command)  # no escape sequences for the terminal


def lease_ports(count: int) -> list[int]:
    """Return `count` different ports of 127.0.0.1 that are free, each leased to this process.

    No other call returns a leased port, in this process or another, also while no server listens there: until
    `release_ports`, or the process ends. No client is given one either: a client that retries a dead server
    at a port of the clients' range connects to itself one day, and holds the port.

    Raises OSError if no port of 127.0.0.1 can be bound, or the process has too many open files.
    """
    leased: list[int] = []
    while len(leased) < count:
        port = random.choice(_SERVER_PORTS)  # nosec B311  # no secret
        leased += [port] if _lease(port) else []
    return leased


def release_ports(ports: Iterable[int]) -> None:
    """End the leases of `ports`."""
    for port in ports:
        os.close(_leases.pop(port))


def _lease(port: int) -> bool:
    with socket.socket() as trial, socket.socket(type=socket.SOCK_DGRAM) as lease:
        # As servers do: connections of the port's last server may still be there.
        trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            lease.bind(("127.0.0.1", port))
            trial.bind(("127.0.0.1", port))
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise  # as without a loopback interface: no other port would do
            return False
        _leases[port] = lease.detach()
    return True


def _listeners(port: int, proc: Path) -> Iterator[str]:
    wanted = f":{port:04X}"
    for name in ("net/tcp", "net/tcp6"):
        try:
            lines = (proc / name).read_text().splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            fields = line.split()
            if fields[1].endswith(wanted) and fields[3] == _LISTEN:
                yield f"socket:[{fields[9]}]"
