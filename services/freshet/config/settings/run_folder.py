"""The folder of a run on one machine: everything that it leaves behind stands in here, at known places."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from freshet.errors import ConfigError

__all__ = ["RunFolder"]


@dataclass(frozen=True, slots=True)
class RunFolder:
    """Layout of a run. Deleting the folder deletes the model and its log, and nothing else."""

    path: Path

    @property
    def log(self) -> Path:
        """The event log: the only copy of what was acknowledged."""
        return self.path / "log"

    @property
    def rows(self) -> Path:
        """The row store."""
        return self.path / "rows"

    @property
    def versions(self) -> Path:
        """Dense versions and their manifests."""
        return self.path / "versions"

    @property
    def logs(self) -> Path:
        """What the processes said, a file a role; may be deleted at any time."""
        return self.path / "logs"

    @property
    def audit(self) -> Path:
        """Who has changed what is served: lines of JSON, never shortened by us."""
        return self.path / "audit.jsonl"

    @property
    def state(self) -> Path:
        """What runs now: process ids, ports, a copy of the spec; may be deleted when nothing runs."""
        return self.path / "state"

    def process_log(self, role: str) -> Path:
        """The log file of one role."""
        return self.logs / f"{role}.log"

    def create(self) -> RunFolder:
        """Make what is missing, readable by the owner only. Raises ConfigError where that fails."""
        try:
            for folder in (self.path, self.log, self.rows, self.versions, self.logs, self.state):
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                "run folder",
                "",
                f"{self.path} cannot be made ({error.filename}: {error.strerror})",
                "the path of a folder, or of none yet, in a place that this user may write to",
                "name another with --folder (backtest and replay: --keep)",
            ) from error
        return self
