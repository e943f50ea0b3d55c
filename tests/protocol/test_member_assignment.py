"""The assignment that a group's leader sends to a member; tests/cli reads those of a real leader."""

from __future__ import annotations

import struct

import pytest

from spark_klog.errors import DecodeError
from spark_klog.protocol.tables.groups import decode_assignment


def _topic(name: bytes, *partitions: int) -> bytes:
    return struct.pack(f">h{len(name)}si{len(partitions)}i", len(name), name, len(partitions), *partitions)


WHOLE = struct.pack(">hi", 1, 2) + _topic(b"a", 2, 0) + _topic(b"b.c") + struct.pack(">i", -1)


def test_an_assignment() -> None:
    assert decode_assignment(WHOLE) == {"a": [0, 2], "b.c": []}
    assert decode_assignment(WHOLE + b"what later versions add") == {"a": [0, 2], "b.c": []}
    assert decode_assignment(b"") == {}


@pytest.mark.parametrize("size", range(1, len(WHOLE) - 4))
def test_a_part_of_one(size: int) -> None:
    with pytest.raises(DecodeError):
        decode_assignment(WHOLE[:size])


def test_counts_that_can_not_be() -> None:
    for count in (1 << 30, -2):
        with pytest.raises(DecodeError):
            decode_assignment(struct.pack(">hi", 0, count))
