"""What compaction asks of the kernels: the table of keys, which rows stay, and bodies with some of their records."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings, strategies as st

from spark_klog.errors import DecodeError
from spark_klog.log.compaction.passes import OffsetMap
from spark_klog.records.contract import CleaningLimits, Kernel, RecordColumns
from spark_klog.records.kernels.reference import siphash
from tests.support.available_kernels import KERNELS
from tests.support.checker.record_model import Row, encode_rows

NOW = 1_700_000_000_000
#: As `openssl mac -macopt hexkey:00...0f -macopt size:16 SIPHASH` has them.
DIGESTS = {
    b"": "a3817f04ba25a8e66df67214c7550293",
    bytes(range(8)): "3b62a9ba6258f5610f83e264f31497b4",
    b"a key of twenty byte": "841fec7532ea4bb516b33af2cc2bf134",
}


@pytest.fixture(params=KERNELS, ids=[kernel.name for kernel in KERNELS])
def kernel(request: pytest.FixtureRequest) -> Kernel:
    return request.param


def _columns(
    kernel: Kernel, rows: list[Row], names: frozenset[str] = frozenset({"key", "value", "offset"})
) -> RecordColumns:
    builder = kernel.builder(names)
    builder.append(encode_rows(rows, 0, NOW), len(rows), 0, NOW, None, 0, 1 << 62)
    return builder.finish()


def _map(slots: int = 101, secret: bytes = bytes(range(16))) -> OffsetMap:
    offsets = OffsetMap(slots * 24)
    offsets.secret = secret
    return offsets


def test_digests_are_those_of_openssl(kernel: Kernel) -> None:
    for key, digest in DIGESTS.items():
        assert siphash(key, bytes(range(16))).hex() == digest
        offsets = _map()
        assert kernel.put_keys(offsets, _columns(kernel, [Row(6, NOW, key, b"v")])) is None
        slot = int.from_bytes(bytes.fromhex(digest)[:8], "little") % 101
        assert offsets.table[24 * slot : 24 * slot + 24] == bytes.fromhex(digest) + (7).to_bytes(8, "little")


@given(
    keys=st.lists(st.none() | st.binary(max_size=40), max_size=120),
    slots=st.sampled_from([3, 5, 29, 101]),
    secret=st.binary(min_size=16, max_size=16),
)
@settings(max_examples=150, deadline=None)
def test_all_kernels_fill_the_same_table(keys: list[bytes | None], slots: int, secret: bytes) -> None:
    rows = [Row(3 * number, NOW, key, None if number % 4 else b"v") for number, key in enumerate(keys)]
    model = _map(slots, secret)
    full = next((row.offset for row in rows if row.key is not None and not model.put(row.key, row.offset)), None)
    for kernel in KERNELS:
        offsets = _map(slots, secret)
        assert kernel.put_keys(offsets, _columns(kernel, rows, frozenset({"key", "offset"}))) == full
        assert (offsets.table[:], len(offsets)) == (model.table[:], len(model))
        for retains in (True, False):
            for end in (0, 100, 1 << 40):
                kept, has_tombstones, without_key = kernel.kept_rows(offsets, _columns(kernel, rows), end, retains)
                expected = [
                    row.offset >= end
                    or (row.key is not None and (row.value is not None or retains) and row.offset >= model.get(row.key))
                    for row in rows
                ]
                assert list(kept) == expected
                assert has_tombstones == any(
                    is_kept and row.value is None for row, is_kept in zip(rows, expected, strict=True)
                )
                assert without_key == sum(row.key is None and row.offset < end for row in rows)


def test_a_table_whose_slots_are_all_taken_ends_each_search(kernel: Kernel) -> None:
    """Of rubbish, too: the search visits each slot once."""
    offsets = _map(5)
    offsets.table[:] = random.Random(1).randbytes(len(offsets.table))
    if kernel.name == "native":
        assert kernel.put_keys(offsets, _columns(kernel, [Row(0, NOW, b"k", b"v")])) == 0
        assert kernel.kept_rows(offsets, _columns(kernel, [Row(0, NOW, b"k", b"v")]), 1, True)[0] == b"\1"


@pytest.mark.skipif(len(KERNELS) < 2, reason="no native kernel")
@pytest.mark.parametrize("change", [{"secret": b"short"}, {"slots": 102}, {"slots": 1}, {"table": bytes(101 * 24)}])
def test_a_table_that_can_not_be(change: dict[str, object]) -> None:
    offsets, native = _map(), KERNELS[-1]
    for name, content in change.items():
        setattr(offsets, name, content)
    with pytest.raises(ValueError, match=r"needed|table"):
        native.put_keys(offsets, _columns(native, [Row(0, NOW, b"k", b"v")]))
    with pytest.raises(ValueError, match=r"needed|table"):
        native.clean_batches(offsets, b"", CleaningLimits(0, 0, 0, b""))


ROWS = [Row(n, NOW + 1000 * n, b"k%d" % n, b"v" * n, (("h", None),) * (n % 2)) for n in range(6)]
_CHANGES = st.lists(st.tuples(st.integers(0, 1000), st.integers(0, 255)), max_size=3)


@given(
    changes=_CHANGES,
    flags=st.lists(st.booleans(), max_size=8) | st.lists(st.booleans(), min_size=6, max_size=6),
    append_time=st.none() | st.just(NOW),
    base=st.sampled_from([None, 0, NOW, -(2**63), 2**63 - 1]),
    cut=st.integers(0, 20),
)
@settings(max_examples=400, deadline=None)
def test_all_kernels_retain_the_same(
    changes: list[tuple[int, int]], flags: list[bool], append_time: int | None, base: int | None, cut: int
) -> None:
    body = bytearray(encode_rows(ROWS, 0, NOW))
    for position, byte in changes:
        body[position % len(body)] = byte
    data = bytes(body[: len(body) - max(0, cut - 15)])
    outcomes = []
    for kernel in KERNELS:
        try:
            left, first, latest = kernel.retained(data, bytes(flags), NOW, append_time, base)
            outcomes.append((bytes(left), first, latest))
        except DecodeError:
            outcomes.append((b"", 0, 0))
    assert outcomes[1:] == outcomes[:-1]
