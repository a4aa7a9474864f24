"""The part that all peers on torch share: from looked-up rows to the loss, and the dense step."""

from __future__ import annotations

import torch
from torch import nn

FIELDS, NUMBERS, DIM = 26, 13, 16


class Dense:
    """An MLP 429-512-256-1 with fused Adam; bf16 by autocast, its weights, states and loss in fp32.

    Padding 429 to 432 or 448 and `torch.compile` gained at most 7 % of this part alone, so neither is here.
    """

    def __init__(self, precision: str) -> None:
        self.half = precision == "bf16"
        self.mlp = nn.Sequential(
            nn.Linear(FIELDS * DIM + NUMBERS, 512),
            nn.ReLU(),
            nn.Linear(512, 256),
            nn.ReLU(),
            nn.Linear(256, 1),
        )
        self.adam = torch.optim.Adam(self.mlp.parameters(), lr=1e-3, fused=True)
        self.loss = nn.BCEWithLogitsLoss()

    def step(self, rows: torch.Tensor, dense: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Run forward, backward (into `rows` and the tensors before them) and the step of Adam.

        rows: (B, 26 * 16); dense: (B, 13); labels: (B,). Returns the mean logloss, detached.
        """
        with torch.autocast("cpu", torch.bfloat16, enabled=self.half):
            logits = self.mlp(torch.cat((rows, dense), 1)).squeeze(1)
        loss: torch.Tensor = self.loss(logits.float(), labels)
        self.adam.zero_grad()
        loss.backward()
        self.adam.step()
        return loss.detach()
