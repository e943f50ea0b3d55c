"""What the decoders of all formats return."""

from __future__ import annotations

from typing import NamedTuple

import pyarrow as pa

_LONGEST_REASON = 1000


class BadRow(NamedTuple):
    """A row that does not decode: its number from 0, and why."""

    row: int
    reason: str


def cut(reason: str) -> str:
    """A reason of bounded length: errors may show the schema or the value, and each row of a batch may be bad."""
    return reason if len(reason) <= _LONGEST_REASON else f"{reason[:_LONGEST_REASON]}..."


class Decoded(NamedTuple):
    """A decoded column: null for each row of `bad`, for each null of the source, and for each row without a schema."""

    values: pa.Array
    bad: list[BadRow]


class FieldPair(NamedTuple):
    """A field of a writer's record, and that of the reader's record which is read from it.

    None: the reader does not read it; the writer does not write it, and its default is no null. `loss` is why different
    values may be read as the same; "" if they are not.
    """

    written: str | None
    read: str | None
    loss: str = ""
