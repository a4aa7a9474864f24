"""Code of the user's that a spec names, `package.module:name`: found in an installed package, on PYTHONPATH,
or in a module that stands beside the spec file.

The spec's folder goes to the end of `sys.path`, so a file there never takes the place of anything installed.
What goes wrong is said with the key that named it: a module that is nowhere, a name that it has not, an
import that fails inside, two modules of one name.
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
"""How a spec names code: a module, a colon, a name within."""


def load_object(reference: str, folder: str, *, where: str, key: str) -> Any:
    """What `package.module:name` names.

    Args:
        reference: matches `REFERENCE`.
        folder:    of the spec file; "" for a spec that has none: nothing stands beside it.
        where, key: what errors name as the place.

    Raises:
        ConfigError: it cannot be imported; says where was looked, or what its import raised.
    """
    module_name, _, name = reference.partition(":")
    beside = _beside(module_name, folder)
    if folder and (path := str(Path(folder).resolve())) not in sys.path:
        sys.path.append(path)
    try:
        module = import_module(module_name)
    except Exception as error:  # whatever a module of the user's raises
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
    """What was expected, and what is wrong: the module is missing, or it stands there and does not import."""
    parts = module.split(".")
    prefixes = [".".join(parts[: i + 1]) for i in range(len(parts))]
    if isinstance(error, ModuleNotFoundError) and error.name in prefixes:
        place = f"put {parts[0]}.py beside the spec, in {Path(folder).resolve()}, or " if folder else ""
        return "a module that can be imported", f"there is no module {error.name}: {place}install its package"
    return "a module that can be imported", f"importing {module} raised {type(error).__name__}: {error}"


def _beside(module: str, folder: str) -> Path | None:
    """The module's outermost file or package that stands in the spec's folder."""
    if not folder:
        return None
    head = Path(folder).resolve() / module.partition(".")[0]
    if head.with_suffix(".py").is_file():
        return head.with_suffix(".py")
    return head / "__init__.py" if (head / "__init__.py").is_file() else None


def _root(module: str) -> Path | None:
    file = getattr(sys.modules[module.partition(".")[0]], "__file__", None)
    return Path(file).resolve() if file else None
