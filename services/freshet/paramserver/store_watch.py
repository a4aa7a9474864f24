"""Monitoring of the row store's servers: replicas and memory of each."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import structlog

from freshet.errors import FreshetError
from freshet.observability.metrics import Metric
from freshet.rows.store import OnServers, StoreServer

__all__ = ["STORE_METRICS", "StoreWatch"]

POLL_S = 10.0

STOP_TIMEOUT_S = 0.2
"""Longest wait of `stop` for a poll that hangs: claims are released after it, within LAST_S."""

STORE_METRICS = (
    Metric(
        "freshet_paramserver_store_replicas",
        "gauge",
        "replicas",
        "Replicas of this master of the row store. All of these gauges are absent while a master is silent.",
        ("server",),
        at=lambda servers: {server.name: server.replicas for server in servers},
    ),
    Metric(
        "freshet_paramserver_store_used_bytes",
        "gauge",
        "bytes",
        "Memory that this master of the row store uses.",
        ("server",),
        at=lambda servers: {server.name: server.used_bytes for server in servers},
    ),
    Metric(
        "freshet_paramserver_store_limit_bytes",
        "gauge",
        "bytes",
        "Memory at which this master refuses writes; 0: no limit, or it reports none.",
        ("server",),
        at=lambda servers: {server.name: server.limit_bytes for server in servers},
    ),
)

log = structlog.get_logger("freshet.paramserver")


class StoreWatch:
    """Polls the servers on a thread of its own, because a silent server blocks a poll."""

    def __init__(self, store: OnServers, poll_s: float = POLL_S) -> None:
        """Start without figures."""
        self._store, self._poll_s = store, poll_s
        self._stop = threading.Event()
        self._failed = False  # the last poll
        self._thread = threading.Thread(target=self._run, name="store watch", daemon=True)
        self.seen: Sequence[StoreServer] = ()
        """Servers at the last poll; empty if it failed, since old figures would hide the failure"""

    def start(self) -> None:
        """Start polling."""
        self._thread.start()

    def stop(self) -> None:
        """Stop polling; waits up to STOP_TIMEOUT_S for a running poll. Idempotent."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(STOP_TIMEOUT_S)

    def poll_servers(self) -> None:
        """Poll once."""
        try:
            self.seen = self._store.servers()
            self._failed = False
        except Exception as error:  # also of third-party stores: the thread must go on
            self.seen = ()
            if not self._failed:
                log.warning(
                    "the row store's servers do not answer; their figures are absent until they do",
                    reason=str(error) if isinstance(error, FreshetError) else repr(error),
                )
            self._failed = True

    def _run(self) -> None:
        while not self._stop.is_set():
            self.poll_servers()
            self._stop.wait(self._poll_s)
