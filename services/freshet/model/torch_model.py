"""`DenseModel` of a torch network: autograd between a `Gather` of rows and the sums of their gradients.

The network, its gradients and its step run on the device of its `Placement`. The rules of `Heads` are those
of the native hedge (`hedge.cpp`, `hedge_start.hpp`). Letters: B samples, L labels, D dense columns, W columns
of vectors.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from freshet.config.spec.layout import layout_of
from freshet.config.spec.model import Spec
from freshet.errors import ConfigError, Mismatch
from freshet.model import (
    LABEL_MERGES,
    TRUST_RATIOS,
    VARIANCE_STEP,
    Lane,
    ModelInputs,
    Precision,
    State,
    StepResult,
    variance_step,
)
from freshet.model.custom import Inputs, Model, Shape
from freshet.model.device import CpuPlacement, Placement
from freshet.model.gather import DeviceGather, Gather, Gathered, HostGather, Standards
from freshet.model.inputs import Labels
from freshet.model.lamb import TrustRatios
from freshet.model.plan import InputPlan, input_plan
from freshet.types import F32, F64, Bool

VARIANCE_FLOOR = 1e-12

DENSE_ROWS_KNOWN, DENSE_GROWTH = 256.0, 3.0
"""From so many values of a column on, a step adds at most so many times its sum of squares about the mean.
One wild value (1e9) would make all others alike for ever; a column at a new level is followed within tens of
steps. `kDenseRowsKnown` and `kDenseGrowth` of hedge.cpp."""

START_ROWS = 100.0
"""Samples, by weight, whose deviation is a numeric label's scale; `kStartRows` of hedge_start.hpp."""


class Sums:
    """A lane's sums since the last step: views into one flat array, additive over lanes and ranks."""

    def __init__(self, labels: int, dense: int) -> None:
        self.all = np.zeros(1 + 4 * labels + 3 * dense)
        self.label = self.all[1 : 1 + 3 * labels].reshape(labels, 3)  # rows, Σ y, Σ y²
        self.gradient = self.all[1 + 3 * labels : 1 + 4 * labels]  # Σ of the loss's gradient at the logits
        self.dense = self.all[1 + 4 * labels :].reshape(dense, 3)  # n, Σ d, Σ d², d from the running mean

    @property
    def rows(self) -> float:
        """Sum of the rows' weights."""
        return float(self.label[:, 0].sum())


@dataclass(slots=True, eq=False)
class Heads:
    """Biases, scales of numeric labels and running means: the state of each label and dense column."""

    number: Bool  # (L,) the label is numeric
    standard: Bool  # (D,) the column is standardised
    bias_lr: float
    bias: F64 = field(init=False)  # (L,)
    squares: F64 = field(init=False)  # (L,) Adagrad's accumulators of the biases
    started: F64 = field(init=False)  # (L,) 1 where the bias has its starting value
    scale: F64 = field(init=False)  # (L,) predictions of a numeric label are scale · z
    label_sums: F64 = field(init=False)  # (L, 3) rows, Σ y, Σ y², until started
    dense: F64 = field(init=False)  # (D, 3): count, mean, Σ (x - mean)²

    def __post_init__(self) -> None:
        labels = len(self.number)
        self.bias, self.squares, self.started = np.zeros((3, labels))
        self.scale, self.label_sums = np.ones(labels), np.zeros((labels, 3))
        self.dense = np.zeros((len(self.standard), 3))

    def standards(self) -> Standards:
        """Return how columns are standardised; the scale of one with fewer than two values is 0."""
        count, mean, squares = self.dense.T
        deviation = np.sqrt(np.maximum(squares, 0) / np.maximum(count, 1) + VARIANCE_FLOOR)
        scale = np.where(count > 1, 1 / deviation, 0.0)
        return Standards(
            self.standard, np.where(self.standard, mean, 0.0), np.where(self.standard, scale, 1.0)
        )

    def count(self, labels: Labels) -> F64:
        """Return a batch's (L, 3) weighted sums: rows, Σ y, Σ y²."""
        w, y = labels.weight.astype(np.float64), labels.value.astype(np.float64)
        columns = [np.bincount(labels.index, x, len(self.number)) for x in (w, w * y, w * y * y)]
        return np.stack(columns, 1).astype(np.float64)

    def count_dense(self, dense: F32, into: F64) -> None:
        """Add a batch's dense numbers, (B, D) float32, to the (D, 3) sums `into`."""
        away = np.where(np.isfinite(dense), dense - self.dense[:, 1], 0.0)
        columns = np.stack([np.isfinite(dense).sum(0), away.sum(0), (away**2).sum(0)], 1)
        into += columns * self.standard[:, None]

    def learning(self, seen: F64) -> tuple[F64, F64, Bool]:
        """Return (bias, scale, has a gradient), each (L,), for a batch with these (L, 3) sums.

        A label that is not started takes starting values: the log-odds of its rows, with half a positive and
        half a negative row added; or for a numeric label the mean, in deviations. A numeric label has no
        gradient until `START_ROWS` rows were seen and their values differ.
        """
        bias, scale, teaches = self.bias.copy(), self.scale.copy(), np.ones(len(self.bias), bool)
        for i in np.flatnonzero(self.started == 0):
            n, total, squares = self.label_sums[i] + seen[i]
            if n <= 0:
                teaches[i] = not self.number[i]
            elif not self.number[i]:
                bias[i] = np.log((total + 0.5) / (n - total + 0.5))
            else:
                mean = total / n
                variance = squares / n - mean * mean
                teaches[i] = n >= START_ROWS and variance > 1e-12 * (mean * mean + 1e-12)
                scale[i] = np.sqrt(variance) if teaches[i] else 1.0
                bias[i] = mean / scale[i]
        return bias, scale, teaches

    def step(self, sums: Sums) -> None:
        """Start new labels, step the biases of the others and merge the sums of the dense columns."""
        bias, scale, teaches = self.learning(sums.label)
        seen = sums.label[:, 0] > 0
        fresh = seen & (self.started == 0)
        old = seen & (self.started > 0) & (sums.gradient != 0)
        self.label_sums[fresh] += sums.label[fresh]
        self.bias[fresh], self.scale[fresh], self.started[fresh] = bias[fresh], scale[fresh], teaches[fresh]
        self.squares[old] += sums.gradient[old] ** 2
        self.bias[old] -= self.bias_lr * sums.gradient[old] / np.sqrt(self.squares[old])
        for column, (n, total, squares) in zip(self.dense, sums.dense, strict=True):
            if n > 0:  # Chan et al. 1979
                away, all_n = total / n, column[0] + n
                more = squares - total * away + away * away * column[0] * n / all_n
                most = DENSE_GROWTH * column[2]
                if column[0] >= DENSE_ROWS_KNOWN and column[2] > VARIANCE_FLOOR * column[0] and more > most:
                    away *= np.sqrt(most / more)
                    more = most
                column[2] = max(column[2] + more, 0.0)  # equal numbers: rounding errors only, below 0 too
                column[1] += away * n / all_n
                column[0] = all_n

    def predict(self, logits: F32) -> F32:
        """Convert (B, L) logits without biases to (B, L) probabilities or numbers."""
        z = logits + self.bias
        with np.errstate(over="ignore"):
            p = np.where(self.number, z * self.scale, 1 / (1 + np.exp(-z)))
        return p.astype(np.float32)


HEAD_STATE = {
    "weights/bias": "bias",
    "optimizer/bias_squares": "squares",
    "statistics/started": "started",
    "statistics/scale": "scale",
    "statistics/label_sums": "label_sums",
    "statistics/dense": "dense",
}


class TorchDense:
    """`DenseModel` of a network. Its parameters are views of one flat tensor, so one operation sums or steps
    all."""

    merges = LABEL_MERGES

    def __init__(
        self,
        spec: Spec,
        build: Callable[[Shape], Model],
        *,
        training: bool,
        precision: Precision,
        new_placement: Callable[[], Placement] = CpuPlacement,
    ) -> None:
        """Build the network by `build`; `new_placement` returns a placement for each lane, all on one
        device."""
        self.placement, self.new_placement = new_placement(), new_placement
        self.spec, self.training, self.precision = spec, training, precision
        self.labels = len(spec.labels)
        self.plan = input_plan(spec, fm=False)
        dense = [spec.features[i] for i in layout_of(spec).dense]
        self.heads = Heads(
            np.array([label.loss != "logloss" for label in spec.labels]),
            np.array(["standard" in f.dense for f in dense], bool),
            spec.model.bias_lr,
        )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(spec.model.seed)
            self.network = build(_shape(spec, self.plan)).to(self.placement.device)
        _check_state(spec, self.network)
        self.names, self.flat = _flatten(self.network)
        self.first, self.second = torch.zeros_like(self.flat), torch.zeros_like(self.flat)
        lamb = spec.model.dense_optimizer == "lamb" and len(self.names) > 0
        self.trust = TrustRatios(self.tensor_ends) if lamb else None  # see `StepsLamb`
        self._steps = self.variance_steps = 0
        self._freeze_next = False  # the next step leaves the second moment as it is
        self.not_finite = {"samples": 0, "steps": 0}
        self._threads = threading.local()

    def lane(self) -> TorchLane:
        """Create a lane."""
        return TorchLane(self)

    def step(self, lanes: Sequence[Lane]) -> None:
        """Update once by the lanes' sums and zero them."""
        first, *others = [lane for lane in lanes if isinstance(lane, TorchLane)]
        frozen, self._freeze_next = self._freeze_next, False
        with self.placement.running():
            for other in others:
                first.merge(other)
            rows = first.sums.rows
            self.not_finite["samples"] += first.not_finite
            if rows > 0:
                self._steps += 1
                self.heads.step(first.sums)
                # Divide by at least `batch_rows`, so that a step of few rows is small: with the mean of its
                # own rows, a single early click would weigh as much as a batch of hundreds of negatives.
                gradient = first.summed() / self.gradient_rows(first)
                # Else the second moment would stay infinite, or a weight become NaN.
                wild = ~torch.isfinite(gradient * gradient)
                self.not_finite["steps"] += int(wild.any())
                self.variance_steps += not frozen
                self._step_weights(gradient.masked_fill_(wild, 0), frozen=frozen)
            first.clear()
            self.placement.fetch({})  # wait, as the lanes' streams are not ordered after this one

    def score(self, inputs: ModelInputs) -> F32:
        """Return (B, L) predictions."""
        lane = getattr(self._threads, "lane", None)
        if lane is None:
            lane = self._threads.lane = TorchLane(self)
        scored: F32 = lane.score(inputs)
        return scored

    def state(self) -> dict[str, NDArray[Any]]:
        """Return a copy of the dense state."""
        state = self._named("weights/network", self.flat)
        state |= {
            f"weights/buffer/{n}": b.detach().cpu().numpy().copy()
            for n, b in _kept_buffers(self.network).items()
        }
        if self.training:
            state |= self._named("optimizer/first", self.first) | self._named("optimizer/second", self.second)
            state["optimizer/step"] = np.array([self._steps], np.int64)
            state |= variance_step(self._steps, self.variance_steps)
            if self.trust is not None:
                state[TRUST_RATIOS] = self.trust.mean.copy()
        state |= {
            name: getattr(self.heads, field).copy()
            for name, field in HEAD_STATE.items()
            if self.training or not name.startswith("optimizer/")
        }
        return state

    def load_state(self, state: State, *, weights_only: bool = False) -> None:
        """Load a state. Raises Mismatch, before any change, if an array is missing or has another shape."""
        expected = self.state()
        wanted = [n for n in expected if not (weights_only and n.startswith("optimizer/"))]
        wanted = [n for n in wanted if n not in (VARIANCE_STEP, TRUST_RATIOS)]
        for name in wanted:
            if name not in state or state[name].shape != expected[name].shape:
                found = state[name].shape if name in state else "nothing"
                raise Mismatch(
                    f"array {name!r} of the version: found {found}, this spec expects {expected[name].shape};"
                    " it was written by another spec or another version of the model's class"
                )
        parts = {"weights/network": self.flat, "optimizer/first": self.first, "optimizer/second": self.second}
        for prefix, flat in parts.items():
            for name, place, shape in self.names:
                if f"{prefix}/{name}" in wanted:
                    flat[place] = torch.from_numpy(np.array(state[f"{prefix}/{name}"], np.float32)).reshape(
                        -1
                    )
                    assert flat[place].shape == (int(np.prod(shape)),)
        for name, buffer in _kept_buffers(self.network).items():
            buffer.copy_(torch.from_numpy(np.array(state[f"weights/buffer/{name}"])))
        self.placement.fetch({})
        for name, attribute in HEAD_STATE.items():
            if name in wanted:
                setattr(self.heads, attribute, np.array(state[name], np.float64))
        if "optimizer/step" in wanted:
            self._steps = int(state["optimizer/step"][0])
            self.variance_steps = int(state.get(VARIANCE_STEP, state["optimizer/step"])[0])
            if self.trust is not None:
                self.trust.mean[:] = state.get(TRUST_RATIOS, 0.0)

    def finite(self) -> bool:
        """Return whether the dense state is finite."""
        return all(bool(np.isfinite(array).all()) for array in self.state().values())

    def moments(self) -> tuple[F32, F32]:
        """Return views of Adam's (d,) moments; see `FreezesVariance`.

        Raises ConfigError if they are in a GPU's memory.
        """
        if self.flat.device.type != "cpu":
            raise ConfigError(
                "the trainer's device",
                "",
                f"{self.flat.device} for train.reduce = {self.spec.train.reduce!r}",
                "cpu: ranks sum momenta in host memory; on a GPU use another train.reduce, such as 'int8'",
            )
        return self.first.numpy(), self.second.numpy()

    def gradient_rows(self, lane: Lane) -> float:
        """Return by how many rows a step divides the lane's gradient.

        Raises TypeError for a lane of another kind of model.
        """
        if not isinstance(lane, TorchLane):
            raise TypeError(f"expected a lane of a torch model, found a {type(lane).__name__}")
        return max(lane.sums.rows, float(self.spec.train.batch_rows))

    def freeze_variance(self) -> None:
        """Make the next step leave Adam's second moment as it is; see `FreezesVariance`."""
        self._freeze_next = True

    @property
    def tensor_ends(self) -> list[int]:
        """Where the gradient of each parameter ends, rising, the last at d."""
        return [place.stop for _, place, _ in self.names]

    @property
    def adam_tensors(self) -> list[tuple[str, str, str]]:
        """Names of the parameters and their moments; see `NamesMoments`. Buffers are not among them."""
        names = [name for name, _, _ in self.names]
        return [(f"weights/network/{n}", f"optimizer/first/{n}", f"optimizer/second/{n}") for n in names]

    def _named(self, prefix: str, flat: torch.Tensor) -> dict[str, NDArray[Any]]:
        whole = flat.detach().cpu().numpy()
        return {f"{prefix}/{name}": whole[place].reshape(shape).copy() for name, place, shape in self.names}

    def _step_weights(self, gradient: torch.Tensor, *, frozen: bool) -> None:
        """Step by Adam with bias correction (Kingma & Ba 2015, algorithm 1), or by LAMB, of the same update.

        The rate rises over the warm-up. Epsilon is divided by `batch_rows`, as the gradient is, so it has the
        same weight at all batch sizes.
        """
        model, t = self.spec.model, self._steps
        kept = model.dense_momentum
        self.first.mul_(kept).add_(gradient, alpha=1 - kept)
        if not frozen:
            self.second.mul_(0.999).addcmul_(gradient, gradient, value=0.001)
        rate = model.dense_lr * min(1.0, t / max(model.dense_warmup_steps, 1))
        root = (
            (self.second / (1 - 0.999**self.variance_steps)).sqrt_().add_(1e-8 / self.spec.train.batch_rows)
        )
        with torch.no_grad():
            if self.trust is None:
                self.flat.addcdiv_(self.first, root, value=-rate / (1 - kept**t))
                return
            update = self.first / root.mul_(1 - kept**t)
            found = self.placement.fetch({"weights": self.flat, "update": update})
            ratios = self.trust.of_step(found["weights"], found["update"], frozen=frozen)
            for (_, place, _), ratio in zip(self.names, ratios.tolist(), strict=True):
                self.flat[place].add_(update[place], alpha=-rate * ratio)


class TorchLane:
    """`Lane` of a torch network."""

    def __init__(self, model: TorchDense) -> None:
        self.model, self.placement = model, model.new_placement()
        kind = HostGather if isinstance(self.placement, CpuPlacement) else DeviceGather
        self.gather: Gather = kind(model.plan, self.placement, model.labels)
        self.sums = Sums(model.labels, len(model.heads.standard))
        self._reduced: F32 | None = None  # copy of the gradient for an all-reduce, until the step
        self.not_finite = 0  # samples that taught nothing since the last step
        with self.placement.running():
            self.gradient = torch.zeros_like(model.flat)
            self.placement.fetch({})

    def score(self, inputs: ModelInputs) -> F32:
        """Return (B, L) predictions."""
        if not inputs.size:  # a network need not compute on empty tensors
            return np.empty((0, self.model.labels), np.float32)
        with torch.inference_mode(), self.placement.running():
            _, logits = self._forward(inputs, learning=False)
            return self.model.heads.predict(self.placement.fetch({"logits": logits.float()})["logits"])

    def forward_backward(self, inputs: ModelInputs, dense_weight: float = 1.0) -> StepResult:
        """Predict, compute the loss's gradients and add the dense ones to the lane's sums.

        Raises:
            ValueError: The inputs have no labels or do not fit the spec.
            RuntimeError: The model was built for serving.
        """
        model, labels = self.model, inputs.labels
        if labels is None:
            raise ValueError("forward_backward needs labels; to serve, use score")
        if not model.training:
            raise RuntimeError("this model was built for serving: build it with training=True to train")
        if not inputs.size:  # all samples of its blocks were refused (PROTOCOL 3): nothing to add to the sums
            unchanged = [np.zeros_like(group.rows) for group in inputs.groups]
            return StepResult(
                self.score(inputs), unchanged, np.zeros(model.labels), np.zeros((model.labels, 1))
            )
        if int(labels.index.max()) >= model.labels:
            raise ValueError(f"label index {labels.index.max()} of a spec with {model.labels} labels")
        seen = model.heads.count(labels)
        with self.placement.running():
            gathered, logits = self._forward(inputs, learning=True)
            z, losses, of_z, wild = self._losses(logits, labels, seen)
            parameters = list(model.network.parameters()) if dense_weight else []
            gradients = _gradients(z, of_z, [*gathered.leaves, *parameters])
            of_leaves = {f"leaf/{i}": gradients[i] for i in range(len(gathered.leaves))}
            if parameters:
                self.gradient += torch.cat([g.reshape(-1) for g in gradients[len(of_leaves) :]])
            found = self.placement.fetch(
                {"logits": logits.float(), "losses": losses, "wild": wild, "of_z": of_z} | of_leaves
            )
        result = StepResult(
            model.heads.predict(found["logits"]),
            self.gather.row_gradients(inputs, [found[name] for name in of_leaves]),
            seen[:, 0].copy(),
            np.bincount(labels.index, found["losses"], model.labels)[:, None].astype(np.float64),
        )
        self.not_finite += int(found["wild"].sum())
        if dense_weight:
            self.sums.label += seen
            self.sums.gradient += np.bincount(labels.index, found["of_z"], model.labels)
            model.heads.count_dense(inputs.dense, self.sums.dense)
        return result

    def reduce_buffers(self) -> list[F32 | F64]:
        """Return the lane's sums as flat arrays; additions to them count in the next step."""
        with self.placement.running():
            self._reduced = self.placement.fetch({"gradient": self.gradient})["gradient"]
        return [self._reduced, self.sums.all]

    def summed(self) -> torch.Tensor:
        """Return the gradient, as all-reduced if `reduce_buffers` was called."""
        if self._reduced is None:
            return self.gradient
        return self.placement.send("back/gradient", self._reduced)

    def merge(self, other: Lane) -> None:
        """Add another lane's sums and zero them. Raises TypeError for a lane of another kind of model."""
        if not isinstance(other, TorchLane):
            raise TypeError("lanes of different models cannot be merged")
        self.sums.all += other.sums.all
        self.not_finite += other.not_finite
        with self.placement.running():
            self.gradient += other.gradient
            other.clear()
            self.placement.fetch({})

    def clear(self) -> None:
        """Zero the sums."""
        self.sums.all[:] = 0.0
        self.not_finite = 0
        self.gradient.zero_()
        self._reduced = None

    def _forward(self, inputs: ModelInputs, *, learning: bool) -> tuple[Gathered, torch.Tensor]:
        """Return the gathered batch and its (B, L) logits."""
        plan, model = self.model.plan, self.model
        gathered = self.gather.gather(inputs, model.heads.standards(), learning=learning)
        vectors, start = gathered.vectors, plan.vectors_from
        by_name = {
            model.spec.features[i].name: vectors[:, c - start : c - start + dim] for i, c, dim in plan.vectors
        }
        with self._precision():
            logits = model.network(Inputs(inputs.size, by_name, vectors, gathered.dense, gathered.linear))
        if not isinstance(logits, torch.Tensor) or logits.shape != (inputs.size, model.labels):
            tensor = isinstance(logits, torch.Tensor)
            raise ConfigError(
                "spec",
                "model.kind",
                model.spec.model.kind,
                f"logits of shape {(inputs.size, model.labels)} from its forward, one column a label",
                f"it returned {tuple(logits.shape) if tensor else f'a {type(logits).__name__}'}",
            )
        return gathered, logits

    def _precision(self) -> AbstractContextManager[Any]:
        bf16 = self.model.precision == "bf16"
        return torch.autocast(self.placement.device.type, torch.bfloat16, enabled=bf16)

    def _losses(
        self, logits: torch.Tensor, labels: Labels, seen: F64
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return, each (B,): logits of the samples' labels, with bias; losses by label kind; their gradients.

        Last, 1 where a loss or a squared gradient was not finite: such a sample has none, and teaches
        nothing.
        """
        send, heads = self.placement.send, self.model.heads
        bias, scale, teaches = (a.astype(np.float32)[labels.index] for a in heads.learning(seen))
        own = send("own", labels.index.astype(np.int64))
        logit = logits.float().gather(1, own[:, None])[:, 0] + send("bias", bias)
        z = logit.detach().requires_grad_()
        y = send("y", labels.value)
        kinds = np.array([label.loss for label in self.model.spec.labels])[labels.index]
        losses = functional.binary_cross_entropy_with_logits(z, y.clamp(0, 1), reduction="none")
        if (kinds != "logloss").any():
            scaled = y / send("scale", scale)
            huber = functional.huber_loss(z, scaled, reduction="none")
            losses = torch.where(send("huber", kinds == "huber"), huber, losses)
            squared = send("mse", kinds == "mse")
            residual = torch.where(squared, z - scaled, 0.0)  # of others, a square might not be finite
            losses = torch.where(squared, 0.5 * residual**2, losses)
        losses = losses * send("weight", labels.weight * teaches)
        (gradient,) = torch.autograd.grad(losses.sum(), [z])
        losses = losses.detach()
        wild = ~(torch.isfinite(losses) & torch.isfinite(gradient * gradient))
        losses, gradient = losses.masked_fill(wild, 0), gradient.masked_fill(wild, 0)
        return logit, losses, gradient, wild * send("teaches", teaches)


def _gradients(of: torch.Tensor, gradient: torch.Tensor, wanted: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return the gradients of a loss with this gradient at `of`; zeros for tensors that it does not depend
    on."""
    if not wanted:  # which autograd refuses
        return []
    grads = torch.autograd.grad(of, wanted, gradient, allow_unused=True)
    return [torch.zeros_like(w) if g is None else g for w, g in zip(wanted, grads, strict=True)]


def _shape(spec: Spec, plan: InputPlan) -> Shape:
    vectors = {spec.features[i].name: dim for i, _, dim in plan.vectors}
    dense = len(layout_of(spec).dense) + len(plan.flags)
    return Shape(tuple(label.name for label in spec.labels), vectors, dense, tuple(spec.model.deep))


def _check_state(spec: Spec, network: Model) -> None:
    """Raise ConfigError for a parameter without a gradient, or a buffer that versions cannot hold."""

    def error(expected: str, hint: str) -> ConfigError:
        return ConfigError("spec", "model.kind", spec.model.kind, expected, hint)

    for name, parameter in network.named_parameters():
        if not parameter.requires_grad:
            hint = f"{name} has requires_grad = False: make it a buffer (register_buffer)"
            raise error("parameters that are all learned", hint)
    for name, buffer in _kept_buffers(network).items():
        try:
            buffer.numpy(force=True)
        except TypeError:
            hint = f"{name} is {buffer.dtype}; use torch.float32"
            raise error("buffers of a type of numpy", hint) from None


def _flatten(network: Model) -> tuple[list[tuple[str, slice, tuple[int, ...]]], torch.Tensor]:
    """Make all parameters views of one flat float32 tensor; return (name, slice, shape) of each, and it."""
    named = list(network.named_parameters())
    flat = torch.cat([p.detach().float().reshape(-1) for _, p in named]) if named else torch.zeros(0)
    names: list[tuple[str, slice, tuple[int, ...]]] = []
    at = 0
    for name, parameter in named:
        place = slice(at, at + parameter.numel())
        parameter.data = flat[place].view(parameter.shape)
        names.append((name, place, tuple(parameter.shape)))
        at = place.stop
    return names, flat


def _kept_buffers(network: Model) -> dict[str, torch.Tensor]:
    """Return the persistent buffers of the network, which are part of its state."""
    kept = network.state_dict(keep_vars=True).keys()
    return {name: buffer for name, buffer in network.named_buffers() if name in kept}
