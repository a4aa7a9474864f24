"""Models of one torch network: `dlrm`, `deepfm`, `dcnv2`, or a user's class."""

from __future__ import annotations

from functools import partial

from freshet.config.spec.model import Spec
from freshet.errors import ConfigError, FreshetError
from freshet.model import Precision
from freshet.model.custom import Model
from freshet.model.device import placement_factory
from freshet.model.torch_model import TorchDense
from freshet.model.towers import DLRM, DCNv2, DeepFM
from freshet.model.user_classes import DENSE_MODEL_HOOK, class_of

__all__ = ["build_alone"]

KINDS: dict[str, type[Model]] = {"dlrm": DLRM, "deepfm": DeepFM, "dcnv2": DCNv2}


def build_alone(spec: Spec, *, training: bool, precision: Precision, device: str = "cpu") -> TorchDense:
    """Build the network that `spec.model.kind` names.

    Raises ConfigError if there is none, it cannot be built, or torch cannot compute on the device.
    """
    kind = spec.model.kind
    new_placement = placement_factory(device)
    if kind in KINDS:
        return TorchDense(
            spec, KINDS[kind], training=training, precision=precision, new_placement=new_placement
        )
    build = partial(_network_class(kind, spec.folder), **dict(spec.model.options))
    try:
        return TorchDense(spec, build, training=training, precision=precision, new_placement=new_placement)
    except FreshetError:
        raise
    except TypeError as error:
        raise ConfigError(
            "spec",
            "model.options",
            dict(spec.model.options),
            f"arguments that {kind} takes after its shape",
            str(error),
        ) from error
    except Exception as error:  # a user's class may raise any error
        raise ConfigError(
            "spec",
            "model.kind",
            kind,
            "a class that can be built from its shape and model.options",
            f"it raised {type(error).__name__}: {error}",
        ) from error


def _network_class(kind: str, folder: str) -> type[Model]:
    found = class_of(kind, folder)
    if not issubclass(found, Model):
        expected = f"a subclass of freshet.Model, or a class with a classmethod {DENSE_MODEL_HOOK}"
        raise ConfigError("spec", "model.kind", kind, expected)
    return found
