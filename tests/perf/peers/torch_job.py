"""The model in plain torch, as a good engineer writes it by hand."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from tests.perf.peers.job import Batch, Options, run

FIELDS, NUMBERS, DIM = 26, 13, 16
WIDTHS = (FIELDS * DIM + NUMBERS, 512, 256, 1)


def network() -> nn.Sequential:
    """The dense part: 429-512-256-1."""
    first, second, third, last = WIDTHS
    return nn.Sequential(
        nn.Linear(first, second), nn.ReLU(), nn.Linear(second, third), nn.ReLU(), nn.Linear(third, last)
    )


class PlainTorch:
    """All 26 tables in one `EmbeddingBag` with sparse gradients, Adagrad on its rows."""

    def __init__(self, options: Options, meta: Mapping[str, Any]) -> None:
        torch.manual_seed(0)
        torch.set_num_threads(options.threads)
        cardinality = meta["cardinality"]
        self.half = options.precision == "bf16"
        self.offsets = torch.arange(FIELDS) * cardinality
        self.rows = nn.EmbeddingBag(FIELDS * cardinality, DIM, mode="sum", sparse=True)
        nn.init.uniform_(self.rows.weight, -0.01, 0.01)
        self.mlp = network()
        self.loss = nn.BCEWithLogitsLoss()
        self.row_step = torch.optim.Adagrad(self.rows.parameters(), lr=0.2)
        self.dense_step = torch.optim.Adam(self.mlp.parameters(), lr=1e-3, fused=True)

    def prepared(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """One bag an id, (B * 26, 1)."""
        ids = torch.from_numpy(batch.ids) + self.offsets
        return ids.reshape(-1, 1), torch.from_numpy(batch.dense), torch.from_numpy(batch.labels)

    def step(self, batch: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """One step."""
        ids, dense, labels = batch
        looked_up = self.rows(ids).view(len(labels), FIELDS * DIM)
        with torch.autocast("cpu", torch.bfloat16, enabled=self.half):
            logits = self.mlp(torch.cat((looked_up, dense), 1)).squeeze(1)
        loss: torch.Tensor = self.loss(logits.float(), labels)
        self.row_step.zero_grad()
        self.dense_step.zero_grad()
        loss.backward()
        self.row_step.step()
        self.dense_step.step()
        return loss.detach()


if __name__ == "__main__":
    run(PlainTorch)
