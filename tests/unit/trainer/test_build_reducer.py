"""1-bit Adam and DCT are refused for models without Adam, before they train or where the model shows it.

Codecs of gradients are refused in mode `async`."""

from dataclasses import replace
from typing import Any

import pytest

from freshet.config.spec.rules import check_rules
from freshet.errors import ConfigError
from freshet.model import build_model
from freshet.trainer.reducers import PlainReducer
from freshet.trainer.reducers.build import build_reducer
from freshet.trainer.reducers.one_bit_lamb import LambReducer
from tests.fixtures.specs import make_spec


def spec_of(reduce: Any = "1bit-adam", **model: Any) -> Any:
    spec = make_spec(ids=2, dims=(8,), **model)
    train = replace(spec.train, reduce=reduce)
    return replace(spec, train=train, serve=replace(spec.serve, score="y0"))


@pytest.mark.parametrize(
    ("model", "named"),
    [({"kind": "linear"}, "'linear' has none"), ({"experts": ("wide", "fm")}, "without the expert deep has")],
)
@pytest.mark.parametrize("reduce", ["1bit-adam", "dct"])
def test_spec_without_adam_is_refused(model: Any, named: str, reduce: str) -> None:
    with pytest.raises(ConfigError, match=named) as refused:
        check_rules(spec_of(reduce, **model), "spec")
    assert "train.reduce" in str(refused.value)
    assert "int8" in str(refused.value)
    check_rules(replace(spec_of(**model), train=make_spec().train), "spec")


@pytest.mark.parametrize("kind", ["hedge", "mlp", "deepfm", "module:Own"])
def test_spec_of_a_model_that_may_have_adam_is_not_refused(kind: str) -> None:
    check_rules(spec_of(kind=kind), "spec")


@pytest.mark.parametrize("kind", ["hedge", "mlp", "linear"])
def test_lamb_is_refused_for_native_code(kind: str) -> None:
    with pytest.raises(ConfigError, match=r"(?s)expected adam.*native code") as refused:
        check_rules(spec_of("fp32", kind=kind, dense_optimizer="lamb"), "spec")
    assert "model.dense_optimizer" in str(refused.value)


@pytest.mark.parametrize(("reduce", "other"), [("1bit-adam", "lamb"), ("1bit-lamb", "adam")])
def test_signs_are_of_the_optimiser_of_the_model(reduce: str, other: Any) -> None:
    with pytest.raises(ConfigError, match=f"(?s)expected 1bit-{other}, fp32, .*dense_optimizer is '{other}'"):
        check_rules(spec_of(reduce, kind="deepfm", dense_optimizer=other), "spec")


@pytest.mark.slow
def test_dct_is_refused_for_lamb() -> None:
    spec = spec_of("dct", kind="deepfm", dense_optimizer="lamb")
    with pytest.raises(ConfigError, match="dense_optimizer is 'lamb'"):
        check_rules(spec, "spec")
    with pytest.raises(ConfigError, match="needs the moments of Adam"):
        build_reducer(spec, build_model(spec, training=True))


@pytest.mark.slow
def test_lamb_has_its_own_reducer() -> None:
    spec = spec_of("1bit-lamb", kind="deepfm", dense_optimizer="lamb")
    check_rules(spec, "spec")
    assert isinstance(build_reducer(spec, build_model(spec, training=True)), LambReducer)


@pytest.mark.parametrize("reduce", ["fp32", "int8"])
def test_averagings_are_whole_or_in_int8(reduce: Any) -> None:
    spec = spec_of(kind="mlp")
    spec = replace(spec, train=replace(spec.train, mode="async", reduce=reduce))
    check_rules(spec, "spec")
    reducer = build_reducer(spec, build_model(spec, training=True))
    assert isinstance(reducer, PlainReducer), "a site sums whole gradients"


@pytest.mark.parametrize("reduce", ["auto", "int4", "adaquantfl", "dct", "1bit-adam"])
def test_averagings_in_codecs_of_gradients_are_refused(reduce: Any) -> None:
    spec = spec_of(kind="mlp")
    with pytest.raises(ConfigError, match="fp32 or int8 in mode async") as refused:
        check_rules(replace(spec, train=replace(spec.train, mode="async", reduce=reduce)), "spec")
    assert "train.reduce" in str(refused.value)


@pytest.mark.parametrize("reduce", ["1bit-adam", "dct"])
def test_model_without_adam_is_refused(reduce: str) -> None:
    spec = spec_of(reduce, kind="linear")
    with pytest.raises(ConfigError, match="needs the moments of Adam"):
        build_reducer(spec, build_model(spec, training=True))
