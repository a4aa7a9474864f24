"""Import of users' classes, `kind = "package.module:Class"` in the spec, without torch."""

from __future__ import annotations

from typing import Any

from freshet.config.spec.transforms import load_object
from freshet.errors import ConfigError

__all__ = ["DENSE_MODEL_HOOK", "class_of"]

DENSE_MODEL_HOOK = "dense_model"
"""Name of a classmethod `(spec, *, training, precision) -> DenseModel`.

A class that has it is no `freshet.Model` (a torch network): it implements the whole dense part, with or
without torch, as a `freshet.model.DenseModel`.
"""


def class_of(kind: str, folder: str) -> type[Any]:
    """Import the class that `package.module:Class` names, also from the spec's folder.

    Raises ConfigError if there is none.
    """
    if ":" not in kind:
        expected = "hedge, linear, dlrm, deepfm, dcnv2, or package.module:Class"
        raise ConfigError("spec", "model.kind", kind, expected)
    found = load_object(kind, folder, where="spec", key="model.kind")
    if not isinstance(found, type):
        raise ConfigError("spec", "model.kind", kind, "a class", f"it is a {type(found).__name__}")
    return found
