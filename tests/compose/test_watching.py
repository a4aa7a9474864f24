"""Boards and alerts on a Prometheus that scrapes the running system: boards show something, alerts are
evaluated, and none fires while all is well.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from freshet.demo import DEMO_SPEC
from freshet.testing.conditions import wait_until
from ops.boards.boards import read_boards
from tests.compose.prometheus import Prometheus
from tests.compose.stack import Stack

RATE_INTERVAL = "1m"  # as Grafana makes of scrapes each 15 s, which is more than ours

SELECTOR = re.compile(r"(?:freshet|process)_[a-z0-9_]+(?:{[^}]*})?")

FAILURES = re.compile(r',status=~"[^"]*"')
"""Which answers are failures: none while all is well, when the rest of the selector must show series."""

EMPTY = {
    "freshet_shard_room_blocks": "rows are in shards of their own here",
    "freshet_shard_unwritten_seconds": "rows are in shards of their own here",
    "freshet_shard_not_finite_gradients_total": "rows are in shards of their own here",
    "freshet_shard_evicted_rows_total": "rows are in shards of their own here",
    "freshet_shard_ssd_full": "rows are in shards of their own here",
    "freshet_shard_max_rows": "rows are in shards of their own here",
    'freshet_shard_rows{table!="crosses"}': "rows are in shards of their own here",
    "freshet_trainer_refused_total": "embedders decode samples here",
    "freshet_joiner_out_of_bounds_total": "no label has bounds here",
    "freshet_door_refused_total": "no door asks for tokens here",
    **dict.fromkeys(
        (
            'freshet_grpc_answers_total{door!="refused",method="ModelInfer",role="inference"}',
            'freshet_grpc_answers_total{door!="refused",role="gateway"}',
            'freshet_grpc_answer_seconds_bucket{method="ModelInfer",role="inference"}',
            f'sum by (status, door) (rate(freshet_grpc_answers_total{{role="gateway"}}[{RATE_INTERVAL}]))',
            'sum by (status, door) (rate(freshet_grpc_answers_total{role="inference", method="ModelInfer"}'
            f"[{RATE_INTERVAL}]))",
        ),
        "no clients speak gRPC here",
    ),
}
"""Query -> why a healthy stack has no series for it. Prometheus returns rules with labels in order."""

pytestmark = [pytest.mark.compose, pytest.mark.timeout(900)]


@pytest.fixture
def prometheus(tmp_path: Path) -> Iterator[Prometheus]:
    """Prometheus of a stack with the demo's spec and its readers, once these are learned from."""
    stack = Stack(DEMO_SPEC.parent, tmp_path)
    stack.down(volumes=True)
    try:
        stack.up()
        stack.up("simulator")
        asked = Prometheus(stack.prometheus)
        wait_until(
            "what was served is measured",
            lambda: bool(asked.query('freshet_trainer_quality{of="served"}')),
            within_s=300,
        )
        yield asked
        asked.close()
    finally:
        stack.keep_words(tmp_path)
        stack.down(volumes=True)
        stack.close()


def test_every_board_query_has_data_and_every_alert_evaluates(
    prometheus: Prometheus,
) -> None:
    queries = {
        expr.replace("$__rate_interval", RATE_INTERVAL): f"{board.title}: {panel.title}"
        for board in read_boards()
        for row in board.rows
        for panel in row.panels
        for expr, _ in panel.queries
    }
    wait_until(
        "there are rates of everything",
        lambda: all(prometheus.query(q) for q in queries if q not in EMPTY) or _told(prometheus, queries),
        within_s=180,
        poll_s=5,
    )
    rules = prometheus.rules()
    selected = {FAILURES.sub("", s) for rule in rules for s in SELECTOR.findall(rule["query"])}

    nothing = [s for s in selected if s not in EMPTY and not prometheus.query(s)]
    assert nothing == [], "\n".join(("alerts on nothing:", *nothing))
    print(f"{len(queries)} queries, {len(rules)} alerts")
    assert [q for q in EMPTY if prometheus.query(q)] == [], "said to be empty"
    assert [(rule["name"], rule.get("lastError")) for rule in rules if rule["health"] != "ok"] == []
    assert prometheus.firing() == {}


def _told(prometheus: Prometheus, queries: dict[str, str]) -> bool:
    empty = [f"{where}: {q}" for q, where in queries.items() if q not in EMPTY and not prometheus.query(q)]
    print("still empty:", *empty, sep="\n  ")
    return False
