"""Two towers: one reads the reader, one the article; the logit is the product of what they come to.

It stands beside the spec, which names it: `kind = "two_towers:TwoTowers"`.
"""

import torch

import freshet
from freshet.model.custom import Inputs, Shape


class TwoTowers(freshet.Model):
    """Logits (B, L) are inner products of two towers (B, L, width). `width` comes from `model.options`."""

    def __init__(self, shape: Shape, *, width: int = 16) -> None:
        super().__init__(shape)
        item = shape.vectors["article"] + shape.vectors["topic"] + shape.dense
        self.labels, self.width = len(shape.labels), width
        self.reader = tower(shape.vectors["reader"], shape.deep, self.labels * width)
        self.item = tower(item, shape.deep, self.labels * width)

    def forward(self, x: Inputs) -> torch.Tensor:
        """Score B pairs. `x.linear` adds each row's own bias: an article's popularity."""
        item = torch.cat([x.vectors["article"], x.vectors["topic"], x.dense], 1)
        products = self.reader(x.vectors["reader"]) * self.item(item)
        return products.view(-1, self.labels, self.width).sum(2) + x.linear


def tower(inputs: int, hidden: tuple[int, ...], outputs: int) -> torch.nn.Sequential:
    """An MLP with a norm in front: vectors of rows start small."""
    layers: list[torch.nn.Module] = [torch.nn.LayerNorm(inputs)]
    for width in hidden:
        layers += [torch.nn.Linear(inputs, width), torch.nn.ReLU()]
        inputs = width
    return torch.nn.Sequential(*layers, torch.nn.Linear(inputs, outputs))
