"""What is public is what the text files say: a change of it is seen, told, and meant."""

from __future__ import annotations

import difflib
import re

import pytest
from packaging.version import Version

from spark_klog.base.names import VERSION
from tests.public.write import FILES, FOLDER
from tests.support.papers import pages

_ADVICE = (
    "Is it meant? docs/reference/versions.md says what may change. Then name it in CHANGELOG.md, run "
    "`python -m tests.public.write`, and commit the files"
)
_ADDRESS = re.compile(r"https://github\.com/spark-klog/[\w-]+")


@pytest.mark.usefixtures("logging_kept")
@pytest.mark.parametrize("name", FILES)
def test_nothing_public_has_changed(name: str) -> None:
    kept, now = (FOLDER / name).read_text().splitlines(), list(FILES[name]())
    changes = [line for line in difflib.ndiff(kept, now) if line[:2] in ("- ", "+ ")]
    assert changes == [], "\n".join([f"tests/public/{name} was (-) and is (+):", *changes, _ADVICE])


def test_pages_import_public_names_only() -> None:
    public = {line.partition("(")[0].split(" ")[0] for line in (FOLDER / "python.txt").read_text().splitlines()}
    for page in pages.pages():
        for snippet in pages.snippets(page):
            for module, names in re.findall(r"^\s*from (spark_klog[\w.]*) import (.+)$", snippet.text, re.MULTILINE):
                named = {f"{module}.{name.strip()}" for name in names.partition("#")[0].split(",")}
                assert named <= public, f"{snippet}: tests/public/python.txt lacks {', '.join(sorted(named - public))}"


def test_pages_name_the_lists() -> None:
    text = (pages.ROOT / "docs" / "reference" / "versions.md").read_text()
    assert {*re.findall(r"`(?:tests/public/)?(\w+\.txt)`", text)} == set(FILES)


def test_address_and_version_stand_everywhere_alike() -> None:
    texts = {name: (pages.ROOT / name).read_text() for name in ("pyproject.toml", "SECURITY.md", "CITATION.cff")}
    assert len({address for text in texts.values() for address in _ADDRESS.findall(text)}) == 1
    cited = re.search(r"^version: (.+)$", texts["CITATION.cff"], re.MULTILINE)
    assert cited is not None
    # between two releases VERSION is that of the next one, X.Y.0.dev0
    assert (cited[1] == VERSION) if not Version(VERSION).is_prerelease else Version(cited[1]) < Version(VERSION)
