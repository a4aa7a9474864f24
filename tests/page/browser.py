"""Chromium and how tests start it."""

from __future__ import annotations

import os
import shutil

import pytest

CALM = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


def browser_path() -> str:
    """Where Chromium is; the test fails without one."""
    named = os.environ.get("FRESHET_TEST_BROWSER")
    names = (named, "chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
    found = next(filter(None, (shutil.which(name) for name in names if name)), None)
    if found is None:
        pytest.fail(
            "no Chromium on PATH: apt-get install chromium, name one in FRESHET_TEST_BROWSER, "
            "or leave these tests out: pytest -m 'not browser'"
        )
    return found
