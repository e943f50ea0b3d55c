"""What the decoders of all formats return."""

from __future__ import annotations

from typing import NamedTuple

import pyarrow as pa


class BadRow(NamedTuple):
    """A row that does not decode: its number from 0, and why."""

    row: int
    reason: str


class Decoded(NamedTuple):
    """A decoded column: null for each row of `bad`, for each null of the source, and for each row without a schema."""

    values: pa.Array
    bad: list[BadRow]
