"""What the script of the documentation's pages does, on a small site: `make docs` takes longer."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import Select, WebDriverWait

from tests.support.papers.pages import ROOT

sys.path.insert(0, str(ROOT / "docs"))

import publish

_STATIC = ROOT / "docs" / "_static"
_SIDEBAR = (ROOT / "docs/_templates/sidebar/versions.html").read_text().partition("-#}")[2]
_PAGE = f"""<!doctype html><html data-content_root="../">
<meta name="viewport" content="width=device-width">
<link rel="stylesheet" href="{_STATIC / "pages.css"}">
{_SIDEBAR.replace("{{ pathto('../versions.js', 1) }}", "../../versions.js")}
<article>
<div class="highlight-bash"><div class="highlight"><pre>klog doctor
klog topics list</pre></div></div>
<div class="highlight-none"><div class="highlight"><pre>klog topics list [OPTIONS]</pre></div></div>
<div><table class="docutils">
<thead><tr><th>option</th><th>default</th><th></th></tr></thead>
<tbody><tr><td>startingOffsets</td><td>latest</td><td>where a stream begins</td></tr></tbody>
</table></div>
</article>
<script src="{_STATIC / "pages.js"}"></script>
"""


@pytest.fixture
def site(chromium: webdriver.Chrome, tmp_path: Path) -> Iterator[Path]:
    """Versions 0.1.0 to 0.3.0rc1, each with a page."""
    for version in ("0.1.0", "0.2.0", "0.3.0rc1"):
        page = tmp_path / version / "recipes" / "load.html"
        page.parent.mkdir(parents=True)
        page.write_text(_PAGE.replace("{{ release }}", version))
        (tmp_path / version / "index.html").write_text(f"<title>{version}</title>")
        publish.list_version(tmp_path, version, is_release=True)
    yield tmp_path
    chromium.get("about:blank")
    chromium.get_log("browser")  # the browser logs that it looks for no file


@pytest.mark.parametrize(
    ("version", "note"),
    [
        ("0.1.0", "This page is about version 0.1.0. The newest release is 0.2.0."),
        ("0.2.0", ""),
        ("0.3.0rc1", "Version 0.3.0rc1 is not released. The newest release is 0.2.0."),
    ],
)
def test_switch_of_versions(chromium: webdriver.Chrome, site: Path, version: str, note: str) -> None:
    chromium.get(f"file://{site}/{version}/recipes/load.html")
    select = Select(chromium.find_element(By.CSS_SELECTOR, ".versions select"))
    assert [option.text for option in select.options] == ["0.3.0rc1 (latest)", "0.2.0 (stable)", "0.1.0"]
    assert select.first_selected_option.get_attribute("value") == version
    assert "".join(element.text for element in chromium.find_elements(By.CSS_SELECTOR, ".other-version")) == note
    other = "0.1.0" if version != "0.1.0" else "0.2.0"
    select.select_by_value(other)
    # From a web server it is the same page of the other version; files can't be looked for.
    WebDriverWait(chromium, 20).until(lambda driver: driver.title == other)


def test_copy_and_tables_of_a_phone(chromium: webdriver.Chrome, site: Path) -> None:
    chromium.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride", {"width": 390, "height": 800, "deviceScaleFactor": 1, "mobile": True}
    )
    chromium.get(f"file://{site}/stable/recipes/load.html")
    assert chromium.find_element(By.CSS_SELECTOR, ".versions select").get_property("value") == "0.2.0"
    (button,) = chromium.find_elements(By.CSS_SELECTOR, "button.copy")
    chromium.execute_script(
        "navigator.clipboard.writeText = (text) => { window.copied = text; return Promise.resolve() }"
    )
    button.click()
    WebDriverWait(chromium, 20).until(lambda _: button.text == "Copied")
    assert chromium.execute_script("return window.copied") == "klog doctor\nklog topics list"
    (table,) = chromium.find_elements(By.CSS_SELECTOR, "table.stacked")
    assert [cell.get_attribute("data-label") for cell in table.find_elements(By.TAG_NAME, "td")] == [
        None,
        "default",
        None,
    ]
    chromium.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride", {"width": 1440, "height": 800, "deviceScaleFactor": 1, "mobile": False}
    )
    WebDriverWait(chromium, 20).until(lambda _: not chromium.find_elements(By.CSS_SELECTOR, "table.stacked"))
