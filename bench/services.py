"""freshet's services as processes of a measurement: started, ready, ended."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import httpx

from freshet.testing.conditions import wait_until

START_S = 60.0
STOP_S = 60.0


@contextmanager
def running(process: subprocess.Popen[Any]) -> Iterator[None]:
    """End a process with the block, as a stop of the service would."""
    try:
        yield
    finally:
        process.terminate()
        process.communicate(timeout=STOP_S)


@contextmanager
def ready_service(
    words: Sequence[str], environment: Mapping[str, str], port: int, *, quiet: bool = False
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a command that answers `/health/ready` on a port; `quiet` drops its output."""
    output = subprocess.DEVNULL if quiet else None
    process = subprocess.Popen(words, env=environment, stdout=output, stderr=output)
    with running(process):
        wait_until_ready(port, process)
        yield process


def wait_until_ready(port: int, process: subprocess.Popen[Any]) -> None:
    """Wait until the service is ready. Raises RuntimeError if the process ends before."""

    def ready() -> bool:
        if process.poll() is not None:
            raise RuntimeError(f"the service at port {port} ended with {process.returncode}")
        try:
            return httpx.get(f"http://127.0.0.1:{port}/health/ready", timeout=5).status_code == 200
        except httpx.HTTPError:  # it does not listen yet
            return False

    wait_until(f"the service at port {port} ready", ready, within_s=START_S)
