"""Names that say nothing: CONTRIBUTING forbids them, and those that are left become fewer."""

from __future__ import annotations

import ast
from collections import Counter

from tests.support.papers.pages import ROOT

#: How often the product binds each name: as a variable, in a loop, a comprehension or a match, or as an argument. A
#: number may only fall: lower it with each change that renames some.
_BOUND = {"found": 13, "one": 103, "item": 32}
#: So that two changes made at the same time need not know each other's.
_SLACK = 40


def test_names_that_say_nothing() -> None:
    bound = Counter(
        name
        for path in (ROOT / "spark_klog").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if (name := _bound_name(node)) in _BOUND
    )
    for name, most in _BOUND.items():
        assert bound[name] <= most, (
            f"{name!r} is bound {bound[name]} times in spark_klog, {most} are allowed: name a new variable by what it "
            "holds, in the field's terms (offset, partition, column, error)"
        )
        assert bound[name] >= most - _SLACK, (
            f"set _BOUND[{name!r}] to {bound[name]}, so that the count can't grow again"
        )


def _bound_name(node: ast.AST) -> str | None:
    match node:
        case ast.Name(id=name, ctx=ast.Store()) | ast.arg(arg=name) | ast.MatchAs(name=name) | ast.MatchStar(name=name):
            return name
        case ast.ExceptHandler(name=name):
            return name
    return None
