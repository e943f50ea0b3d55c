"""Corrupt batches among good ones, in any magic: all good ones are read, the bad ones are passed on unchanged."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from spark_klog.errors import CorruptBatchError, DecodeError
from spark_klog.records.contract import Kernel
from spark_klog.records.formats.batch_v2 import build_batch
from spark_klog.records.kernels.reference import append_record
from spark_klog.records.reading.reader import AbortedTransactions, BadBatch, RecordReader
from spark_klog.wire.codecs import codec_by_name
from tests.support.available_kernels import KERNELS
from tests.support.brokers.bad_batches import TIME, Batch, batch, damaged, read, with_field
from tests.support.checker.record_model import Row, encode_rows, to_lists

#: By magic: start of the bytes that a checksum covers, its position. Then fields of magic 2 that tests damage.
COVERED = {0: 16, 1: 16, 2: 21}
CHECKSUM = {0: 12, 1: 12, 2: 17}
MAGIC, LAST_OFFSET_DELTA, COUNT = 16, 23, 57


@pytest.fixture(params=KERNELS, ids=[kernel.name for kernel in KERNELS])
def kernel(request: pytest.FixtureRequest) -> Kernel:
    found: Kernel = request.param
    return found


def check(kernel: Kernel, batches: Sequence[Batch]) -> list[BadBatch]:
    """Check that good batches are read and bad ones passed on, in order; by default the first bad one is raised."""
    offsets, bad = read(kernel, batches)
    assert offsets == [offset for item in batches if not item.is_bad for offset in item.offsets]
    assert [(item.offset, bytes(item.data)) for item in bad] == [
        (item.claim, item.data) for item in batches if item.is_bad
    ]
    assert all(isinstance(item.error, DecodeError) for item in bad)
    if bad:
        reader = RecordReader(frozenset(["offset"]), kernel=kernel)
        with pytest.raises(type(bad[0].error)) as caught:
            list(reader.read(b"".join(item.data for item in batches), 0, 1 << 40))
        assert str(caught.value) == str(bad[0].error)
    return bad


MAKERS: dict[str, Callable[[int], Batch]] = {
    "v2": lambda offset: batch(offset, 10),
    "v2 gzip": lambda offset: batch(offset, 10, codec="gzip"),
    "v1 wrapper": lambda offset: batch(offset, 10, 1, "gzip"),
    "v0 wrapper": lambda offset: batch(offset, 10, 0, "gzip"),
}
CODECS = ["none", "gzip", "snappy", "lz4", "zstd"]


@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize("where", ["first", "middle", "last", "all"])
def test_a_wrong_checksum(kernel: Kernel, kind: str, where: str) -> None:
    batches = [MAKERS[kind](offset) for offset in (100, 110, 120)]
    for index in {"first": [0], "middle": [1], "last": [2], "all": [0, 1, 2]}[where]:
        batches[index] = damaged(batches[index])
    for item in check(kernel, batches):
        assert isinstance(item.error, CorruptBatchError)
        assert "is stored, the bytes have" in str(item.error)


@pytest.mark.parametrize("codec", CODECS)
def test_every_codec_in_magic_2(kernel: Kernel, codec: str) -> None:
    """A payload that does not decompress is bad, though its checksum is valid."""
    good = [batch(0, 5, codec=codec), batch(10, 5, codec=codec)]
    payload = b"\xff" * 40
    broken = build_batch(
        payload, 5, base_timestamp=TIME, max_timestamp=TIME, base_offset=5, attributes=codec_by_name(codec).id
    )
    (bad,) = check(kernel, [good[0], Batch(5, 5, broken, 5, is_bad=True), good[1]])
    assert not isinstance(bad.error, CorruptBatchError)


def test_a_batch_of_fewer_records_than_it_says(kernel: Kernel) -> None:
    rows = encode_rows([Row(5, TIME, b"k", b"value 5")], 5, TIME)
    short = build_batch(rows, 2, base_timestamp=TIME, max_timestamp=TIME, base_offset=5)
    check(kernel, [batch(0, 5), Batch(5, 2, short, 5, is_bad=True), batch(7, 2)])


def test_a_batch_that_grows_too_large(kernel: Kernel) -> None:
    batches = [batch(0, 2, codec="gzip"), batch(2, 100, codec="gzip"), batch(102, 2, codec="gzip")]
    offsets, bad = read(kernel, batches, limit=200)
    assert offsets == [0, 1, 102, 103]
    assert [(item.offset, bytes(item.data)) for item in bad] == [(2, batches[1].data)]


@pytest.mark.parametrize("magic", [0, 1])
@pytest.mark.parametrize("wrong", [[0], [4], [9], [3, 4], [0, 5, 9], list(range(10))])
def test_messages_in_a_run(kernel: Kernel, magic: int, wrong: list[int]) -> None:
    batches = [damaged(one) if one.offset in wrong else one for one in (batch(at, 1, magic) for at in range(10))]
    for item in check(kernel, batches):
        assert isinstance(item.error, CorruptBatchError)


@pytest.mark.parametrize("magic", [0, 1])
def test_a_run_between_other_batches(kernel: Kernel, magic: int) -> None:
    run = [batch(at, 1, magic) for at in range(10, 20)]
    run[4] = damaged(run[4])
    other = [batch(20, 1, 1 - magic), batch(21, 1, 1 - magic)]
    check(
        kernel, [batch(0, 10), *run, *other, damaged(batch(22, 4, magic, "gzip")), *[batch(26, 1, magic)], batch(27, 3)]
    )


@pytest.mark.parametrize("magic", [0, 1])
def test_a_message_that_looks_like_a_wrapper(kernel: Kernel, magic: int) -> None:
    """The checksum covers the codec bits; a message in which they are damaged is a bad batch of its own."""
    run = [batch(at, 1, magic) for at in range(5)]
    run[2] = damaged(run[2], MAGIC + 1, 0x01)
    check(kernel, run)


class _Counting:
    """A kernel that counts the bytes of messages it is given."""

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel
        self.taken = 0

    def builder(self, columns: frozenset[str]) -> Any:
        return _CountingBuilder(self, self._kernel.builder(columns))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kernel, name)


class _CountingBuilder:
    def __init__(self, counting: _Counting, builder: Any) -> None:
        self._counting, self._builder = counting, builder

    def append_messages(self, messages: Any, *others: Any) -> None:
        self._counting.taken += len(messages)
        self._builder.append_messages(messages, *others)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._builder, name)


@pytest.mark.parametrize("wrong", [[999], [500], [0, 250, 500, 750, 999]])
def test_a_long_run_is_not_read_again_for_each_message(kernel: Kernel, wrong: list[int]) -> None:
    batches = [damaged(one) if one.offset in wrong else one for one in (batch(at, 1, 1) for at in range(1000))]
    counting: Any = _Counting(kernel)
    offsets, bad = read(counting, batches)
    assert offsets == [offset for offset in range(1000) if offset not in wrong]
    assert [item.offset for item in bad] == wrong
    assert counting.taken <= 2 * sum(len(item.data) for item in batches)


@pytest.mark.parametrize(
    ("form", "position", "value"),
    [(">q", 0, -1), (">q", 0, -(1 << 63)), (">i", LAST_OFFSET_DELTA, -1), (">i", COUNT, -1), (">i", COUNT, -(1 << 31))],
)
@pytest.mark.parametrize("where", [0, 1, 2])
def test_an_impossible_header(kernel: Kernel, form: str, position: int, value: int, where: int) -> None:
    """The length still tells where the next batch begins."""
    batches = [batch(100, 10), batch(110, 10), batch(120, 10)]
    batches[where] = with_field(batches[where], form, position, value)
    (bad,) = check(kernel, batches)
    assert "batch at position" in str(bad.error)


@pytest.mark.parametrize(("form", "position"), [(">i", LAST_OFFSET_DELTA), (">i", COUNT)])
def test_a_header_that_says_too_much(kernel: Kernel, form: str, position: int) -> None:
    """The checksum shows the damage; that the batch claims offsets of later ones does not end the reading."""
    batches = [batch(100, 10), with_field(batch(110, 10), form, position, (1 << 31) - 1), batch(120, 10)]
    (bad,) = check(kernel, batches)
    assert isinstance(bad.error, CorruptBatchError)


@pytest.mark.parametrize("magic", [0, 1, 2])
@pytest.mark.parametrize(
    ("form", "position", "value", "message"),
    [
        (">b", MAGIC, 3, "unknown magic 3"),
        (">b", MAGIC, 77, "unknown magic 77"),
        (">i", 8, 0, "length 0"),
        (">i", 8, -1, "length -1"),
        (">i", 8, 13, "length 13"),
    ],
)
def test_what_is_no_batch_ends_the_reading(
    kernel: Kernel, magic: int, form: str, position: int, value: int, message: str
) -> None:
    """The start of the next batch is unknown, so no bytes can be passed on as the bad batch."""
    nothing = with_field(batch(10, 1, magic), form, position, value)
    with pytest.raises(DecodeError, match=f"no batch at position .*{message}"):
        read(kernel, [batch(0, 10), nothing, batch(20, 10)])


def test_a_cut_off_end_is_no_bad_batch(kernel: Kernel) -> None:
    whole = batch(0, 10)
    cut = batch(10, 10)
    assert read(kernel, [whole, cut._replace(data=cut.data[:-1])]) == (list(range(10)), [])
    assert read(kernel, [damaged(whole), cut._replace(data=cut.data[:11])])[0] == []


@pytest.mark.parametrize("magic", [0, 1, 2])
def test_only_wanted_batches_are_looked_at(kernel: Kernel, magic: int) -> None:
    """A batch that begins at or after the end of the range may be corrupt; one that reaches into it is read."""
    batches = [batch(at, 1, magic) for at in range(10)]
    assert read(kernel, [*batches, damaged(batch(10, 1, magic))], 0, 10) == (list(range(10)), [])
    offsets, bad = read(kernel, [*batches, damaged(batch(10, 1, magic))], 0, 11)
    assert (offsets, [item.offset for item in bad]) == (list(range(10)), [10])


def test_a_part_of_what_there_is(kernel: Kernel) -> None:
    batches = [batch(0, 10), damaged(batch(10, 10)), batch(20, 10), damaged(batch(30, 10))]
    assert read(kernel, batches, 5, 10) == ([5, 6, 7, 8, 9], [])
    offsets, bad = read(kernel, batches, 5, 25)
    assert (offsets, [item.offset for item in bad]) == ([5, 6, 7, 8, 9, 20, 21, 22, 23, 24], [10])
    # only the corrupt batch has offsets of the range: it is passed on, and nothing is read
    offsets, bad = read(kernel, batches[1:], 12, 15)
    assert (offsets, [item.offset for item in bad]) == ([], [10])


CONTROL, TRANSACTIONAL = 0x20, 0x10


def transactional(offset: int, attributes: int, key: bytes = b"k") -> Batch:
    rows = encode_rows([Row(offset, TIME, key, b"value %d" % offset)], offset, TIME)
    data = build_batch(
        rows,
        1,
        base_timestamp=TIME,
        max_timestamp=TIME,
        base_offset=offset,
        attributes=attributes,
        producer_id=7,
        producer_epoch=0,
    )
    return Batch(offset, 1, data, offset)


def test_transactions(kernel: Kernel) -> None:
    """Aborted and control batches stay hidden beside bad ones; one that is bad itself is passed on."""
    abort, commit = struct.pack(">hh", 0, 0), struct.pack(">hh", 0, 1)
    batches = [
        transactional(0, TRANSACTIONAL),
        damaged(transactional(1, TRANSACTIONAL)),
        transactional(2, TRANSACTIONAL | CONTROL, abort),
        transactional(3, TRANSACTIONAL),
        damaged(batch(4, 1)),
        transactional(5, TRANSACTIONAL | CONTROL, commit),
        damaged(transactional(6, TRANSACTIONAL | CONTROL, commit)),
        batch(7, 1),
    ]
    offsets, bad = read(kernel, batches, aborted=AbortedTransactions([(7, 0)]))
    assert (offsets, [item.offset for item in bad]) == ([3, 7], [1, 4, 6])


def control(records: int, key: bytes | None) -> bytes:
    body = bytearray()
    for delta in range(records):
        append_record(body, 0, delta, key, b"")
    return build_batch(
        body, records, base_timestamp=TIME, max_timestamp=TIME, base_offset=1, last_offset_delta=0,
        attributes=CONTROL, producer_id=7,
    )  # fmt: skip


def test_a_control_batch_without_a_record(kernel: Kernel) -> None:
    """Compaction has removed the marker, and the transaction that it ended."""
    batches = [batch(0, 1), Batch(1, 1, control(0, None), 1), batch(2, 1)]
    assert read(kernel, batches, aborted=AbortedTransactions([(7, 0)])) == ([0, 2], [])


@pytest.mark.parametrize("key", [None, b"", b"\0\0\0"])
def test_a_control_batch_with_another_record(kernel: Kernel, key: bytes | None) -> None:
    batches = [batch(0, 1), Batch(1, 1, control(1, key), 1, is_bad=True), batch(2, 1)]
    offsets, bad = read(kernel, batches, aborted=AbortedTransactions([(7, 0)]))
    assert (offsets, [str(item.error) for item in bad]) == (
        [0, 2],
        ["control batch at offset 1 holds no control record"],
    )


@pytest.mark.parametrize(("rows", "seen"), [(5, [10, 1, 2, 10]), (15, [1, 2, 20]), (25, [1, 2])])
def test_full_columns_and_bad_batches_are_yielded_in_order(kernel: Kernel, rows: int, seen: list[int]) -> None:
    """Columns come as soon as they are full; a bad batch does not cut them. Here it is its number among the batches."""
    batches = [batch(0, 10), damaged(batch(10, 10)), with_field(batch(20, 10), ">i", COUNT, -1), batch(30, 10)]
    reader = RecordReader(frozenset(["offset"]), kernel=kernel, rows=rows, yields_bad=True)
    parts = list(reader.read(b"".join(item.data for item in batches), 0, 40))
    assert [part.offset // 10 if isinstance(part, BadBatch) else part.count for part in parts] == seen
    assert reader.finish().count == 20 - sum(count for count in seen if count >= 10)


def test_the_caller_may_stop_at_a_bad_batch(kernel: Kernel) -> None:
    reader = RecordReader(frozenset(["offset"]), kernel=kernel, yields_bad=True)
    data = batch(0, 10).data + damaged(batch(10, 10)).data + batch(20, 10).data
    bad = next(reader.read(data, 0, 40))
    assert isinstance(bad, BadBatch)
    assert (bad.offset, reader.rows) == (10, 10)


@st.composite
def _batches(draw: st.DrawFn) -> list[Batch]:
    found: list[Batch] = []
    offset = draw(st.integers(0, 1 << 30))
    for _ in range(draw(st.integers(0, 12))):
        magic = draw(st.sampled_from([0, 1, 2]))
        codec = draw(st.sampled_from(["none", "gzip", "snappy"]))
        count = 1 if magic < 2 and codec == "none" else draw(st.integers(1, 5))
        item = batch(offset, count, magic, codec)
        kind = draw(st.sampled_from(["good", "good", "covered", "checksum", "header"]))
        if kind == "checksum":
            item = damaged(item, CHECKSUM[magic] + draw(st.integers(0, 3)), draw(st.integers(1, 255)))
        elif kind == "header" and magic == 2:
            form, position = draw(st.sampled_from([(">q", 0), (">i", LAST_OFFSET_DELTA), (">i", COUNT)]))
            item = with_field(item, form, position, draw(st.integers(-(1 << 31), -1)))
        elif kind == "covered":
            position = draw(st.integers(COVERED[magic], len(item.data) - 1).filter(lambda at: at != MAGIC))
            item = damaged(item, position, draw(st.integers(1, 255)))
        found.append(item)
        offset += count + draw(st.integers(0, 3))
    return found


@pytest.mark.parametrize("kernel", KERNELS, ids=[kernel.name for kernel in KERNELS])
@settings(deadline=None)
@given(_batches())
def test_any_mixture(kernel: Kernel, batches: list[Batch]) -> None:
    check(kernel, batches)


@pytest.mark.parametrize("kernel", KERNELS, ids=[kernel.name for kernel in KERNELS])
@settings(deadline=None)
@given(_batches(), st.binary(max_size=60), st.integers(0, 500), st.integers(0, 1 << 31), st.integers(0, 50))
def test_any_bytes(kernel: Kernel, batches: list[Batch], noise: bytes, at: int, first: int, more: int) -> None:
    """Any bytes give records, bad batches or `DecodeError`, never another exception or an endless loop."""
    data = b"".join(item.data for item in batches)
    at = min(at, len(data))
    data = data[:at] + noise + data[at + len(noise) // 2 :]
    reader = RecordReader(frozenset(["offset"]), kernel=kernel, yields_bad=True)
    try:
        for bad in reader.read(data, first, first + more):
            assert isinstance(bad, BadBatch)
            assert len(bad.data) >= 26
    except DecodeError:
        pass
    assert all(first <= offset < first + more for offset in to_lists(reader.finish())["offset"])
