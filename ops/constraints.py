"""`python -m ops.constraints` writes ops/docker/constraints.txt: the releases of Python
packages that images are built with, so that one commit has the same ones tomorrow.

They are those that are installed here, which the tests have just run with, of all that services need. torch
is not among them (the Dockerfile's TORCH names it), nor what torch itself asks for by exact release.
"""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Iterable, Iterator
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
CONSTRAINTS = ROOT / "ops" / "docker" / "constraints.txt"
DEVELOPMENT = {"test", "demo", "local", "versus"}
"""Extras that no image is built with."""


def declared() -> list[Requirement]:
    """What pyproject.toml asks for, for services."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    texts = [text for name, part in sorted(extras.items()) if name not in DEVELOPMENT for text in part]
    return [Requirement(text) for text in [*project["dependencies"], *texts]]


def needed(wanted: Iterable[Requirement]) -> dict[str, str]:
    """Installed release by name, of these and of all that they need.

    Raises PackageNotFoundError, naming it, for what is not installed.
    """
    found: dict[str, str] = {}
    waiting = [(need, frozenset(need.extras)) for need in wanted]
    seen: set[tuple[str, frozenset[str]]] = set()
    while waiting:
        need, extras = waiting.pop()
        name = canonicalize_name(need.name)
        if (name, extras) in seen:
            continue
        seen.add((name, extras))
        if name != "torch":
            found[name] = version(name)
        for text in requires(name) or ():
            part = Requirement(text)
            if _wanted(part, extras) and not (name == "torch" and _exact(part)):
                waiting.append((part, frozenset(part.extras)))
    return found


def _wanted(part: Requirement, extras: frozenset[str]) -> bool:
    return part.marker is None or any(part.marker.evaluate({"extra": extra}) for extra in extras | {""})


def _exact(part: Requirement) -> bool:
    return any(bound.operator == "==" for bound in part.specifier)


def text_of(releases: dict[str, str]) -> str:
    """The file's text."""
    return "".join(f"{line}\n" for line in _lines(releases))


def _lines(releases: dict[str, str]) -> Iterator[str]:
    yield "# `python -m ops.constraints` writes this: what images are built with."
    yield from (f"{name}=={releases[name]}" for name in sorted(releases))


def main() -> int:
    """Write the file; says what is missing here."""
    try:
        releases = needed(declared())
    except PackageNotFoundError as error:
        print(f'{error.name} is not installed: pip install ".[test]" first', file=sys.stderr)
        return 1
    CONSTRAINTS.write_text(text_of(releases))
    print(f"{len(releases)} releases in {CONSTRAINTS.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
