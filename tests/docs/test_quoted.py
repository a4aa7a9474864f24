"""Queries and log lines that runbooks and pages quote: operators paste and search for them at night."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from freshet.process.telemetry import PROCESS_METRICS
from ops.reference.logs_page import calls
from ops.reference.metrics_page import SERVICES
from tests.docs.promql import assert_promql, labels_divided, quoted
from tests.fixtures.pages import ROOT

RUNBOOKS = sorted((ROOT / "ops" / "runbooks").glob("*.md"))
PAGES = [*RUNBOOKS, *sorted((ROOT / "docs").glob("*.md"))]

LABELS = {
    name: metric.labels
    for metrics in (*SERVICES.values(), PROCESS_METRICS)
    for metric in metrics
    for name in (
        metric.exposed,
        f"{metric.exposed}_bucket",
        f"{metric.exposed}_sum",
        f"{metric.exposed}_count",
    )
}

PHRASE = re.compile(r"[\"`]([a-z][a-z',:;…-]*(?: [a-z0-9',:;…-]+){2,})[\"`]")
NO_LOG_LINES = ("docker ", "freshet ", "streaming ")  # commands, and the title of a book


def log_lines(text: str) -> list[str]:
    """What a page quotes of a log: three words and more, where it speaks of one; … for what varies."""
    lines = [line for line in text.splitlines() if re.search(r"\blogs?\b", line)]
    return [p for line in lines for p in PHRASE.findall(line) if not p.startswith(NO_LOG_LINES)]


@pytest.mark.promtool
def test_queries_on_pages_are_promql(tmp_path: Path) -> None:
    queries = [query for page in PAGES for query in quoted(page.read_text())]

    assert len(queries) > 40
    assert_promql(queries, tmp_path)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_query_on_a_page_divides_by_the_same_labels(page: Path) -> None:
    for query in quoted(page.read_text()):
        for one, other in labels_divided(query, LABELS):
            assert one == other, f"{query}: answers nothing, as no labels are alike; sum both sides"


def test_labels_that_are_not_alike_are_seen() -> None:
    plain = "rate(freshet_inference_candidates_total[5m]) / rate(freshet_http_requests_total[5m])"
    summed = "sum by (instance) (rate(freshet_inference_candidates_total[5m])) / sum(freshet_trainer_steps)"
    alike = "sum(freshet_trainer_steps) / sum(freshet_trainer_ranks) > 0.1"

    assert [one == other for one, other in labels_divided(plain, LABELS)] == [False]
    assert [one == other for one, other in labels_divided(summed, LABELS)] == [False]
    assert [one == other for one, other in labels_divided(alike, LABELS)] == [True]
    assert labels_divided("freshet_joiner_newest_sample_ms / 1000", LABELS) == []


def test_operations_names_every_alert_by_a_symptom() -> None:
    """An operator who starts from a symptom finds the runbook; expressions are in the rules alone."""
    page = (ROOT / "docs" / "operations.md").read_text()
    section = page.split("## Monitoring")[1].split("\n## ")[0]

    assert sorted(re.findall(r"\]\(\.\./ops/runbooks/(Freshet\w+)\.md\)", section)) == [
        path.stem for path in RUNBOOKS if path.stem != "README"
    ]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_log_lines_that_a_page_quotes_are_said(page: Path) -> None:
    for line in log_lines(page.read_text()):
        pattern = re.compile(".*".join(re.escape(part.strip()) for part in line.split("…")))
        said = any(pattern.match(call.message) for call in calls() if call.message)
        assert said, f"{line!r}: no message in reference/logs.md"


def test_runbooks_quote_log_lines() -> None:
    assert len([line for page in RUNBOOKS for line in log_lines(page.read_text())]) > 6
