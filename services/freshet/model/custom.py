"""Custom models: subclass `freshet.Model` and name the class in the spec, `kind = "package.module:Class"`.

    class TwoTowers(freshet.Model):
        def __init__(self, shape, *, width=64):
            super().__init__(shape)
            self.user = torch.nn.Linear(shape.vectors["user"], width)
            self.item = torch.nn.Linear(shape.vectors["item"], width)

        def forward(self, x):
            return (self.user(x.vectors["user"]) * self.item(x.vectors["item"])).sum(1, keepdim=True)

`model.options` of the spec become the constructor's keyword arguments. Letters: B samples, L labels.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

__all__ = ["Inputs", "Model", "Shape"]


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a model's inputs and outputs."""

    labels: tuple[str, ...]  # L names, in the order of the columns of the logits
    vectors: Mapping[str, int]  # feature -> dim of its vector; dense and cross features have none
    dense: int  # columns of `Inputs.dense`: numbers, then missing flags
    deep: tuple[int, ...]  # `model.deep` of the spec


@dataclass(frozen=True, slots=True, eq=False)
class Inputs:
    """One batch. Gradients of `vectors` and `linear` become row gradients."""

    size: int  # B
    vectors: Mapping[str, torch.Tensor]  # feature -> (B, dim); lists are pooled; a null's vector is zeros
    concatenated: torch.Tensor  # (B, sum of dims) all vectors, in the order of `Shape.vectors`
    dense: torch.Tensor  # (B, Shape.dense) float32, standardised if the spec says so
    linear: torch.Tensor  # (B, L) sum of the rows' scalars for each label; zeros if the model has none


class Model(torch.nn.Module):
    """A network from a batch's inputs to logits.

    Several threads call `forward` concurrently, so it must not change the module. Versions hold parameters
    and buffers by name. The caller adds a bias per label, so the last layer needs none.
    """

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape

    def forward(self, x: Inputs) -> torch.Tensor:
        """Return (B, L) logits: log-odds, or for a numeric label its value in standard deviations."""
        raise NotImplementedError("a freshet.Model must define forward(self, x) -> logits (B, L)")
