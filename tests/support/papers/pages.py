"""The documentation (README and docs): snippets, links and headings of its pages, and the commands in snippets."""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import click

from spark_klog.cli.main import main

ROOT = Path(__file__).parents[3]
GENERATED = ROOT / "docs" / "reference" / "generated"
_FENCE = re.compile(r"^( *)```(.*)$")
_LINK = re.compile(r"(?<!\\)\[[^\]]*\]\(([^)\s]+)\)")


@dataclass(frozen=True)
class Snippet:
    """A fenced code block of a page; `line` is where it begins, `language` is "" if none is given."""

    page: str
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def pages() -> list[str]:
    """Paths of README and the pages of docs that are not generated, relative to the project's root."""
    return ["README.md", *sorted(str(path.relative_to(ROOT)) for path in _written())]


def _written() -> Iterator[Path]:
    return (path for path in (ROOT / "docs").rglob("*.md") if GENERATED not in path.parents)


@cache
def tracked() -> frozenset[Path]:
    """What a clone has: the files that git tracks, and their folders."""
    command = ["git", "ls-files", "-z"]
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True, timeout=60).stdout
    files = [ROOT / name for name in listed.split("\0") if name]
    return frozenset([*files, *(folder for file in files for folder in file.parents)])


def snippets(page: str) -> list[Snippet]:
    """All fenced code blocks of a page, in order."""
    found, begun = [], None
    lines: list[str] = []
    for number, line in enumerate((ROOT / page).read_text().splitlines(), 1):
        fence = _FENCE.match(line)
        if fence is None:
            lines.append(line[begun[2] :] if begun else line)
        elif begun is None:
            begun, lines = (number, fence[2].strip(), len(fence[1])), []
        else:
            found.append(Snippet(page, begun[0], begun[1].partition(" ")[0], "\n".join(lines) + "\n"))
            begun = None
    assert begun is None, f"{page}:{begun and begun[0]}: a fence that does not end"
    return found


def prose(page: str) -> str:
    """The text of a page without its fenced code blocks."""
    lines, is_inside = [], False
    for line in (ROOT / page).read_text().splitlines():
        if _FENCE.match(line):
            is_inside = not is_inside
        elif not is_inside:
            lines.append(line)
    return "\n".join(lines)


def links(page: str) -> list[str]:
    """Targets of a page's links and images."""
    return _LINK.findall(prose(page))


def anchors(page: str) -> set[str]:
    """Anchors of the headings of a page, as GitHub and MyST name them."""
    titles = re.findall(r"^#+ +(.*)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def command_lines(text: str) -> Iterator[list[list[str]]]:
    """Yield each shell line of a snippet as a list of commands, split at `|` and `&&`; a command is a list of words."""
    for line in text.replace("\\\n", " ").splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars="|<>;&")
        lexer.whitespace_split = True
        words = list(lexer)
        commands: list[list[str]] = [[]]
        for word in words:
            if word in ("|", "&&"):
                commands.append([])
            else:
                commands[-1].append(word)
        if words:
            yield commands


def check_klog(words: list[str]) -> None:
    """Assert that the commands and options of a klog command line exist; it may end with a command group."""
    command: click.Command = main
    context = click.Context(main, info_name="klog")
    rest = words[1:]
    while isinstance(command, click.Group) and rest:
        found = command.get_command(context, rest[0])
        assert found is not None, f"{shlex.join(words)}: klog has no command {rest[0]}"
        command, rest = found, rest[1:]
        context = click.Context(command, info_name=command.name, parent=context)
    names = {name for option in command.params for name in [*option.opts, *option.secondary_opts]}
    for word in rest:
        if re.match(r"--?[A-Za-z]", word):
            assert word.partition("=")[0] in names, f"{shlex.join(words)}: {command.name} has no option {word}"
