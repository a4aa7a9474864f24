"""The packages of freshet and their imports as a Mermaid diagram, between two markers of ARCHITECTURE.md.

The layers are those that import-linter checks (pyproject.toml). An arrow says that a package imports another;
an arrow that follows from two others is left out (transitive reduction), as are the packages of `BASE`, which
all of them import.
"""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "services" / "freshet"
BASE = frozenset({"config", "observability"})
HIDDEN = frozenset({"seams"})  # deprecated names
BEGIN, END = "<!-- structure: written by `make docs` -->", "<!-- end of structure -->"


def with_figure(text: str) -> str:
    """The text of ARCHITECTURE.md with the figure of today. Raises ValueError: a marker is missing."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"ARCHITECTURE.md: expected the markers {BEGIN!r} and {END!r}")
    return f"{before}{BEGIN}\n{figure()}{END}{after}"


def figure() -> str:
    """The diagram, as a fenced block."""
    layers = list(_layers())
    shown = {name for layer in layers for name in layer}
    arrows = _reduced({name: _imports(name) & shown - {name} for name in shown})
    lines = ["```mermaid", "flowchart TB"]
    for number, layer in enumerate(layers):
        lines += [f"  subgraph L{number}[ ]", "    direction LR", *(f"    {name}" for name in layer), "  end"]
    lines += [f"  {name} --> {other}" for name in sorted(arrows) for other in sorted(arrows[name])]
    return "\n".join([*lines, "```", ""])


def _layers() -> Iterator[list[str]]:
    """Packages of each layer, from above; single modules and what all import are left out."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    for layer in settings["tool"]["importlinter"]["contracts"][0]["layers"]:
        names = [name.strip() for name in layer.replace(":", "|").split("|")]
        packages = [name for name in names if (SOURCE / name).is_dir() and name not in BASE | HIDDEN]
        if packages:
            yield packages


def _imports(package: str) -> set[str]:
    """Top-level names of freshet that the modules of a package import."""
    found = set()
    for path in (SOURCE / package).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module:
                parts = node.module.split(".")
                if parts[0] == "freshet":
                    found |= {parts[1]} if len(parts) > 1 else {alias.name for alias in node.names}
    return found


def _reduced(arrows: Mapping[str, set[str]]) -> dict[str, set[str]]:
    """Without the arrows that follow from others."""
    reach: dict[str, set[str]] = {}

    def reachable(name: str, path: tuple[str, ...] = ()) -> set[str]:
        if name not in reach and name not in path:
            below = [reachable(other, (*path, name)) | {other} for other in arrows[name]]
            reach[name] = set().union(*below)
        return reach.get(name, set())

    return {
        name: {
            other
            for other in below
            if not any(other in reachable(between) for between in below if between != other)
        }
        for name, below in arrows.items()
    }
