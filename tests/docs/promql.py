"""PromQL that stands in pages: what is quoted there, whether it can be read, and the labels it divides by."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path

import yaml

METRIC = re.compile(r"\b(?:freshet|process)_[a-z0-9_]+\b")
NAMED = re.compile(r"[a-z0-9_]+(\{[a-z_, ]+\})?")  # a metric, maybe with names of labels: no query
AGGREGATED = re.compile(r"(?:sum|min|max|avg|count)\s*(?:by\s*\(([^)]*)\))?\s*\(")


def quoted(text: str) -> list[str]:
    """Queries of our metrics among a page's code."""
    spans = re.findall(r"`([^`\n]+)`", text)
    return [span for span in spans if METRIC.search(span) and not NAMED.fullmatch(span)]


def assert_promql(queries: Sequence[str], folder: Path) -> None:
    """That Prometheus can read each; promtool says which it cannot."""
    rules = [{"record": f"page:{i}", "expr": query} for i, query in enumerate(queries)]
    file = folder / "queries.yml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "queries", "rules": rules}]}))
    promtool = shutil.which("promtool")
    assert promtool, "promtool is missing: apt-get install prometheus, or make test SKIP=promtool"
    done = subprocess.run(
        [promtool, "check", "rules", file], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def labels_divided(query: str, labels: Mapping[str, Sequence[str]]) -> list[tuple[set[str], set[str]]]:
    """Labels on both sides of each division of two vectors; `labels`: series -> those of its own.

    Where they differ Prometheus finds no pairs and answers nothing, which looks like a zero.
    """
    sides = re.split(r" / (?=[a-z])", query)  # not by a number
    return [(_labels(one, labels), _labels(other, labels)) for one, other in pairwise(sides)]


def _labels(side: str, labels: Mapping[str, Sequence[str]]) -> set[str]:
    """`instance` stands for what every series has, `job` and `role` among it."""
    aggregated = AGGREGATED.match(side)
    if aggregated is None:
        return {"instance", *labels[METRIC.findall(side)[0]]}
    return set(filter(None, (name.strip() for name in (aggregated[1] or "").split(","))))


OPS = Path(__file__).parents[2] / "ops"
RULES = OPS / "alerts" / "freshet.rules.yml"
