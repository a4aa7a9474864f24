"""A disk that is full, for chosen processes: whatever they write to a file is refused."""

from __future__ import annotations

import contextlib
import resource
from collections.abc import Callable, Iterable

from tests.servers.processes import Process


class Disk:
    """What the processes write to, their output apart, which is a pipe. Needs no rights: files may have 0
    bytes (RLIMIT_FSIZE), so that a write fails as on a full disk, but with EFBIG; new folders and empty files
    can be made there too.

    A process that is started while the disk is full finds it full as well, once `keep_full` is called.
    """

    def __init__(self, processes: Callable[[], Iterable[Process]]) -> None:
        self._processes = processes
        self._before: dict[int, tuple[int, int]] = {}  # process id -> its limits
        self.is_full = False

    def fill(self) -> None:
        """Refuse writes."""
        self.is_full = True
        self.keep_full()

    def keep_full(self) -> None:
        """Refuse those of processes that were started since, too."""
        for process in self._processes():
            if self.is_full and process.alive and process.pid not in self._before:
                with contextlib.suppress(ProcessLookupError):
                    soft, hard = resource.prlimit(process.pid, resource.RLIMIT_FSIZE)
                    self._before[process.pid] = (soft, hard)
                    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (0, hard))

    def make_room(self) -> None:
        """Take writes again."""
        self.is_full = False
        alive = {process.pid for process in self._processes() if process.alive}
        for pid, limits in self._before.items():
            if pid in alive:
                with contextlib.suppress(ProcessLookupError):
                    resource.prlimit(pid, resource.RLIMIT_FSIZE, limits)
        self._before.clear()
