"""What a run of the alarms says at its end: an alert that stays silent, or goes on, is a failure."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from tests.compose import alarms


@contextmanager
def nothing(_: Any) -> Iterator[None]:
    """Break nothing."""
    yield


@pytest.mark.parametrize(
    ("fires", "wrong"),
    [
        ([["FreshetDown"], []], ""),
        ([[]] * 9, "did not fire within 0 s: ['FreshetDown']"),
        ([["FreshetDown"]] * 9, "still firing: ['FreshetDown']"),
    ],
)
def test_an_alert_that_never_fires_or_never_ends_is_an_error(
    fires: list[list[str]], wrong: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(alarms, "RESOLVED_S", 0.0)
    seen = iter(fires)
    broken: Any = SimpleNamespace(prometheus=SimpleNamespace(firing=lambda: next(seen)))
    group: Any = SimpleNamespace(break_=nothing, within_s=0.0)

    found = alarms.make_fire(broken, group, ["FreshetDown"], is_last=False)

    assert [line for line in found if not wrong] == []
    assert not wrong or any(wrong in line for line in found)


def test_a_run_with_one_of_them_ends_with_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(alarms, "on_a_stack", lambda *_: ["  nothing: did not fire"])

    with pytest.raises(SystemExit) as ended:
        alarms.main([])

    assert ended.value.code not in (0, None)
