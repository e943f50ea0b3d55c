"""The pages as a site: versions, their aliases, and the commands of the landing page. `make check` builds the pages."""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path

from sphinx.application import Sphinx

from spark_klog import errors
from spark_klog.broker.settings.config import PLACES
from spark_klog.spark.option_table import Use, names_for
from tests.support.papers import pages as papers
from tests.support.papers.pages import ROOT

sys.path.insert(0, str(ROOT / "docs"))

import generate
import publish


def _add(site: Path, version: str, *, is_release: bool = True) -> dict[str, object]:
    """What the site's list says after the build of a version; `stable` and `latest` must lead to their folders."""
    folder = site / version
    folder.mkdir(exist_ok=True)
    (folder / "index.html").write_text(version)
    publish.list_version(site, version, is_release=is_release)
    listed = json.loads((site / "versions.js").read_text().removeprefix("window.KLOG_VERSIONS = ").rstrip(";\n"))
    assert isinstance(listed, dict)
    for alias in {"stable", "latest"} & set(listed):
        assert (site / alias / "index.html").read_text() == listed[alias]
    return listed


def test_each_build_adds_its_version(tmp_path: Path) -> None:
    assert _add(tmp_path, "0.1.0rc1") == {"versions": ["0.1.0rc1"], "latest": "0.1.0rc1"}
    assert "url=latest/index.html" in (tmp_path / "index.html").read_text()
    for version in ("0.1.0", "0.10.0", "0.2.0", "0.11.0.dev1"):
        _add(tmp_path, version)
    assert "url=stable/index.html" in (tmp_path / "index.html").read_text()
    expected = {
        "versions": ["0.11.0.dev1", "0.10.0", "0.2.0", "0.1.0", "0.1.0rc1"],
        "latest": "0.11.0.dev1",
        "stable": "0.10.0",
    }
    assert _add(tmp_path, "0.2.0") == expected, "a version that is built again is listed once"


def test_stable_is_the_last_release(tmp_path: Path) -> None:
    """Before the first one, and before the next one has its date in the changelog, pages are those of no release."""
    assert "stable" not in _add(tmp_path, "0.1.0", is_release=False)
    assert _add(tmp_path, "0.1.0")["stable"] == "0.1.0"
    assert _add(tmp_path, "0.2.0.dev0", is_release=False)["stable"] == "0.1.0"
    assert _add(tmp_path, "0.2.0", is_release=False) | {"versions": []} == {
        "versions": [],
        "latest": "0.2.0",
        "stable": "0.1.0",
    }
    assert publish.is_released("0.0.9") is False


def test_each_page_has_the_switch() -> None:
    """tests/ui/test_documentation.py uses it. Sphinx does not say that a file of a page's head is missing."""
    settings = (ROOT / "docs" / "conf.py").read_text()  # importing it would write the generated pages
    assert '"sidebar/versions.html"' in settings
    named = set(re.findall(r"\"(\w+\.(?:js|css))\"", settings)) - {"scorer.js"}
    assert named
    assert [name for name in named if not (ROOT / "docs" / "_static" / name).exists()] == []


def test_commands_of_the_landing_page_are_those_of_other_pages() -> None:
    """tests/spark/test_snippets.py runs both; who goes on in another page finds the commands again."""
    known = {line for page in papers.pages() if page != "docs/index.md" for line in _lines(page)}
    landing = _lines("docs/index.md")
    assert len(landing) > 10
    assert [line for line in landing if line not in known] == []


def _lines(page: str) -> list[str]:
    """The lines of code of a page, in code blocks and prose, without comments and indentation."""
    snippets = [line for snippet in _snippets(page) for line in snippet.text.splitlines()]
    commands = re.findall(r"`((?:pip|klog) [^`]+)`", papers.prose(page))
    return [code for line in (*snippets, *commands) if (code := line.partition("  #")[0].strip())]


def _snippets(page: str) -> list[papers.Snippet]:
    return [snippet for snippet in papers.snippets(page) if not snippet.language.startswith("{")]


def test_what_is_copied_has_no_prompts() -> None:
    snippets = [snippet for page in papers.pages() for snippet in _snippets(page)]
    assert [str(snippet) for snippet in snippets if re.search(r"^\s*([$%] |>>> )", snippet.text, re.MULTILINE)] == []


def test_search_leads_to_the_row_of_a_name(tmp_path: Path) -> None:
    """Options, settings, errors and metrics are objects of the search, each with its row."""
    pages = ["reading.md", "writing.md", *(f"generated/{name}" for name in generate.PAGES)]
    for page in pages:
        target = tmp_path / "reference" / page
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / "docs" / "reference" / page, target)
    (tmp_path / "index.md").write_text("# Pages\n")
    settings = {"extensions": ["myst_parser", "named_rows"]}
    out = tmp_path / "out"
    app = Sphinx(tmp_path, None, out, out, "dummy", settings, status=None, warning=None)
    app.build()
    rows = app.env.domains["row"].data["rows"]
    names = {name.rpartition(".")[2] if kind == "class" else name for name, kind, _, _ in rows}
    options = {*names_for(Use.READ), *names_for(Use.WRITE), *PLACES, *generate.client_setting_names()}
    classes = {kind.__name__ for kind in generate.public_errors() if kind.__module__ == errors.__name__}
    metrics = set(re.findall(r"^\| (klog_\w+) \|", generate.metrics(), re.MULTILINE))
    assert len(metrics) > 20
    assert sorted((options | classes | metrics) - names) == []
    page, anchor = next((page, anchor) for name, _, page, anchor in rows if name == "startingOffsets")
    assert (page, anchor) == ("reference/reading", "row-startingoffsets")
    doctree = app.env.get_doctree(page)
    assert "earliest" in doctree.ids[anchor].astext()
