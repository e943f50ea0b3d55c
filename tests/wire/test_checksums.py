"""CRC-32C and CRC-32 against published vectors, and the CRC-32C of the hardware against crcmod."""

from __future__ import annotations

from collections.abc import Callable

import crcmod.predefined
import pytest
from hypothesis import given, strategies as st

from spark_klog.wire import checksums
from spark_klog.wire.checksums import crc32, crc32c
from spark_klog.wire.primitives import Buffer

_CRCMOD = crcmod.predefined.mkCrcFun("crc-32c")

# RFC 3720, B.4, and the check value of the CRC catalogue
VECTORS = [
    (bytes(32), 0x8A9136AA),
    (b"\xff" * 32, 0x62A8AB43),
    (bytes(range(32)), 0x46DD794E),
    (bytes(range(31, -1, -1)), 0x113FDB5C),
    (
        bytes.fromhex(
            "01c00000 00000000 00000000 00000000 14000000 0000040000000014 00000018 28000000 00000000 02000000 00000000"
        ),
        0xD9963A56,
    ),
    (b"123456789", 0xE3069283),
    (b"", 0),
]


@pytest.mark.parametrize(("data", "expected"), VECTORS)
@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_crc32c_vectors(kind: type, data: bytes, expected: int) -> None:
    assert crc32c(kind(data)) == expected


@pytest.mark.parametrize(("data", "expected"), VECTORS)
@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_crc32c_vectors_without_the_hardware(kind: type, data: bytes, expected: int) -> None:
    assert checksums._crcmod_crc32c()(kind(data), 0) == expected


@pytest.mark.parametrize("function", [crc32c, checksums._crcmod_crc32c()], ids=["installed", "crcmod"])
def test_crc32c_of_parts(function: Callable[[Buffer, int], int]) -> None:
    for data, expected in VECTORS:
        for middle in range(len(data) + 1):
            assert function(data[middle:], function(data[:middle], 0)) == expected


def test_crc32_check_value() -> None:
    assert crc32(b"123456789") == 0xCBF43926


@given(st.binary(max_size=3000), st.integers(0, 8))
def test_crc32c_against_crcmod(data: bytes, start: int) -> None:
    assert crc32c(memoryview(data)[start:]) == _CRCMOD(data[start:])
