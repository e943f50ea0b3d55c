# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
"""The native kernel: does what reference.py does, without Python objects and without the GIL.

The layouts are in reference.py (records) and message_set.py (messages). A body is walked once; the first byte that
contradicts its layout ends the walk with an error, and the builder does not change.

Memory safety, everywhere below:
- all reads are in [at, end): a size from the data is compared with the bytes left before it is used;
- before the walk there is room for all rows that a body can hold, bounded by the body's size;
- the builder's sizes are set only after a successful walk, so an error leaves them as they were.

_kernel_crc.pxi       CRC-32C
_kernel_memory.pxi    growing buffers, their way to Arrow and back
_kernel_utf8.pxi      whether bytes are UTF-8
_kernel_columns.pxi   columns that rows are written to
_kernel_messages.pxi  messages of magic 0 and 1, CRC-32
_kernel_records.pxi   records of magic 2
_kernel_encode.pxi    columns to bodies, partitions of keys
_kernel_scan.pxi      runs of batches of magic 2: headers, checksums, order of offsets
_kernel_compact.pxi   last offsets of keys, batches that lose records
_kernel_convert.pxi   records of magic 2 as messages
"""

from libc.stdint cimport INT32_MAX, INT64_MAX, INT64_MIN, int32_t, int64_t, uint8_t, uint32_t, uint64_t
from libc.stdlib cimport free, realloc
from libc.string cimport memcpy, memmove, memset

from cpython.buffer cimport PyBUF_SIMPLE, PyBUF_WRITABLE, PyBuffer_FillInfo, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytes cimport PyBytes_FromStringAndSize

from spark_klog.errors import CorruptBatchError, DecodeError
from spark_klog.records.contract import (
    BatchRun, BinaryColumn, CleanedRun, HeadersColumn, IndexState, MessageRun, OrderedBatches,
    RecordColumns,
)
from spark_klog.wire.checksums import crc32c

name = "native"
# As in __init__.py, which says when to raise it.
VERSION = 6
cdef str TOO_LARGE_TEXT = "more than 2 GiB of keys, of values or of headers in one batch of columns"


# The result of a walk.
cdef enum:
    OK = 0
    NO_MEMORY = -1
    TOO_LARGE = -2
    DAMAGED = -3
    LEFT_OVER = -4
    WRONG_CRC = -6
    WRONG_MAGIC = -7
    HAS_CODEC = -8
    TOO_MANY = -9


include "_kernel_crc.pxi"
include "_kernel_memory.pxi"
include "_kernel_utf8.pxi"
include "_kernel_columns.pxi"
include "_kernel_messages.pxi"
include "_kernel_records.pxi"
include "_kernel_encode.pxi"
include "_kernel_scan.pxi"
include "_kernel_compact.pxi"
include "_kernel_convert.pxi"


cdef inline int64_t difference(int64_t a, int64_t b) noexcept nogil:
    """a - b, saturated to 64 bits."""
    if b < 0 and a > INT64_MAX + b:
        return INT64_MAX
    if b > 0 and a < INT64_MIN + b:
        return INT64_MIN
    return a - b


# Writes the wanted rows of a body and returns a state; fills `End` if that is not OK.
ctypedef int (*Walk)(const Body *body, Row *row, End *where) noexcept nogil


cdef inline int64_t most_records(const Body *body) noexcept:
    """The number of records that fit into a body of this size: an upper limit for what a header claims."""
    return body.size // SMALLEST_RECORD


cdef void set_deltas(Body *body, int64_t base_offset, int64_t first, int64_t end) noexcept:
    """Select offsets in [first, end); a body has deltas to the base offset, from 0 to 2^31 - 1."""
    body.shift = base_offset
    # a saturated bound lies beyond all deltas, as the exact one does
    body.first = difference(first, base_offset)
    body.last = difference(difference(end, base_offset), 1)


cdef class NativeBuilder:
    """See `contract.ColumnBuilder`."""

    cdef Column _key, _value
    cdef Bytes _offset, _timestamp, _kind
    cdef Headers _headers
    cdef int64_t _rows
    cdef bint _has_key, _has_value, _has_offset, _has_timestamp, _has_kind, _has_headers
    cdef bint _is_walking

    def __cinit__(self, columns):
        # all other fields are zero at first
        self._has_key = "key" in columns
        self._has_value = "value" in columns
        self._has_offset = "offset" in columns
        self._has_timestamp = "timestamp" in columns
        self._has_kind = "timestampType" in columns
        self._has_headers = "headers" in columns

    def __dealloc__(self):
        release_column(&self._key)
        release_column(&self._value)
        release(&self._offset)
        release(&self._timestamp)
        release(&self._kind)
        release_column(&self._headers.names)
        release_column(&self._headers.values)
        release(&self._headers.ends)
        release(&self._headers.valid)

    @property
    def rows(self):
        return self._rows

    @property
    def size(self):
        return self._key.data.size + self._value.data.size

    def append(self, body, int64_t count, int64_t base_offset, int64_t base_timestamp, append_time, int64_t first,
               int64_t end):
        cdef Py_buffer view
        cdef Body task
        cdef End where
        cdef int state
        memset(&task, 0, sizeof(Body))
        memset(&where, 0, sizeof(End))
        task.count = max(count, 0)
        task.base_timestamp = base_timestamp
        task.is_append_time = append_time is not None
        task.append_time = 0 if append_time is None else append_time
        set_deltas(&task, base_offset, first, end)
        PyObject_GetBuffer(body, &view, PyBUF_SIMPLE)
        try:
            task.data = <const uint8_t *>view.buf
            task.size = view.len
            state = self._add(walk_records, &task, &where) if task.count <= most_records(&task) else TOO_MANY
        finally:
            PyBuffer_Release(&view)
        if state == TOO_MANY:
            raise DecodeError(f"{count} records can't be in {task.size} bytes")
        if state == LEFT_OVER:
            raise DecodeError(f"{task.size - where.position} bytes left over after {count} records")
        if state != OK:
            raise DecodeError(f"record at position {where.position} is damaged or cut off")

    def append_batches(self, data, int64_t position, int64_t first, int64_t end, int64_t rows, int64_t size):
        """See `contract.ColumnBuilder.append_batches`."""
        cdef Py_buffer view
        cdef const uint8_t *at
        cdef Batch batch
        cdef Body task
        cdef End where
        cdef int64_t next_offset = first, start_of_crc
        if position < 0:
            raise ValueError(f"position {position}")
        whole = memoryview(data)
        PyObject_GetBuffer(whole, &view, PyBUF_SIMPLE)
        try:
            while next_offset < end and self._rows < rows and self._key.data.size + self._value.data.size < size:
                at = <const uint8_t *>view.buf + position
                if not read_plain_batch(at, view.len - position, &batch) or batch.base_offset >= end:
                    break
                start_of_crc = position + BATCH_CRC_START
                if batch_crc(at + BATCH_CRC_START, batch.size - BATCH_CRC_START, whole, start_of_crc) != batch.crc:
                    break
                if batch.last_offset >= first:
                    memset(&task, 0, sizeof(Body))
                    memset(&where, 0, sizeof(End))
                    task.data = at + BATCH_HEADER
                    task.size = batch.size - BATCH_HEADER
                    task.count = batch.count
                    task.base_timestamp = batch.base_timestamp
                    task.is_append_time = batch.is_append_time
                    task.append_time = batch.max_timestamp
                    set_deltas(&task, batch.base_offset, first, end)
                    if task.count > most_records(&task) or self._add(walk_records, &task, &where) != OK:
                        break
                position += batch.size
                next_offset = batch.last_offset + 1
        finally:
            PyBuffer_Release(&view)
        return position, next_offset

    def append_messages(self, messages, int magic, last_offset, append_time, first, end):
        cdef Py_buffer view
        cdef Body task
        cdef End where
        cdef int state
        memset(&task, 0, sizeof(Body))
        memset(&where, 0, sizeof(End))
        task.magic = magic
        task.is_append_time = append_time is not None
        task.append_time = 0 if append_time is None else append_time
        task.is_inner = last_offset is not None
        PyObject_GetBuffer(messages, &view, PyBUF_SIMPLE)
        try:
            task.data = <const uint8_t *>view.buf
            task.size = view.len
            with nogil:
                state = count_messages(&task, &where)
            if state == OK:
                shift = 0 if last_offset is None else last_offset - where.message.offset
                set_range(&task, shift, first, end)
                state = self._add(walk_messages, &task, &where)
        finally:
            PyBuffer_Release(&view)
        if state == WRONG_CRC:
            raise CorruptBatchError(
                f"message of offset {where.message.offset}: CRC {where.message.crc:#010x} is stored, "
                f"the bytes have {where.crc:#010x}"
            )
        if state == WRONG_MAGIC:
            raise DecodeError(f"message of magic {where.message.magic} among messages of magic {magic}")
        if state == HAS_CODEC:
            raise DecodeError(f"compressed message of offset {where.message.offset} inside a compressed message")
        if state != OK:
            raise DecodeError(f"message at position {where.position} is damaged or cut off")

    cdef int _add(self, Walk walk, const Body *body, End *where) except? -1:
        """Walk a body, and keep its rows if the walk succeeds. A state; `MemoryError`, `DecodeError`."""
        cdef Row row
        cdef int state
        cdef Headers before
        if self._is_walking:
            raise RuntimeError("the builder is in use by another thread")
        self._prepare(body.count, body.size)
        before = self._headers
        self._start(&row)
        self._is_walking = True
        with nogil:
            state = walk(body, &row, where)
        self._is_walking = False
        if state == OK:
            self._keep(&row)
            return OK
        truncate(&self._headers, &before)
        if state == NO_MEMORY:
            raise MemoryError
        if state == TOO_LARGE:
            raise DecodeError(TOO_LARGE_TEXT)
        return state

    cdef int _prepare(self, int64_t rows, int64_t size) except -1:
        """Make room for all that a body of `size` bytes may hold; only headers grow during the walk.

        `DecodeError` if 32-bit offsets may overflow, `MemoryError`.
        """
        if size > INT32_MAX - max(self._key.data.size, self._value.data.size):
            raise DecodeError(TOO_LARGE_TEXT)
        if self._has_key:
            prepare_column(&self._key, rows, size)
        if self._has_value:
            prepare_column(&self._value, rows, size)
        if self._has_offset:
            prepare(&self._offset, 8 * rows)
        if self._has_timestamp:
            prepare(&self._timestamp, 8 * rows)
        if self._has_kind:
            prepare(&self._kind, 4 * rows)
        if self._has_headers:
            prepare_column(&self._headers.names, 0, 0)
            prepare_column(&self._headers.values, 0, 0)
            prepare_offsets(&self._headers.ends, rows)
            prepare(&self._headers.valid, rows)
        return 0

    cdef void _start(self, Row *row) noexcept:
        memset(row, 0, sizeof(Row))
        if self._has_key:
            row.key = pen_of(&self._key)
        if self._has_value:
            row.value = pen_of(&self._value)
        if self._has_offset:
            row.offset = <int64_t *>self._offset.data
        if self._has_timestamp:
            row.timestamp = <int64_t *>self._timestamp.data
        if self._has_kind:
            row.kind = <int32_t *>self._kind.data
        if self._has_headers:
            row.headers = &self._headers
        row.count = self._rows

    cdef void _keep(self, const Row *row) noexcept:
        self._rows = row.count
        if self._has_key:
            keep_written(&self._key, &row.key, row.count)
        if self._has_value:
            keep_written(&self._value, &row.value, row.count)
        if self._has_offset:
            self._offset.size = 8 * row.count
        if self._has_timestamp:
            self._timestamp.size = 8 * row.count
        if self._has_kind:
            self._kind.size = 4 * row.count

    def finish(self):
        if self._is_walking:
            raise RuntimeError("the builder is in use by another thread")
        columns = RecordColumns(self._rows)
        if self._has_key:
            columns.key = column_taken(&self._key)
        if self._has_value:
            columns.value = column_taken(&self._value)
        if self._has_offset:
            columns.offset = taken(&self._offset)
        if self._has_timestamp:
            columns.timestamp = taken(&self._timestamp)
        if self._has_kind:
            columns.timestamp_type = taken(&self._kind)
        if self._has_headers:
            columns.headers = headers_taken(&self._headers)
        self._rows = 0
        return columns


def builder(columns):
    """See `contract.Kernel.builder`."""
    return NativeBuilder(columns)
