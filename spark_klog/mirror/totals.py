"""Counts of what a mirror has done."""

from __future__ import annotations

from dataclasses import asdict, dataclass


@dataclass
class Totals:
    """Counts of a mirror since it was started; `bytes` are those of batches, as they are compressed.

    `copied` batches are as at the source, `rebuilt` ones were encoded again. `lag` is the number of offsets that are
    not mirrored yet, as of the last look. `lost` offsets were deleted at the source before they were mirrored.
    `restarts` were made after failures.
    """

    partitions: int = 0
    records: int = 0
    bytes: int = 0
    copied: int = 0
    rebuilt: int = 0
    lag: int | None = None
    lost: int = 0
    groups: int = 0
    restarts: int = 0

    def as_dict(self) -> dict[str, int | None]:
        """The counts by name, for JSON."""
        return asdict(self)
