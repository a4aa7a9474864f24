"""The model on PaddlePaddle's parameter server: one server and one trainer, over the loopback interface.

The way its documentation recommends for recommenders on CPUs: asynchronous mode, `sparse_embedding` in a
`MemorySparseTable` of the server, an `InMemoryDataset` that `--threads` threads of the trainer run through.
All fields share one table, so that a batch is looked up with one request; a row's id is its number + 1,
because Paddle drops id 0. Its `SparseAdaGradSGDRule` is row-wise Adagrad, but takes the mean of a row's
gradients in a batch, not their sum, and one dimension of the 16 has an accumulator of its own.

bf16 exists for the three products only (oneDNN) and in one thread: with two, Paddle 2.6.2 crashes.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from contextlib import ExitStack, redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from bench.peers.job import Options, batches_of, parsed, serve
from bench.peers.paddle_server import IS_SERVER, cpu_s, end_with_parent, free_ports, roles, started

FIELDS, NUMBERS, DIM = 26, 13, 16
PASS_BATCHES_OF_4096 = 48
"""A pass of the dataset has 196,608 rows; a measurement takes whole passes."""

SHARDS = 16
"""Shards of the table. The default of 1000, meant for clusters, costs the server 30 % more CPU here."""

FIRST_SQUARES = 1.0
"""Paddle divides by sqrt(1 + squares / first), without the squares of the current gradient: so not near 0."""

ROW_RATE, DENSE_RATE = 0.2, 1e-3
RANGE = 0.01
PRODUCTS = {"mul", "mul_grad"}


def table_settings(name: str) -> dict[str, Any]:
    """Return the settings of the rows' table, by the path in Paddle's protocol buffer."""
    settings: dict[str, Any] = {
        "table_class": "MemorySparseTable",
        "shard_num": SHARDS,
        "accessor.accessor_class": "SparseAccessor",
        "accessor.fea_dim": DIM + 2,
        "accessor.embedx_dim": DIM - 1,
        "accessor.embedx_threshold": 0,
    }
    for part in ("embed", "embedx"):
        rule = f"accessor.{part}_sgd_param"
        settings[f"{rule}.name"] = "SparseAdaGradSGDRule"
        settings[f"{rule}.adagrad.learning_rate"] = ROW_RATE
        settings[f"{rule}.adagrad.initial_g2sum"] = FIRST_SQUARES
        settings[f"{rule}.adagrad.initial_range"] = RANGE
        settings[f"{rule}.adagrad.weight_bounds"] = [-10.0, 10.0]
    return {f"table_parameters.{name}.{key}": value for key, value in settings.items()}


class Model:
    """The program and its inputs."""

    def __init__(self, cardinality: int, half: bool) -> None:
        import paddle  # noqa: PLC0415 - the rest of this module is tested where Paddle is not installed
        from paddle.distributed import fleet  # noqa: PLC0415 - likewise

        paddle.enable_static()
        paddle.seed(0)
        fleet.init(is_collective=False)
        data, nn = paddle.static.data, paddle.static.nn
        ids = data("ids", [-1, 1], "int64", lod_level=1)
        dense, labels = data("dense", [-1, NUMBERS], "float32"), data("labels", [-1, 1], "float32")
        self.feeds = [ids, dense, labels]
        rows = nn.sparse_embedding(
            ids, [FIELDS * cardinality + 1, DIM], param_attr=paddle.ParamAttr(name="rows")
        )
        x = paddle.concat([paddle.reshape(rows, [-1, FIELDS * DIM]), dense], 1)
        for width in (512, 256):
            x = nn.fc(x, width, activation="relu")
        losses = paddle.nn.functional.binary_cross_entropy_with_logits(nn.fc(x, 1), labels, reduction="none")
        loss = paddle.mean(losses)
        self.loss_sum, self.loss_count = (
            paddle.static.create_global_var([1], 0.0, "float32", persistable=True, name=name)
            for name in ("loss_sum", "loss_count")
        )
        paddle.assign(self.loss_sum + loss.detach(), self.loss_sum)
        paddle.increment(self.loss_count)
        if half:
            bf16 = paddle.static.amp.bf16
            lists = bf16.AutoMixedPrecisionListsBF16(custom_bf16_list={"mul"})
            bf16.rewrite_program_bf16(paddle.static.default_main_program(), lists)
        strategy = fleet.DistributedStrategy()
        strategy.a_sync = True
        strategy.sparse_table_configs = {"rows": table_settings("rows")}
        adam = paddle.optimizer.Adam(DENSE_RATE)
        fleet.distributed_optimizer(adam, strategy).minimize(loss)
        self.paddle, self.fleet = paddle, fleet

    def use_onednn(self) -> None:
        """Use oneDNN for the products: faster than Paddle's MKL of 2019, and required for bf16."""
        for op in self.paddle.static.default_main_program().global_block().ops:
            if op.type in PRODUCTS:
                op._set_attr("use_mkldnn", True)

    def mean_loss(self) -> float:
        """Return the mean loss of the batches since the last call."""
        scope = self.paddle.static.global_scope()
        tensors = [scope.find_var(v.name).get_tensor() for v in (self.loss_sum, self.loss_count)]
        total, count = (float(np.array(tensor)[0]) for tensor in tensors)
        for tensor in tensors:
            tensor.set(np.zeros(1, np.float32), self.paddle.CPUPlace())
        return total / count


def write_slots(options: Options, cardinality: int, file: Path) -> int:
    """Write the first rows as Paddle's slots, each a count and its values; returns the number of rows."""
    written = 0
    offsets = np.arange(FIELDS) * cardinality + 1
    with file.open("w") as lines:
        for batch in batches_of(options):
            ids = (batch.ids + offsets).tolist()
            for row, numbers, label in zip(ids, batch.dense.tolist(), batch.labels.tolist(), strict=True):
                first, second = " ".join(map(str, row)), " ".join([f"{number:.6g}" for number in numbers])
                lines.write(f"{FIELDS} {first} {NUMBERS} {second} 1 {label:g}\n")
            written += len(ids)
            if written >= PASS_BATCHES_OF_4096 * 4096:
                break
    return written


def train(model: Model, options: Options, cardinality: int, server: int) -> None:
    """Read the rows into memory, pass over them once to warm up, then measure."""
    paddle = model.paddle
    executor = paddle.static.Executor(paddle.CPUPlace())
    executor.run(paddle.static.default_startup_program())
    model.fleet.init_worker()
    model.use_onednn()
    dataset = paddle.distributed.InMemoryDataset()
    threads = 1 if options.precision == "bf16" else options.threads
    dataset.init(use_var=model.feeds, pipe_command="cat", batch_size=options.batch, thread_num=threads)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "slots"
        rows = write_slots(options, cardinality, file)
        dataset.set_filelist([str(file)])
        dataset.load_into_memory()

    def run_through() -> None:
        with redirect_stdout(sys.stderr):
            executor.train_from_dataset(paddle.static.default_main_program(), dataset, thread=threads)

    def measure() -> dict[str, float]:
        passes = 0
        began, cpu_began = time.perf_counter(), time.process_time() + cpu_s(server)
        while time.perf_counter() - began < options.seconds:
            run_through()
            passes += 1
        took, cpu = time.perf_counter() - began, time.process_time() + cpu_s(server) - cpu_began
        return {
            "samples_per_s": passes * rows / took,
            "samples_per_cpu_s": passes * rows / cpu,  # of trainer and server
            "logloss": model.mean_loss(),
            "batches": passes * rows // options.batch,
            "threads": threads,
        }

    run_through()
    model.mean_loss()
    serve(measure, options.wait)
    model.fleet.stop_worker()


def main() -> None:
    """Start the server, then train; the server's process runs this, too."""
    options = parsed()
    cardinality = json.loads((options.data / "meta.json").read_text())["cardinality"]
    half = options.precision == "bf16"
    if IS_SERVER:
        end_with_parent()
        model = Model(cardinality, half)
        model.fleet.init_server()
        model.fleet.run_server()
        return
    server_role, trainer_role = roles(*free_ports(2))
    with ExitStack() as stack:
        server = started(server_role, stack)
        os.environ.update(trainer_role)
        options = replace(options, data=options.data.absolute())
        os.chdir(stack.enter_context(tempfile.TemporaryDirectory()))  # Paddle leaves *_train_desc.prototxt
        with redirect_stdout(sys.stderr):
            model = Model(cardinality, half)
        train(model, options, cardinality, server.pid)


if __name__ == "__main__":
    main()
