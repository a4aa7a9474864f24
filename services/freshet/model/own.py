"""Classes of the user's, named in the spec as `kind = "package.module:Class"`: found here, without torch."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from freshet.errors import ConfigError

__all__ = ["DENSE_MODEL_HOOK", "class_of"]

DENSE_MODEL_HOOK = "dense_model"
"""Name of a classmethod `(spec, *, training, precision) -> DenseModel`.

A class that has it is no `freshet.Model` (a torch network); it makes the whole dense part itself, without
torch if it likes: gradients of the rows, steps, state and scores, by `freshet.model.DenseModel`.
"""


def class_of(kind: str) -> type[Any]:
    """The class that `package.module:Class` names. Raises ConfigError if there is none."""
    module, _, name = kind.partition(":")
    if not name:
        expected = "hedge, linear, dlrm, deepfm, dcnv2, or package.module:Class"
        raise ConfigError("spec", "model.kind", kind, expected)
    try:
        found = getattr(import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ConfigError("spec", "model.kind", kind, "a class that can be imported", str(error)) from error
    if not isinstance(found, type):
        raise ConfigError("spec", "model.kind", kind, "a class", f"it is a {type(found).__name__}")
    return found
