"""Measures of a package's source, on small samples."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from freshet import types
from ops.house.sources import texts_of
from ops.house.static import ARRAYS, Facts, facts_of, is_participle, measures_of

PATH = "services/freshet/a.py"


def facts(source: str) -> Facts:
    tree = ast.parse(source)
    return facts_of(PATH, source, tree, texts_of(PATH, source, tree))


def test_more_than_eight_parameters_count_without_self() -> None:
    eight, nine = (", ".join(f"a{i}" for i in range(count)) for count in (8, 9))
    source = f"""
def f({nine}): ...
class C:
    def g(self, {eight}): ...
    def h(self, *, {nine}): ...
"""

    assert facts(source).long_signatures == [f"{PATH}:2 f (9)", f"{PATH}:5 C.h (9)"]


def test_an_array_argument_wants_its_shape_in_the_docstring() -> None:
    source = '''
def given(a: F32) -> None:
    """Step rows (U, D)."""
def one_dimension(a: "list[NDArray[Any]]", b: NDArray[Any]) -> None:
    """Step keys (U,)."""
def absent(a: F32 | None = None) -> None:
    """Step rows (all of them)."""
def no_array(a: int) -> None:
    """Count."""
def _private(a: F32) -> None: ...
'''
    found = facts(source)

    assert found.with_arrays == 3
    assert found.without_shape == [f"{PATH}:6 absent"]


def test_every_array_alias_of_the_package_is_known() -> None:
    source = ast.parse(Path(types.__file__).read_text(encoding="utf-8"))
    aliases = {
        ast.unparse(node.targets[0])
        for node in source.body
        if isinstance(node, ast.Assign) and "NDArray[" in ast.unparse(node.value)
    }

    assert aliases
    assert aliases <= ARRAYS


def test_a_function_that_raises_wants_to_say_so() -> None:
    source = '''
def says(a):
    """Go. Raises ValueError for a negative number."""
    if a: raise ValueError
def section(a):
    """Go.

    Raises:
        ValueError: negative.
    """
    raise ValueError
def silent(a):
    """Go."""
    raise ValueError(a)
def passes_on(a):
    """Go."""
    try: ...
    except ValueError: raise
def abstract(a):
    """Go."""
    raise NotImplementedError
def inner(a):
    """Go."""
    def f(): raise ValueError
@click.command()
def verb(a):
    """Help."""
    raise ValueError
'''
    found = facts(source)

    assert found.that_raise == 3
    assert found.without_raises == [f"{PATH}:12 silent"]


def test_what_counts_unless_the_sentence_asks() -> None:
    found = facts('"""What is read. What is this? It says what it is."""\n# what to do\nx = "what"\n')

    assert sorted(found.whats) == [
        f"{PATH}:1 What is read. It says what",
        f"{PATH}:1 what it is.",
        f"{PATH}:2 what to do",
    ]
    assert found.words == 14


def test_who_words_count() -> None:
    assert (
        len(facts('"""Whoever asks: nobody, somebody whose rows are here, whom we know, who waits."""').whos)
        == 6
    )


@pytest.mark.parametrize("path", ["cli/kept.py", "cli/trying.py", "a/grpc_told.py", "a/pipelined.py"])
def test_a_module_named_by_a_participle_is_found(path: str) -> None:
    assert is_participle(path)


@pytest.mark.parametrize(
    "path", ["a/hashing.py", "a/tracing.py", "a/core.py", "a/kept_rows.py", "a/ring.py", "a/bed.py"]
)
def test_a_term_of_the_field_is_none(path: str) -> None:
    assert not is_participle(path)


def test_the_measures_are_sums_and_shares() -> None:
    some = [
        Facts("a.py", lines=n, words=1_000, with_arrays=4, without_shape=["x"], whats=["y"])
        for n in range(1, 12)
    ]
    values = {one.name: one.now for one in measures_of(some)}

    assert values["Python files"] == 11
    assert values["Python lines"] == 66
    assert values["% of public functions with array arguments without a shape in the docstring"] == 25
    assert values["noun-what per 10,000 words of docstring and comment"] == 10
    assert values["lines of a file, median"] == 6
    assert values["lines of a file, p90"] == 10
    assert values["lines of a file, longest"] == 11


def test_a_package_without_files_has_measures() -> None:
    assert {one.now for one in measures_of([])} == {0}
