"""A model of the user's, tried in another process: `up` loads no torch, and outlives what its import does."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import astuple, dataclass
from pathlib import Path

import orjson

from freshet.config.spec import Spec, load_spec
from freshet.errors import ConfigError

__all__ = ["refuse_bad_model"]

LINES = 5
"""Of what a process that died left on its standard error."""


@dataclass(frozen=True, slots=True)
class _Said:
    """A ConfigError on its way between processes."""

    where: str
    key: str
    found: str
    expected: str
    hint: str


def refuse_bad_model(spec: Spec, spec_file: Path) -> None:
    """Raise ConfigError if `model.kind` names a class that cannot be trained and served. Takes as long as
    importing it does; nothing for a kind of freshet's own.
    """
    if ":" not in spec.model.kind:
        return
    command = [sys.executable, "-m", "freshet.apps.model_trial", str(spec_file)]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, check=False)  # nosec B603  # no shell
    if done.returncode == 0:
        return
    try:
        said = _Said(**orjson.loads(done.stdout.splitlines()[-1]))
    except (IndexError, TypeError, orjson.JSONDecodeError):
        tail = "\n  ".join(done.stderr.decode(errors="replace").strip().splitlines()[-LINES:])
        hint = f"trying it ended with {done.returncode}: {tail}"
        said = _Said(str(spec_file), "model.kind", spec.model.kind, "a class that can be used", hint)
    raise ConfigError(*astuple(said))


def _main(spec_file: str) -> int:
    from freshet.model.trial import try_out

    try:
        try_out(load_spec(spec_file), spec_file)
    except ConfigError as error:
        found = error.found if isinstance(error.found, str) else str(error.found)
        said = _Said(error.where, error.key, found, error.expected, error.hint)
        print(orjson.dumps(said).decode())
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(_main(sys.argv[1]))
