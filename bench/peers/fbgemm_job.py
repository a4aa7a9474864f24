"""The model on FBGEMM's table-batched embeddings, called without TorchRec."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from bench.peers.dense import DIM, FIELDS, Dense
from bench.peers.fbgemm_tables import tables
from bench.peers.job import Batch, Options, run

Prepared = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


class Fbgemm:
    """A table a field, one id a bag."""

    def __init__(self, options: Options, meta: Mapping[str, Any]) -> None:
        torch.manual_seed(0)
        torch.set_num_threads(options.threads)
        self.rows = tables(FIELDS, meta["cardinality"], DIM)
        self.dense = Dense(options.precision)

    def prepared(self, batch: Batch) -> Prepared:
        """Return ids by field, then by row; the ends of bags; numbers; labels."""
        ids = torch.from_numpy(batch.ids).t().reshape(-1).to(torch.int32).contiguous()
        ends = torch.arange(len(ids) + 1, dtype=torch.int32)
        return ids, ends, torch.from_numpy(batch.dense), torch.from_numpy(batch.labels)

    def step(self, batch: Prepared) -> torch.Tensor:
        """Train on a batch; the backward pass steps the rows."""
        ids, ends, dense, labels = batch
        return self.dense.step(self.rows(ids, ends), dense, labels)


if __name__ == "__main__":
    run(Fbgemm)
