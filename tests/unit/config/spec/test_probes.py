"""Changed code of a transform is refused by its outcomes on the probe."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

from freshet.config.spec.model import Spec
from freshet.config.spec.parse import load_spec
from freshet.config.spec.transforms import check_outcomes, outcomes_of
from freshet.errors import Mismatch

TEXT = """
name = "shop"
[events]
served = { key = ["r", "i"], time = "ts:ms" }
action = { key = ["r", "i"], time = "ts:ms" }
[labels]
click = { on = "action.type == 'x'" }
[features]
price = { field = "price", dense = "own_changing:f" }
age = { field = "age", dense = [{ name = "clip", high = 9 }, "standard"] }
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    (tmp_path / "freshet.toml").write_text(TEXT)
    return tmp_path


def with_code(folder: Path, code: str) -> Spec:
    (folder / "own_changing.py").write_text(f"import numpy as np\ndef f(x):\n    {code}\n")
    sys.modules.pop("own_changing", None)
    importlib.invalidate_caches()
    return load_spec(folder / "freshet.toml")


def test_outcomes_cover_only_transforms_of_the_user(folder: Path) -> None:
    outcomes = outcomes_of(with_code(folder, "return x + 1"))

    assert list(outcomes) == ["price"]
    assert outcomes["price"][:3] == [None, 1.0, 2.0]


def test_changed_outcomes_are_refused_and_equal_ones_accepted(folder: Path) -> None:
    trained = outcomes_of(with_code(folder, "return x + x"))

    check_outcomes(with_code(folder, "return 2 * x  # faster"), trained, "version 3")
    with pytest.raises(Mismatch, match=r"(?s)features.price.dense: own_changing:f makes 3 of 1\n.*version 3"):
        check_outcomes(with_code(folder, "return 3 * x"), trained, "version 3")


def test_missing_outcome_differs_from_a_number(folder: Path) -> None:
    trained = outcomes_of(with_code(folder, "return x"))

    with pytest.raises(Mismatch, match="makes 0 of nan"):
        check_outcomes(with_code(folder, "return np.nan_to_num(x)"), trained, "version 3")


def test_versions_without_outcomes_are_accepted(folder: Path) -> None:
    check_outcomes(with_code(folder, "return x"), {}, "version 3")
