"""The walks of docs/explanation/reading-the-code.md enter their functions in the page's order."""

from __future__ import annotations

import re

from benchmarks.house import walks
from tests.support.papers.pages import ROOT

_FUNCTION = re.compile(r"^\| `([\w/]+\.py)` `(\w+)` \|", re.MULTILINE)
#: The sections, and the walk of `benchmarks.house` that each is.
_WALKS = {"A batch read": "task", "A row written": "write", "A Produce served": "Produce"}


def test_walks() -> None:
    page = (ROOT / "docs" / "explanation" / "reading-the-code.md").read_text()
    _, *sections = re.split(r"^## ", page, flags=re.MULTILINE)
    titles = [section.partition("\n")[0] for section in sections]
    assert titles == list(_WALKS)
    made = walks(warm=2, repeats=2)
    for title, section in zip(titles, sections, strict=True):
        entered = list(made[_WALKS[title]].functions)
        named = [(path, name) for path, name in _FUNCTION.findall(section)]
        assert 5 <= len(named) <= 10
        assert [function for function in entered if function in named] == named, title
