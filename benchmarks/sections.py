"""`results.json`: the last figures of each work.

An object with a section per work, by name. A run replaces a whole section and keeps the others.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from benchmarks.figures import Result, Side

_LISTS_OF_NUMBERS = re.compile(r"\[\n([-+.\de,\s]+)\]")


@dataclass(frozen=True)
class Circumstances:
    """The command of a run, the code, the machine, and its load before the run."""

    command: str
    commit: str
    is_dirty: bool
    machine: dict[str, str]
    load: float


@dataclass(frozen=True)
class Section:
    """The results of a work, `measured` at a time in words (UTC)."""

    name: str
    measured: str
    circumstances: Circumstances
    notes: tuple[str, ...]
    results: tuple[Result, ...]


def now() -> str:
    return datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC")


def load(path: Path) -> dict[str, Section]:
    """The sections by name; empty if there is no file yet."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return {}
    return {name: _section(name, fields) for name, fields in json.loads(text).items()}


def save(path: Path, sections: Mapping[str, Section]) -> None:
    text = json.dumps({name: _fields(section) for name, section in sections.items()}, indent=1, ensure_ascii=False)
    replace(path, _LISTS_OF_NUMBERS.sub(lambda found: f"[{' '.join(found[1].split())}]", text) + "\n")


def replace(path: Path, text: str) -> None:
    """Replace a file atomically: it has the old or the new content, never a part."""
    new = path.with_name(f".{path.name}.{os.getpid()}.new")
    try:
        with new.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(new, path)
    finally:
        new.unlink(missing_ok=True)


def _fields(section: Section) -> dict[str, Any]:
    return {
        "measured": section.measured,
        **asdict(section.circumstances),
        "notes": section.notes,
        "results": [_result_fields(result) for result in section.results],
    }


def _section(name: str, fields: Mapping[str, Any]) -> Section:
    return Section(
        name,
        fields["measured"],
        Circumstances(**{key: fields[key] for key in Circumstances.__dataclass_fields__}),
        tuple(fields["notes"]),
        tuple(_result(result) for result in fields["results"]),
    )


def _result_fields(result: Result) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "work": result.work,
        "unit": result.unit,
        "higher_is_better": result.higher_is_better,
        "command": result.command,
        "sides": [asdict(side) for side in result.sides],
    }
    if result.noted_ratio is not None:
        fields["noted_ratio"] = result.noted_ratio
    return fields


def _result(fields: Mapping[str, Any]) -> Result:
    klog, *peers = (Side(**side) for side in fields["sides"])
    return Result(
        fields["work"],
        fields["unit"],
        klog,
        peers[0] if peers else None,
        fields["command"],
        fields["higher_is_better"],
        fields.get("noted_ratio"),
    )
