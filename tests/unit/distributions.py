"""A third party's distribution, made in a folder: a module, and the metadata that installing it leaves."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

__all__ = ["distribution"]


def distribution(folder: Path, name: str, points: Mapping[str, Mapping[str, str]], code: str) -> None:
    """Write module `name` with this code, and its entry points: {group: {point: "module:object"}}."""
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir(parents=True)
    (folder / f"{name}.py").write_text(code)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    lines = []
    for group, named in points.items():
        lines += [f"[{group}]", *(f"{point} = {value}" for point, value in named.items())]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n")
