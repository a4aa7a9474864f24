"""Trial of a user's model in another process, so that `up` need not load torch and survives a failed
import."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import astuple, dataclass
from pathlib import Path

import orjson

from freshet.config.spec import Spec, load_spec
from freshet.errors import ConfigError

STDERR_LINES = 5
"""Last lines of standard error that a report of a failed trial quotes."""


@dataclass(frozen=True, slots=True)
class _ErrorFields:
    """The fields of a ConfigError, as JSON between processes."""

    where: str
    key: str
    found: str
    expected: str
    hint: str


def refuse_bad_model(spec: Spec, spec_file: Path) -> None:
    """Raise ConfigError if `model.kind` names a class that cannot be trained and served.

    The trial takes as long as importing the class; built-in kinds are not tried.
    """
    if ":" not in spec.model.kind:
        return
    command = [sys.executable, "-m", "freshet.apps.model_trial", str(spec_file)]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, check=False)  # nosec B603  # no shell
    if done.returncode == 0:
        return
    try:
        fields = _ErrorFields(**orjson.loads(done.stdout.splitlines()[-1]))
    except (IndexError, TypeError, orjson.JSONDecodeError):
        tail = "\n  ".join(done.stderr.decode(errors="replace").strip().splitlines()[-STDERR_LINES:])
        hint = f"trying it ended with {done.returncode}: {tail}"
        fields = _ErrorFields(str(spec_file), "model.kind", spec.model.kind, "a class that can be used", hint)
    raise ConfigError(*astuple(fields))


def _main(spec_file: str) -> int:
    from freshet.model.trial import try_out

    try:
        try_out(load_spec(spec_file), spec_file)
    except ConfigError as error:
        found = error.found if isinstance(error.found, str) else str(error.found)
        fields = _ErrorFields(error.where, error.key, found, error.expected, error.hint)
        print(orjson.dumps(fields).decode())
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(_main(sys.argv[1]))
