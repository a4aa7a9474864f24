"""The model in TorchRec: a `FusedEmbeddingBagCollection`, whose rows step inside the backward pass.

Row-wise Adagrad by FBGEMM's `SplitTableBatchedEmbeddingBagsCodegen` on the CPU; ids come as a
`KeyedJaggedTensor`. A table a field: FBGEMM's fast CPU kernel takes only tables that no two features share.
Measured beside it on 2 cores, two rounds: `DistributedModelParallel` with one rank over gloo 1.10 of its
samples/s in bf16 and 0.91 in fp32, FBGEMM's tables without TorchRec (fbgemm_job.py) 1.06 and 0.81.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of packages that are no business of ours
    from torchrec.modules.embedding_configs import EmbeddingBagConfig, PoolingType
    from torchrec.modules.fused_embedding_modules import FusedEmbeddingBagCollection
    from torchrec.optim.rowwise_adagrad import RowWiseAdagrad
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from bench.peers.dense import DIM, FIELDS, Dense
from bench.peers.job import Batch, Options, run

RATE, EPS = 0.2, 1e-8
KEYS = [f"field{i}" for i in range(FIELDS)]

Prepared = tuple[KeyedJaggedTensor, torch.Tensor, torch.Tensor]


class TorchRec:
    """A table a field, one id a bag."""

    def __init__(self, options: Options, meta: Mapping[str, Any]) -> None:
        torch.manual_seed(0)
        torch.set_num_threads(options.threads)
        tables = [
            EmbeddingBagConfig(
                name=f"table_of_{key}",
                embedding_dim=DIM,
                num_embeddings=meta["cardinality"],
                feature_names=[key],
                pooling=PoolingType.SUM,
            )
            for key in KEYS
        ]
        self.rows = FusedEmbeddingBagCollection(tables, RowWiseAdagrad, {"lr": RATE, "eps": EPS})
        self.dense = Dense(options.precision)

    def prepared(self, batch: Batch) -> Prepared:
        """Return ids by key, then by row; numbers; labels."""
        ids = torch.from_numpy(batch.ids).t().reshape(-1).contiguous()
        lengths = torch.ones(len(ids), dtype=torch.int32)
        keyed = KeyedJaggedTensor(KEYS, ids, lengths=lengths)
        return keyed, torch.from_numpy(batch.dense), torch.from_numpy(batch.labels)

    def step(self, batch: Prepared) -> torch.Tensor:
        """Train on a batch; the backward pass steps the rows."""
        keyed, dense, labels = batch
        return self.dense.step(self.rows(keyed).values(), dense, labels)


if __name__ == "__main__":
    run(TorchRec)
