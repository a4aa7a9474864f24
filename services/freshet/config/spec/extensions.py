"""Import of the user's code that a spec names as `package.module:name`.

The module is an installed package, on PYTHONPATH, or beside the spec file. The spec's folder goes to the end
of `sys.path`, so a file there never shadows an installed module. Errors name the key of the spec.
"""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from typing import Any

from freshet.config.options import nearest_hint
from freshet.errors import ConfigError

__all__ = ["REFERENCE", "load_object"]

REFERENCE = r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*"
"""Pattern of a reference to code: a module, a colon, a name in the module."""


def load_object(reference: str, folder: str, *, where: str, key: str) -> Any:
    """Import the object that `package.module:name` names.

    Args:
        reference: matches `REFERENCE`.
        folder: folder of the spec file; "" if the spec has no file.
        where, key: place for errors.

    Raises:
        ConfigError: the module is missing or its import fails, the module lacks the name, or another module
            shadows the one beside the spec.
    """
    module_name, _, name = reference.partition(":")
    beside = _beside(module_name, folder)
    if folder and (path := str(Path(folder).resolve())) not in sys.path:
        sys.path.append(path)
    try:
        module = import_module(module_name)
    except Exception as error:  # the user's module may raise any error
        raise ConfigError(where, key, reference, *_why(error, module_name, folder)) from error
    if beside is not None and _root(module_name) != beside:
        raise ConfigError(
            where,
            key,
            reference,
            f"the module beside the spec, {beside}",
            f"another one of that name was imported, {_root(module_name)}; give yours a name of its own",
        )
    if not hasattr(module, name):
        names = [n for n in vars(module) if not n.startswith("_")]
        hint = nearest_hint(name, names) or f"there is no {name} in {module.__file__}"
        raise ConfigError(where, key, reference, f"a name that module {module_name} defines", hint)
    return getattr(module, name)


def _why(error: Exception, module: str, folder: str) -> tuple[str, str]:
    """Return the expectation and the hint for a failed import: the module is missing, or its code raised."""
    parts = module.split(".")
    prefixes = [".".join(parts[: i + 1]) for i in range(len(parts))]
    if isinstance(error, ModuleNotFoundError) and error.name in prefixes:
        place = f"put {parts[0]}.py beside the spec, in {Path(folder).resolve()}, or " if folder else ""
        return "a module that can be imported", f"there is no module {error.name}: {place}install its package"
    return "a module that can be imported", f"importing {module} raised {type(error).__name__}: {error}"


def _beside(module: str, folder: str) -> Path | None:
    """Return the file of the module's outermost package in the spec's folder, if there is one."""
    if not folder:
        return None
    head = Path(folder).resolve() / module.partition(".")[0]
    if head.with_suffix(".py").is_file():
        return head.with_suffix(".py")
    return head / "__init__.py" if (head / "__init__.py").is_file() else None


def _root(module: str) -> Path | None:
    file = getattr(sys.modules[module.partition(".")[0]], "__file__", None)
    return Path(file).resolve() if file else None
