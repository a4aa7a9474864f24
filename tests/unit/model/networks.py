"""Networks of each kind, one of them the test's own."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from freshet.config.spec.model import Spec
from freshet.model.custom import Inputs, Model, Shape
from tests.fixtures.specs import make_spec

KINDS = ("dlrm", "deepfm", "dcnv2", "tests.unit.model.networks:Own")
OPTIONS: dict[str, Any] = {
    "dense": [(True, True), (False, False)],
    "lists": ("mean", "sum"),
    "losses": ("logloss", "huber"),
    "deep": (20, 12),
}


class Own(Model):
    """A user's class that uses everything it is given, a buffer too."""

    def __init__(self, shape: Shape, *, width: int = 8) -> None:
        super().__init__(shape)
        self.inner = torch.nn.Linear(shape.vectors["f0"] + shape.dense, width)
        self.outer = torch.nn.Linear(width, len(shape.labels))
        self.register_buffer("factor", torch.tensor([0.5]))

    def forward(self, x: Inputs) -> torch.Tensor:
        h = torch.tanh(self.inner(torch.cat([x.vectors["f0"], x.dense], 1)))
        logits: torch.Tensor = self.outer(h) * self.get_buffer("factor") + x.linear
        return logits


def spec_of(kind: str, **changes: Any) -> Spec:
    return make_spec(**{**OPTIONS, "kind": kind, **changes})


def same(a: dict[str, Any], b: dict[str, Any]) -> None:
    assert a.keys() == b.keys()
    for name, value in a.items():
        np.testing.assert_array_equal(value, b[name], err_msg=name)
