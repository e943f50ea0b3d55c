"""Print the table of docs/reference/clients.md: what the client matrix tests."""

from __future__ import annotations

import sys

from tests.support.clients import ALL, Client

_HEAD = ("client", "creates topics", "codecs", "records", "reads from")


def row(kind: type[Client]) -> tuple[str, ...]:
    records = {0: "keys, nulls", 1: "keys, nulls, times", 2: "keys, nulls, times, headers"}[kind.magic]
    return (
        kind.name,
        "by its admin client" if kind.has_admin else "by auto-creation",
        ", ".join(kind.codecs),
        records if kind.sets_timestamps else records.replace("times", "times of its own"),
        "offset, time" if kind.finds_times else "offset",
    )


def table() -> str:
    """The table in Markdown."""
    lines = [_HEAD, tuple("---" for _ in _HEAD), *(row(kind) for kind in ALL)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


if __name__ == "__main__":
    sys.stdout.write(table())
