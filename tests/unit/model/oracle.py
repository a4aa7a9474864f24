"""The default model's whole step in torch's autograd and plain numpy: what the native step must equal."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from freshet.config.spec.layout import layout_of
from freshet.config.spec.model import Spec
from freshet.model import GroupInputs, ModelInputs
from freshet.model.torch_model import START_ROWS

F64 = torch.float64

BUCKETS = 12
STACK_RATE, LINEAR_RATE, COUNT_BIAS_RATE, COUNT_SCALE_RATE = 0.02, 0.1, 0.05, 0.02
"""Adagrad's step sizes of the small weights."""


class Rounded(torch.autograd.Function):
    """Rounds to bf16; its gradient passes as if it had not."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        return x.to(torch.bfloat16).to(F64)

    @staticmethod
    def backward(ctx: Any, g: Any) -> Any:
        return g


def rounded(x: Any) -> Any:
    """Rounded to bf16."""
    return Rounded.apply(x)


class Oracle:
    """Starts from a model's state and keeps its own from there, in float64.

    `rounding`: matrix products take operands rounded to bf16, going forward.
    """

    def __init__(self, spec: Spec, state: dict[str, Any], *, rounding: bool = False) -> None:
        self.spec, self.layout, self.rounding = spec, layout_of(spec), rounding
        self.L = len(spec.labels)
        alone = spec.model.kind in ("linear", "mlp")
        self.experts = (spec.model.kind,) if alone else tuple(sorted(spec.model.experts, key="stack".__eq__))
        self.K = len(self.experts)
        linear = ("wide", "fast", "fm", "linear") if spec.defaults > 1 else ()
        self.linear = [name for name in self.experts if name in linear]
        flags = sum(spec.features[index].missing == "flag" for index in self.layout.dense)
        columns = len(self.layout.dense) + flags if self.linear else 0
        counted = [g for g in self.layout.groups if g.slot("count")]
        features = sum(len(g.features) for g in counted)
        stacked = self.K - 1 if "stack" in self.experts else 0
        self.heads_shapes = {
            "stack": (stacked,),
            "linear": (len(self.linear), columns),
            "count_bias": (features, BUCKETS),
            "count_scale": (features, BUCKETS),
        }
        starts = {"stack": 1 / max(stacked, 1), "linear": 0.0, "count_bias": 0.0, "count_scale": 1.0}
        self.heads = torch.tensor(
            np.concatenate(
                [
                    np.full((self.L, int(np.prod(shape))), starts[name])
                    for name, shape in self.heads_shapes.items()
                ],
                axis=1,
            ),
            dtype=F64,
            requires_grad=True,
        )
        self.heads_squares = np.zeros(self.heads.shape)
        self.weights = {
            n.removeprefix("weights/"): torch.tensor(a, dtype=F64, requires_grad=True)
            for n, a in state.items()
            if n.startswith("weights/mlp")
        }
        self.first = {n: torch.zeros_like(w) for n, w in self.weights.items()}
        self.second = {n: torch.zeros_like(w) for n, w in self.weights.items()}
        self.bias = np.zeros((self.L, self.K))
        self.squares = np.zeros((self.L, self.K))
        self.loss = np.zeros((self.L, self.K))
        self.started = np.zeros(self.L, bool)
        self.scale = np.ones(self.L)
        self.seen: list[list[tuple[float, float]]] = [[] for _ in range(self.L)]
        self.dense_seen: list[list[float]] = [[] for _ in self.layout.dense]
        self.steps = 0

    def mixture(self) -> Any:
        e = np.exp(self.loss.min(1, keepdims=True) - self.loss)
        return e / e.sum(1, keepdims=True)

    def parts(self) -> dict[str, Any]:
        """Small weights by name, each (L, ...)."""
        sizes = [int(np.prod(shape)) for shape in self.heads_shapes.values()]
        return {
            name: part.reshape(self.L, *shape)
            for (name, shape), part in zip(
                self.heads_shapes.items(), torch.split(self.heads, sizes, dim=1), strict=True
            )
        }

    def rates(self) -> Any:
        """(H,) step sizes of the small weights."""
        rates = (STACK_RATE, LINEAR_RATE, COUNT_BIAS_RATE, COUNT_SCALE_RATE)
        sizes = [int(np.prod(shape)) for shape in self.heads_shapes.values()]
        return np.repeat(rates, sizes)

    def gathered(self, inputs: ModelInputs, rows: list[Any]) -> tuple[Any, dict[str, Any], Any]:
        """The MLP's input without padding, sums of scalars by name, FM's output."""
        B = inputs.size
        scalars = {n: torch.zeros(B, self.L, dtype=F64) for n in ("wide", "fast", "cross", "linear")}
        columns: list[Any] = list(self.dense_columns(inputs))
        vectors: dict[int, list[Any]] = {}
        for group, g, r in zip(self.layout.groups, inputs.groups, rows, strict=True):
            for f, index in enumerate(group.features):
                at, sample, factor = self.occurrences(B, g, f, index)
                pooled = (
                    torch.zeros(B, r.shape[1], dtype=F64).index_add(
                        0, torch.tensor(sample), r[torch.tensor(at)]
                    )
                    * torch.tensor(factor)[:, None]
                )
                for slot in group.slots:
                    if slot.name == "count":
                        continue
                    part = pooled[:, slot.start : slot.start + slot.width]
                    if slot.name == "vector":
                        columns.append(part)
                        vectors.setdefault(slot.width, []).append(part)
                    else:
                        scalars[slot.name] = scalars[slot.name] + part
        fm = torch.zeros(B, dtype=F64)
        for same in vectors.values():
            v = torch.stack(same)
            fm = fm + 0.5 * (v.sum(0) ** 2 - (v**2).sum(0)).sum(1)
        return torch.cat(columns, 1) if columns else torch.zeros(B, 0, dtype=F64), scalars, fm

    def occurrences(self, B: int, g: GroupInputs, f: int, index: int) -> tuple[Any, Any, Any]:
        """Rows and samples of the occurrences of feature f that have a row; (B,) pooling factors."""
        at = g.positions[g.feature_starts[f] : g.feature_starts[f + 1]].astype(np.int64)
        ends = g.list_ends[f]
        sample = np.arange(B) if ends is None else np.searchsorted(ends, np.arange(len(at)), "right")
        keep = at >= 0
        mean = self.spec.features[index].pool == "mean"
        count = np.bincount(sample[keep], minlength=B)
        factor = np.where(count > 0, 1 / np.maximum(count, 1), 0.0) if mean else np.ones(B)
        return at[keep], sample[keep], factor

    def counted(self, inputs: ModelInputs, rows: list[Any]) -> Any:
        """(B, L) of the expert counts. It teaches no rows."""
        z, small, feature = torch.zeros(inputs.size, self.L, dtype=F64), self.parts(), -1
        for group, g, r in zip(self.layout.groups, inputs.groups, rows, strict=True):
            seen, wide = group.slot("count"), group.slot("wide")
            if seen is None or wide is None:
                continue
            for f, index in enumerate(group.features):
                feature += 1
                at, sample, factor = self.occurrences(inputs.size, g, f, index)
                bucket = np.clip(np.rint(g.rows[at, seen.start].astype(np.float64) * 32), 0, BUCKETS - 1)
                weights = r.detach()[torch.tensor(at), wide.start : wide.start + self.L]
                of = torch.tensor(bucket.astype(np.int64))
                bias, scale = (small[f"count_{part}"][:, feature, of].T for part in ("bias", "scale"))
                z = z.index_add(
                    0,
                    torch.tensor(sample),
                    (bias + scale * weights) * torch.tensor(factor[sample])[:, None],
                )
        return z

    def marked(self, inputs: ModelInputs, gradients: list[Any]) -> list[Any]:
        """Gradients with the mark of steps that do not count: of rows that early positives alone have."""
        labels = inputs.labels
        assert labels is not None
        early = np.array([self.spec.join.is_early(label) for label in self.spec.labels])
        counts = ~(early[labels.index] & (labels.value > 0))
        for group, g, gradient in zip(self.layout.groups, inputs.groups, gradients, strict=True):
            slot = group.slot("count")
            if slot is None:
                continue
            seen = np.zeros(len(g.rows), np.bool_)
            for f, index in enumerate(group.features):
                at, sample, _ = self.occurrences(inputs.size, g, f, index)
                seen[at[counts[sample]]] = True
            gradient[~seen, slot.start] = np.abs(gradient[~seen]).max(axis=1, initial=0)
        return gradients

    def linear_columns(self, inputs: ModelInputs) -> Any:
        """(B, columns): every dense column standardised, whatever the spec says of it, then missing flags."""
        values = [self.standard(d, inputs.dense[:, d]) for d in range(len(self.layout.dense))]
        flags = [
            ~np.isfinite(inputs.dense[:, d])
            for d, index in enumerate(self.layout.dense)
            if self.spec.features[index].missing == "flag"
        ]
        return torch.tensor(np.stack([*values, *flags], axis=1).astype(np.float64))

    def standard(self, d: int, column: Any) -> Any:
        """A dense column by the mean and deviation of what was seen so far; 0 where missing."""
        x = column.astype(np.float64)
        seen = np.array(self.dense_seen[d])
        x = (
            (x - seen.mean()) / np.sqrt(seen.var() + 1e-12)
            if len(seen) > 1
            else np.where(np.isfinite(x), 0, x)
        )
        return np.where(np.isfinite(x), np.clip(x, -10, 10), 0)

    def dense_columns(self, inputs: ModelInputs) -> list[Any]:
        values, flags = [], []
        for d, index in enumerate(self.layout.dense):
            feature = self.spec.features[index]
            x = inputs.dense[:, d].astype(np.float64)
            missing = ~np.isfinite(x)
            if "standard" in feature.dense:
                x = self.standard(d, x)
            values.append(torch.tensor(np.where(missing, 0, x))[:, None])
            if feature.missing == "flag":
                flags.append(torch.tensor(missing.astype(np.float64))[:, None])
        return values + flags

    def logits(self, inputs: ModelInputs, rows: list[Any]) -> Any:
        """(B, L, K) without biases; 0 for the stack, which needs those of the others."""
        x, scalars, fm = self.gathered(inputs, rows)
        deep = None
        if "deep" in self.experts or "mlp" in self.experts:
            h = x
            for i in range(len(self.spec.model.deep)):
                w = self.weights[f"mlp/{i}/weight"]
                if self.rounding:
                    h, w = rounded(h), rounded(w)
                h = torch.relu(h @ w + self.weights[f"mlp/{i}/bias"][None])
            deep = h @ self.weights["mlp/head"].T
        out = []
        for name in self.experts:
            if name in ("wide", "fast", "cross", "linear"):
                z = scalars[name]
            elif name == "mlp":
                z = deep
            elif name == "counts":
                z = self.counted(inputs, rows)
            elif name == "stack":
                z = torch.zeros(inputs.size, self.L, dtype=F64)
            else:
                z = scalars["linear"] + fm[:, None]
                z = z + deep if name == "deep" else z
            if name in self.linear and self.heads_shapes["linear"][1]:
                weights = self.parts()["linear"][:, self.linear.index(name)]
                z = z + self.linear_columns(inputs) @ weights.T
            out.append(z)
        return torch.stack(out, 2)

    def stacked(self, z: Any) -> Any:
        """(B, L, K) logits with biases -> the same with the stack's, which teaches only its own weights."""
        if "stack" not in self.experts:
            return z
        others = z[:, :, :-1]
        return torch.cat([others, (others.detach() * self.parts()["stack"][None]).sum(2, keepdim=True)], 2)

    def start(self, label: int, seen: list[tuple[float, float]]) -> tuple[float, float, bool]:
        """(bias, scale, whether it teaches) of a label that starts from these (value, weight)."""
        y, w = np.array(seen).T if seen else (np.zeros(0), np.zeros(0))
        number = self.spec.labels[label].loss != "logloss"
        if not len(y):
            return 0.0, 1.0, not number
        if not number:
            return float(np.log(((y * w).sum() + 0.5) / (w.sum() - (y * w).sum() + 0.5))), 1.0, True
        mean = (y * w).sum() / w.sum()
        deviation = np.sqrt((w * (y - mean) ** 2).sum() / w.sum())
        known = w.sum() >= START_ROWS and deviation > 0
        return (mean / deviation, deviation, True) if known else (mean, 1.0, False)

    def forward_backward(self, inputs: ModelInputs) -> dict[str, Any]:
        labels = inputs.labels
        assert labels is not None
        rows = [torch.tensor(g.rows, dtype=F64, requires_grad=True) for g in inputs.groups]
        z = self.logits(inputs, rows)
        number = np.array([label.loss != "logloss" for label in self.spec.labels])
        with torch.no_grad():
            zb = self.stacked(z + torch.tensor(self.bias)).numpy()
            p = np.where(number[None, :, None], zb * self.scale[None, :, None], 1 / (1 + np.exp(-zb)))
            predictions = (p * self.mixture()).sum(2)
        bias = torch.zeros(self.L, self.K, dtype=F64)
        scale, teaches = self.scale.copy(), np.ones(self.L, bool)
        seen: list[list[tuple[float, float]]] = []
        for head in range(self.L):
            mine = labels.index == head
            seen.append(
                list(zip(labels.value[mine].astype(float), labels.weight[mine].astype(float), strict=True))
            )
            b = self.bias[head]
            if not self.started[head]:
                first, scale[head], teaches[head] = self.start(head, self.seen[head] + seen[head])
                b = np.full(self.K, first)
            bias[head] = torch.tensor(b)
        bias.requires_grad_()
        own = self.stacked(z + bias)[torch.arange(inputs.size), torch.tensor(labels.index.astype(np.int64))]
        y = torch.tensor(labels.value / scale[labels.index])[:, None].expand(-1, self.K)
        losses = torch.nn.functional.binary_cross_entropy_with_logits(own, y.clamp(0, 1), reduction="none")
        kinds = np.array([label.loss for label in self.spec.labels])[labels.index]
        huber = torch.nn.functional.huber_loss(own, y, reduction="none")
        mse = 0.5 * (own - y) ** 2
        losses = torch.where(torch.tensor(kinds == "huber")[:, None], huber, losses)
        losses = torch.where(torch.tensor(kinds == "mse")[:, None], mse, losses)
        losses = losses * torch.tensor(labels.weight * teaches[labels.index])[:, None]
        # Rows that several experts share learn from the mean of their losses, biases and small weights from
        # their own expert's.
        sharing = sum(name in ("fm", "deep") for name in self.experts)
        share = torch.tensor([1 / sharing if n in ("fm", "deep") else 1.0 for n in self.experts], dtype=F64)

        def gradients(of: Any, wanted: list[Any]) -> list[Any]:
            found = torch.autograd.grad(of.sum(), wanted, allow_unused=True, retain_graph=True)
            return [torch.zeros_like(w) if g is None else g for w, g in zip(wanted, found, strict=True)]

        grads = gradients(losses * share, [*rows, *self.weights.values()])
        small = gradients(losses, [bias, self.heads])
        per_label = np.stack([losses.detach().numpy()[labels.index == head].sum(0) for head in range(self.L)])
        return {
            "predictions": predictions,
            "gradients": self.marked(inputs, [g.numpy().copy() for g in grads[: len(rows)]]),
            "bias": small[0].numpy(),
            "heads": small[1].numpy(),
            "weights": dict(zip(self.weights, grads[len(rows) :], strict=True)),
            "losses": per_label,
            "seen": seen,
            "dense": [inputs.dense[:, d] for d in range(len(self.layout.dense))],
        }

    def step(self, parts: list[dict[str, Any]]) -> None:
        """One update from the sums of several lanes."""
        model = self.spec.model
        self.steps += 1
        total = sum(w for part in parts for seen in part["seen"] for _, w in seen)
        for head in range(self.L):
            seen = [pair for part in parts for pair in part["seen"][head]]
            if not seen:
                continue
            n = sum(w for _, w in seen)
            self.loss[head] = self.loss[head] * model.hedge_discount**n + sum(
                part["losses"][head] for part in parts
            )
            self.loss[head] -= self.loss[head].min()
            if not self.started[head]:
                self.seen[head] += seen
                first, self.scale[head], self.started[head] = self.start(head, self.seen[head])
                self.bias[head] = first
                if "stack" in self.experts:
                    self.bias[head, -1] = 0.0
                continue
            g = sum(part["bias"][head] for part in parts)
            self.squares[head] += g * g
            self.bias[head] -= model.bias_lr * g / np.sqrt(self.squares[head] + 1e-300)
            g = sum(part["heads"][head] for part in parts)
            self.heads_squares[head] += g * g
            moved = self.rates() * g / np.sqrt(self.heads_squares[head] + 1e-300)
            self.heads.data[head] -= torch.tensor(moved)
        for part in parts:
            for d, x in enumerate(part["dense"]):
                self.dense_seen[d] += [float(v) for v in x if np.isfinite(v)]
        rate = model.dense_lr * min(1, self.steps / model.dense_warmup_steps)
        with torch.no_grad():
            for name, weights in self.weights.items():
                g = sum(part["weights"][name] for part in parts) / max(total, self.spec.train.batch_rows)
                self.first[name].mul_(model.dense_momentum).add_(g, alpha=1 - model.dense_momentum)
                self.second[name].mul_(0.999).add_(g * g, alpha=0.001)
                m = self.first[name] / (1 - model.dense_momentum**self.steps)
                v = self.second[name] / (1 - 0.999**self.steps)
                update = m / (v.sqrt() + 1e-8 / self.spec.train.batch_rows)
                if model.dense_optimizer == "lamb" and weights.norm() > 0:
                    update *= (weights.norm() / update.norm()).clamp(0.01, 10)
                weights.sub_(rate * update)
