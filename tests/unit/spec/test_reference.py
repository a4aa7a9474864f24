from pathlib import Path

import pytest

import freshet.settings.reference
import freshet.spec.reference
from freshet.options import key_of, options_of
from freshet.settings import variables
from freshet.spec.model import Explore, Feature, Gate, Join, Label, Model, Serve, Spec, Stream, Table, Train

DOCS = Path(__file__).parents[3] / "docs"


@pytest.mark.parametrize(
    ("file", "text", "module"),
    [
        ("feature-spec.md", freshet.spec.reference.reference(), "freshet.spec.reference"),
        ("settings.md", freshet.settings.reference.reference(), "freshet.settings.reference"),
    ],
)
def test_the_reference_is_what_the_code_says(file: str, text: str, module: str) -> None:
    assert (DOCS / file).read_text() == text, f"stale: python -m {module} > docs/{file}"


def test_every_key_stands_in_the_reference() -> None:
    text = (DOCS / "feature-spec.md").read_text()

    sections: list[type] = [Spec, Stream, Join, Label, Table, Feature, Model, Train, Serve]
    inner: list[tuple[type, str]] = [(Explore, "explore."), (Gate, "gate.")]
    for cls, prefix in [*((s, "") for s in sections), *inner]:
        for option in options_of(cls):
            assert f"| `{prefix}{key_of(option)}` |" in text


def test_every_variable_stands_in_the_reference() -> None:
    text = (DOCS / "settings.md").read_text()

    assert all(f"| `{v.name}` |" in text for v in variables())
