"""Fuzz targets: each takes bytes, and raises `AssertionError` or any other exception if the package breaks a promise.

The promises: decoding foreign bytes returns or raises `DecodeError`, nothing else; decompressed data stay within the
given limit; all kernels behave the same; one part of the package reads what another part writes.

Input of all targets but `codecs`, `avro` and `protobuf` (see avro_rows.py, protobuf_rows.py): four bytes of knobs (see
`_Knobs`), then a source (see envelope.py).
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

from spark_klog.errors import ConfigError, DecodeError, ErrorCode, LogCorrupted, ProtocolError
from spark_klog.log.compaction import passes
from spark_klog.log.compaction.passes import OffsetMap
from spark_klog.log.segments.transaction_index import AbortedTransaction
from spark_klog.log.tools.dump import Damage, Dumped, _dump, _dump_07
from spark_klog.records import kernels
from spark_klog.records.building.assignment import assign_offsets
from spark_klog.records.building.conversion import down_convert, up_convert
from spark_klog.records.contract import COLUMNS, NO_TIMESTAMP, Kernel, Record
from spark_klog.records.formats.batch import Header, check_crc, iter_batches
from spark_klog.records.formats.batch_v2 import BatchHeader, body
from spark_klog.records.formats.message_07 import check_crc_07, iter_messages_07, records_07
from spark_klog.records.formats.message_set import inner_set
from spark_klog.records.reading.reader import AbortedTransactions, records_of, visible_batches
from spark_klog.wire.codecs import codec_by_id
from tests.support.brokers.batches import read_records
from tests.support.brokers.compaction_logs import compact as compacted

from .avro_rows import check
from .codec_data import MAX_INFLATED, MEND, ORACLES
from .envelope import Mode, wrap, wrap_07
from .protobuf_rows import check_protobuf
from .reading import Reading

Target = Callable[[bytes], None]
#: Limit for a decompressed batch: small, so that a run is fast.
LIMIT = 1 << 16
#: Limit for converted batches: other formats need more bytes per record.
_ROOM = 64 * LIMIT
_CODEC_LIMITS = (MAX_INFLATED, 1 << 12, 100, 0)
_END = 2**63 - 1
_MANY = 1 << 62
_TIME = 1_700_000_000_000


def kernels_named(choice: str) -> list[Kernel]:
    """Load the kernels "reference", "native" or "both"; "both" skips a native kernel that is missing or too old."""
    chosen = [kernels.load("reference")] if choice != "native" else []
    if choice != "reference":
        try:
            native = kernels.load("native")
        except ConfigError:
            if choice == "native":
                raise
        else:
            if hasattr(native, "message_run"):
                chosen.append(native)
            elif choice == "native":
                raise ConfigError("the native kernel is older than message sets; build it again")
    return chosen


#: run.py and asan.py replace them.
KERNELS = kernels_named("both")


@dataclass(frozen=True)
class _Knobs:
    """The first four bytes of an input."""

    mode: int
    """Bits 0-1 the `Mode`, bits 2-4 how many bytes are cut off at the end."""
    span: int
    """Which offsets: bits 0-3 from where, bits 4-7 how many; see `offsets`."""
    choice: int
    """What else there is to choose for a target."""
    columns: int
    """A bit a column; 0 is all."""

    def log(self, source: bytes, wrapped: Callable[[bytes, Mode], bytes] = wrap) -> bytes:
        log = wrapped(source, Mode(self.mode & 3))
        return log[: len(log) - (self.mode >> 2 & 7)]

    def offsets(self, log: bytes) -> tuple[int, int]:
        """A range of offsets near the first batch, or all offsets."""
        base: int = struct.unpack_from(">q", log)[0] if len(log) >= 8 else 0
        low, many = self.span & 15, self.span >> 4
        first = 0 if low == 0 else min(max(base + low - 4, 0), _END)
        return first, _END if many == 0 else min(first + many - 1, _END)

    def chosen_columns(self) -> frozenset[str]:
        chosen = frozenset(name for bit, name in enumerate(COLUMNS) if self.columns >> bit & 1)
        return chosen or frozenset(COLUMNS)


def _split(data: bytes) -> tuple[_Knobs, bytes]:
    return _Knobs(*data[:4].ljust(4, b"\x00")), data[4:]


def _is_too_large(error: DecodeError) -> bool:
    return "grow beyond" in str(error)


def _records(log: bytes) -> tuple[list[tuple[Header, list[Record]]], DecodeError | None]:
    """The records of the visible batches up to the first error, and that error."""
    batches: list[tuple[Header, list[Record]]] = []
    try:
        for header, batch in visible_batches(log):
            batches.append((header, list(records_of(header, batch, LIMIT))))
    except DecodeError as error:
        return batches, error
    return batches, None


# Reading


def fuzz_reader(data: bytes) -> None:
    """Read a log in every way: all kernels agree, columns match records, and a part matches the whole."""
    knobs, source = _split(data)
    log = knobs.log(source)
    first, end = knobs.offsets(log)
    rows = (_MANY, 1, 2, 5)[knobs.choice >> 5 & 3]
    reading = Reading(log, first, end, LIMIT, knobs.chosen_columns(), _aborted(knobs, log), rows)
    strict = reading.by_all(KERNELS)
    assert not strict.bad
    if strict.is_refused:
        lenient = replace(reading, passing_over=True).by_all(KERNELS)
        assert lenient.bad or lenient.is_refused
        assert lenient.rows >= strict.rows
    assert len({_message_run(kernel, log, end) for kernel in KERNELS}) == 1
    batches, error = _records(log)
    if error is None and _are_in_order(log) and all(_is_in_order(header, records) for header, records in batches):
        records = [record for _, records in batches for record in records]
        offsets = sorted({record.offset for record in records})
        whole = Reading(log, 0, _END, LIMIT)
        whole.check_range(KERNELS, records, 0, _END)
        if offsets:
            first, end = (offsets[number % len(offsets)] for number in (knobs.span & 15, knobs.span >> 4))
            whole.check_range(KERNELS, records, first, end)
    if error is None or not _is_too_large(error):
        _read_records(log, [], [record for _, records in batches for record in records], error)
        if reading.aborted:
            _read_records(log, reading.aborted, None, None)


def _are_in_order(log: bytes) -> bool:
    """Return whether no batches overlap: of overlapping ones, even without records, readers take one for corrupt."""
    following = 0
    for header, _ in iter_batches(log):
        first = header.base_offset if isinstance(header, BatchHeader) else header.last_offset
        if not following <= first <= header.last_offset:
            return False
        following = header.next_offset
    return True


def _aborted(knobs: _Knobs, log: bytes) -> list[tuple[int, int]]:
    """(producer id, first offset) pairs of aborted transactions, for the first batch's producer and for others."""
    if not knobs.choice & 1 or len(log) < 51:
        return []
    base, producer = struct.unpack_from(">q", log)[0], struct.unpack_from(">q", log, 43)[0]
    pairs = [(producer, base), (producer, base + 6), (producer + 1, base + 1), (-1, 0)]
    return [pair for bit, pair in enumerate(pairs) if knobs.choice >> bit & 2]


def _message_run(kernel: Kernel, log: bytes, end: int) -> int | None:
    try:
        return kernel.message_run(log, 0, end)
    except DecodeError:
        return None


def _is_in_order(header: Header, records: list[Record]) -> bool:
    """Return whether the records' offsets are within the batch; if not, reading from an offset may skip records."""
    return header.next_offset < _END and all(0 <= record.offset <= header.last_offset for record in records)


def _read_records(
    log: bytes, aborted: Sequence[tuple[int, int]], expected: list[Record] | None, error: DecodeError | None
) -> None:
    records: list[Record] = []
    raised = False
    try:
        for record in read_records(log, AbortedTransactions(aborted) if aborted else None):
            records.append(record)
    except DecodeError:
        raised = True
    if expected is not None:
        assert raised == (error is not None)
        assert records[: len(expected)] == expected


# Logs of Kafka 0.7


def fuzz_message_07(data: bytes) -> None:
    """Messages of a Kafka 0.7 log, and their records, have the expected offsets and stay within the limit."""
    knobs, source = _split(data)
    log = knobs.log(source, wrap_07)
    base = knobs.span << knobs.choice % 56
    position = base
    try:
        for message in iter_messages_07(log, base):
            assert message.offset == position
            position = message.next_offset
            try:
                check_crc_07(message)
                records = list(records_07(message, LIMIT))
            except DecodeError:
                continue
            assert {record.offset for record in records} <= {message.offset}
            assert sum(len(record.value or b"") for record in records) <= max(LIMIT, len(message.payload))
    except DecodeError:
        pass
    assert base <= position <= base + len(log)


# Codecs


def fuzz_codecs(data: bytes) -> None:
    """Decompress: byte 0 has the codec (bits 0-2) and whether to fix checksums (bit 3), byte 1 the limit."""
    head, payload = data[:2].ljust(2, b"\x00"), data[2:]
    limit = _CODEC_LIMITS[head[1] & 3]
    codec_id = head[0] & 7
    if head[0] & 8:
        payload = MEND.get(codec_id, bytes)(payload)
    try:
        codec = codec_by_id(codec_id)
    except DecodeError:
        assert codec_id > 4
        return
    if not codec_id:
        return
    try:
        result = bytes(codec.decompress(payload, limit))
    except DecodeError:
        return
    assert len(result) <= limit
    # a limit of exactly that size is enough, a smaller one is not
    assert bytes(codec.decompress(memoryview(payload), len(result))) == result
    if result:
        try:
            codec.decompress(payload, len(result) - 1)
        except DecodeError:
            pass
        else:
            raise AssertionError("decompressed more than its limit")
    if codec_id in ORACLES and result:
        expected = ORACLES[codec_id](payload)
        assert expected is None or expected == result
    if len(result) < 4096:
        assert bytes(codec.decompress(codec.compress(result), len(result))) == result


# Conversion


def fuzz_conversion(data: bytes) -> None:
    """Convert down and up: the output has the same records as the input, and all kernels write the same bytes."""
    knobs, source = _split(data)
    log = knobs.log(source)
    first, _ = knobs.offsets(log)
    for magic in (0, 1):
        down = _by_all(lambda magic=magic: down_convert(log, magic, first, LIMIT))
        if down is not None:
            _check_down(log, bytes(down.data), magic, first)
    up = _by_all(lambda: up_convert(log, LIMIT))
    if up is not None:
        _check_up(log, bytes(up))


def _by_all(convert: Callable[[], Any]) -> Any:
    """What a function makes with each kernel; None if the log is refused."""
    made: list[Any] = []
    for kernel in KERNELS:
        with mock.patch.object(kernels, "load", return_value=kernel):
            try:
                made.append(convert())
            except DecodeError:
                made.append(None)
            except ProtocolError as error:
                if error.code != ErrorCode.UNSUPPORTED_COMPRESSION_TYPE:
                    raise
                made.append(None)
    assert made[1:] == made[:-1]
    return made[0]


def _whole(log: bytes) -> Iterator[tuple[Header, memoryview]]:
    """The batches of a log that we wrote; all of its bytes belong to batches with right checksums."""
    size = 0
    for header, batch in iter_batches(log):
        check_crc(header, batch)
        size += len(batch)
        yield header, batch
    assert size == len(log)


def _check_down(log: bytes, down: bytes, magic: int, first: int) -> None:
    expected: deque[tuple[Any, ...]] = deque()
    for header, batch in iter_batches(log):
        if header.magic <= magic:
            expected.append((bytes(batch),))
        elif not header.is_control:
            expected.extend(
                (record.offset, record.key, record.value, record.timestamp if magic else NO_TIMESTAMP)
                for record in records_of(header, batch, LIMIT)
                if header.codec_id or record.offset >= first
            )
    for header, batch in _whole(down):
        assert header.magic <= magic
        if expected and expected[0] == (bytes(batch),):
            expected.popleft()
            continue
        _take(
            expected,
            batch,
            (
                (record.offset, record.key, record.value, record.timestamp)
                for record in records_of(header, batch, _ROOM)
            ),
        )
    assert not expected


def _take(expected: deque[tuple[Any, ...]], batch: memoryview, records: Iterator[tuple[Any, ...]]) -> None:
    """Check that this batch is the next expected one, either unchanged or by its records."""
    if expected and expected[0] == (bytes(batch),):
        expected.popleft()
        return
    for record in records:
        assert expected
        assert expected.popleft() == record


def _check_up(log: bytes, up: bytes) -> None:
    expected: deque[tuple[Any, ...]] = deque()
    following = 0
    for header, batch in iter_batches(log):
        if isinstance(header, BatchHeader):
            expected.append((bytes(batch),))
            continue
        for record in records_of(header, batch, LIMIT):
            expected.append((following, record.key, record.value, record.timestamp, max(record.timestamp_type, 0)))
            following += 1
    for header, batch in _whole(up):
        assert header.magic == 2
        if expected and expected[0] == (bytes(batch),):
            expected.popleft()  # kept unchanged, whatever it contains
            continue
        _take(
            expected,
            batch,
            (
                (record.offset, record.key, record.value, record.timestamp, record.timestamp_type)
                for record in records_of(header, batch, _ROOM)
                if header.base_offset <= record.offset <= header.last_offset
            ),
        )
    assert not expected


# Offset assignment


def fuzz_assignment(data: bytes) -> None:
    """Assigned offsets are dense, the append time is set, and a rejected log is unchanged."""
    knobs, source = _split(data)
    log = knobs.log(source)
    first = (0, 7, 2**31 - 2, 2**40)[knobs.choice & 3]
    append_time = (None, _TIME)[knobs.choice >> 2 & 1]
    records = bytearray(log)
    try:
        assigned = assign_offsets(
            memoryview(records), first, leader_epoch=knobs.columns, append_time=append_time, limit=LIMIT
        )
    except DecodeError:
        assert records == log
        return
    following = first
    batches = list(_whole(bytes(assigned.data)))
    assert [header for header, _ in batches] == assigned.headers
    for header, batch in batches:
        if isinstance(header, BatchHeader):
            assert header.base_offset == following
            assert header.leader_epoch == knobs.columns
            following = header.next_offset
        try:
            read = list(records_of(header, batch, _ROOM))
        except DecodeError:  # a broker does not decode more than it needs
            assert isinstance(header, BatchHeader) or (header.codec_id and header.magic == 1) or not header.codec_id
            following = header.next_offset
            continue
        if not isinstance(header, BatchHeader):
            assert [record.offset for record in read] == list(range(following, header.next_offset))
            following = header.next_offset
        if append_time is not None and header.magic:
            assert {(record.timestamp, record.timestamp_type) for record in read} == {(append_time, 1)}
    assert following == assigned.next_offset


# Compaction


def fuzz_compaction(data: bytes) -> None:
    """Compact a log: all kernels leave the same bytes, or find a batch damaged; what is left can be compacted again."""
    knobs, source = _split(data)
    log = knobs.log(source)
    start, end = knobs.offsets(log)
    for header, batch in iter_batches(log) if _is_readable(log) else ():
        try:
            body(header, batch, LIMIT) if isinstance(header, BatchHeader) else inner_set(header, batch, LIMIT)
        except DecodeError:
            return  # it may be huge
    aborted = [AbortedTransaction(producer, first, first + 9, first) for producer, first in _aborted(knobs, log)]
    now, keys = _TIME + (knobs.choice & 8), (1 << 12, 3)[knobs.choice >> 4 & 1]
    cleaned = [_compacted(kernel, log, start, end, aborted, now, keys) for kernel in KERNELS]
    assert cleaned[1:] == cleaned[:-1]
    if cleaned[0] is not None:
        again = [_compacted(kernel, cleaned[0], start, end, aborted, now, keys) for kernel in KERNELS]
        assert again[0] is not None
        assert again[1:] == again[:-1]


def _is_readable(log: bytes) -> bool:
    try:
        deque(iter_batches(log), 0)
    except DecodeError:
        return False
    return True


def _compacted(
    kernel: Kernel, log: bytes, start: int, end: int, aborted: list[AbortedTransaction], now: int, keys: int
) -> bytes | None:
    """What is left of the log; None if it is damaged."""
    with mock.patch.object(passes, "load", return_value=kernel):
        try:
            offsets = OffsetMap(1 << 12)
            offsets.capacity = min(offsets.capacity, keys)
            return compacted(log, start=start, end=end, aborted=aborted, now=now, offsets=offsets).data
        except LogCorrupted:
            return None


# Dump


def fuzz_dump(data: bytes) -> None:
    """`klog log dump`: every byte of a file belongs to a batch, to damage or to zeros at its end."""
    knobs, source = _split(data)
    if knobs.choice & 1:
        items = _dump_07(memoryview(knobs.log(source, wrap_07)), knobs.span)
        size = len(knobs.log(source, wrap_07))
    else:
        items = _dump(memoryview(knobs.log(source)))
        size = len(knobs.log(source))
    position = 0
    for item in items:
        assert item.position == position
        assert item.size > 0
        position += item.size
        if isinstance(item, Damage):
            assert item.reason
        elif isinstance(item, Dumped):
            _look_into(item)
        else:
            assert position == size
    assert position == size


def _look_into(item: Dumped) -> None:
    assert len(item.data) == item.size
    try:
        records = item.records(LIMIT)
        described = item.describe()
    except DecodeError:
        return
    assert isinstance(item.header, BatchHeader) or described["count"] == len(records)
    assert described["size"] == item.size


# Avro


def fuzz_avro(data: bytes) -> None:
    """Decode Avro rows: both kernels agree, a bad row leaves no trace, and what is decoded can be encoded."""
    check(data, tuple(kernel.name for kernel in reversed(KERNELS)))


# Protobuf


def fuzz_protobuf(data: bytes) -> None:
    """Decode Protobuf rows: the native kernel reads what google.protobuf reads, and what is decoded can be encoded."""
    check_protobuf(data, tuple(kernel.name for kernel in reversed(KERNELS)))


TARGETS: dict[str, Target] = {
    function.__name__.removeprefix("fuzz_"): function
    for function in (
        *(fuzz_reader, fuzz_message_07, fuzz_codecs, fuzz_conversion, fuzz_assignment, fuzz_compaction, fuzz_dump),
        *(fuzz_avro, fuzz_protobuf),
    )
}
