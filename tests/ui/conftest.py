"""Chromium for the tests of the page."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from selenium import webdriver

from tests.support.clients.build import built, copy_into
from tests.support.packages.registries import download, program
from tests.ui.browser import chromium


@pytest.fixture(scope="session", name="chromium")
def shared_chromium() -> Iterator[webdriver.Chrome]:
    """One browser for all tests."""
    with chromium() as browser:
        yield browser


@pytest.fixture(scope="session")
def axe() -> str:
    """The source of axe-core, the accessibility checker."""
    folder = Path(__file__).parent / "axe"
    files = [folder / "package.json", folder / "package-lock.json"]

    def install(work: Path) -> None:
        copy_into(work, files)
        npm = program(("npm",), "npm")
        download("axe", [npm, "ci", "--ignore-scripts", "--no-audit", "--no-fund"], cwd=work)

    return (built("axe", files, install) / "node_modules/axe-core/axe.min.js").read_text(encoding="utf-8")
