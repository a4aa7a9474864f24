"""Every call that logs keeps to the documented keys, levels and forms."""

from __future__ import annotations

from pathlib import Path

import pytest

from freshet.observability.log_keys import ALWAYS, KEYS, SOMETIMES
from ops.reference.logs_page import LEVELS, Call, calls


def names(found: list[Call]) -> list[str]:
    return [f"{c.where}:{c.line} {c.message!r} {c.keys}" for c in found]


@pytest.mark.slow
def test_calls_are_found() -> None:
    assert len(calls()) > 60
    assert {"joiner", "gateway", "trainer", "inference", "embedder", "paramserver"} <= {
        c.part for c in calls()
    }


def test_every_key_is_a_documented_one() -> None:
    assert not names([c for c in calls() if set(c.keys) - KEYS.keys() - {"left_out", "logger"}]), (
        "describe the key in observability/log_keys.py, or use the one that there is for the thing"
    )


def test_no_key_hides_in_an_opaque_mapping() -> None:
    assert not names([c for c in calls() if c.unknown and not c.where.startswith("observability/logging.py")])


def test_every_documented_key_is_used() -> None:
    used = {key for call in calls() for key in call.keys}

    assert not KEYS.keys() - used, "nobody says these any more"


def test_a_key_has_one_meaning() -> None:
    assert not KEYS.keys() & (ALWAYS.keys() | SOMETIMES.keys())


def test_levels_are_the_four_that_settings_know() -> None:
    assert not names([c for c in calls() if c.level not in LEVELS])


def test_messages_are_constant_texts() -> None:
    assert not names(
        [c for c in calls() if not c.message and c.where != "observability/logging.py"]
    )  # a library's


@pytest.mark.parametrize("key", ["body", "payload", "record", "events", "token", "password", "url", "error"])
def test_there_is_no_key_for_secrets_and_events(key: str) -> None:
    assert key not in KEYS


def test_a_key_that_is_not_documented_is_seen(tmp_path: Path) -> None:
    text = 'where = {"topic": 1}\nlog.error("x", **where, nonsense=2)\nlog.info("y", **more)\n'

    (tmp_path / "x.py").write_text(text)

    found = calls(tmp_path)

    assert [(c.keys, c.unknown) for c in found] == [(("topic", "nonsense"), False), ((), True)]
