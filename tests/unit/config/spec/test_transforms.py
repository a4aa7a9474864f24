"""Transforms of `dense`: built in, by entry point, from a module beside the spec; and errors about them."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from freshet.config.spec.identity import diff, identity_hash, render
from freshet.config.spec.model import Spec
from freshet.config.spec.parse import load_spec, parse_spec
from freshet.config.spec.transforms import PROBE, TRANSFORMS, Column, column_of
from freshet.errors import ConfigError
from tests.fixtures.distributions import distribution

ORACLES: dict[str, tuple[dict[str, float], Callable[[float], float]]] = {
    "log1p": ({}, lambda x: math.copysign(math.log1p(abs(x)), x)),
    "clip": ({"low": -2.0, "high": 24.0}, lambda x: min(max(x, -2.0), 24.0)),
}
"""Parameters for each built-in transform, and its oracle for one number."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder for a spec and its modules."""
    return tmp_path


def text_of(dense: str) -> str:
    return f"""
name = "shop"
[events]
served = {{ key = ["r", "i"], time = "ts:ms" }}
action = {{ key = ["r", "i"], time = "ts:ms" }}
[labels]
click = {{ on = "action.type == 'x'" }}
[tables]
user = {{ dim = 16 }}
[features]
user = {{ field = "user", table = "user" }}
price = {{ field = "price", dense = {dense} }}
"""


def spec_of(dense: str, folder: Path | None = None) -> Spec:
    if folder is None:
        return parse_spec(text_of(dense))
    (folder / "freshet.toml").write_text(text_of(dense))
    return load_spec(folder / "freshet.toml")


def column(spec: Spec) -> Column:
    found = column_of(spec.feature("price"), spec.folder)
    assert found is not None
    return found


# --- built in


def test_every_transform_that_computes_has_an_oracle() -> None:
    assert set(ORACLES) == {t.name for t in TRANSFORMS.values() if t.function is not None}


@pytest.mark.parametrize("name", list(ORACLES))
def test_transform_equals_its_oracle(name: str) -> None:
    parameters, oracle = ORACLES[name]
    pairs = "".join(f", {key} = {value}" for key, value in parameters.items())
    spec = spec_of(f'[{{ name = "clip", low = -1e30 }}, {{ name = "{name}"{pairs} }}]')
    made = column(spec).run(PROBE)

    wanted = [math.nan if math.isnan(x) else oracle(x) for x in PROBE.tolist()]
    np.testing.assert_allclose(made, np.array(wanted, np.float32), rtol=2e-7)


def test_raw_standard_and_a_leading_log1p_leave_no_column_steps() -> None:
    for dense in ('"raw"', '"standard"', '"log1p"', '["log1p", "standard"]'):
        assert column_of(spec_of(dense).feature("price"), "") is None


# --- identity


def test_only_parameters_other_than_defaults_change_identity() -> None:
    plain = spec_of('{ name = "clip", low = 0 }')

    assert identity_hash(spec_of('{ name = "clip", low = 0.0 }')) == identity_hash(plain)
    assert identity_hash(spec_of('[{ name = "log1p" }]')) == identity_hash(spec_of('"log1p"'))
    assert identity_hash(spec_of('{ name = "clip", low = 1 }')) != identity_hash(plain)
    assert identity_hash(spec_of('{ name = "clip", high = 0 }')) != identity_hash(plain)
    [change] = diff(plain, spec_of('{ name = "clip", low = 1 }'))
    assert change.kind == "identity"
    assert change.key == "features.price.dense"


def test_models_older_than_parameters_keep_their_identity() -> None:
    known = "9f83f9860b7b"
    former = parse_spec("defaults = 1" + text_of('["log1p", "standard"]'))
    assert identity_hash(former).startswith(known)


def test_a_spec_with_transforms_is_written_back_and_read_again(folder: Path) -> None:
    (folder / "own_written.py").write_text("def half(x, *, by=2.0):\n    return x / by\n")
    spec = spec_of('[{ name = "own_written:half", by = 4 }, { name = "clip", high = 9 }, "standard"]', folder)

    assert parse_spec(render(spec), folder=str(folder)) == spec


# --- the user's


def test_function_beside_the_spec_has_its_defaults_as_parameters(folder: Path) -> None:
    (folder / "own_beside.py").write_text(
        "import numpy as np\n\ndef cut(x, *, limit=99.0):\n    return np.minimum(x, np.float32(limit))\n"
    )

    plain, five = (
        spec_of('"own_beside:cut"', folder),
        spec_of('{ name = "own_beside:cut", limit = 5 }', folder),
    )

    assert column(plain).run(PROBE)[14] == 99
    assert column(five).run(PROBE)[14] == 5
    assert identity_hash(plain) != identity_hash(five)


def test_descriptor_bounds_its_parameters(folder: Path) -> None:
    (folder / "own_descriptor.py").write_text(
        "from freshet import Parameter, Transform\n"
        "def _power(x, *, by):\n    return abs(x) ** by\n"
        'power = Transform("power", "to a power", _power, (Parameter("by", 0.5, 0, 1, doc="exponent"),))\n'
    )

    assert column(spec_of('"own_descriptor:power"', folder)).run(PROBE)[13] == 10
    with pytest.raises(ConfigError, match=r"(?s)dense.by = 3.0.*a number from 0 to 1.*by: exponent"):
        spec_of('{ name = "own_descriptor:power", by = 3 }', folder)


def test_entry_point_adds_a_transform(folder: Path) -> None:
    code = "import numpy as np\ndef root(x):\n    return np.sqrt(np.abs(x))\n"
    distribution(folder / "site", "their_dist", {"freshet.transforms": {"root": "their_dist:root"}}, code)
    sys.path.append(str(folder / "site"))

    assert column(spec_of('["root", "standard"]')).run(PROBE)[13] == 10
    with pytest.raises(ConfigError, match=f"one of {', '.join(TRANSFORMS)}, root"):
        spec_of('"rot"')


def test_in_place_and_returned_are_equal_and_input_is_unchanged(folder: Path) -> None:
    (folder / "own_places.py").write_text(
        "import numpy as np\ndef there(x):\n    np.abs(x, out=x)\ndef back(x):\n    return np.abs(x)\n"
    )
    probe = PROBE.copy()

    there = column(spec_of('"own_places:there"', folder)).run(probe)
    back = column(spec_of('"own_places:back"', folder)).run(probe)

    np.testing.assert_array_equal(there, back)
    np.testing.assert_array_equal(probe, PROBE)


# --- errors

REFUSED = {
    "gone": ('"own_nowhere:f"', "there is no module own_nowhere: put own_nowhere.py beside the spec"),
    "name": ('"own_bad:lenght"', 'did you mean "length"?'),
    "unknown": ('"lgo1p"', 'did you mean "log1p"?'),
    "no function": ('"own_bad:number"', "it is a int"),
    "no column": ('"own_bad:nothing"', "it takes no column"),
    "two columns": ('"own_bad:two"', "other is not such a parameter"),
    "length": ('"own_bad:length"', "as many numbers as it is given, (20,)\n  it gave shape (19,)"),
    "no array": ('"own_bad:listed"', "it gave a list"),
    "dtype": ('"own_bad:double"', "it gave float64; end with .astype(np.float32)"),
    "raises": ('"own_bad:raises"', "it raised KeyError: 'x'"),
    "infinite": ('"own_bad:infinite"', "it makes -inf of 0; clip the numbers first"),
    "mean": ('"own_bad:centred"', "would differ between training and serving"),
    "random": ('"own_bad:noisy"', "a function that works number by number"),
    "parameter": ('{ name = "own_bad:fine", by = 1 }', "it takes none"),
    "no number": ('{ name = "clip", low = "x" }', "a finite number"),
    "nothing to clip": ('"clip"', "low must be below high, and one of them must be set"),
    "raw beside": ('["raw", "log1p"]', '"raw" alone'),
}
BAD = """
import numpy as np
number = 3
def nothing(): ...
def two(x, other): return x
def length(x): return x[1:] if len(x) > 1 else x
def listed(x): return list(x)
def double(x): return x.astype(np.float64)
def raises(x): raise KeyError("x")
def infinite(x): return np.log(x)
def centred(x): return x - np.nanmean(x) if not np.isnan(x).all() else x
def noisy(x): return x + np.random.default_rng().random(len(x), np.float32)
def fine(x): return x
"""


@pytest.mark.parametrize("case", list(REFUSED))
def test_invalid_transform_is_refused_with_the_reason(case: str, folder: Path) -> None:
    (folder / "own_bad.py").write_text(BAD)
    dense, said = REFUSED[case]

    with pytest.raises(ConfigError) as caught:
        spec_of(dense, folder)

    assert said in str(caught.value)
    assert "features.price.dense" in str(caught.value)
    assert "freshet.toml" in str(caught.value)


def test_failing_import_is_refused_with_its_error(folder: Path) -> None:
    (folder / "own_broken.py").write_text("import surely_not_installed\n")

    with pytest.raises(ConfigError, match=r"importing own_broken raised ModuleNotFoundError: .*surely_not"):
        spec_of('"own_broken:f"', folder)


def test_second_module_of_the_same_name_is_refused(folder: Path) -> None:
    for name in ("a", "b"):
        (folder / name).mkdir()
        (folder / name / "own_twice.py").write_text("def f(x):\n    return x\n")
    spec_of('"own_twice:f"', folder / "a")

    with pytest.raises(ConfigError, match=r"another one of that name was imported, .*/a/own_twice.py"):
        spec_of('"own_twice:f"', folder / "b")


def test_a_function_that_fails_on_real_numbers_names_its_feature(folder: Path) -> None:
    (folder / "own_later.py").write_text("def f(x):\n    assert not (x == 77).any()\n    return x\n")
    spec = spec_of('"own_later:f"', folder)

    with pytest.raises(ConfigError, match=r"(?s)features.price.dense.*it raised AssertionError"):
        column(spec).run(np.array([77], np.float32))


def test_infinite_result_outside_the_probe_counts_as_missing(folder: Path) -> None:
    (folder / "own_square.py").write_text("def f(x):\n    return x * x\n")
    made = column(spec_of('"own_square:f"', folder)).run(np.array([3e38, 3], np.float32))

    np.testing.assert_array_equal(made, np.array([np.nan, 9], np.float32))


def test_a_column_that_cannot_be_written_to_is_copied(folder: Path) -> None:
    (folder / "own_constant.py").write_text(
        "import numpy as np\ndef f(x):\n    return np.broadcast_to(np.float32(1), x.shape)\n"
    )
    made = column(spec_of('"own_constant:f"', folder)).run(np.array([np.nan, 3], np.float32))

    np.testing.assert_array_equal(made, np.array([1, 1], np.float32))
