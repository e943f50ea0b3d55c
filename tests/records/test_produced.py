"""Validation of produced batches: those of other clients pass, those with false headers do not."""

from __future__ import annotations

import struct
from typing import Any

import pytest
from aiokafka.record.default_records import DefaultRecordBatchBuilder
from crc32c import crc32c
from hypothesis import given, settings, strategies as st
from kafka.record.memory_records import MemoryRecordsBuilder

from spark_klog.errors import CorruptBatchError, DecodeError
from spark_klog.records import kernels
from spark_klog.records.reading.produced import MOST_INDEXES, check_produced, schema_ids
from tests.support.available_kernels import KERNELS
from tests.support.brokers.batches import make_batch

NOW = 1_700_000_000_000
#: Positions and formats of a batch's header fields, from the protocol guide.
FIELDS = {"attributes": (21, ">h"), "last_offset_delta": (23, ">i"), "base_timestamp": (27, ">q")}
FIELDS |= {"max_timestamp": (35, ">q"), "count": (57, ">i")}
CODECS = ["none", "gzip", "snappy", "lz4", "zstd"]
INT32_MAX = 2**31 - 1


@pytest.fixture(params=[kernel.name for kernel in KERNELS], autouse=True)
def _kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARK_KLOG_KERNEL", request.param)


def lying(batch: bytes | bytearray, **fields: int) -> bytearray:
    """The batch with other values in its header, and a valid checksum."""
    changed = bytearray(batch)
    for name, value in fields.items():
        position, form = FIELDS[name]
        struct.pack_into(form, changed, position, value)
    struct.pack_into(">I", changed, 17, crc32c(bytes(changed[21:])))
    return changed


def _batch(count: int, codec: str = "none", size: int = 20) -> bytearray:
    return make_batch([(b"k", b"v" * size)] * count, [NOW + number for number in range(count)], codec)


@pytest.mark.parametrize("codec", range(5))
@pytest.mark.parametrize("count", [1, 2, 3000])
def test_batches_of_other_clients_pass(codec: int, count: int) -> None:
    builder = MemoryRecordsBuilder(magic=2, compression_type=codec, batch_size=1 << 24)
    other = DefaultRecordBatchBuilder(2, codec, 0, -1, -1, -1, 1 << 24)
    for number in range(count):
        headers = [("h", b"x")] * (number % 3)
        builder.append(NOW - number, None if number % 2 else b"key", b"value", headers)
        other.append(number, NOW - number, b"key", None if number % 2 else b"value", headers)
    builder.close()
    for data in (builder.buffer(), bytes(other.build())):
        assert not check_produced(data, kernels.load(), is_one=True).is_transactional


LIES: list[dict[str, Any]] = [
    {"count": INT32_MAX, "last_offset_delta": INT32_MAX - 1},
    {"count": 4, "last_offset_delta": 3},
    {"count": 2, "last_offset_delta": 1},
    {"count": 2},
    {"last_offset_delta": 3},
    {"last_offset_delta": INT32_MAX},
    {"count": 0, "last_offset_delta": -1},
    {"count": 0, "last_offset_delta": 0},
    {"count": -1},
    {"max_timestamp": -2},
    {"base_timestamp": -(2**63)},
    {"attributes": 0x20},
]


@pytest.mark.parametrize("lie", LIES, ids=str)
def test_lies_are_refused(lie: dict[str, Any]) -> None:
    good = _batch(3)
    assert not check_produced(lying(good), kernels.load()).is_transactional
    with pytest.raises(DecodeError) as refused:
        check_produced(lying(good, **lie), kernels.load())
    assert not isinstance(refused.value, CorruptBatchError)


@pytest.mark.parametrize("codec", CODECS)
def test_the_count_of_a_compressed_batch_is_bounded(codec: str) -> None:
    """A hundred bytes can't move the log's end by 2^31 records."""
    good = _batch(1, codec)
    with pytest.raises(DecodeError):
        check_produced(lying(good, count=INT32_MAX, last_offset_delta=INT32_MAX - 1), kernels.load())
    limit = 100_000
    with pytest.raises(DecodeError):
        check_produced(lying(good, count=limit, last_offset_delta=limit - 1), kernels.load(), limit=limit)


@pytest.mark.parametrize("codec", CODECS)
def test_what_compresses_well_passes(codec: str) -> None:
    assert not check_produced(_batch(3000, codec, size=2000), kernels.load()).is_transactional


@pytest.mark.parametrize("codec", [5, 6, 7])
def test_an_unknown_codec_is_refused(codec: int) -> None:
    """No reader would get past the batch."""
    with pytest.raises(DecodeError, match=f"unknown compression codec {codec}"):
        check_produced(lying(_batch(3), attributes=codec), kernels.load())


@settings(max_examples=60)
@given(
    count=st.integers(1, 40),
    told=st.integers(-3, 60),
    delta=st.integers(-3, 60),
    position=st.integers(61, 500),
    value=st.integers(0, 255),
)
def test_only_batches_that_decode_pass(count: int, told: int, delta: int, position: int, value: int) -> None:
    """In whatever passes, aiokafka's reader must find the records that the header promises."""
    from aiokafka.record._crecords import DefaultRecordBatch

    data = bytearray(_batch(count, size=3))
    data[min(position, len(data) - 1)] = value
    data = lying(data, count=told, last_offset_delta=delta)
    try:
        check_produced(data, kernels.load(), is_one=True)
    except DecodeError:
        return
    assert (told, delta) == (count, count - 1)
    records = list(DefaultRecordBatch(bytes(data)))
    assert [record.offset for record in records] == list(range(count))


def test_a_damaged_batch_is_corrupt_whatever_it_says() -> None:
    """Clients send a batch again after CORRUPT_MESSAGE, but not after INVALID_RECORD."""
    good = lying(_batch(3))
    for position in (22, 26, 27, 60, 61, 64, 65):
        bad = bytearray(good)
        bad[position] ^= 0x81 if position == 27 else 0x21
        with pytest.raises(CorruptBatchError):
            check_produced(bad, kernels.load())


def test_one_batch_a_partition() -> None:
    good = _batch(3)
    assert not check_produced(good + good, kernels.load()).is_transactional
    with pytest.raises(DecodeError, match="more than one"):
        check_produced(good + good, kernels.load(), is_one=True)


@pytest.mark.parametrize("codec", CODECS)
def test_ids_of_many_records(codec: str) -> None:
    """What the broker's loop looks at has a size that the number of records does not change."""
    good, other = b"\0\0\0\0\1", b"\0\0\0\0\2"
    pairs = [(None, good + b"x")] * 3000 + [(None, None), (None, other)]
    batch = make_batch(pairs, [NOW] * len(pairs), codec)
    ids = schema_ids(bytes(batch) * 2, ["value"])["value"]
    assert {schema: len(indexes) for schema, indexes in ids.items()} == {good: MOST_INDEXES, None: 2, other: 2}
    assert (ids[None], ids[other]) == ([3000, 6002], [3001, 6003])
