"""The follower of versions: it loads and checks the version of the alias `stable`, then serves it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import structlog
from numpy.typing import NDArray
from prometheus_client import CollectorRegistry

from freshet.config.spec.identity import explain_defaults
from freshet.errors import Corrupt, Mismatch, first_line
from freshet.inference import metrics
from freshet.model.inputs import ModelInputs
from freshet.observability.skipped_state import skip
from freshet.observability.spans import start_version_load
from freshet.observability.tracing import running
from freshet.types import F32
from freshet.versions import Manifest, VersionStore
from freshet.versions.weights import not_finite

log = structlog.get_logger(__name__)

RETRY_S = 10.0
"""Seconds before a version that could not be loaded is tried again: its file may have been restored."""


class Scorer(Protocol):
    """A model with the weights of one version."""

    def score(self, inputs: ModelInputs) -> F32:
        """Return (B, L) float32 predictions; valid until the next call on the same thread."""


Load = Callable[[Mapping[str, NDArray[np.generic]]], Scorer]


@dataclass(frozen=True, slots=True, eq=False)
class ServingVersion:
    """A loaded version."""

    manifest: Manifest
    scorer: Scorer


@dataclass(frozen=True, slots=True)
class VersionsState:
    """The version served, and a refused one."""

    serving: ServingVersion | None = None
    reason: str = "no version has been promoted yet"  # why `stable` is not served; "" if it is
    refused: int | None = None  # number of the refused version


class VersionFollower:
    """Serves the version of `stable`, by a thread. `state` may be read from any thread."""

    def __init__(
        self,
        store: VersionStore,
        load: Load,
        registry: CollectorRegistry,
        *,
        model: str,
        spec_hash: str,
        poll_s: float,
        prefixes: Sequence[str] = (),
        fits: Callable[[Manifest], None] = lambda _: None,
    ) -> None:
        """Read nothing yet.

        Args:
            load: makes a scorer of a version's tensors; raises if the version cannot be served.
            prefixes: of the tensors to load.
            fits: raises if a version cannot be served.
        """
        self._store, self._load, self._poll_s = store, load, poll_s
        self._model, self._spec_hash, self._prefixes = model, spec_hash, prefixes
        self._fits = fits
        self._retry_in_s: dict[int, float] = {}  # number -> seconds until it is tried again
        self.state = VersionsState()
        self._swaps = metrics.SWAPS.counter(registry)
        self._kept_out = metrics.KEPT_OUT.counter(registry)

    def run(self, stop: threading.Event) -> None:
        """Follow until `stop` is set, and retry after any error."""
        while not stop.is_set():
            try:
                self.poll()
            except Exception as error:  # a bug must not end the thread
                log.error("following versions failed, retrying", exc_info=error)
                self.state = replace(self.state, reason=f"following versions failed: {first_line(error)}")
            stop.wait(self._poll_s)

    def poll(self) -> None:
        """Load and serve the version of `stable` if it is not served yet; on an error the old one stays."""
        try:
            wanted, problem = self._wanted()
        except Exception as error:
            self.state = replace(self.state, reason=f"the version store cannot be read: {first_line(error)}")
            return
        serving = self.state.serving
        if wanted is None or (serving is not None and serving.manifest.number == wanted):
            if serving is not None and self.state.reason != problem:
                self.state = VersionsState(serving, problem)
            return
        self._retry_in_s = {n: s - self._poll_s for n, s in self._retry_in_s.items() if n == wanted}
        if self._retry_in_s.get(wanted, 0) > 0:
            return
        with running(start_version_load(self._spec_hash, wanted)):
            self._load_and_serve(wanted, serving)
        if problem and not self.state.reason:
            self.state = replace(self.state, reason=problem)

    def _load_and_serve(self, wanted: int, serving: ServingVersion | None) -> None:
        try:
            version = self._loaded(wanted)
        except Exception as error:  # a bad version must never take the server down
            self._retry_in_s[wanted] = RETRY_S
            self._kept_out.inc()
            log.error("version kept out", version=wanted, reason=first_line(error))
            if isinstance(error, (Corrupt, KeyError)):
                skip("version", f"version {wanted}", first_line(error))
            reason = f"version {wanted} kept out: {first_line(error)}"
            self.state = VersionsState(serving or self._older(wanted), reason, wanted)
            return
        self.state = VersionsState(version, "")
        self._swaps.inc()
        log.info("version served", version=wanted, event_time_ms=version.manifest.event_time_ms)

    def _wanted(self) -> tuple[int | None, str]:
        """Return the number of the version to serve, and a problem with the alias `stable` ("": none).

        If `stable` is missing or cannot be read, the served version stays; if none is served, the newest
        promoted version is, such as version 0 of a new model.
        """
        aliases = self._store.aliases()
        stable = aliases.get("stable")
        if stable is not None:
            return stable, ""
        serving = self.state.serving
        problem = aliases.damaged.get("stable", "")
        if serving is not None:
            number: int | None = serving.manifest.number
        else:
            number = next((n for n in reversed(self._store.numbers()) if self._is_promoted(n)), None)
        if number is None:
            return None, problem
        if not problem and number > 0:
            problem = "the alias stable is missing; `freshet version promote NUMBER` sets it anew"
        return number, f"version {number} is served: {problem}" if problem else ""

    def _is_promoted(self, number: int) -> bool:
        try:
            return self._store.manifest(number).verdict == "promoted"
        except (Corrupt, KeyError) as error:
            skip("version", f"version {number}", str(error))
            return False

    def _older(self, number: int) -> ServingVersion | None:
        """Load the newest promoted version before a damaged one, else the newest after it."""
        try:
            numbers = self._store.numbers()
        except Exception as error:
            log.error("older versions cannot be listed", version=number, reason=first_line(error))
            return None
        newest_first = numbers[::-1]
        for older in (*(n for n in newest_first if n < number), *(n for n in newest_first if n > number)):
            try:
                if self._store.manifest(older).verdict == "promoted":
                    return self._loaded(older)
            except Exception as error:
                log.error("version kept out", version=older, reason=first_line(error))
        return None

    def _loaded(self, number: int) -> ServingVersion:
        version = self._store.get(number, self._prefixes)
        manifest = version.manifest
        if manifest.model != self._model or manifest.spec_hash != self._spec_hash:
            hint = " ".join(explain_defaults(self._spec_hash, manifest.spec_hash).split())
            raise Mismatch(
                f"expected a version of model {self._model!r}, spec {self._spec_hash[:12]}; "
                f"found {manifest.model!r}, {manifest.spec_hash[:12]}{hint and f'. {hint}'}"
            )
        self._fits(manifest)
        bad = not_finite(version.tensors)
        if bad is not None:
            raise Corrupt(f"tensor {bad} holds NaN or infinity")
        return ServingVersion(manifest, self._load(dict[str, Any](version.tensors)))
