"""Validation of the run folder that a command names."""

from __future__ import annotations

from pathlib import Path

from freshet.errors import ConfigError

__all__ = ["existing_folder"]


def existing_folder(folder: Path) -> Path:
    """Return `folder`. Raises ConfigError if `freshet up`, `demo`, `run` or `replay` did not create it."""
    if _is_run(folder):
        return folder
    if (folder / "log").is_dir() and (folder / "state").is_dir():
        return folder  # its creator ended, or found the disk full, before it wrote the log
    fault = "is a file" if folder.is_file() else "is no run folder" if folder.exists() else "does not exist"
    near = sorted(str(one) for one in Path().glob("*/") if _is_run(one) and one != folder)
    raise ConfigError(
        "--folder",
        "",
        f"{folder} {fault}",
        "a folder that `freshet up SPEC` or `freshet demo` has made (it holds log/)",
        f"did you mean --folder {' or '.join(near[:3])}?" if near else "`freshet demo` creates an example",
    )


def _is_run(folder: Path) -> bool:
    return (folder / "log" / "catalog.sqlite").is_file()
