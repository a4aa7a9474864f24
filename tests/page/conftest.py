"""One browser for all tests of the page; every page is checked for errors and foreign requests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

from tests.page.browser import CALM, browser_path
from tests.page.scripted import Scripted

expect.set_options(timeout=20_000)  # a machine that is shared is slow at times


@pytest.fixture(
    scope="module"
)  # its event loop runs in this thread: no test after these could start one of its own
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=browser_path(), args=list(CALM))
        yield browser
        browser.close()


@pytest.fixture
def console() -> Iterator[Callable[..., Scripted]]:
    """Start a scripted console with a state; the test's end stops it."""
    started: list[Scripted] = []

    def start(world: dict[str, Any], **options: Any) -> Scripted:
        console = Scripted(world, **options)
        console.start()
        started.append(console)
        return console

    yield start
    for console in started:
        console.stop()


@pytest.fixture
def opened(browser: Browser) -> Iterator[Callable[..., Page]]:
    """Open a page; at the end of the test it has queried no other host and logged nothing in its console.

    A test that stops the server expects the browser to say so: `lost=True`.
    """
    watched = []

    def open_page(url: str, *, lost: bool = False, width: int = 1440, **options: Any) -> Page:
        context = browser.new_context(viewport={"width": width, "height": 900}, **options)
        page = context.new_page()
        said: list[str] = []
        page.on("console", lambda m: said.append(m.text) if m.type in {"error", "warning"} else None)
        page.on("pageerror", lambda error: said.append(f"uncaught: {error}"))
        hosts: set[str] = set()
        page.on("request", lambda r: hosts.add(urlsplit(r.url).netloc))
        watched.append((context, said, hosts, urlsplit(url).netloc, lost))
        page.goto(url)
        return page

    yield open_page
    for context, said, hosts, own, lost in watched:
        context.close()
        assert hosts <= {own}
        assert [s for s in said if not (lost and "Failed to load resource" in s)] == []
