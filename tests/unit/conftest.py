"""Fixtures of all unit tests."""

from __future__ import annotations

import pytest

from freshet.http import service_client


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let requests to services wait long for answers: a loaded machine may take more than a second."""
    for each in (service_client.ask, service_client.why_unready, service_client.figures_of):
        assert each.__kwdefaults__ is not None
        monkeypatch.setitem(each.__kwdefaults__, "timeout_s", 20.0)
