"""Runs the fenced blocks of a page as its reader would: in one folder, from the first to the last.

- sh: by bash, stopping at the first error. `freshet up`, `demo`, `run` and `simulate` go on beside the next
  blocks until the page ends; the next command waits until gateway and inference are ready.
- python: a script of its own.
- A block whose first line is a comment with a file's name (`# my_model.py`) is written to that file, and not
  run by itself. A toml block with [events] is a spec: checked, and written to freshet.toml.
- toml and json that are not whole files must be TOML and JSON.

Ports are free ones; a page that says 127.0.0.1:7000 means them.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tomllib
from dataclasses import dataclass, field
from pathlib import Path

from freshet.apps.supervision import is_ready
from freshet.config.settings import variables
from freshet.process.ports import lease_ports
from freshet.testing.conditions import wait_until
from tests.fixtures.pages import Block

LONG_S = 180.0
"""How long a block may take, on a machine three times slower than ours: what needs longer is left out."""

STAYS = re.compile(r"^freshet (up|demo|run|simulate)\b")
FILE = re.compile(r"# ([\w./-]+\.(?:py|toml|avsc|json|sh))\s*")
EXECUTED = ("sh", "bash", "python", "toml", "json")


@dataclass
class Reader:
    """A reader who follows a page, in a folder of its own."""

    folder: Path
    ports: dict[str, int] = field(default_factory=dict)  # what a page calls them -> what they are here
    staying: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def __post_init__(self) -> None:
        names = {  # a port of 0 is of a listener that is off
            v.name: str(v.option.default)
            for v in variables()
            if v.name.endswith("_PORT") and v.option.default
        }
        free = lease_ports(len(names))
        self.ports = dict(zip(names.values(), free, strict=True))
        binaries = self.folder / ".bin"
        binaries.mkdir(parents=True)
        for name, what in (("freshet", "-m freshet.cli"), ("python", ""), ("python3", "")):
            script = binaries / name
            script.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} {what} "$@"\n')
            script.chmod(0o755)
        self.environment = {
            **os.environ,
            **{name: str(port) for name, port in zip(names, free, strict=True)},
            "PATH": f"{binaries}{os.pathsep}{os.environ['PATH']}",
        }

    def follow(self, block: Block) -> None:
        """Do what a block says. AssertionError shows where, the command, and what it said."""
        name = FILE.fullmatch(block.text.partition("\n")[0])
        if name is not None:
            path = self.folder / name[1]
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(self._here(block.text))
        if block.language in ("sh", "bash"):
            for part in _parts(block.text):
                self._shell(block, self._here(part))
        elif block.language == "python" and name is None:
            self._run(block, [sys.executable, "-c", self._here(block.text)])
        elif block.language == "json":
            json.loads(block.text)
        elif block.language == "toml":
            self._toml(block, spec=name is None and "[events]" in block.text)

    def leave(self) -> None:
        """End what was started."""
        for process in reversed(self.staying):
            if process.poll() is None:
                process.send_signal(signal.SIGINT)
            try:
                process.wait(60)
            finally:
                if process.poll() is None:
                    process.kill()
                    process.wait()

    def _here(self, text: str) -> str:
        """The text with the ports of this run."""
        return re.sub(
            r"\b(127\.0\.0\.1|localhost):(\d{4})\b",
            lambda m: f"127.0.0.1:{self.ports.get(m[2], m[2])}",
            text,
        )

    def _shell(self, block: Block, command: str) -> None:
        if not STAYS.match(command):
            self._run(block, ["bash", "-euo", "pipefail", "-c", command])
            return
        log = self.folder / f".said-{len(self.staying)}"
        with log.open("wb") as out:
            process = subprocess.Popen(
                ["bash", "-c", f"exec {command}"],
                cwd=self.folder,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
            )
        self.staying.append(process)

        def ready() -> bool:
            assert process.poll() is None, f"{block}: `{command}` ended:\n{log.read_text()}"
            return all(is_ready(self.ports[port]) for port in ("7000", "7001"))

        wait_until(f"{block}: `{command}` is ready", ready, within_s=LONG_S)

    def _run(self, block: Block, command: list[str]) -> None:
        try:
            done = subprocess.run(
                command,
                cwd=self.folder,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                timeout=LONG_S,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            said = (error.output or b"").decode(errors="replace")
            raise AssertionError(f"{block}: not done after {LONG_S:g} s:\n{command[-1]}\n{said}") from None
        said = done.stdout.decode(errors="replace")
        assert done.returncode == 0, f"{block}: ended with {done.returncode}:\n{command[-1]}\n{said}"

    def _toml(self, block: Block, *, spec: bool) -> None:
        try:
            tomllib.loads(block.text)
        except tomllib.TOMLDecodeError:
            for line in block.text.splitlines():  # lines that stand for each other
                tomllib.loads(line)
        if spec:
            (self.folder / "freshet.toml").write_text(block.text)
            self._run(block, ["bash", "-euo", "pipefail", "-c", "freshet check freshet.toml"])


def _parts(text: str) -> list[str]:
    """A script cut at the commands that stay: each of these alone, what stands between them together."""
    parts: list[str] = [""]
    for line in text.splitlines():
        if STAYS.match(line) and not parts[-1].endswith("\\\n"):
            parts += [line, ""]
        else:
            parts[-1] += line + "\n"
    return [p for p in parts if p.strip()]
