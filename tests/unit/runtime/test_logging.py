"""Logs: what cannot be written is dropped, and nobody who logs is told."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator

import orjson
import pytest
import structlog

from freshet.runtime.logging import configure_logging


class FullDisk(io.StringIO):
    def write(self, text: str) -> int:
        raise OSError(28, "No space left on device")

    def flush(self) -> None:
        raise OSError(28, "No space left on device")


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    yield
    structlog.reset_defaults()
    structlog.contextvars.clear_contextvars()


def test_a_message_is_an_object_a_line_with_its_service(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("joiner")

    structlog.get_logger().warning("log full", topic="samples")

    said = orjson.loads(capsys.readouterr().err)
    assert (said["service"], said["level"], said["event"]) == ("joiner", "warning", "log full")


def test_a_message_that_cannot_be_written_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    configure_logging("joiner")
    monkeypatch.setattr(sys, "stderr", FullDisk())

    structlog.get_logger().error("not written")
