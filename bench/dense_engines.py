"""Scoring the dense part by our native functions, by ONNX Runtime and by torch; ADR 0004's figures.

    python -m bench.dense_engines [SECONDS A CASE]      needs onnx and onnxruntime

One request's 100 rows of the model of the budgets: 26 ids, 13 dense numbers, dim 16, MLP 512-256-1, one
thread. `whole` is the work of serving after the lookup: rows and positions to predictions (gather, linear
sums, FM, MLP, biases, mixture). `mlp` is the network alone, from a ready input (100, 432), which flatters the
engines that would still need a gather before and the hedge after it. Medians of CPU time; the predictions of
every engine are compared with the native ones.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import onnx
import onnxruntime
import torch
from onnx import TensorProto, helper, numpy_helper

from bench.rounds import micros
from freshet.config.spec.layout import layout_of
from freshet.model.hedge import HedgeDense
from freshet.model.inputs import GroupInputs, ModelInputs
from freshet.types import F32
from tests.fixtures.specs import make_spec

ROWS, IDS, DENSE, DIM = 100, 26, 13, 16
DEEP = (512, 256)
SPEC = make_spec(ids=IDS, dense=((False, False),) * DENSE, deep=DEEP, experts=("fm", "deep"))


def native_model(precision: str) -> HedgeDense:
    """Return a model whose last layer is not zero, so that the MLP counts."""
    model = HedgeDense(SPEC, training=False, precision="bf16" if precision == "bf16" else "fp32")
    rng = np.random.default_rng(0)
    state = model.state()
    state["weights/mlp/head"] = rng.normal(0, 0.1, state["weights/mlp/head"].shape).astype(np.float32)
    model.load_state(state, weights_only=True)
    return model


def request() -> ModelInputs:
    """Return 100 candidates of one user; half of the ids are the request's, half the candidate's."""
    rng = np.random.default_rng(1)
    (group,) = layout_of(SPEC).groups
    shared = np.repeat(np.arange(IDS // 2), ROWS)
    own = IDS // 2 + np.arange(ROWS * (IDS - IDS // 2))
    positions = np.concatenate([shared, own]).astype(np.int32)
    rows = rng.normal(0, 0.3, (int(positions.max()) + 1, group.width)).astype(np.float32)
    starts = (np.arange(IDS + 1) * ROWS).astype(np.uint32)
    dense = rng.normal(size=(ROWS, DENSE)).astype(np.float32)
    return ModelInputs(ROWS, [GroupInputs(rows, positions, starts, [None] * IDS)], dense, None)


Weights = dict[str, F32]


def weights_of(model: HedgeDense) -> Weights:
    """Return the weights by name, and the hedge as constants."""
    state = model.state()
    return {
        **{f"w{i}": state[f"weights/mlp/{i}/weight"] for i in range(len(DEEP))},
        **{f"b{i}": state[f"weights/mlp/{i}/bias"] for i in range(len(DEEP))},
        "head": np.ascontiguousarray(state["weights/mlp/head"].T),
        "bias": state["weights/bias"].astype(np.float32),  # (1, 2): fm, deep
        "mixture": model.mixture(),  # (1, 2)
    }


def slots() -> tuple[int, int]:
    """Return the offsets of the linear scalar and of the vector in a row."""
    (group,) = layout_of(SPEC).groups
    linear, vector = group.slot("linear"), group.slot("vector")
    assert linear is not None
    assert vector is not None
    return linear.start, vector.start


# --- ONNX Runtime


def session(nodes: list[Any], inputs: list[Any], constants: dict[str, Any]) -> onnxruntime.InferenceSession:
    """Return a session that runs in the caller's thread."""
    graph = helper.make_graph(
        nodes,
        "dense",
        inputs,
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [None, None])],
        [numpy_helper.from_array(np.ascontiguousarray(value), name) for name, value in constants.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.checker.check_model(model)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    return onnxruntime.InferenceSession(model.SerializeToString(), options, ["CPUExecutionProvider"])


def mlp_nodes(source: str) -> list[Any]:
    """Return the nodes of the network, from `source` to `deep` (B, 1)."""
    nodes = []
    for i in range(len(DEEP)):
        nodes += [
            helper.make_node("Gemm", [source, f"w{i}", f"b{i}"], [f"h{i}"]),
            helper.make_node("Relu", [f"h{i}"], [f"r{i}"]),
        ]
        source = f"r{i}"
    return [*nodes, helper.make_node("MatMul", [source, "head"], ["deep"])]


def onnx_mlp(weights: Weights) -> Callable[[F32], F32]:
    """Return a function of the network alone."""
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, [None, weights["w0"].shape[0]])
    last = helper.make_node("Identity", ["deep"], ["y"])
    run = session([*mlp_nodes("x"), last], [x], {k: weights[k] for k in ("w0", "b0", "w1", "b1", "head")}).run
    return lambda x: run(["y"], {"x": x})[0]


def onnx_whole(weights: Weights) -> Callable[[ModelInputs], F32]:
    """Return a function of everything after the lookup, as one graph."""
    at, vectors = slots()
    node = helper.make_node
    nodes = [
        node("Gather", ["rows", "positions"], ["picked"], axis=0),  # (IDS, B, S)
        node("Slice", ["picked", "lin0", "lin1", "ax2"], ["scalars"]),
        node("ReduceSum", ["scalars", "ax0"], ["linear"], keepdims=0),  # (B, 1)
        node("Slice", ["picked", "vec0", "vec1", "ax2"], ["vectors"]),  # (IDS, B, DIM)
        node("ReduceSum", ["vectors", "ax0"], ["s"], keepdims=0),
        node("Mul", ["s", "s"], ["ss"]),
        node("Mul", ["vectors", "vectors"], ["vv"]),
        node("ReduceSum", ["vv", "ax0"], ["q"], keepdims=0),
        node("Sub", ["ss", "q"], ["d"]),
        node("ReduceSum", ["d", "ax1"], ["pairs2"], keepdims=1),
        node("Mul", ["pairs2", "half"], ["pairs"]),
        node("Add", ["linear", "pairs"], ["fm"]),
        node("Transpose", ["vectors"], ["bvd"], perm=[1, 0, 2]),
        node("Reshape", ["bvd", "flat"], ["v"]),
        node("Concat", ["dense", "v"], ["x"], axis=1),
        *mlp_nodes("x"),
        node("Add", ["fm", "deep"], ["z1"]),
        node("Concat", ["fm", "z1"], ["z"], axis=1),
        node("Add", ["z", "bias"], ["logits"]),
        node("Sigmoid", ["logits"], ["p"]),
        node("Mul", ["p", "mixture"], ["weighted"]),
        node("ReduceSum", ["weighted", "ax1"], ["y"], keepdims=1),
    ]
    constants = {
        **weights,
        "half": np.array(0.5, np.float32),
        "lin0": np.array([at]), "lin1": np.array([at + 1]),
        "vec0": np.array([vectors]), "vec1": np.array([vectors + DIM]),
        "ax0": np.array([0]), "ax1": np.array([1]), "ax2": np.array([2]), "flat": np.array([-1, IDS * DIM]),
    }  # fmt: skip
    inputs = [
        helper.make_tensor_value_info("rows", TensorProto.FLOAT, [None, None]),
        helper.make_tensor_value_info("positions", TensorProto.INT32, [IDS, None]),
        helper.make_tensor_value_info("dense", TensorProto.FLOAT, [None, DENSE]),
    ]
    run = session(nodes, inputs, constants).run

    def score(inputs: ModelInputs) -> F32:
        (group,) = inputs.groups
        positions = group.positions.reshape(IDS, inputs.size)
        scores: F32 = run(["y"], {"rows": group.rows, "positions": positions, "dense": inputs.dense})[0]
        return scores

    return score


# --- torch


def torch_mlp(weights: Weights) -> Callable[[F32], F32]:
    """Return a function of the network alone."""
    w = {name: torch.from_numpy(np.ascontiguousarray(value.T)) for name, value in weights.items()}

    def score(x: F32) -> F32:
        with torch.inference_mode():
            h = torch.from_numpy(x)
            for i in range(len(DEEP)):
                h = torch.nn.functional.linear(h, w[f"w{i}"], w[f"b{i}"]).relu_()
            scores: F32 = torch.nn.functional.linear(h, w["head"]).numpy()
            return scores

    return score


def torch_whole(weights: Weights) -> Callable[[ModelInputs], F32]:
    """Return a function of everything after the lookup, eager."""
    at, first = slots()
    network = torch_mlp(weights)
    bias, mixture = torch.from_numpy(weights["bias"]), torch.from_numpy(weights["mixture"])

    def score(inputs: ModelInputs) -> F32:
        (group,) = inputs.groups
        with torch.inference_mode():
            positions = torch.from_numpy(group.positions.astype(np.int64))
            picked = torch.from_numpy(group.rows).index_select(0, positions).view(IDS, inputs.size, -1)
            vectors = picked[:, :, first : first + DIM]
            s = vectors.sum(0)
            fm = picked[:, :, at].sum(0) + 0.5 * (s * s - (vectors * vectors).sum(0)).sum(1)
            x = torch.cat(
                [torch.from_numpy(inputs.dense), vectors.transpose(0, 1).reshape(inputs.size, -1)], 1
            )
            deep = torch.from_numpy(network(x.numpy()))[:, 0]
            p = torch.sigmoid(torch.stack([fm, fm + deep], 1) + bias)
            scores: F32 = (p * mixture).sum(1, keepdim=True).numpy()
            return scores

    return score


def main() -> None:
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else 2.0
    torch.set_num_threads(1)
    inputs = request()
    models = {precision: native_model(precision) for precision in ("fp32", "bf16")}
    weights = weights_of(models["fp32"])
    expected = models["fp32"].score(inputs).copy()
    wholes: dict[str, Callable[[ModelInputs], F32]] = {
        "native fp32": models["fp32"].score,
        "native bf16": models["bf16"].score,
        "onnxruntime": onnx_whole(weights),
        "torch": torch_whole(weights),
    }
    x = np.random.default_rng(2).normal(size=(ROWS, weights["w0"].shape[0])).astype(np.float32)
    networks = {"onnxruntime": onnx_mlp(weights), "torch": torch_mlp(weights)}
    apart = {name: float(np.abs(score(inputs) - expected).max()) for name, score in wholes.items()}
    assert max(apart.values()) < 0.01, apart
    rounds: dict[str, list[float]] = {}
    for _ in range(5):  # interleaved: a busy machine is equally busy for all
        for name, score in wholes.items():
            rounds.setdefault(f"whole, {name}", []).append(micros(partial(score, inputs), seconds / 5))
        for name, network in networks.items():
            rounds.setdefault(f"mlp, {name}", []).append(micros(partial(network, x), seconds / 5))
    print(
        json.dumps(
            {
                "rows": ROWS,
                "kernels": models["fp32"].native.kernels,
                "onnxruntime": onnxruntime.__version__,
                "torch": torch.__version__,
                "micros": {name: float(np.median(found)) for name, found in rounds.items()},
                "predictions_apart": apart,
            },
            indent=1,
        )
    )


if __name__ == "__main__":
    main()
