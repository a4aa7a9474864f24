"""When a run's world began, kept in its folder: a simulator started again goes on with the same world."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import orjson

from freshet.demo.world import DriftPlan
from freshet.errors import ConfigError

__all__ = ["STATE_FILE", "Began", "begin", "kept_world", "read_began"]

STATE_FILE = "simulator.json"


@dataclass(frozen=True, slots=True)
class Began:
    """What makes a world this one, and when it began."""

    seed: int
    drift_at_s: tuple[float, ...]
    drift_every_s: float | None
    began_ms: int = 0

    @property
    def plan(self) -> DriftPlan:
        """When tastes change abruptly."""
        return DriftPlan(self.drift_at_s, self.drift_every_s)


def read_began(file: Path, wanted: Began) -> Began | None:
    """The world that this folder has, None if it has none yet.

    Raises ConfigError if it is another one than `wanted`: what was learned from it would be wrong.
    """
    found = _read(file)
    if found is None:
        return None
    for name in ("seed", "drift_at_s", "drift_every_s"):
        mine, asked = getattr(found, name), getattr(wanted, name)
        if mine != asked:
            raise ConfigError(
                str(file),
                name,
                asked,
                f"{mine}, with which this run's world began",
                "leave the option away or as it was, or start over in another folder",
            )
    return found


def kept_world(state: Path) -> Began | None:
    """The world of a run, by its folder of states; None if it has none yet.

    Raises ConfigError if it cannot be read.
    """
    return _read(state / STATE_FILE)


def _read(file: Path) -> Began | None:
    try:
        said: dict[str, Any] = orjson.loads(file.read_bytes())
        return Began(
            int(said["seed"]),
            tuple(float(at) for at in said["drift_at_s"]),
            None if said["drift_every_s"] is None else float(said["drift_every_s"]),
            int(said["began_ms"]),
        )
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (orjson.JSONDecodeError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            str(file), "", f"not what the simulator wrote: {error!r}", "its own file", "delete the run folder"
        ) from None


def begin(file: Path, wanted: Began, now_ms: int) -> Began:
    """Begin a world now and keep when, all or nothing."""
    made = Began(wanted.seed, wanted.drift_at_s, wanted.drift_every_s, now_ms)
    fresh = file.with_suffix(".new")
    fresh.write_bytes(orjson.dumps({"v": 1, **asdict(made)}))
    os.replace(fresh, file)
    return made
