"""A load does not ask of which format its table is: what formats differ in says `Table`."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from pathlib import Path

import pytest

from tests.support.papers.pages import ROOT

_FORMAT = re.compile(r"(?<!time)delta|iceberg", re.IGNORECASE)
_LOAD = ROOT / "spark_klog" / "load"


@pytest.mark.parametrize("path", sorted(_LOAD.rglob("*.py")), ids=lambda path: str(path.relative_to(_LOAD)))
def test_formats_are_named_to_users_only(path: Path) -> None:
    """In texts for users; in no name, import, comment or docstring."""
    source = path.read_text()
    docstrings = {
        node.body[0].lineno
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None
    }
    named = [
        f"{path.name}:{token.start[0]}: {token.line.strip()}"
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if _FORMAT.search(token.string)
        and (token.type in (tokenize.NAME, tokenize.COMMENT) or token.start[0] in docstrings)
    ]
    assert named == []
    assert not re.search("_table is|format_of", source)
