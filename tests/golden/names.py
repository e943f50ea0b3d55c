"""The names in golden directories: of files, nodes of trees, fields of JSON, and whatever has klog in its name.

Parts that are data or chosen at random are as tests/public/formats.txt has them: TOPIC, TOKEN, digits as one 0.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.golden.support import NUMBERS, unpack

#: Properties, entries of metadata, headers, topics, groups: by names that only klog writes.
_OWN = re.compile(r"(?<![a-z_.])_{0,2}klog[._-][a-z][a-z._-]*")
_UUID = re.compile(rb"[0-9a-f]{8}-[0-9a-f-]{27}")
#: Keys of JSON that are data.
_DATA = re.compile(rf"\d.*|{NUMBERS}|bad")


def written_names(version: str, folder: Path) -> set[str]:
    """The names in a version's golden directories, which are unpacked into `folder`."""
    names: set[str] = set()
    for archive in ("source", "target", "cluster", "loads", "tables", "checkpoints"):
        root = unpack(version, archive, folder)
        for path in (path for path in root.rglob("*") if path.is_file()):
            if archive == "cluster" and path.parent == root and path.suffix == ".log":
                continue  # what the brokers logged
            names.update(match for match in _OWN.findall(_UUID.sub(b"", path.read_bytes()).decode("latin-1")))
            inside = path.relative_to(root).parts
            if path.name == ".lock":
                continue
            if "directories" in inside:
                names.add(_node("/".join(inside[1:]).removesuffix(".value")))
            elif "_klog" in inside:
                names |= _of_journal(path)
            elif archive in ("source", "target", "cluster") and not re.search("[0-9]", path.name):
                names.add(f"file {path.name}\n")
    return names


def _node(path: str) -> str:
    path = re.sub("^(brokers/topics/)[^/]+", r"\1TOPIC", re.sub("^(config/topics)/.*", r"\1", path))
    return f"node /{re.sub('[0-9]+', '0', path)}\n"


def _of_journal(path: Path) -> set[str]:
    if "+" in path.name:  # of records, and of letters
        keys = (key for line in path.read_bytes().splitlines() for key in _keys(json.loads(line)))
        return {f"field {key}" for key in keys} if path.suffix == ".jsonl" else set()
    if path.parent.name.startswith(".tmp-"):
        return set()
    names = {re.sub("(?<=-)[0-9a-z]{7}(?![0-9a-z])", "TOKEN", re.sub("[0-9]{5,}", "0", path.name))}
    if path.suffix == ".json":
        names |= {f"field {key}" for key in _keys(json.loads(path.read_bytes()))}
    return names


def _keys(value: Any) -> Iterator[str]:
    """The keys of JSON, without those that are data: topics, numbers, hours."""
    if isinstance(value, dict):
        yield from (key for key in value if not _DATA.fullmatch(key))
    for each in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _keys(each)


def is_listed(name: str, listed: str) -> bool:
    """Whether the list of formats has a name; of one that goes on with what a user chose, its beginning."""
    listed = re.sub("[0-9]{5,}", "0", listed)
    if name.startswith("field "):
        return re.search(rf"\b{re.escape(name.removeprefix('field '))}\b", listed) is not None
    if not _OWN.fullmatch(name):
        return name in listed
    beginnings = re.findall(rf"({_OWN.pattern})(?=NAME|HASH)|(?<=prefix )({_OWN.pattern})", listed)
    return re.search(rf"(?<![a-z_.]){re.escape(name)}(?![a-z])", listed) is not None or any(
        name.startswith(one) for pair in beginnings for one in pair if one
    )
