"""The steps of the pages are carried out: README, docs and the examples' own pages."""

import csv
import gzip
import random
import shutil
from pathlib import Path

import pytest

from tests.docs.running import EXECUTED, Reader
from tests.fixtures.pages import ROOT, blocks

PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "examples").glob("*/README.md")),
]


def with_something_to_run(page: Path) -> bool:
    return any(b.language in EXECUTED and not b.left_out for b in blocks(page))


@pytest.fixture
def reader(tmp_path: Path):
    """A reader who has what pages take for granted: the examples, events' schemas, a file of samples."""
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    for schema in ("impressions.avsc", "actions.avsc"):
        shutil.copy(ROOT / "examples" / "quickstart" / schema, tmp_path / schema)
    write_samples(tmp_path / "samples.csv.gz")
    reader = Reader(tmp_path)
    try:
        yield reader
    finally:
        reader.leave()


def write_samples(path: Path) -> None:
    """A thousand headlines; a reader's parity and an article's decide the click."""
    rng = random.Random(1)
    with gzip.open(path, "wt", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["ts", "reader", "items.article", "items.topic", "items.age_s", "click"])
        for n in range(1_000):
            reader, article = rng.randrange(20), rng.randrange(20)
            click = int(rng.random() < (0.8 if (reader + article) % 2 else 0.1))
            at = f"2026-01-01T00:{n // 60 % 60:02d}:{n % 60:02d}Z"
            writer.writerow([at, f"r{reader}", f"a{article}", "music", rng.randrange(9_000), click])


@pytest.mark.system
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "page", [p for p in PAGES if with_something_to_run(p)], ids=lambda p: str(p.relative_to(ROOT))
)
def test_the_commands_of_a_page_can_be_followed(page: Path, reader: Reader) -> None:
    for block in blocks(page):
        if block.language in EXECUTED and not block.left_out:
            reader.follow(block)


def test_a_block_that_is_not_executed_says_why(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "One:\n```sh\ntrue\n```\n<!-- not executed: takes an hour -->\n\n```sh\nsleep 3600\n```\n"
        "- in a list\n  ```python\n  if True:\n      pass\n  ```\n"
    )

    found = [(b.line, b.language, b.text, b.left_out) for b in blocks(page)]

    assert found == [
        (3, "sh", "true\n", ""),
        (8, "sh", "sleep 3600\n", "takes an hour"),
        (12, "python", "if True:\n    pass\n", ""),
    ]


def test_what_fails_is_named_by_page_line_and_output(reader: Reader) -> None:
    page = ROOT / "README.md"
    block = next(b for b in blocks(page) if b.language == "sh")
    broken = type(block)(page, block.line, "sh", "echo so far so good\nfalse\n", "")

    with pytest.raises(AssertionError, match=rf"README.md:{block.line}: ended with 1:(.|\n)*so far so good"):
        reader.follow(broken)
