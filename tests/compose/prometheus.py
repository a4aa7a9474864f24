"""What a stack's Prometheus answers."""

from __future__ import annotations

from typing import Any

import httpx


class Prometheus:
    """Prometheus' HTTP API, version 1."""

    def __init__(self, url: str) -> None:
        self._client = httpx.Client(base_url=url, timeout=20)

    def query(self, expr: str) -> list[dict[str, Any]]:
        """The series of an instant query: [{metric, value}]. AssertionError if it is refused."""
        answer = self._client.get("/api/v1/query", params={"query": expr}).json()
        assert answer["status"] == "success", f"{expr}: {answer.get('error')}"
        found: list[dict[str, Any]] = answer["data"]["result"]
        return found

    def rules(self) -> list[dict[str, Any]]:
        """Every alert's rule as it was evaluated last: name, health, lastError, state."""
        groups = self._client.get("/api/v1/rules").json()["data"]["groups"]
        return [rule for group in groups for rule in group["rules"]]

    def firing(self) -> dict[str, str]:
        """Alerts that fire now -> since when, RFC 3339."""
        alerts = self._client.get("/api/v1/alerts").json()["data"]["alerts"]
        return {a["labels"]["alertname"]: a["activeAt"] for a in alerts if a["state"] == "firing"}

    def close(self) -> None:
        """Ask no more."""
        self._client.close()
