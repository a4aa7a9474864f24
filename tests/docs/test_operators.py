"""What operators are given: alerts with runbooks, boards of metrics that there are, rules that fire when they
should."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from freshet.process.telemetry import PROCESS_METRICS
from ops.boards.__main__ import texts
from ops.boards.boards import read_boards
from ops.reference.metrics_page import SERVICES
from tests.docs.promql import OPS, RULES, assert_promql

RULE_TESTS = sorted((OPS / "alerts").glob("*.test.yml"))
PARTS = ("What it means.", "Look here.", "Do this.", "How to know it worked.")

NAMES = {
    name
    for metrics in (*SERVICES.values(), PROCESS_METRICS)
    for m in metrics
    for name in (
        [f"{m.exposed}_{part}" for part in ("bucket", "sum", "count")]
        if m.kind == "histogram"
        else [m.exposed]
    )
}
"""The names of all series that services expose."""


def alerts() -> dict[str, dict[str, object]]:
    groups = yaml.safe_load(RULES.read_text())["groups"]
    return {rule["alert"]: rule for group in groups for rule in group["rules"] if "alert" in rule}


def series(query: str) -> set[str]:
    return set(re.findall(r"\bfreshet_[a-z0-9_]+", query))


@pytest.mark.parametrize("name", alerts())
def test_an_alert_is_of_metrics_that_there_are_and_has_a_runbook(name: str) -> None:
    rule = alerts()[name]
    annotations, labels = rule["annotations"], rule["labels"]
    assert isinstance(annotations, dict)
    assert isinstance(labels, dict)

    assert series(str(rule["expr"])) <= NAMES
    assert labels["severity"] in ("page", "ticket")
    assert annotations["runbook"] == f"ops/runbooks/{name}.md"
    text = (OPS / "runbooks" / f"{name}.md").read_text()
    assert all(f"**{part}**" in text for part in PARTS)
    assert f"({name}.md)" in (OPS / "runbooks" / "README.md").read_text()


def test_rules_and_alerts_read_existing_metrics_and_records() -> None:
    rules = [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]
    recorded = {rule["record"] for rule in rules if "record" in rule}

    assert set().union(*(series(rule["expr"]) for rule in rules)) <= NAMES
    assert set().union(*(re.findall(r"\bfreshet:[a-z0-9_:]+", rule["expr"]) for rule in rules)) == recorded


def test_no_alert_counts_unauthorized_requests() -> None:
    """Strangers could silence it by asking; a client beyond its limit would set it off."""
    for name, rule in alerts().items():
        for selector in re.findall(r"(?:http_requests|grpc_answers)_total\{([^}]*)\}", str(rule["expr"])):
            assert 'door!="refused"' in selector, name


def test_every_runbook_is_of_an_alert() -> None:
    assert {p.stem for p in (OPS / "runbooks").glob("Freshet*.md")} == set(alerts())


@pytest.mark.parametrize("path", sorted((OPS / "runbooks").glob("*.md")), ids=lambda p: p.stem)
def test_runbooks_name_existing_metrics(path: Path) -> None:
    histograms = {name.removesuffix("_bucket") for name in NAMES}
    assert series(path.read_text()) <= NAMES | histograms


def test_every_alert_is_made_to_fire_and_not_to_fire() -> None:
    cases = [
        case
        for path in RULE_TESTS
        for test in yaml.safe_load(path.read_text())["tests"]
        for case in test["alert_rule_test"]
    ]

    assert {c["alertname"] for c in cases if c["exp_alerts"]} == set(alerts())
    assert {c["alertname"] for c in cases if not c["exp_alerts"]} == set(alerts())


@pytest.mark.promtool
@pytest.mark.parametrize("path", RULE_TESTS, ids=lambda path: path.name)
def test_promtool_agrees(path: Path, tmp_path: Path) -> None:
    promtool = shutil.which("promtool")
    assert promtool, "promtool is missing: apt-get install prometheus, or make test SKIP=promtool"
    subprocess.run([promtool, "check", "rules", RULES], check=True, capture_output=True, timeout=120)
    tests, rules = (yaml.safe_load(at.read_text()) for at in (path, RULES))
    parts = []
    for i, test in enumerate(tests["tests"]):  # promtool evaluates all rules of a test, judged or not
        judged = {"", *(case["alertname"] for case in test["alert_rule_test"])}
        groups = [
            {**group, "rules": [rule for rule in group["rules"] if rule.get("alert", "") in judged]}
            for group in rules["groups"]
        ]
        (tmp_path / f"{i}.rules.yml").write_text(yaml.safe_dump({**rules, "groups": groups}))
        parts.append(tmp_path / f"{i}.yml")
        parts[-1].write_text(yaml.safe_dump({**tests, "rule_files": [f"{i}.rules.yml"], "tests": [test]}))
    done = subprocess.run(
        [promtool, "test", "rules", *parts], capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.promtool
def test_the_boards_queries_are_promql(tmp_path: Path) -> None:
    queries = (e for b in read_boards() for r in b.rows for p in r.panels for e, _ in p.queries)
    assert_promql([query.replace("$__rate_interval", "1m") for query in queries], tmp_path)


def test_boards_show_metrics_that_there_are_and_are_written() -> None:
    for board in read_boards():
        for row in board.rows:
            for panel in row.panels:
                for expr, _ in panel.queries:
                    assert series(expr) <= NAMES, (board.title, panel.title)
    for path, text in texts().items():
        assert path.read_text() == text, "make docs writes them anew"


def test_the_page_scrapes_every_role_at_its_port() -> None:
    page = (OPS.parent / "docs" / "operations.md").read_text()
    block = re.search(r"```yaml\n(scrape_configs:.*?)```", page, re.DOTALL)
    assert block is not None
    ours, stack = (
        {
            (target["labels"]["role"], name.rpartition(":")[2])
            for target in scraped["static_configs"]
            for name in target["targets"]
            if scraped["job_name"] == "freshet"
        }
        for text in (block[1], (OPS / "docker" / "config" / "prometheus.yml").read_text())
        for scraped in yaml.safe_load(text)["scrape_configs"]
    )

    assert ours == stack
    asked = {role for rule in alerts().values() for role in re.findall(r'role="(\w+)"', str(rule["expr"]))}
    assert asked <= {role for role, _ in ours}
