"""Saving, serving, starting and refusing."""

from __future__ import annotations

import subprocess
import sys
import threading
from dataclasses import replace

import numpy as np
import pytest

from freshet import _native
from freshet.config.spec.model import Spec
from freshet.errors import ConfigError, Mismatch
from freshet.model import SERVING_PREFIXES, GroupInputs, ModelInputs, Precision, SplitStep, build_model
from freshet.model.hedge import HedgeDense, he_uniform, uniform
from freshet.types import I32, U32
from tests.fixtures.specs import make_batch, make_spec

SPEC = make_spec(dense=[(True, True)], lists=("mean",), losses=("logloss", "huber"), deep=(20, 12))


def trained(spec: Spec = SPEC, steps: int = 5, lanes: int = 1, seed: int = 0):
    model = build_model(spec, training=True)
    workers = [model.lane() for _ in range(lanes)]
    rng = np.random.default_rng(seed)
    for _ in range(steps):
        for lane in workers:
            lane.forward_backward(make_batch(spec, 32, rng))
        model.step(workers)
    return model


def same(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> None:
    assert a.keys() == b.keys()
    for name, value in a.items():
        np.testing.assert_array_equal(value, b[name], err_msg=name)


def labelled(inputs: ModelInputs, **labels: object) -> ModelInputs:
    return replace(inputs, labels=replace(inputs.labels, **labels))  # type: ignore[type-var]


def test_restored_model_trains_on_to_the_bit() -> None:
    straight, stopped = trained(steps=5), trained(steps=5)
    resumed = build_model(SPEC, training=True)
    resumed.load_state(stopped.state())
    same(resumed.state(), straight.state())
    rng_a, rng_b = np.random.default_rng(9), np.random.default_rng(9)
    for model, rng in ((straight, rng_a), (resumed, rng_b)):
        lane = model.lane()
        for _ in range(3):
            lane.forward_backward(make_batch(SPEC, 32, rng))
            model.step([lane])
    same(resumed.state(), straight.state())
    assert resumed.state()["optimizer/step"].tolist() == [8]


def test_serving_without_optimiser_state_scores_as_the_trainer() -> None:
    model = trained()
    state = {n: a for n, a in model.state().items() if n.startswith(SERVING_PREFIXES)}
    served = build_model(SPEC, training=False)
    served.load_state(state, weights_only=True)
    batch = make_batch(SPEC, 70, np.random.default_rng(4))
    np.testing.assert_array_equal(served.score(batch), model.score(batch))
    np.testing.assert_array_equal(served.lane().score(batch), model.score(batch))
    np.testing.assert_array_equal(served.score(replace(batch, labels=None)), model.score(batch))


def test_progressive_prediction_equals_the_served_one() -> None:
    model = trained()
    batch = make_batch(SPEC, 70, np.random.default_rng(4))
    served = model.score(batch)
    np.testing.assert_array_equal(model.lane().forward_backward(batch).predictions, served)


def test_a_model_built_for_serving_does_not_train() -> None:
    with pytest.raises(RuntimeError, match="training=True"):
        build_model(SPEC, training=False).lane().forward_backward(
            make_batch(SPEC, 4, np.random.default_rng(0))
        )


def test_a_state_of_another_shape_is_refused_and_nothing_changes() -> None:
    model = trained()
    before = model.state()
    other = trained(
        make_spec(dense=[(True, True)], lists=("mean",), losses=("logloss", "huber"), deep=(20, 13))
    )
    with pytest.raises(Mismatch, match=r"mlp/1/weight.*\(20, 13\).*\(20, 12\)"):
        model.load_state(other.state())
    with pytest.raises(Mismatch, match="no array"):
        model.load_state({n: a for n, a in before.items() if "scale" not in n})
    same(model.state(), before)


def test_merged_lanes_step_as_separate_ones_do() -> None:
    apart, merged = trained(steps=3), trained(steps=3)
    rng_a, rng_b = np.random.default_rng(1), np.random.default_rng(1)
    for model, rng in ((apart, rng_a), (merged, rng_b)):
        lanes = [model.lane() for _ in range(3)]
        for lane in lanes:
            lane.forward_backward(make_batch(SPEC, 20, rng))
        if model is merged:
            lanes[0].merge(lanes[1])
            lanes[0].merge(lanes[2])
            lanes = lanes[:1]
        model.step(lanes)
    same(apart.state(), merged.state())


def test_a_step_that_lanes_share_is_the_step_to_the_bit() -> None:
    spec = make_spec(dense=[(True, True)], deep=(64, 32))
    rng = np.random.default_rng(5)
    whole, shared = (HedgeDense(spec, training=True, precision="fp32") for _ in range(2))
    split: SplitStep = shared
    ours, theirs = ([model.lane() for _ in range(2)] for model in (whole, shared))
    for _ in range(3):
        batches = [make_batch(spec, 30, rng) for _ in range(2)]
        for lane, batch in zip(ours + theirs, batches + batches, strict=True):
            lane.forward_backward(batch)
        whole.step(ours)
        split.begin_step(theirs)
        for part in (2, 0, 1):
            split.step_part(theirs, part, 3)
    for name, array in whole.state().items():
        np.testing.assert_array_equal(shared.state()[name], array, err_msg=name)


def test_ranks_that_add_up_each_others_sums_take_the_same_step() -> None:
    ranks = [trained(steps=2) for _ in range(2)]
    rng = np.random.default_rng(3)
    lanes = [model.lane() for model in ranks]
    for lane in lanes:
        lane.forward_backward(make_batch(SPEC, 20, rng))
    buffers = [lane.reduce_buffers() for lane in lanes]
    for left, right in zip(*buffers, strict=True):
        left[:] = right[:] = left + right
    for model, lane in zip(ranks, lanes, strict=True):
        model.step([lane])
    same(ranks[0].state(), ranks[1].state())


def test_dense_weight_zero_changes_row_gradients_only() -> None:
    model = trained()
    before = model.state()
    lane = model.lane()
    batch = make_batch(SPEC, 40, np.random.default_rng(6))
    kept = [g.copy() for g in lane.forward_backward(batch, 0.0).gradients]
    model.step([lane])
    same(model.state(), before)
    for a, b in zip(kept, lane.forward_backward(batch, 1.0).gradients, strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_rank_without_data_takes_the_step_of_the_others() -> None:
    model = trained()
    busy, idle = model.lane(), model.lane()
    other = trained()
    alone = other.lane()
    batch = make_batch(SPEC, 40, np.random.default_rng(6))
    busy.forward_backward(batch)
    alone.forward_backward(batch)
    model.step([idle, busy])
    other.step([alone])
    same(model.state(), other.state())


def test_a_label_starts_at_the_log_odds_of_its_first_batch() -> None:
    spec = make_spec(ids=1, experts=("wide", "fm"))
    model = build_model(spec, training=True)
    batch = labelled(
        make_batch(spec, 100, np.random.default_rng(0)),
        value=(np.arange(100) < 20).astype(np.float32),
        weight=np.ones(100, np.float32),
    )
    lane = model.lane()
    lane.forward_backward(batch)
    model.step([lane])
    np.testing.assert_allclose(model.state()["weights/bias"], np.log(20.5 / 80.5), rtol=1e-6)


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_a_first_batch_of_one_kind_starts_at_finite_odds(value: float) -> None:
    spec = make_spec(ids=1)
    model = build_model(spec, training=True)
    batch = make_batch(spec, 256, np.random.default_rng(0))
    lane = model.lane()
    lane.forward_backward(labelled(batch, value=np.full(256, value, np.float32)))
    model.step([lane])
    assert np.abs(model.state()["weights/bias"]).max() < 8
    assert model.finite()


@pytest.mark.parametrize("kind", ["hedge", "deepfm"])
def test_a_number_is_not_measured_by_its_first_few_rows(kind: str) -> None:
    """Its scale is for ever the deviation of the rows that it starts from, and three can be far off."""
    spec, rng = make_spec(kind=kind, losses=("huber",)), np.random.default_rng(0)
    model = build_model(spec, training=True)
    lane, scores = model.lane(), np.zeros(1, np.float32)
    for rows in (1, 2, 4, 8, 16, 32, 64, 128):
        batch = make_batch(spec, rows, rng)
        usual, first = 100 + 60 * rng.normal(size=rows), 3 + rng.random(rows)
        labels = {"value": np.float32(usual if rows > 2 else first), "weight": np.ones(rows, np.float32)}
        scores = model.score(batch)
        result = lane.forward_backward(labelled(batch, **labels))
        assert any((g != 0).any() for g in result.gradients) == (rows >= 64)
        model.step([lane])

    assert 40 < float(model.state()["statistics/scale"][0]) < 90
    assert 50 < float(np.median(scores)) < 150


def test_equal_numbers_have_no_gradient_until_they_differ() -> None:
    spec = make_spec(losses=("mse",))
    model = build_model(spec, training=True)
    lane = model.lane()
    batch = make_batch(spec, 130, np.random.default_rng(0))
    result = lane.forward_backward(labelled(batch, value=np.full(130, 7.0, np.float32)))
    assert all((g == 0).all() for g in result.gradients)
    model.step([lane])
    scores = model.score(batch)
    assert abs(float(np.median(scores)) - 7.0) < 1  # the mean, and what random rows add
    assert any((g != 0).any() for g in lane.forward_backward(batch).gradients)


def test_a_label_without_samples_keeps_its_state() -> None:
    model = trained()
    before = model.state()
    batch = make_batch(SPEC, 40, np.random.default_rng(6))
    lane = model.lane()
    lane.forward_backward(labelled(batch, index=np.zeros(40, np.uint8), value=np.ones(40, np.float32)))
    model.step([lane])
    after = model.state()
    np.testing.assert_array_equal(after["weights/bias"][1], before["weights/bias"][1])
    np.testing.assert_array_equal(after["hedge/loss"][1], before["hedge/loss"][1])
    assert (after["hedge/loss"][0] != before["hedge/loss"][0]).any()


def test_the_hedge_follows_the_expert_with_the_smaller_loss() -> None:
    spec = make_spec(ids=1, experts=("wide", "fm"))
    model = HedgeDense(spec, training=True, precision="fp32")
    state = model.state()
    state["hedge/loss"][0] = (0.0, 2.0)
    model.load_state(state)
    np.testing.assert_allclose(model.mixture()[0], [1 / (1 + np.exp(-2)), 1 / (1 + np.exp(2))], rtol=1e-6)


def test_a_weight_that_is_not_finite_is_noticed() -> None:
    model = trained()
    assert model.finite()
    state = model.state()
    state["weights/mlp/0/bias"][3] = np.inf
    model.load_state(state)
    assert not model.finite()


def test_rows_that_are_not_finite_give_gradients_that_are_not() -> None:
    model = trained()
    batch = make_batch(SPEC, 10, np.random.default_rng(0))
    batch.groups[0].rows[:] = np.nan
    assert np.isnan(model.score(batch)).any()
    assert any(np.isnan(g).any() for g in model.lane().forward_backward(batch, 0.0).gradients)


def test_lanes_of_many_threads_compute_what_one_computes() -> None:
    model = trained()
    rng = np.random.default_rng(0)
    batches = [make_batch(SPEC, 300, rng) for _ in range(4)]
    wanted = [[g.copy() for g in model.lane().forward_backward(b).gradients] for b in batches]
    found: list[list[np.ndarray]] = [[] for _ in batches]

    def run(i: int) -> None:
        found[i] = [g.copy() for g in model.lane().forward_backward(batches[i]).gradients]

    threads = [threading.Thread(target=run, args=(i,)) for i in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    for a, b in zip(wanted, found, strict=True):
        for x, y in zip(a, b, strict=True):
            np.testing.assert_array_equal(x, y)


def test_an_empty_batch_has_no_predictions_and_no_effect() -> None:
    model = trained()
    before = model.state()
    lane = model.lane()
    batch = make_batch(SPEC, 0, np.random.default_rng(0))
    assert lane.forward_backward(batch).predictions.shape == (0, 2)
    assert model.score(batch).shape == (0, 2)
    model.step([lane])
    same(model.state(), before)


def break_group(inputs: ModelInputs, **changes: object) -> ModelInputs:
    first = replace(inputs.groups[0], **changes)  # type: ignore[arg-type]
    return replace(inputs, groups=[first, *inputs.groups[1:]])


def test_inputs_outside_of_their_arrays_are_refused() -> None:
    model, batch = trained(), make_batch(SPEC, 10, np.random.default_rng(0))
    group: GroupInputs = batch.groups[0]
    far = group.positions.copy()
    far[3] = len(group.rows)
    low = group.positions.copy()
    low[3] = -2
    starts = group.feature_starts.copy()
    starts[1] += 1
    ends = [None if e is None else e + np.uint32(1) for e in group.list_ends]
    for broken, reason in (
        (break_group(batch, positions=far), r"a position is not in \[-1, 20\)"),
        (break_group(batch, positions=low), "a position is not in"),
        (break_group(batch, feature_starts=starts), "one occurrence a sample"),
        (break_group(batch, list_ends=ends), "list_ends must end"),
        (break_group(batch, rows=group.rows[:, :-1].copy()), "expected rows of"),
        (replace(batch, dense=batch.dense[:5]), "expected dense numbers"),
        (replace(batch, groups=[]), "expected 1 groups"),
    ):
        with pytest.raises(ValueError, match=reason):
            model.score(broken)
    with pytest.raises(ValueError, match="label index 2"):
        model.lane().forward_backward(labelled(batch, index=np.full(10, 2, np.uint8)))


def test_a_kind_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ConfigError, match="nonsense"):
        build_model(make_spec(kind="nonsense"), training=True)


def test_initial_weights_are_the_same_on_every_machine() -> None:
    assert [hex(int(x)) for x in uniform(0, 0, 2)] == ["0xbfef8030ddc2d772", "0x5f552ce482f2aa47"]
    assert [hex(int(x)) for x in uniform(7, 3, 1)] == ["0x813b3291529949cb"]
    weights = he_uniform(7, 1, (400, 300))
    assert np.abs(weights).max() <= np.sqrt(6 / 400)
    assert weights.std() == pytest.approx(np.sqrt(2 / 400), rel=0.02)
    assert np.unique(weights).size > 0.95 * weights.size
    assert (he_uniform(7, 1, (4, 3)) != he_uniform(7, 2, (4, 3))).any()
    assert (he_uniform(8, 1, (4, 3)) != he_uniform(7, 1, (4, 3))).any()


def test_serving_the_default_model_does_not_import_torch() -> None:
    code = (
        "import sys; from tests.fixtures.specs import make_spec, make_batch; import numpy as np;"
        "from freshet.model import build_model; s = make_spec();"
        "build_model(s, training=False).score(make_batch(s, 8, np.random.default_rng(0)));"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", f"import sys; sys.path[:0] = {sys.path!r}; {code}"], check=True)


def test_labels_are_required_to_train() -> None:
    batch = replace(make_batch(SPEC, 4, np.random.default_rng(0)), labels=None)
    with pytest.raises(ValueError, match="needs labels"):
        build_model(SPEC, training=True).lane().forward_backward(batch)


def shared(spec: Spec, sizes: list[int], seed: int) -> ModelInputs:
    """A batch of requests of these sizes, whose even features are one value, or list, a request."""
    per_request = make_batch(spec, len(sizes), np.random.default_rng(seed))
    per_sample = make_batch(spec, sum(sizes), np.random.default_rng(seed + 1))
    groups = []
    for r, s in zip(per_request.groups, per_sample.groups, strict=True):
        flags = np.array([f % 2 == 0 for f in range(len(s.list_ends))], np.uint8)
        kept = [r if flag else s for flag in flags]
        spans = [g.positions[g.feature_starts[f] : g.feature_starts[f + 1]] for f, g in enumerate(kept)]
        rows = np.concatenate([s.rows, r.rows])
        spans = [
            np.where(span < 0, span, span + (len(s.rows) if g is r else 0)).astype(np.int32)
            for span, g in zip(spans, kept, strict=True)
        ]
        starts = np.cumsum([0, *(len(span) for span in spans)], dtype=np.uint32)
        lists = [g.list_ends[f] for f, g in enumerate(kept)]
        groups.append(GroupInputs(rows, np.concatenate(spans), starts, lists, flags))
    return ModelInputs(sum(sizes), groups, per_sample.dense, None, np.cumsum(sizes, dtype=np.uint32))


@pytest.mark.parametrize("kernels", _native.kernel_names())
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("sizes", [[70], [1], [3, 300, 0, 40]])
@pytest.mark.parametrize("dims", [(16, 8), (6, 5)])
def test_shared_features_score_as_if_each_sample_had_them(
    sizes: list[int], precision: Precision, kernels: str, dims: tuple[int, int]
) -> None:
    spec = make_spec(
        ids=4, dims=dims, dense=[(True, True)], lists=("mean", "sum", "mean"),
        losses=("logloss", "huber"), deep=(20, 12), kind="mlp",
    )  # fmt: skip
    served = HedgeDense(spec, training=False, precision=precision, kernels=kernels)
    rng = np.random.default_rng(0)
    state = {
        name: rng.normal(0, 0.3, array.shape).astype(np.float32) if name.startswith("weights/") else array
        for name, array in served.state().items()
    }
    served.load_state(state, weights_only=True)
    batch = shared(spec, sizes, 3)

    together = served.score(batch).copy()

    rounding = 1e-5 if precision == "fp32" else 0.02
    np.testing.assert_allclose(together, served.score(batch.expanded()), rounding, rounding)
    alone = [served.score(request_of(batch, r)).copy() for r in range(len(sizes))]
    np.testing.assert_array_equal(together, np.concatenate(alone))


def request_of(batch: ModelInputs, r: int) -> ModelInputs:
    """One of a batch's requests."""
    assert batch.request_ends is not None
    stop = int(batch.request_ends[r])
    start = int(batch.request_ends[r - 1]) if r else 0
    groups = []
    for g in batch.groups:
        spans: list[I32] = []
        ends_of: list[U32 | None] = []
        assert g.shared is not None
        for f, ends in enumerate(g.list_ends):
            span = g.positions[g.feature_starts[f] : g.feature_starts[f + 1]]
            begin, end = (r, r + 1) if g.shared[f] else (start, stop)
            if ends is None:
                spans.append(span[begin:end])
                ends_of.append(None)
                continue
            bounds = np.concatenate([[0], ends]).astype(np.uint32)[begin : end + 1]
            spans.append(span[bounds[0] : bounds[-1]])
            ends_of.append(bounds[1:] - bounds[0])
        starts = np.cumsum([0, *(len(span) for span in spans)], dtype=np.uint32)
        groups.append(GroupInputs(g.rows, np.concatenate(spans), starts, ends_of, g.shared))
    ends = np.array([stop - start], np.uint32)
    return ModelInputs(stop - start, groups, batch.dense[start:stop], None, ends)


def test_requests_that_do_not_fit_the_batch_are_refused() -> None:
    served = build_model(SPEC, training=False)
    batch = shared(SPEC, [3, 4], 1)
    for ends, match in (
        ([3, 6], "number of samples"),
        ([4, 3], "must not fall"),
        ([7], "a request if it is shared"),
    ):
        with pytest.raises(ValueError, match=match):
            served.score(replace(batch, request_ends=np.array(ends, np.uint32)))
    with pytest.raises(RuntimeError, match="takes no requests"):
        build_model(SPEC, training=True).lane().score(batch)
