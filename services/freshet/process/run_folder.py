"""The run folder of an embedded system, as the command line finds it."""

from __future__ import annotations

from pathlib import Path

from freshet.errors import ConfigError

__all__ = ["existing_folder"]


def existing_folder(folder: Path) -> Path:
    """The run folder, which must have been made by `freshet up`, `demo`, `run` or `replay`."""
    if _is_run(folder):
        return folder
    if (folder / "log").is_dir() and (folder / "state").is_dir():
        return folder  # made by one that had no time, or no space, to write into it
    what = "is a file" if folder.is_file() else "is no run folder" if folder.exists() else "does not exist"
    near = sorted(str(one) for one in Path().glob("*/") if _is_run(one) and one != folder)
    raise ConfigError(
        "--folder",
        "",
        f"{folder} {what}",
        "a folder that `freshet up SPEC` or `freshet demo` has made (it holds log/)",
        f"did you mean --folder {' or '.join(near[:3])}?" if near else "`freshet demo` starts one to look at",
    )


def _is_run(folder: Path) -> bool:
    return (folder / "log" / "catalog.sqlite").is_file()
