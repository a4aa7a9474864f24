"""The number of modules on the path of an event, a gradient and a rank request, counted in running services.

- An event: a system as `freshet up` runs it, from `POST /v1/impressions` to the row that inference serves,
  and the rank request that is scored with it. Versions and flushes are left out: their intervals are hours.
- A rank request: inference, from `POST /v1/rank` until the log has the served impression.
- A gradient: a push of a remote client, through gRPC, to the rows of a shard.

`windows.path_of` defines when a module is on a path.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, redirect_stdout
from itertools import count
from pathlib import Path

import httpx
import numpy as np

import freshet
from bench.codecs import shard_in, spec_of
from freshet.apps.local import Local
from freshet.config.spec.layout import layout_of
from freshet.coordination.assignment import Owners
from freshet.paramserver.server import RowSizes, identity_of, serve_rows
from freshet.rows.grpc.client import RemoteRows, Served
from freshet.rows.service import KeyGroup, Push
from freshet.rpc.channel import Transport
from freshet.rpc.server import FrameServer
from freshet.tables import Plan
from freshet.types import Fence, OffsetRange, TimeMs
from ops.house.hook.sitecustomize import Entered
from ops.house.limits import Measure
from ops.house.sources import ROOT
from ops.house.windows import Windows, path_of

EXAMPLE = ROOT / "examples" / "quickstart"
SPEC_CHANGES = {
    'emit = "early"': 'emit = "window"',
    'window = "2s"': 'window = "1s"',
    "[model]": '[train]\nversion_interval = "1d"\nflush_interval = "1h"\n\n[model]',
}
PASSES = 3  # windows with a datum, and as many idle ones
WARM_EVENTS = 20
EVENT_S = 5.0
"""The samples of an event samples are emitted after 2 s (label window and grace), and served 0.2 s later."""

RANK_S = 0.5
"""A rank request is answered in milliseconds; 0.1 s later the log has the impression. Its samples are joined
after the window (`SPEC_CHANGES`)."""

PUSH_S = 0.1
WARM_PUSHES = 3

TRAINED_S = 60.0
CANDIDATES = [{"article": f"a{i}", "topic": "music", "age_s": 60.0} for i in range(3)]


def measure_paths() -> list[Measure]:
    """Measure all three.

    Raises:
        TimeoutError: a datum did not pass within its window.
    """
    event, rank = event_and_rank()
    with redirect_stdout(sys.stderr):  # the log of the shard in this process
        gradient = pushed_gradient()
    return [
        Measure("modules on the path of an event", len(event), event),
        Measure("modules on the path of a gradient", len(gradient), gradient),
        Measure("modules on the path of a rank request", len(rank), rank),
    ]


def event_and_rank() -> tuple[list[str], list[str]]:
    """Return the modules of an event and of a rank request."""
    with tempfile.TemporaryDirectory(prefix="house-") as temporary:
        folder = Path(temporary)
        (folder / "windows").mkdir()
        windows = Windows(folder / "windows")
        with (
            variables(windows.environment()),
            freshet.local(spec_in(folder), folder=folder / "run") as system,
        ):
            page = Page(system)
            for _ in range(WARM_EVENTS):
                page.send()
                page.rank()
            page.wait_until_trained(TRAINED_S)
            events, idle = [], []
            for _ in range(PASSES):
                with windows.open() as number:
                    time.sleep(EVENT_S)
                idle.append(number)
                with windows.open() as number:
                    page.send()
                    time.sleep(EVENT_S)
                events.append(number)
                page.wait_until_trained(0.0)
            ranks = []
            for _ in range(PASSES):
                with windows.open() as number:
                    page.rank()
                    time.sleep(RANK_S)
                ranks.append(number)
                page.wait_until_trained(TRAINED_S)
            processes = windows.read()
    inference = [one for one in processes if "inference" in one.command.split()]
    rank = path_of(inference, ranks, idle)
    return sorted({*path_of(processes, events, idle), *rank}), rank


def pushed_gradient() -> list[str]:
    """Return the modules of a gradient: client and shard share this process and meet over gRPC."""
    with tempfile.TemporaryDirectory(prefix="house-") as temporary:
        folder = Path(temporary)
        windows, entered = Windows(folder), Entered(folder)
        entered.start()
        try:
            with remote_rows(folder) as (rows, push):
                passes, idle = [], []
                for turn in range(WARM_PUSHES + PASSES):
                    with windows.open() as number:
                        time.sleep(PUSH_S)
                    idle.append(number)
                    with windows.open() as number:
                        rows.push(push(turn))
                        time.sleep(PUSH_S)
                    passes.append(number)
                return path_of(windows.read(), passes[WARM_PUSHES:], idle)
        finally:
            entered.stop()


@contextmanager
def remote_rows(folder: Path) -> Iterator[tuple[RemoteRows, Callable[[int], Push]]]:
    """A client of a shard, and pushes of one row by their number."""
    spec = spec_of(tables=1)
    group = layout_of(spec).groups[0]
    plan = Plan(tables=np.zeros(1, np.uint8), buckets=spec.buckets)
    plan.build(np.array([7], np.uint64), np.array([0, 1], np.uint32))
    keys = KeyGroup(0, plan.keys.copy(), plan.tables.copy(), plan.bucket_starts.copy())
    gradients = np.full((1, group.width), 1e-4, np.float32)
    transport = Transport()

    def push(turn: int) -> Push:
        return Push((OffsetRange(0, turn, turn + 1),), Fence(1), TimeMs(turn), [keys], [gradients])

    with shard_in(folder, spec, Fence(1)) as shard, ExitStack() as ending:
        shard.load()
        server = FrameServer("127.0.0.1:0", transport, identity=identity_of(spec.name, "hash"))
        serve_rows(server, shard, RowSizes(spec.buckets, (group.width,), (group.state_floats,)))
        server.start()
        ending.callback(server.stop, 0.0)
        owners = Owners.of({f"127.0.0.1:{server.port}": range(spec.buckets)}, buckets=spec.buckets)
        rows = RemoteRows(Served(spec.name, "hash"), lambda: owners, transport)
        ending.callback(rows.close)
        yield rows, push


class Page:
    """Sends events and rank requests, and knows how many samples they make."""

    def __init__(self, system: Local) -> None:
        self._system = system
        self._samples = 0
        self._requests = count()

    def send(self) -> None:
        """Send one impression."""
        now_ms = time.time_ns() // 1_000_000
        event = {"request_id": f"r{next(self._requests)}", "ts": now_ms, "reader": "u1", "items": CANDIDATES}
        self._system.send(impressions=[event])
        self._samples += len(CANDIDATES)

    def rank(self) -> None:
        """Send one rank request; the served page is an impression, too."""
        request = f"r{next(self._requests)}"
        self._system.rank({"reader": "u1"}, CANDIDATES, request_id=request)
        self._samples += len(CANDIDATES)

    def wait_until_trained(self, within_s: float) -> None:
        """Wait until the trainer has learned from all events. Raises TimeoutError."""
        deadline = time.monotonic() + within_s
        while (trained := self._trained()) < self._samples:
            if time.monotonic() > deadline:
                raise TimeoutError(f"expected {self._samples} samples to be trained on, found {trained}")
            time.sleep(0.1)

    def _trained(self) -> int:
        address = f"http://127.0.0.1:{self._system.ports['trainer']}/status"
        return int(httpx.get(address, timeout=30).json()["samples"])


def spec_in(folder: Path) -> Path:
    """Copy the example into a folder, with `SPEC_CHANGES`; returns the path of its spec."""
    for schema in EXAMPLE.glob("*.avsc"):
        shutil.copy(schema, folder)
    text = (EXAMPLE / "freshet.toml").read_text(encoding="utf-8")
    for old, new in SPEC_CHANGES.items():
        assert old in text, old
        text = text.replace(old, new)
    path = folder / "freshet.toml"
    path.write_text(text, encoding="utf-8")
    return path


@contextmanager
def variables(values: Mapping[str, str]) -> Iterator[None]:
    """Set variables of the environment for a block."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
