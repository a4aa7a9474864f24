"""How the servers of the row store are: whether each has a replica, and how full it is."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence

import structlog

from freshet.errors import FreshetError
from freshet.observability.metrics import Metric, Reading
from freshet.rows.store import OnServers, StoreServer

__all__ = ["STORE_METRICS", "StoreWatch"]

LOOK_S = 10.0

LEAVE_S = 0.2
"""How long the end of a look is waited for, where it hangs: claims are released after it, within LAST_S."""

STORE_METRICS = (
    Metric(
        "freshet_paramserver_store_replicas",
        "gauge",
        "replicas",
        "Replicas that follow this master of the row store. None of these is there while a master is silent.",
        ("server",),
    ),
    Metric(
        "freshet_paramserver_store_used_bytes",
        "gauge",
        "bytes",
        "Memory that this master of the row store uses.",
        ("server",),
    ),
    Metric(
        "freshet_paramserver_store_limit_bytes",
        "gauge",
        "bytes",
        "What it may use before it refuses writes; 0: no limit, or it does not say.",
        ("server",),
    ),
)

log = structlog.get_logger("freshet.paramserver")


class StoreWatch:
    """Looks now and then, on a thread of its own: a silent server must hold up nothing else."""

    def __init__(self, store: OnServers, look_s: float = LOOK_S) -> None:
        """Nothing is looked at yet."""
        self._store, self._look_s = store, look_s
        self._stop = threading.Event()
        self._in_vain = False  # the last look
        self._thread = threading.Thread(target=self._run, name="store watch", daemon=True)
        self.seen: Sequence[StoreServer] = ()
        """At the last look; empty if that was in vain, as former figures would say that all is well."""

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self) -> None:
        """End; a look that is under way is waited for, but not for long. Idempotent."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(LEAVE_S)

    def look(self) -> None:
        """Take one look."""
        try:
            self.seen = self._store.servers()
            self._in_vain = False
        except Exception as error:  # of stores of others, too: without looks former figures would stay
            self.seen = ()
            if not self._in_vain:
                log.warning(
                    "the row store's servers cannot be looked at; nothing is told of them until they can",
                    reason=str(error) if isinstance(error, FreshetError) else repr(error),
                )
            self._in_vain = True

    def readings(self) -> Mapping[str, Reading]:
        """Values of STORE_METRICS."""
        return {
            "freshet_paramserver_store_replicas": {(s.name,): s.replicas for s in self.seen},
            "freshet_paramserver_store_used_bytes": {(s.name,): s.used_bytes for s in self.seen},
            "freshet_paramserver_store_limit_bytes": {(s.name,): s.limit_bytes for s in self.seen},
        }

    def _run(self) -> None:
        while not self._stop.is_set():
            self.look()
            self._stop.wait(self._look_s)
