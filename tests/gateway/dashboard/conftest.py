"""A browser for the tests of a module, and pages in it that neither complain nor ask anything of other machines."""

from __future__ import annotations

import contextlib
import re
import shutil
from collections.abc import Iterator
from typing import Any

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
ELSEWHERE = re.compile(r"^(?!http://127\.0\.0\.1:|data:|blob:)")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """One for each module, not for the session: as long as it is there, no test can run an event loop of its own."""
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    if CHROMIUM is None:
        pytest.skip("no chromium on this machine")
    with playwright.sync_playwright() as running:
        browser = running.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@contextlib.contextmanager
def opened(browser: Any, url: str, *, width: int = 1440, height: int = 900) -> Iterator[Any]:
    """A page in a context of its own. What it complains about in its console, or asks of others, fails the test."""
    context = browser.new_context(viewport={"width": width, "height": height})
    context.set_default_timeout(15_000)
    left: list[str] = []

    def refuse(route: Any) -> None:
        left.append(route.request.url)
        route.abort()

    context.route(ELSEWHERE, refuse)
    tab = context.new_page()
    complaints: list[str] = []
    tab.on("pageerror", lambda error: complaints.append(str(error)))
    tab.on("console", lambda line: complaints.append(line.text) if line.type in ("error", "warning") else None)
    tab.goto(url)
    try:
        yield tab
    finally:
        context.close()
    expected = ("Failed to load resource", "net::ERR")  # a gateway that is away or wants a key
    assert [line for line in complaints if not any(part in line for part in expected)] == []
    assert left == []
