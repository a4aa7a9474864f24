"""TCP ports: the process that holds one, read from /proc for error messages, and free ports."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import socket
from collections.abc import Iterator
from pathlib import Path

from freshet.errors import ConfigError
from freshet.http.addresses import Address

_LISTEN = "0A"

_SERVER_PORTS = range(15_000, 32_000)
"""Below the ports that Linux and others give to clients, from 32,768 on."""


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


def free_ports(count: int) -> list[int]:
    """Find `count` different ports of 127.0.0.1 that are free now, and that no client is given later."""
    found: set[int] = set()
    while len(found) < count:
        port = random.choice(_SERVER_PORTS)  # nosec B311  # no secret
        with socket.socket() as trial, contextlib.suppress(OSError):
            trial.bind(("127.0.0.1", port))
            found.add(port)
    return list(found)


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
