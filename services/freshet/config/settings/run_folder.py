"""Layout of the folder that holds all data of a run on one machine."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from freshet.errors import ConfigError

__all__ = ["RunFolder"]


@dataclass(frozen=True, slots=True)
class RunFolder:
    """Paths in a run folder. To delete the folder deletes the model and its log, and nothing else."""

    path: Path

    @property
    def log(self) -> Path:
        """The event log: the only copy of the acknowledged events."""
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
        """Log files of the processes, one for each role; may be deleted at any time."""
        return self.path / "logs"

    @property
    def audit(self) -> Path:
        """The audit log: JSON lines; the file is never truncated or rotated."""
        return self.path / "audit.jsonl"

    @property
    def state(self) -> Path:
        """State of the running processes: ids, ports, a copy of the spec; may be deleted when none runs."""
        return self.path / "state"

    def process_log(self, role: str) -> Path:
        """Return the log file of a role."""
        return self.logs / f"{role}.log"

    def create(self) -> RunFolder:
        """Create missing folders, readable by the owner only. Raises ConfigError if one cannot be created."""
        try:
            for folder in (self.path, self.log, self.rows, self.versions, self.logs, self.state):
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                "run folder",
                "",
                f"{self.path} cannot be created ({error.filename}: {error.strerror})",
                "the path of a folder that exists or can be created by this user",
                "name another with --folder (backtest and replay: --keep)",
            ) from error
        return self
