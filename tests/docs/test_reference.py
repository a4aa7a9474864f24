from pathlib import Path

import pytest

from freshet.config.options import key_of, options_of
from freshet.config.settings import variables
from freshet.config.spec.model import (
    Explore,
    Feature,
    Files,
    Gate,
    Join,
    Label,
    Model,
    Retention,
    Serve,
    Spec,
    Stream,
    Table,
    Train,
)
from ops.reference import PAGES, Page
from ops.reference.structure import with_figure

FOLDER = Path(__file__).parents[2] / "docs" / "reference"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_each_page_is_what_the_code_says(page: Page) -> None:
    path = FOLDER / page.name
    found = path.read_text() if path.exists() else ""

    assert found == page.text(), f"docs/reference/{page.name} is stale: `make docs` writes it anew"


def test_the_figure_in_architecture_is_what_the_imports_say() -> None:
    text = (FOLDER.parents[1] / "ARCHITECTURE.md").read_text()

    assert with_figure(text) == text, "ARCHITECTURE.md is stale: `make docs` draws its figure anew"


def test_each_page_is_written_once() -> None:
    assert len({page.name for page in PAGES}) == len(PAGES)


def test_no_page_is_left_over() -> None:
    files = {str(p.relative_to(FOLDER)) for p in FOLDER.rglob("*") if p.is_file()}

    assert files == {page.name for page in PAGES}, "a page that no longer is written: delete it"


def test_a_page_is_the_same_each_time() -> None:
    for page in PAGES:
        assert page.text() == page.text()
        assert " at 0x" not in page.text(), "an address in memory: another one in the next process"


def test_every_key_stands_in_the_reference_of_the_spec() -> None:
    text = (FOLDER / "feature-spec.md").read_text()

    sections: list[type] = [Spec, Stream, Join, Label, Table, Feature, Model, Train, Serve, Retention, Files]
    inner: list[tuple[type, str]] = [(Explore, "explore."), (Gate, "gate.")]
    for cls, prefix in [*((s, "") for s in sections), *inner]:
        for option in options_of(cls):
            assert f"| `{prefix}{key_of(option)}` |" in text


def test_every_variable_stands_in_the_reference_of_the_settings() -> None:
    text = (FOLDER / "settings.md").read_text()

    assert all(f"| `{v.name}` |" in text for v in variables())
