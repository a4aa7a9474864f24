"""Boards as Grafana reads them: its dashboard JSON, schema version 39 (Grafana 11)."""

from __future__ import annotations

from typing import Any

from ops.boards.boards import Board, Panel

SOURCE = {"type": "prometheus", "uid": "freshet-prometheus"}
WIDTH, HEIGHT = 24, 8


def as_json(board: Board) -> dict[str, Any]:
    """The dashboard; panels of a row share its width."""
    panels: list[dict[str, Any]] = []
    y = 0
    for row in board.rows:
        panels.append(
            {
                "id": len(panels) + 1,
                "type": "row",
                "title": row.title,
                "collapsed": False,
                "gridPos": {"x": 0, "y": y, "w": WIDTH, "h": 1},
                "panels": [],
            }
        )
        width = WIDTH // len(row.panels)
        for i, panel in enumerate(row.panels):
            place = {"x": i * width, "y": y + 1, "w": width, "h": HEIGHT}
            panels.append(_panel(panel, len(panels) + 1, place))
        y += 1 + HEIGHT
    return {
        "uid": board.uid,
        "title": board.title,
        "tags": ["freshet"],
        "timezone": "browser",
        "schemaVersion": 39,
        "version": 1,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "links": [
            {
                "title": "freshet",
                "type": "dashboards",
                "tags": ["freshet"],
                "asDropdown": True,
                "keepTime": True,
            }
        ],
        "panels": panels,
    }


def _panel(panel: Panel, number: int, place: dict[str, int]) -> dict[str, Any]:
    return {
        "id": number,
        "type": "timeseries",
        "title": panel.title,
        "description": panel.doc,
        "datasource": SOURCE,
        "gridPos": place,
        "fieldConfig": {
            "defaults": {"unit": panel.unit, "custom": {"fillOpacity": 8, "showPoints": "never"}},
            "overrides": [],
        },
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}},
        "targets": [
            {"refId": chr(ord("A") + i), "datasource": SOURCE, "expr": expr, "legendFormat": legend}
            for i, (expr, legend) in enumerate(panel.queries)
        ],
    }
