"""ARCHITECTURE names every room of the product once, in a wing whose size is about what it says."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from tests.support.papers.pages import ROOT

_PRODUCT = ROOT / "spark_klog"
_WING = re.compile(r"### (.+): ([\d,]+) lines")
#: How far a size may be off: a page that changes each day would be wrong most days.
_TOLERANCE = 0.15


def wings() -> dict[str, tuple[int, list[str]]]:
    """The size and the rooms of each wing by its title."""
    text = (ROOT / "ARCHITECTURE.md").read_text()
    section = text[text.index("\n## Rooms\n") : text.index("\n## What the folders do not say\n")]
    titles: dict[str, tuple[int, list[str]]] = {}
    rooms: list[str] = []
    for line in section.splitlines():
        if heading := _WING.fullmatch(line):
            rooms = []
            titles[heading[1]] = int(heading[2].replace(",", "")), rooms
        elif line.startswith("| `"):
            rooms += re.findall(r"`([^`]+)`", line.split(" | ")[0])
    return titles


def _sources(room: str) -> Iterator[Path]:
    path = _PRODUCT / room
    yield from (
        [path] if path.is_file() else (file for file in path.rglob("*") if file.suffix in (".py", ".pyx", ".pxi"))
    )


def test_every_room_is_in_one_wing() -> None:
    named = sorted(room for _, rooms in wings().values() for room in rooms)
    packages = [f"{path.parent.name}/" for path in _PRODUCT.glob("*/__init__.py")]
    modules = [path.name for path in _PRODUCT.glob("*.py") if path.name != "__init__.py"]
    assert named == sorted(packages + modules), "name each room in one wing of ARCHITECTURE.md, section Rooms"


def test_wings_are_as_large_as_they_say() -> None:
    for title, (said, rooms) in wings().items():
        lines = sum(len(path.read_text().splitlines()) for room in rooms for path in _sources(room))
        assert abs(lines - said) <= _TOLERANCE * said, f"ARCHITECTURE.md: {title} has {round(lines, -3):,} lines"
