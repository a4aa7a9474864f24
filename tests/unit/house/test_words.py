"""Forbidden words are found in prose and nowhere else."""

from __future__ import annotations

from pathlib import Path

import pytest

from ops.house.sources import texts_of
from ops.house.words import (
    Finding,
    Vocabulary,
    Word,
    whole_words,
    word_of,
)

ROOT = Path(__file__).parents[3]
DOOR = word_of({"pattern": "doors?", "write": "endpoint", "files": ["docs/houses/*"]})
LETTER = word_of({"pattern": "letters?", "write": "dead letter", "allowed": "dead letters?"})
OWN = word_of({"pattern": "own writes", "write": "read-my-writes"})
SMALL = Vocabulary([DOOR, LETTER, OWN], openings=["Of"])


def found(
    source: str, path: str = "services/freshet/a.py", vocabulary: Vocabulary = SMALL
) -> list[tuple[int, str, str]]:
    """Line, kind and text of each forbidden word."""
    return [(one.line, one.kind, one.found) for one in vocabulary.findings(path, texts_of(path, source))]


@pytest.mark.parametrize(
    ("source", "kind", "line"),
    [
        ('"""A door."""', "docstring", 1),
        ('"""One.\n\nA door.\n"""', "docstring", 3),
        ('class A:\n    """One."""\n    x: int\n    """A door."""', "docstring", 4),
        ('def f():\n    """A door."""', "docstring", 2),
        ("x = 1  # a door", "comment", 1),
        ("# one\n# a door\nx = 1", "comment", 2),
        ('x = "#"  # a door', "comment", 1),
        ('log.warning("a door", port=1)', "log message", 1),
        ('self._log.error(f"{n} doors")', "log message", 1),
        ('raise ValueError(f"{n}: expected a door")', "error text", 1),
        ('METRIC = Metric("freshet_x", "gauge", "", "The door.")', "help", 1),
    ],
)
def test_a_word_is_found_in_every_kind_of_prose_of_a_python_file(source: str, kind: str, line: int) -> None:
    assert [(where, what) for where, what, _ in found(source)] == [(line, kind)]


@pytest.mark.parametrize(
    "source",
    [
        'door = "door"',
        'x = "# a door"',
        'x = """\n# a door\n"""',
        'def f():\n    """Calls `door.open`."""',
        'METRIC = Metric("door", "gauge")',
        '"""Indoors, and adored."""',
    ],
)
def test_code_strings_and_parts_of_words_are_not_prose(source: str) -> None:
    assert found(source) == []


def test_the_name_of_a_test_is_prose() -> None:
    source = "def test_a_door_opens() -> None: ...\n"

    assert found(source, "tests/unit/test_a.py") == [(1, "test name", "door")]
    assert found(source, "services/freshet/a.py") == []


def test_a_page_is_prose_but_for_code_and_targets_of_links() -> None:
    page = "A [door](door.md).\n\n```sh\nopen door\n```\n\n- `door`\n- doors\n"

    assert found(page, "docs/a.md") == [(1, "page", "door"), (8, "page", "doors")]


def test_comments_of_cpp_are_prose() -> None:
    source = 'int door;  // a door\nauto s = "// door";\n/* one\n * door */\n'

    assert found(source, "services/native/src/a.cpp") == [(1, "comment", "door"), (4, "comment", "door")]


def test_a_phrase_is_found_across_lines_and_cases() -> None:
    assert found("# its Own\n# writes\n") == [(1, "comment", "Own writes")]


def test_a_word_is_allowed_in_its_phrases() -> None:
    assert found("# a dead letter\n") == []
    assert found("# dead letters and letters\n") == [(1, "comment", "letters")]


def test_a_word_is_allowed_in_its_files() -> None:
    assert found("A door.", "docs/houses/a.md") == []
    assert found("A door.", "docs/a.md") == [(1, "page", "door")]


@pytest.mark.parametrize("text", ["Of a door", "One. Of two", "One:\n\nOf two", "- Of two", "| Of two |"])
def test_a_sentence_with_a_forbidden_opening_is_found(text: str) -> None:
    assert "Of" in [what for _, _, what in found(text, "docs/a.md")]


@pytest.mark.parametrize("text", ["One of two", "One of\nTwo", "Often", "None, Of"])
def test_the_same_word_within_a_sentence_is_not(text: str) -> None:
    assert found(text, "docs/a.md") == []


def test_a_misspelt_key_of_a_word_is_refused() -> None:
    with pytest.raises(ValueError, match="alowed"):
        word_of({"pattern": "door", "write": "endpoint", "alowed": "front door"})
    with pytest.raises(ValueError, match="write"):
        word_of({"pattern": "door"})


def test_the_words_of_the_project_are_found() -> None:
    vocabulary = Vocabulary.load()
    bad = "# Nobody asked the guest at the door of the seam.\n# Of rows: it is told of letters.\n"
    good = "# The listener rejects requests; the shard writes dead letters. One of the ranks asks for rows.\n"

    said = [what for _, _, what in found(bad, vocabulary=vocabulary)]
    assert sorted(said) == sorted(["Nobody", "asked", "guest", "door", "seam", "Of", "told", "letters"])
    assert found(good, vocabulary=vocabulary) == []


def test_a_finding_names_its_place_and_the_word_to_write() -> None:
    assert str(Finding("a.py", 3, "comment", "door", "endpoint")) == 'a.py:3: comment: "door": write endpoint'


def test_without_words_nothing_is_found() -> None:
    assert found("# Of a door", vocabulary=Vocabulary([])) == []


def test_a_pattern_matches_whole_words_only() -> None:
    assert Word("a|b", whole_words("a|b"), "", None, ()).expression.findall("a ab b") == ["a", "b"]
