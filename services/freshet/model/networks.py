"""Models of one torch network: `dlrm`, `deepfm`, `dcnv2`, or a user's class."""

from __future__ import annotations

import inspect
from functools import partial

import torch
from torch import Tensor, nn

from freshet.config.spec.model import Spec
from freshet.errors import ConfigError, FreshetError
from freshet.model import DENSE_MODEL_HOOK, Precision, class_of
from freshet.model.custom import Inputs, Model, Shape
from freshet.model.device import placement_factory
from freshet.model.torch_model import TorchDense


def mlp(inputs: int, hidden: tuple[int, ...]) -> nn.Sequential:
    """Build layers of Linear and ReLU."""
    layers: list[nn.Module] = []
    for width in hidden:
        layers += [nn.Linear(inputs, width), nn.ReLU()]
        inputs = width
    return nn.Sequential(*layers)


def zero_head(inputs: int, labels: int) -> nn.Linear:
    """Build a last layer of zeros, so that the first predictions are the biases alone."""
    head = nn.Linear(inputs, labels, bias=False)
    nn.init.zeros_(head.weight)
    return head


class DLRM(Model):
    """DLRM (Naumov et al. 2019): an MLP over dot products of all pairs of vectors and of the dense part.

    Raises ConfigError unless all tables have the same dim.
    """

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        dims = set(shape.vectors.values())
        if len(dims) != 1:
            raise ConfigError(
                "spec", "tables.*.dim", sorted(dims), "one dim for all tables: dlrm multiplies vectors"
            )
        self.dim = dims.pop()
        count = len(shape.vectors) + (shape.dense > 0)
        self.bottom = mlp(shape.dense, (4 * self.dim, self.dim)) if shape.dense else None
        pairs = torch.triu_indices(count, count, offset=1)
        self.register_buffer("pairs", pairs[0] * count + pairs[1], persistent=False)
        self.top = mlp(pairs.shape[1] + (self.dim if shape.dense else 0), shape.deep)
        self.head = zero_head(shape.deep[-1] if shape.deep else pairs.shape[1] + self.dim, len(shape.labels))

    def forward(self, x: Inputs) -> Tensor:
        """Return (B, L) logits."""
        vectors = x.concatenated.view(x.size, -1, self.dim)
        parts: list[Tensor] = []
        if self.bottom is not None:
            dense = self.bottom(x.dense)
            vectors = torch.cat([vectors, dense[:, None].to(vectors.dtype)], 1)
            parts.append(dense)
        dots = torch.bmm(vectors, vectors.transpose(1, 2)).flatten(1)
        parts.append(dots.index_select(1, self.get_buffer("pairs")))
        logits: Tensor = self.head(self.top(torch.cat(parts, 1)))
        return logits


class DeepFM(Model):
    """DeepFM (Guo et al. 2017): sum of linear terms, factorisation machine and MLP. FM pairs vectors of equal
    dim."""

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        inputs = shape.dense + sum(shape.vectors.values())
        self.deep = mlp(inputs, shape.deep)
        self.head = zero_head(shape.deep[-1] if shape.deep else inputs, len(shape.labels))
        self.dims = sorted(set(shape.vectors.values()))

    def forward(self, x: Inputs) -> Tensor:
        """Return (B, L) logits."""
        logits = self.head(self.deep(torch.cat([x.dense, x.concatenated], 1))) + x.linear
        for dim in self.dims:
            v = torch.stack([v for v in x.vectors.values() if v.shape[1] == dim])
            logits = logits + 0.5 * (v.sum(0) ** 2 - (v**2).sum(0)).sum(1, keepdim=True)
        total: Tensor = logits
        return total


class DCNv2(Model):
    """DCN v2 (Wang et al. 2021): full-rank cross layers beside an MLP, both on the concatenated input."""

    LAYERS = 3

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        inputs = shape.dense + sum(shape.vectors.values())
        self.cross = nn.ModuleList(nn.Linear(inputs, inputs) for _ in range(self.LAYERS))
        self.deep = mlp(inputs, shape.deep)
        self.head = zero_head(inputs + (shape.deep[-1] if shape.deep else inputs), len(shape.labels))

    def forward(self, x: Inputs) -> Tensor:
        """Return (B, L) logits."""
        first = torch.cat([x.dense, x.concatenated], 1)
        crossed = first
        for layer in self.cross:
            crossed = first * layer(crossed) + crossed
        logits: Tensor = self.head(torch.cat([crossed, self.deep(first)], 1))
        return logits


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
    network, options = _network_class(kind, spec.folder), dict(spec.model.options)
    try:
        inspect.signature(network).bind("its shape", **options)
    except TypeError as error:
        expected = f"arguments that {kind} takes after its shape"
        raise ConfigError("spec", "model.options", options, expected, str(error)) from error
    build = partial(network, **options)
    try:
        return TorchDense(spec, build, training=training, precision=precision, new_placement=new_placement)
    except FreshetError:
        raise
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
