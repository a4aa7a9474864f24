"""Classes of the user's are tried before anything runs: each mistake is named."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from freshet.errors import ConfigError
from freshet.model.custom import Inputs, Model, Shape
from freshet.model.trial import try_out
from tests.fixtures.specs import make_spec

HERE = "tests.unit.model.test_trial"


class Good(Model):
    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self.layer = torch.nn.Linear(sum(shape.vectors.values()) + shape.dense, len(shape.labels))

    def forward(self, x: Inputs) -> torch.Tensor:
        logits: torch.Tensor = self.layer(torch.cat([x.concatenated, x.dense], 1))
        return logits


class Unfinished(Model):
    pass


class NoShape(Model):
    def __init__(self) -> None:
        super().__init__(Shape((), {}, 0, ()))


class WrongFeature(Model):
    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self.layer = torch.nn.Linear(shape.vectors["usr"], 1)


class TwoArguments(Good):
    def forward(self, x: Inputs, y: Inputs) -> torch.Tensor:  # type: ignore[override]
        return super().forward(x)


class Squeezed(Good):
    def forward(self, x: Inputs) -> torch.Tensor:
        return super().forward(x).squeeze()


class NotATensor(Good):
    def forward(self, x: Inputs) -> Any:
        return [0.0] * x.size


class NotANumber(Good):
    def forward(self, x: Inputs) -> torch.Tensor:
        return torch.log(super().forward(x) - 1e6)


class Root(Good):
    def forward(self, x: Inputs) -> torch.Tensor:
        return super().forward(x) + torch.sqrt(torch.sum(x.vectors["f0"] ** 2, 1, keepdim=True))


class Draws(Good):
    def forward(self, x: Inputs) -> torch.Tensor:
        logits: torch.Tensor = torch.nn.functional.dropout(super().forward(x), 0.5)
        return logits


class Statistics(Good):
    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self.norm = torch.nn.BatchNorm1d(len(shape.labels))

    def forward(self, x: Inputs) -> torch.Tensor:
        logits: torch.Tensor = self.norm(super().forward(x))
        return logits


class Detached(Good):
    def forward(self, x: Inputs) -> torch.Tensor:
        return super().forward(x).detach()


class Hidden(Good):
    made = 0

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        Hidden.made += 1
        self.factor = float(Hidden.made)

    def forward(self, x: Inputs) -> torch.Tensor:
        return super().forward(x) * self.factor


class Frozen(Good):
    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self.layer.bias.requires_grad_(False)


class Half(Good):
    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self.register_buffer("scale", torch.ones((), dtype=torch.bfloat16))


class Broken(Good):
    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self.layer = torch.nn.Linear("8", 1)  # type: ignore[arg-type]


MISTAKES = {
    "Frozen": r"all learned(?s:.*)layer.bias has requires_grad = False: make it a buffer",
    "Half": r"of a type of numpy(?s:.*)scale is torch.bfloat16",
    "Broken": "model.kind(?s:.*)it raised TypeError",
    "Unfinished": "must define forward",
    "NoShape": "arguments that .*NoShape takes after its shape",
    "WrongFeature": "it raised KeyError: 'usr'",
    "TwoArguments": r"forward\(self, x\) -> logits \(B, L\)(?s:.*)missing 1 required positional.*'y'",
    "Squeezed": r"logits of shape \(\d, 1\)(?s:.*)it returned \(",
    "NotATensor": "it returned a list",
    "NotANumber": "finite logits",
    "Root": "finite gradients",
    "Draws": "no dropout",
    "Statistics": "no BatchNorm",
    "Detached": "does not require grad",
    "Hidden": "keep no other state",
}


def test_a_good_class_passes() -> None:
    try_out(
        make_spec(kind=f"{HERE}:Good", lists=("mean",), dense=((True, True),), losses=("logloss", "huber"))
    )


def test_kinds_of_freshets_own_and_dense_models_need_no_trial() -> None:
    try_out(make_spec(kind="hedge"))


@pytest.mark.parametrize("name", list(MISTAKES))
def test_a_mistake_is_named(name: str) -> None:
    with pytest.raises(ConfigError, match=MISTAKES[name]):
        try_out(make_spec(kind=f"{HERE}:{name}", dense=((False, False),)))
