"""Trial of a user's class before anything runs: build it, train a step on random samples, serve it.

`freshet check` and `freshet up` report errors that would otherwise end a trainer at its first batch, or make
served scores differ from trained ones silently. `python -m freshet.model.trial SPEC` prints such an error as
JSON, for `up`, which need not load torch itself and survives a failed import.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TypeVar

import numpy as np
import orjson

from freshet.config.spec import load_spec
from freshet.config.spec.layout import Group, layout_of
from freshet.config.spec.model import Spec
from freshet.errors import ConfigError, FreshetError
from freshet.model import DenseModel, GroupInputs, Labels, ModelInputs, StepResult, build_model, class_of
from freshet.model.custom import Model
from freshet.types import F32, I32, U32

SIZES = (8, 1)
"""Sizes of the batches: one of a single sample shows errors by `squeeze` and by means over a batch."""

UNIQUE = 5
ROW_SCALE = 0.05

T = TypeVar("T")


def try_out(spec: Spec, where: str = "spec", device: str = "cpu") -> None:
    """Try the user's class that `model.kind` names, if it names one.

    Trains on `device`, serves on the CPU.

    Raises:
        ConfigError: The class cannot be imported, built or run, its logits have another shape or are not
            finite, or its forward depends on more than its inputs. The error names `where`.
    """
    if ":" not in spec.model.kind:
        return
    try:
        _try_out(spec, device)
    except ConfigError as error:
        raise ConfigError(where, error.key, error.found, error.expected, error.hint) from error


def _try_out(spec: Spec, device: str) -> None:
    model = build_model(spec, training=True, device=device)
    if not issubclass(class_of(spec.model.kind, spec.folder), Model):
        return  # it builds its own dense model, which may need the inputs of a real trainer
    for size in SIZES:
        _train_and_serve(spec, model, random_inputs(spec, size), exactly=device == "cpu")


def _train_and_serve(spec: Spec, model: DenseModel, inputs: ModelInputs, *, exactly: bool) -> None:
    def same(a: F32, b: F32) -> bool:
        return np.array_equal(a, b) if exactly else np.allclose(a, b, rtol=1e-2, atol=1e-3)

    def call_forward(function: Callable[[], T]) -> T:
        try:
            return function()
        except FreshetError:
            raise
        except Exception as error:  # a user's class may raise any error
            hint = f"forward raised {type(error).__name__}: {error}"
            raise _error(spec, "forward(self, x) -> logits (B, L)", hint) from error

    lane = model.lane()
    before = model.state()
    first = call_forward(lambda: lane.forward_backward(inputs))
    predictions = first.predictions.copy()
    _check_finite(spec, first)
    changed = [name for name, array in model.state().items() if not np.array_equal(array, before[name])]
    if changed:
        hint = f"{changed[0]} changed, though several lanes run it at once: no BatchNorm, use LayerNorm"
        raise _error(spec, "a forward that leaves the module as it is", hint)
    if not same(predictions, call_forward(lambda: lane.forward_backward(inputs)).predictions):
        hint = "called twice it gave two answers: no dropout and no draws, or serving scores otherwise"
        raise _error(spec, "a forward that is a function of its inputs", hint)
    model.step([lane])
    served = build_model(spec, training=False)
    served.load_state(model.state(), weights_only=True)
    if not same(call_forward(lambda: served.score(inputs)), model.score(inputs)):
        hint = "a module made anew with the same parameters and buffers scores otherwise: keep no other state"
        raise _error(spec, "scores that follow from parameters and buffers", hint)


def _check_finite(spec: Spec, result: StepResult) -> None:
    finite = np.isfinite(result.predictions).all() and np.isfinite(result.expert_losses).all()
    if not finite:
        hint = "on small random inputs its loss is NaN or infinite: look for a log, a division, an overflow"
        raise _error(spec, "finite logits", hint)
    if not all(np.isfinite(g).all() for g in result.gradients):
        hint = "one at its inputs is NaN or infinite: sqrt and norms have none at 0"
        raise _error(spec, "finite gradients", hint)


def _error(spec: Spec, expected: str, hint: str) -> ConfigError:
    return ConfigError("spec", "model.kind", spec.model.kind, expected, hint)


def random_inputs(spec: Spec, size: int) -> ModelInputs:
    """Draw a batch like those of real features: small rows, one of zeros, nulls, lists (some empty), missing
    numbers."""
    rng = np.random.default_rng(size)
    layout = layout_of(spec)
    dense = rng.normal(size=(size, len(layout.dense))).astype(np.float32)
    dense[rng.random(dense.shape) < 0.1] = np.nan
    labels = Labels(
        (np.arange(size) % len(spec.labels)).astype(np.uint8),
        (rng.random(size) < 0.5).astype(np.float32),
        np.ones(size, np.float32),
    )
    groups = [_group(spec, group, size, rng) for group in layout.groups]
    return ModelInputs(size, groups, dense, labels)


def _group(spec: Spec, group: Group, size: int, rng: np.random.Generator) -> GroupInputs:
    positions: list[I32] = []
    starts = [0]
    ends: list[U32 | None] = []
    for index in group.features:
        listed = spec.features[index].kind == "list"
        end = np.cumsum(rng.integers(0, 4, size)).astype(np.uint32) if listed else None
        count = int(end[-1]) if end is not None else size
        ends.append(end)
        positions.append(rng.integers(-1, UNIQUE, count).astype(np.int32))
        starts.append(starts[-1] + count)
    rows = (rng.normal(size=(UNIQUE, group.width)) * ROW_SCALE).astype(np.float32)
    rows[0] = 0.0  # like a new row
    where = np.concatenate(positions) if positions else np.empty(0, np.int32)
    return GroupInputs(rows, where, np.array(starts, np.uint32), ends)


def _main(spec_file: str) -> int:
    try:
        try_out(load_spec(spec_file), spec_file)
    except ConfigError as error:
        fields = {name: str(getattr(error, name)) for name in ("where", "key", "found", "expected", "hint")}
        print(orjson.dumps(fields).decode())
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(_main(sys.argv[1]))
