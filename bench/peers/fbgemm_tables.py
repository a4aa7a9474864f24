"""FBGEMM's table-batched embeddings on the CPU, set up for speed."""

from __future__ import annotations

import warnings
from typing import Any

import torch

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of packages that are not ours
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
        BoundsCheckMode,
        ComputeDevice,
        EmbeddingLocation,
        SplitTableBatchedEmbeddingBagsCodegen,
    )


def tables(count: int, rows: int, dim: int, index: torch.dtype = torch.int32) -> Any:
    """Return `count` tables of `rows` rows each, with row-wise Adagrad (0.2) in the backward pass.

    Ids and ends are of type `index`; no check of ids against the bounds.
    """
    batched = SplitTableBatchedEmbeddingBagsCodegen(
        [(rows, dim, EmbeddingLocation.HOST, ComputeDevice.CPU)] * count,
        optimizer=EmbOptimType.EXACT_ROWWISE_ADAGRAD,
        learning_rate=0.2,
        eps=1e-8,
        bounds_check_mode=BoundsCheckMode.NONE,
        embedding_table_index_type=index,
        embedding_table_offset_type=index,
    )
    batched.init_embedding_weights_uniform(-0.01, 0.01)
    return batched
