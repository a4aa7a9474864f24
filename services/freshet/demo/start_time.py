"""Seed, drifts and start time of a simulation, stored so that a restarted simulator continues it."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import orjson

from freshet.demo.news_site import DriftPlan
from freshet.errors import ConfigError

STATE_FILE = "simulator.json"


@dataclass(frozen=True, slots=True)
class RunStart:
    """The parameters of a simulation, and its start."""

    seed: int
    drift_at_s: tuple[float, ...]
    drift_every_s: float | None
    began_ms: int = 0

    @property
    def plan(self) -> DriftPlan:
        """The drifts as a plan."""
        return DriftPlan(self.drift_at_s, self.drift_every_s)


def read_start(file: Path, wanted: RunStart) -> RunStart | None:
    """Read the start of the simulation; None before the first.

    Raises ConfigError if its parameters are not those of `wanted`, because the model has learned from them.
    """
    found = _read(file)
    if found is None:
        return None
    for name in ("seed", "drift_at_s", "drift_every_s"):
        stored, requested = getattr(found, name), getattr(wanted, name)
        if stored != requested:
            raise ConfigError(
                str(file),
                name,
                requested,
                f"{stored}, with which this simulation began",
                "omit the option or keep its value, or start over in another folder",
            )
    return found


def stored_start(state: Path) -> RunStart | None:
    """Read the start of the simulation from a run's `state` folder; None before the first.

    Raises ConfigError if the file does not parse.
    """
    return _read(state / STATE_FILE)


def _read(file: Path) -> RunStart | None:
    try:
        stored: dict[str, Any] = orjson.loads(file.read_bytes())
        return RunStart(
            int(stored["seed"]),
            tuple(float(at) for at in stored["drift_at_s"]),
            None if stored["drift_every_s"] is None else float(stored["drift_every_s"]),
            int(stored["began_ms"]),
        )
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (orjson.JSONDecodeError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            str(file), "", f"no state of a simulator: {error!r}", "its own file", "delete the run folder"
        ) from None


def save_start(file: Path, wanted: RunStart, now_ms: int) -> RunStart:
    """Store a simulation that starts now, atomically."""
    start = RunStart(wanted.seed, wanted.drift_at_s, wanted.drift_every_s, now_ms)
    fresh = file.with_suffix(".new")
    fresh.write_bytes(orjson.dumps({"v": 1, **asdict(start)}))
    os.replace(fresh, file)
    return start
