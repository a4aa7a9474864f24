"""A peer's job as a process of its own environment, which measures on request."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO

from bench.peers.registry import PEERS
from bench.peers.setup import FOLDER, missing, python_of

ROOT = Path(__file__).parents[2]
TRAINING_KEYS = ("samples_per_s", "samples_per_cpu_s", "logloss", "batches", "threads")
"""The keys that a training job prints for each measurement."""

SHUT_DOWN_S = 20.0


class JobError(Exception):
    """A job cannot be started, has ended, or has printed something unexpected."""


def environment_of(job: str) -> str:
    """Return the peer in whose environment a job of the model runs.

    Raises:
        JobError: there is no such job.
    """
    for name, peer in PEERS.items():
        if job == name or job in peer.also:
            return name
    jobs = [job for name, peer in PEERS.items() for job in (name, *peer.also)]
    raise JobError(f"no job {job!r}; there are {', '.join(jobs)}")


def not_installed(peer: str, folder: Path = FOLDER) -> str | None:
    """Return the command that installs a peer, or None if it is installed."""
    return f"python -m bench.peers.setup {peer}" if missing(peer, folder) else None


def checked(line: str, keys: Sequence[str], job: str) -> dict[str, float]:
    """Parse a job's line to numbers by name.

    Raises:
        JobError: the line is no JSON object, or a key is missing or no number.
    """
    try:
        said = json.loads(line)
    except ValueError:
        said = None
    if not isinstance(said, dict):
        raise JobError(f"{job} printed {line[:200]!r}: expected one JSON object on a line")
    for key in keys:
        value = said.get(key)
        if isinstance(value, bool) or not isinstance(value, int | float):
            found = f"{value!r}" if key in said else f"nothing, only {', '.join(said)}"
            raise JobError(f"{job}: expected a number under {key!r}, found {found}")
    return said


class Job:
    """A running job: the process is started and warmed up on entry, and ended on exit.

    While it waits for its turn it uses no CPU. `ready` waits for the warm-up, so that several jobs can be
    started before the first is waited for.
    """

    def __init__(self, job: str, peer: str, words: Sequence[str], keys: Sequence[str]) -> None:
        """`job`: bench/peers/<job>_job.py; `peer`: the environment; `words`: options."""
        advice = not_installed(peer)
        if advice:
            raise JobError(f"{job}: the environment of {peer} is missing or old; make it: {advice}")
        self.job, self.keys = job, keys
        self._command = [str(python_of(peer)), "-m", f"bench.peers.{job}_job", *words, "--wait"]
        self._environment = _environment(PEERS[peer].environment)
        self._process: subprocess.Popen[str] | None = None
        self._errors: IO[str] | None = None
        self._ready = False

    def __enter__(self) -> Job:
        self._errors = tempfile.TemporaryFile("w+")
        self._process = subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            cwd=ROOT,
            env=self._environment,
        )
        return self

    def ready(self) -> None:
        """Wait until it is warm."""
        if not self._ready:
            self._line()
            self._ready = True

    def measured(self) -> dict[str, float]:
        """Measure once more."""
        self.ready()
        assert self._process is not None
        assert self._process.stdin is not None
        try:
            self._process.stdin.write("measure\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._ended() from None
        return checked(self._line(), self.keys, self.job)

    def _line(self) -> str:
        """Return the next JSON line; other output, of packages, is skipped."""
        assert self._process is not None
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                return line
        raise self._ended()

    def _ended(self) -> JobError:
        assert self._process is not None
        assert self._errors is not None
        status = self._process.wait()
        self._errors.seek(0)
        return JobError(f"{self.job} ended with status {status}:\n{self._errors.read().strip()[-3000:]}")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        assert self._process is not None
        assert self._errors is not None
        try:
            self._process.communicate(timeout=SHUT_DOWN_S)  # closes its standard input, so it ends
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.communicate()
        self._errors.close()


def training_job(job: str, data: Path, precision: str, batch: int, seconds: float, threads: int = 2) -> Job:
    """Return a job that trains the model on a workload's folder; each measurement takes `seconds`."""
    words = [f"--data={data.absolute()}", f"--precision={precision}", f"--batch={batch}"]
    words += [f"--seconds={seconds}", f"--threads={threads}"]
    return Job(job, environment_of(job), words, TRAINING_KEYS)


def _environment(own: Mapping[str, str]) -> dict[str, str]:
    """Return our environment without the paths of our packages, and with the peer's variables."""
    kept = {k: v for k, v in os.environ.items() if k not in {"PYTHONPATH", "PYTHONHOME"}}
    return kept | {"PYTHONWARNINGS": "ignore"} | dict(own)
