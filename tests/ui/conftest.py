"""Chromium for the page's tests: one for all of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from selenium import webdriver
from selenium.webdriver.chrome.service import Service

from tests.support.clients.build import built, copy_into, download
from tests.support.tools import program


@pytest.fixture(scope="session")
def chromium() -> Iterator[webdriver.Chrome]:
    """Debian's Chromium, without a window, and its driver."""
    options = webdriver.ChromeOptions()
    options.binary_location = program(("chromium",), "chromium")
    driver = program(("chromedriver",), "chromium-driver")
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"):
        options.add_argument(argument)
    options.add_argument("--js-flags=--expose-gc")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    browser = webdriver.Chrome(options, Service(driver))
    browser.set_page_load_timeout(60)
    browser.set_script_timeout(60)
    yield browser
    browser.quit()


@pytest.fixture(scope="session")
def axe() -> str:
    """The source of axe-core."""
    folder = Path(__file__).parent / "axe"
    files = [folder / "package.json", folder / "package-lock.json"]

    def install(work: Path) -> None:
        copy_into(work, files)
        npm = program(("npm",), "npm")
        download([npm, "ci", "--ignore-scripts", "--no-audit", "--no-fund"], work)

    return (built("axe", files, install) / "node_modules/axe-core/axe.min.js").read_text(encoding="utf-8")
