"""The model on TensorFlow Recommenders Addons: one dynamic embedding on a cuckoo hash table, Keras' MLP.

All fields share the table, so that a step has one `unique`, one lookup and one update. Rows step by Adagrad
per element, the nearest to row-wise that there is. In a `tf.function`. Measured beside this, CPU time a
sample at
4096: `bp_v2` 1.2 times, Keras' newer optimizers 1.1 times, batches of 2048 1.2 times and of 8192 1.1 times.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import tensorflow as tf
import tf_keras as keras

from bench.peers.job import Batch, Options, run

FIELDS, NUMBERS, DIM = 26, 13, 16
RANGE, FIRST_SQUARES = 0.01, 1e-10
CPU_LIBRARY = "_cuckoo_hashtable_ops.so"

Prepared = tuple[tf.Tensor, tf.Tensor, tf.Tensor]


class NotLoaded:
    """Replaces a library of operators for GPUs: any use of one fails, with its name."""


def dynamic_embedding() -> Any:
    """Import the package's module on a TensorFlow for CPUs.

    The wheel 0.8.1 is built with CUDA, against the `tensorflow` of the same version: three of its five
    libraries (`_math_ops`, `_data_flow_ops`, `_hkv_ops`) need symbols that `tensorflow-cpu` lacks, such as
    `stream_executor::gpu::ScopedActivateExecutorContext`. They hold operators for GPUs, which CPUs do
    without; `_cuckoo_hashtable_ops` needs none of them. So only that one has to load.
    """
    load = tf.load_op_library

    def load_if_possible(path: str) -> Any:
        try:
            return load(path)
        except tf.errors.NotFoundError as error:
            if "undefined symbol" not in str(error) or path.endswith(CPU_LIBRARY):
                raise
            return NotLoaded()

    tf.load_op_library = load_if_possible
    try:
        from tensorflow_recommenders_addons import (  # noqa: PLC0415 - patched for this import only
            dynamic_embedding as module,
        )
    finally:
        tf.load_op_library = load
    return module


class DynamicEmbedding:
    """C ids a field; id f * C + id belongs to field f."""

    def __init__(self, options: Options, meta: Mapping[str, Any]) -> None:
        tf.get_logger().setLevel("ERROR")
        de = dynamic_embedding()
        tf.random.set_seed(0)
        tf.config.threading.set_intra_op_parallelism_threads(options.threads)
        tf.config.threading.set_inter_op_parallelism_threads(1)
        if options.precision == "bf16":
            keras.mixed_precision.set_global_policy("mixed_bfloat16")
        self.cardinality = meta["cardinality"]
        self.rows = de.keras.layers.Embedding(
            DIM,
            initializer=tf.keras.initializers.RandomUniform(-RANGE, RANGE, seed=0),
            init_capacity=FIELDS * self.cardinality,
            kv_creator=de.CuckooHashTableCreator(),
            name="rows",
        )
        dense = keras.layers.Dense
        self.mlp = keras.Sequential([dense(512, "relu"), dense(256, "relu"), dense(1)])
        self.mlp.build((None, FIELDS * DIM + NUMBERS))
        optimizers = keras.optimizers.legacy
        self.row_step = de.DynamicEmbeddingOptimizer(optimizers.Adagrad(0.2, FIRST_SQUARES))
        self.dense_step = optimizers.Adam(1e-3)
        self._step = tf.function(self._traced)

    def prepared(self, batch: Batch) -> Prepared:
        """Return ids of rows (B, 26), numbers and labels."""
        ids = batch.ids + tf.range(FIELDS, dtype=tf.int64) * self.cardinality
        return ids, tf.constant(batch.dense), tf.constant(batch.labels)

    def step(self, batch: Prepared) -> tf.Tensor:
        """Train on a batch."""
        return self._step(*batch)

    def _traced(self, ids: tf.Tensor, dense: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            rows = tf.reshape(self.rows(ids), [-1, FIELDS * DIM])
            logits = tf.cast(tf.squeeze(self.mlp(tf.concat([rows, dense], 1)), 1), tf.float32)
            loss = tf.reduce_mean(tf.nn.sigmoid_cross_entropy_with_logits(labels, logits))
        variables = [self.rows.shadow, *self.mlp.trainable_variables]
        of_rows, *of_dense = tape.gradient(loss, variables)
        self.row_step.apply_gradients([(of_rows, variables[0])])
        self.dense_step.apply_gradients(zip(of_dense, variables[1:], strict=True))
        return loss


if __name__ == "__main__":
    run(DynamicEmbedding)
