"""What all tests share: how hypothesis behaves on machines that are shared and slow at times."""

import gc
import os
import signal
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import httpx
import pytest
import structlog
from hypothesis import HealthCheck, settings

from freshet.observability import skipped_state
from freshet.rpc import channel

pytest_plugins = ["tests.servers.fixtures"]

# A deadline per example measures the machine, not the code; the timeout of each test still bounds it.
settings.register_profile("freshet", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("quick", settings.get_profile("freshet"), max_examples=25)  # `make unit`
settings.load_profile("freshet")

# Processes that tests start find the package as the tests do, and compile it once, not hundreds of times.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
os.environ["PYTHONPATH"] = os.pathsep.join(
    [str(Path(__file__).parents[1] / "services"), *filter(None, [os.environ.get("PYTHONPATH")])]
)

# `nohup` and shells that start jobs in the background ignore these signals, and an ignored signal stays
# ignored in the processes that tests start and then signal. A handler ignores it here alone: exec gives
# children the default.
for _number in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, lambda _number, _frame: None)


HTTP_S = 60.0
"""httpx gives up after 5 s by default; a machine that is shared stands still for longer."""


@pytest.fixture(autouse=True, scope="session")
def patient_http() -> Iterator[None]:
    """Calls of `httpx.get` and the like wait for HTTP_S unless they say how long."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("get", "post", "put", "patch", "delete", "head", "options", "request", "stream"):
            patch.setattr(httpx, name, partial(getattr(httpx, name), timeout=HTTP_S))
        yield


GRPC_MS = 10_000
"""Channels give up a connection after 2 s without an answer; the suite's threads stand still for longer."""


@pytest.fixture(autouse=True, scope="session")
def patient_grpc() -> Iterator[None]:
    """Channels and servers in the tests' process wait for GRPC_MS."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("CONNECT_MS", "KEEPALIVE_TIMEOUT_MS"):
            patch.setattr(channel, name, GRPC_MS)
        yield


@pytest.fixture(autouse=True)
def forgotten_modules() -> Iterator[None]:
    """Modules beside a spec that a test has loaded are gone for the next one, whose spec may have others of
    the same name: one process holds one module of a name."""
    path, modules = list(sys.path), set(sys.modules)
    yield
    added = [Path(folder).resolve() for folder in sys.path if folder not in path]
    for name in set(sys.modules) - modules if added else ():
        file = getattr(sys.modules[name], "__file__", None)
        if file and any(Path(file).resolve().is_relative_to(folder) for folder in added):
            del sys.modules[name]
    sys.path[:] = path


@pytest.fixture(autouse=True)
def nothing_skipped() -> None:
    """Counts of damaged state are the process's; each test is one."""
    skipped_state.forget()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run files in the order of their longest timeout, so that no long test is left for one worker alone."""
    longest: dict[Path, float] = {}
    for item in items:
        timeout = item.get_closest_marker("timeout")
        longest[item.path] = max(longest.get(item.path, 0.0), timeout.args[0] if timeout else 0.0)
    items.sort(key=lambda item: -longest[item.path])


def pytest_collection_finish() -> None:
    """Keep modules and collected tests out of later collections: each full one would visit all of them."""
    gc.collect()
    gc.freeze()


TESTS_BETWEEN_COLLECTIONS = 100
"""Services that were started in the tests' process have raised gc's thresholds; each store that only a cycle
still holds keeps a terabyte of addresses reserved, and there are 128."""

_tests = iter(range(1, 1_000_000))


@pytest.fixture(autouse=True)
def log_as_it_was() -> Iterator[None]:
    """`capture_logs` leaves structlog configured, and later tests would print on stdout."""
    before = structlog.is_configured()
    yield
    if not before:
        structlog.reset_defaults()
    if next(_tests) % TESTS_BETWEEN_COLLECTIONS == 0:
        gc.collect()
