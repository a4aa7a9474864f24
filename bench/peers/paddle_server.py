"""The parameter server of `paddle_job`: a process beside the trainer, on the loopback interface."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from contextlib import ExitStack

ROLE = "TRAINING_ROLE"
IS_SERVER = os.environ.get(ROLE) == "PSERVER"
PR_SET_PDEATHSIG = 1
STOP_S = 10.0


def free_ports(count: int) -> list[int]:
    """Return different free ports of the loopback interface."""
    with ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def roles(server_port: int, trainer_port: int) -> tuple[dict[str, str], dict[str, str]]:
    """Return the environments of one server and one trainer, as Paddle's launcher sets them."""
    shared = {
        "PADDLE_PSERVERS_IP_PORT_LIST": f"127.0.0.1:{server_port}",
        "PADDLE_TRAINER_ENDPOINTS": f"127.0.0.1:{trainer_port}",
        "PADDLE_TRAINERS_NUM": "1",
        "POD_IP": "127.0.0.1",
    }
    server = {**shared, ROLE: "PSERVER", "PADDLE_PORT": str(server_port)}
    trainer = {**shared, ROLE: "TRAINER", "PADDLE_PORT": str(trainer_port), "PADDLE_TRAINER_ID": "0"}
    return server, trainer


def started(role: Mapping[str, str], stack: ExitStack) -> subprocess.Popen[bytes]:
    """Start this job again as the server; it ends with `stack`, or with this process."""
    command = [sys.executable, "-m", "bench.peers.paddle_job", *sys.argv[1:]]
    nothing = subprocess.DEVNULL
    server = subprocess.Popen(
        command, env={**os.environ, **role}, stdin=nothing, stdout=nothing, stderr=nothing
    )
    stack.callback(_end, server)
    return server


def end_with_parent() -> None:
    """Let the kernel kill this server when the trainer has ended (Linux)."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def cpu_s(pid: int) -> float:
    """Return user and system time of a process, all its threads."""
    with open(f"/proc/{pid}/stat") as file:
        fields = file.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _end(server: subprocess.Popen[bytes]) -> None:
    server.terminate()
    try:
        server.wait(STOP_S)
    except subprocess.TimeoutExpired:
        server.kill()
        server.wait()
