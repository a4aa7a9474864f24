"""A simulated news site with known click probabilities, drifting tastes and changing items, and its spec.

`freshet simulate` sends its readers to a running system; `freshet demo` starts both. The simulator measures
the click rate of the model's choices, of random choices and of the best possible ones.
"""

from __future__ import annotations

from pathlib import Path

from freshet.errors import ConfigError

__all__ = ["DEMO_FOLDER", "DEMO_SPEC", "DRIFT_AT", "DRIFT_EVERY", "UNFINISHED", "write_spec"]

DEMO_FOLDER = "freshet-demo"
"""Default folder of the demo, in the working directory."""

DRIFT_AT, DRIFT_EVERY = "150s", "5m"
"""Defaults of `freshet simulate` and `freshet demo`: the first drift of the readers' tastes, and the interval
of later ones."""

DEMO_SPEC = Path(__file__).parent / "site" / "freshet.toml"
FILES = ("freshet.toml", "pages.avsc", "actions.avsc")

_NEW = ".{}.new"
UNFINISHED = frozenset(map(_NEW.format, FILES))
"""Temporary files that a killed process may leave; the next `write_spec` replaces them."""


def write_spec(folder: Path) -> Path:
    """Write the demo's spec to a folder and return the path of its freshet.toml; keep identical files.

    Raises ConfigError if a file exists with other content, or the folder cannot be written to.
    """
    wanted = {name: DEMO_SPEC.with_name(name).read_bytes() for name in FILES}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        missing = [name for name in FILES if not (folder / name).exists()]
        for name in FILES:
            if name not in missing and (folder / name).read_bytes() != wanted[name]:
                raise ConfigError(
                    str(folder / name),
                    "",
                    "another content than the demo's",
                    "the file as the demo wrote it, or none",
                    "a changed spec is run by `freshet up`; to see the demo again, use another folder",
                )
        for name in missing:
            _write(folder / name, wanted[name])
    except OSError as error:
        raise ConfigError(
            str(folder),
            "",
            f"the spec cannot be written ({error.filename or folder}: {error.strerror})",
            "the path of a folder that this user may write to, with space on its disk",
        ) from error
    return folder / FILES[0]


def _write(path: Path, data: bytes) -> None:
    """Write a file atomically, because a partial one would count as changed."""
    temporary = path.with_name(_NEW.format(path.name))
    try:
        temporary.write_bytes(data)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
