"""Example scripts as modules: they are programs, not a package."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

EXAMPLES = Path(__file__).parents[2] / "examples"


def example(folder: str, name: str) -> ModuleType:
    """The module that `python examples/FOLDER/NAME.py` runs, with its neighbours to import."""
    place = str(EXAMPLES / folder)
    if place not in sys.path:
        sys.path.insert(0, place)
    return importlib.import_module(name)
