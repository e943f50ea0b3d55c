# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
"""The native kernel: what reference.py does, without Python objects and without the GIL.

Record layout: see reference.py. A body is walked once; a record that is not what the layout says ends the walk with
`DecodeError`, and nothing of its body has been added.
"""

from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t
from libc.stdlib cimport free, realloc
from libc.string cimport memcpy, memset

from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytes cimport PyBytes_FromStringAndSize

from spark_klog.errors import DecodeError
from spark_klog.records.contract import BinaryColumn, HeadersColumn, RecordColumns

name = "native"

cdef int64_t MAX_INT32 = 0x7FFFFFFF


cdef struct Bytes:
    uint8_t *data
    int64_t size
    int64_t capacity


cdef int reserve(Bytes *buffer, int64_t extra) noexcept nogil:
    """Room for `extra` more bytes; -1 without memory."""
    cdef int64_t capacity
    cdef void *grown
    if buffer.size + extra <= buffer.capacity:
        return 0
    capacity = buffer.capacity * 2
    if capacity < buffer.size + extra:
        capacity = buffer.size + extra
    if capacity < 4096:
        capacity = 4096
    grown = realloc(buffer.data, capacity)
    if grown == NULL:
        return -1
    buffer.data = <uint8_t *>grown
    buffer.capacity = capacity
    return 0


cdef inline int put(Bytes *buffer, const void *data, int64_t size) noexcept nogil:
    if reserve(buffer, size) < 0:
        return -1
    if size:
        memcpy(buffer.data + buffer.size, data, size)
    buffer.size += size
    return 0


cdef bytes taken(Bytes *buffer):
    """The content as bytes; the buffer becomes empty, its memory stays for the next batch."""
    content = PyBytes_FromStringAndSize(<char *>buffer.data, buffer.size)
    buffer.size = 0
    return content


# A column of bytes: offsets (INT32, one more than values), data, one validity byte a value until it is taken.
cdef struct Column:
    Bytes offsets
    Bytes data
    Bytes valid
    int64_t nulls


cdef void release(Column *column) noexcept nogil:
    free(column.offsets.data)
    free(column.data.data)
    free(column.valid.data)


cdef inline int add(Column *column, const uint8_t *value, int64_t size) noexcept nogil:
    """Append a value; size -1 is null. -1 without memory, -2 where 32-bit offsets do not reach."""
    cdef uint8_t is_valid = size >= 0
    cdef int32_t end
    if size > 0:
        if column.data.size + size > MAX_INT32:
            return -2
        if put(&column.data, value, size) < 0:
            return -1
    end = <int32_t>column.data.size
    if put(&column.offsets, &end, 4) < 0 or put(&column.valid, &is_valid, 1) < 0:
        return -1
    column.nulls += not is_valid
    return 0


cdef int begin(Column *column) noexcept nogil:
    """The leading zero of the offsets."""
    cdef int32_t zero = 0
    return put(&column.offsets, &zero, 4) if column.offsets.size == 0 else 0


cdef bytes bitmap(Bytes *valid):
    cdef int64_t count = valid.size
    cdef int64_t i
    packed = PyBytes_FromStringAndSize(NULL, (count + 7) // 8)
    cdef uint8_t *bits = <uint8_t *><char *>packed
    memset(bits, 0, (count + 7) // 8)
    for i in range(count):
        bits[i >> 3] |= valid.data[i] << (i & 7)
    return packed


cdef object column_taken(Column *column):
    if begin(column) < 0:
        raise MemoryError
    validity = bitmap(&column.valid) if column.nulls else None
    result = BinaryColumn(taken(&column.offsets), taken(&column.data), validity, column.nulls)
    column.valid.size = 0
    column.nulls = 0
    return result


cdef inline const uint8_t *read_varint(const uint8_t *at, const uint8_t *end, int64_t *value) noexcept nogil:
    """The position after a zig-zag varint of at most 64 bits, NULL where it is cut off or longer."""
    cdef uint64_t result
    cdef int shift
    cdef uint8_t byte
    if at >= end:
        return NULL
    byte = at[0]
    at += 1
    if byte < 0x80:
        value[0] = (byte >> 1) ^ -<int64_t>(byte & 1)
        return at
    result = byte & 0x7F
    shift = 7
    while True:
        if at >= end or shift > 63:
            return NULL
        byte = at[0]
        at += 1
        if shift == 63 and byte > 1:
            return NULL
        result |= <uint64_t>(byte & 0x7F) << shift
        if byte < 0x80:
            break
        shift += 7
    value[0] = <int64_t>(result >> 1) ^ -<int64_t>(result & 1)
    return at


cdef struct Marks:
    int64_t key_offsets, key_data, key_valid, key_nulls
    int64_t value_offsets, value_data, value_valid, value_nulls


cdef enum:
    OK = 0
    NO_MEMORY = -1
    TOO_LARGE = -2
    DAMAGED = -3
    LEFT_OVER = -4
    NOT_UTF8 = -5


cdef bint is_utf8(const uint8_t *at, int64_t size) noexcept nogil:
    """As Python's strict UTF-8: no surrogates, no overlong forms, at most U+10FFFF."""
    cdef const uint8_t *end = at + size
    cdef uint8_t byte
    cdef int more, i
    cdef uint32_t code
    while at < end:
        byte = at[0]
        if byte < 0x80:
            at += 1
            continue
        if 0xC2 <= byte <= 0xDF:
            more = 1
            code = byte & 0x1F
        elif (byte & 0xF0) == 0xE0:
            more = 2
            code = byte & 0x0F
        elif 0xF0 <= byte <= 0xF4:
            more = 3
            code = byte & 0x07
        else:
            return False
        if end - at <= more:
            return False
        for i in range(1, more + 1):
            if (at[i] & 0xC0) != 0x80:
                return False
            code = (code << 6) | (at[i] & 0x3F)
        if more == 2 and (code < 0x800 or 0xD800 <= code <= 0xDFFF):
            return False
        if more == 3 and (code < 0x10000 or code > 0x10FFFF):
            return False
        at += more + 1
    return True


cdef class NativeBuilder:
    """See `contract.ColumnBuilder`."""

    cdef Column _key, _value, _header_key, _header_value
    cdef Bytes _offset, _timestamp, _kind, _header_ends, _header_valid
    cdef int64_t _rows, _header_nulls
    cdef bint _has_key, _has_value, _has_offset, _has_timestamp, _has_kind, _has_headers

    def __cinit__(self, columns):
        memset(&self._key, 0, sizeof(Column))
        memset(&self._value, 0, sizeof(Column))
        memset(&self._header_key, 0, sizeof(Column))
        memset(&self._header_value, 0, sizeof(Column))
        memset(&self._offset, 0, sizeof(Bytes))
        memset(&self._timestamp, 0, sizeof(Bytes))
        memset(&self._kind, 0, sizeof(Bytes))
        memset(&self._header_ends, 0, sizeof(Bytes))
        memset(&self._header_valid, 0, sizeof(Bytes))
        self._has_key = "key" in columns
        self._has_value = "value" in columns
        self._has_offset = "offset" in columns
        self._has_timestamp = "timestamp" in columns
        self._has_kind = "timestampType" in columns
        self._has_headers = "headers" in columns

    def __dealloc__(self):
        release(&self._key)
        release(&self._value)
        release(&self._header_key)
        release(&self._header_value)
        free(self._offset.data)
        free(self._timestamp.data)
        free(self._kind.data)
        free(self._header_ends.data)
        free(self._header_valid.data)

    @property
    def rows(self):
        return self._rows

    @property
    def size(self):
        return self._key.data.size + self._value.data.size

    def append(self, body, int64_t count, int64_t base_offset, int64_t base_timestamp, append_time, int64_t first,
               int64_t end):
        cdef Py_buffer view
        cdef int64_t fixed_time = 0 if append_time is None else append_time
        cdef bint is_append_time = append_time is not None
        cdef int64_t position = 0
        cdef int state
        cdef Column key = self._key, value = self._value
        cdef Column header_key = self._header_key, header_value = self._header_value
        cdef Bytes offset = self._offset, timestamp = self._timestamp, kind = self._kind
        cdef Bytes header_ends = self._header_ends, header_valid = self._header_valid
        cdef int64_t rows = self._rows, header_nulls = self._header_nulls
        PyObject_GetBuffer(body, &view, PyBUF_SIMPLE)
        try:
            with nogil:
                state = self._walk(<const uint8_t *>view.buf, view.len, count, base_offset, base_timestamp,
                                   is_append_time, fixed_time, first, end, &position)
        finally:
            PyBuffer_Release(&view)
        if state == OK:
            return
        # Back to what was there before this body; buffers may have moved, their content has not.
        shrink_column(&self._key, &key)
        shrink_column(&self._value, &value)
        shrink_column(&self._header_key, &header_key)
        shrink_column(&self._header_value, &header_value)
        self._offset.size = offset.size
        self._timestamp.size = timestamp.size
        self._kind.size = kind.size
        self._header_ends.size = header_ends.size
        self._header_valid.size = header_valid.size
        self._rows = rows
        self._header_nulls = header_nulls
        if state == NO_MEMORY:
            raise MemoryError
        if state == TOO_LARGE:
            raise DecodeError("more than 2 GiB of keys or values in one batch of columns")
        if state == LEFT_OVER:
            raise DecodeError(f"{len(body) - position} bytes left over after {count} records")
        if state == NOT_UTF8:
            raise DecodeError(f"header name in the record at position {position} is not UTF-8")
        raise DecodeError(f"record at position {position} is damaged or cut off")

    cdef int _walk(self, const uint8_t *data, int64_t size, int64_t count, int64_t base_offset,
                   int64_t base_timestamp, bint is_append_time, int64_t append_time, int64_t first, int64_t last,
                   int64_t *position) noexcept nogil:
        cdef const uint8_t *at = data
        cdef const uint8_t *stop = data + size
        cdef const uint8_t *end
        cdef const uint8_t *key
        cdef const uint8_t *value
        cdef int64_t length, delta, offset, key_size, value_size, headers, timestamp, i
        cdef int32_t kind = is_append_time
        cdef int state
        cdef bint wanted
        if begin(&self._key) < 0 or begin(&self._value) < 0:
            return NO_MEMORY
        if begin(&self._header_key) < 0 or begin(&self._header_value) < 0:
            return NO_MEMORY
        for i in range(count):
            position[0] = at - data
            at = read_varint(at, stop, &length)
            if at == NULL or length < 1 or length > stop - at:
                return DAMAGED
            end = at + length
            at = read_varint(at + 1, end, &delta)
            if at == NULL:
                return DAMAGED
            at = read_varint(at, end, &offset)
            if at == NULL or offset < 0 or offset > MAX_INT32:
                return DAMAGED
            at = read_varint(at, end, &key_size)
            if at == NULL or key_size < -1 or key_size > end - at:
                return DAMAGED
            key = at
            if key_size > 0:
                at += key_size
            at = read_varint(at, end, &value_size)
            if at == NULL or value_size < -1 or value_size > end - at:
                return DAMAGED
            value = at
            if value_size > 0:
                at += value_size
            at = read_varint(at, end, &headers)
            if at == NULL or headers < 0 or headers > end - at:
                return DAMAGED
            offset += base_offset
            wanted = first <= offset < last
            if headers or (wanted and self._has_headers):
                state = self._headers(&at, end, headers, wanted and self._has_headers)
                if state < 0:
                    return state
            if at != end:
                return DAMAGED
            if not wanted:
                continue
            if self._has_key:
                state = add(&self._key, key, key_size)
                if state < 0:
                    return state
            if self._has_value:
                state = add(&self._value, value, value_size)
                if state < 0:
                    return state
            if self._has_offset and put(&self._offset, &offset, 8) < 0:
                return NO_MEMORY
            if self._has_timestamp:
                timestamp = append_time if is_append_time else <int64_t>(<uint64_t>base_timestamp + <uint64_t>delta)
                if put(&self._timestamp, &timestamp, 8) < 0:
                    return NO_MEMORY
            if self._has_kind and put(&self._kind, &kind, 4) < 0:
                return NO_MEMORY
            self._rows += 1
        if at != stop:
            position[0] = at - data
            return LEFT_OVER
        return OK

    cdef int _headers(self, const uint8_t **start, const uint8_t *end, int64_t count, bint wanted) noexcept nogil:
        """Walk, and where `wanted` keep, one record's headers; `start` moves behind them."""
        cdef const uint8_t *at = start[0]
        cdef int64_t size, i
        cdef int32_t total
        cdef uint8_t is_valid = count > 0
        cdef int state
        for i in range(count):
            at = read_varint(at, end, &size)
            if at == NULL or size < 0 or size > end - at:
                return DAMAGED
            if not is_utf8(at, size):
                return NOT_UTF8
            if wanted:
                state = add(&self._header_key, at, size)
                if state < 0:
                    return state
            at += size
            at = read_varint(at, end, &size)
            if at == NULL or size < -1 or size > end - at:
                return DAMAGED
            if wanted:
                state = add(&self._header_value, at, size)
                if state < 0:
                    return state
            if size > 0:
                at += size
        start[0] = at
        if wanted:
            total = <int32_t>self._header_key.valid.size
            if put(&self._header_ends, &total, 4) < 0 or put(&self._header_valid, &is_valid, 1) < 0:
                return NO_MEMORY
            self._header_nulls += not is_valid
        return OK

    def finish(self):
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
            columns.headers = self._headers_taken()
        self._rows = 0
        return columns

    cdef object _headers_taken(self):
        cdef int64_t total = self._header_key.valid.size
        validity = bitmap(&self._header_valid) if self._header_nulls else None
        nulls = self._header_nulls
        self._header_nulls = 0
        self._header_valid.size = 0
        return HeadersColumn(bytes(4) + taken(&self._header_ends), validity, nulls, column_taken(&self._header_key),
                             column_taken(&self._header_value), total)


cdef void shrink_column(Column *column, const Column *before) noexcept:
    # `begin` may have put the leading zero since: it stays
    column.offsets.size = before.offsets.size if before.offsets.size else min(column.offsets.size, 4)
    column.data.size = before.data.size
    column.valid.size = before.valid.size
    column.nulls = before.nulls


def builder(columns):
    """See `contract.Kernel.builder`."""
    return NativeBuilder(columns)


cdef inline int varint_size(int64_t value) noexcept nogil:
    cdef uint64_t zigzag = (<uint64_t>value << 1) ^ <uint64_t>(value >> 63)
    cdef int size = 1
    while zigzag > 0x7F:
        zigzag >>= 7
        size += 1
    return size


cdef inline uint8_t *write_varint(uint8_t *at, int64_t value) noexcept nogil:
    cdef uint64_t zigzag = (<uint64_t>value << 1) ^ <uint64_t>(value >> 63)
    while zigzag > 0x7F:
        at[0] = <uint8_t>(zigzag & 0x7F) | 0x80
        at += 1
        zigzag >>= 7
    at[0] = <uint8_t>zigzag
    return at + 1


cdef struct Source:
    const int32_t *offsets
    const uint8_t *data
    const uint8_t *validity


cdef class _Buffers:
    """Holds the buffers of the columns while the GIL is released."""

    cdef list _views

    def __cinit__(self):
        self._views = []

    cdef const uint8_t *address(self, buffer) except? NULL:
        cdef const uint8_t[::1] view
        if buffer is None or len(buffer) == 0:
            return NULL
        view = memoryview(buffer).cast("B")
        self._views.append(view)
        return &view[0]

    cdef Source source(self, column) except *:
        cdef Source result
        memset(&result, 0, sizeof(Source))
        if column is not None:
            result.offsets = <const int32_t *>self.address(column.offsets)
            result.data = self.address(column.data)
            result.validity = self.address(column.validity)
        return result


cdef inline int64_t value_at(const Source *source, int64_t row, const uint8_t **value) noexcept nogil:
    """Size of a value, -1 for null."""
    if source.offsets == NULL or (source.validity != NULL and not (source.validity[row >> 3] >> (row & 7)) & 1):
        return -1
    value[0] = source.data + source.offsets[row]
    return source.offsets[row + 1] - source.offsets[row]


cdef inline int64_t field_size(int64_t size) noexcept nogil:
    return varint_size(size) + (size if size > 0 else 0)


cdef inline uint8_t *write_field(uint8_t *at, const uint8_t *value, int64_t size) noexcept nogil:
    at = write_varint(at, size)
    if size > 0:
        memcpy(at, value, size)
        at += size
    return at


def encode(columns, int64_t start, int64_t target):
    """See `contract.Kernel.encode`."""
    cdef _Buffers buffers = _Buffers()
    cdef Source key = buffers.source(columns.key)
    cdef Source value = buffers.source(columns.value)
    cdef Source lists, names, contents
    cdef const int64_t *timestamps = <const int64_t *>buffers.address(columns.timestamp)
    cdef int64_t count = columns.count
    cdef int64_t base, maximum, row = start
    cdef Bytes body
    cdef int state = OK
    memset(&body, 0, sizeof(Bytes))
    memset(&lists, 0, sizeof(Source))
    memset(&names, 0, sizeof(Source))
    memset(&contents, 0, sizeof(Source))
    headers = columns.headers
    if headers is not None:
        lists.offsets = <const int32_t *>buffers.address(headers.offsets)
        lists.validity = buffers.address(headers.validity)
        names = buffers.source(headers.keys)
        contents = buffers.source(headers.values)
    base = maximum = timestamps[start]
    try:
        with nogil:
            while row < count and body.size < target:
                state = put_record(&body, &key, &value, &lists, &names, &contents, row, row - start,
                                   timestamps[row] - base)
                if state < 0:
                    break
                if timestamps[row] > maximum:
                    maximum = timestamps[row]
                row += 1
        if state < 0:
            raise MemoryError
        return PyBytes_FromStringAndSize(<char *>body.data, body.size), row, base, maximum
    finally:
        free(body.data)


cdef int put_record(Bytes *body, const Source *key, const Source *value, const Source *lists, const Source *names,
                    const Source *contents, int64_t row, int64_t offset_delta, int64_t timestamp_delta) noexcept nogil:
    cdef const uint8_t *key_at = NULL
    cdef const uint8_t *value_at_ = NULL
    cdef const uint8_t *name_at = NULL
    cdef const uint8_t *content_at = NULL
    cdef int64_t key_size = value_at(key, row, &key_at)
    cdef int64_t value_size = value_at(value, row, &value_at_)
    cdef int64_t first = 0, last = 0, i, size, name_size
    cdef uint8_t *at
    if lists.offsets != NULL and (lists.validity == NULL or (lists.validity[row >> 3] >> (row & 7)) & 1):
        first = lists.offsets[row]
        last = lists.offsets[row + 1]
    size = 1 + varint_size(timestamp_delta) + varint_size(offset_delta) + field_size(key_size)
    size += field_size(value_size) + varint_size(last - first)
    for i in range(first, last):
        name_size = value_at(names, i, &name_at)
        size += field_size(name_size if name_size > 0 else 0) + field_size(value_at(contents, i, &content_at))
    if reserve(body, size + 10) < 0:
        return NO_MEMORY
    at = write_varint(body.data + body.size, size)
    at[0] = 0
    at = write_varint(at + 1, timestamp_delta)
    at = write_varint(at, offset_delta)
    at = write_field(at, key_at, key_size)
    at = write_field(at, value_at_, value_size)
    at = write_varint(at, last - first)
    for i in range(first, last):
        name_size = value_at(names, i, &name_at)
        at = write_field(at, name_at, name_size if name_size > 0 else 0)
        size = value_at(contents, i, &content_at)
        at = write_field(at, content_at, size)
    body.size = at - body.data
    return OK


cdef uint32_t murmur2(const uint8_t *data, int64_t size) noexcept nogil:
    """Kafka's 32-bit murmur2 (org.apache.kafka.common.utils.Utils)."""
    cdef uint32_t m = 0x5BD1E995
    cdef uint32_t h = 0x9747B28CU ^ <uint32_t>size
    cdef uint32_t k
    cdef int64_t i
    cdef int64_t whole = size & ~3
    for i in range(0, whole, 4):
        k = data[i] | <uint32_t>data[i + 1] << 8 | <uint32_t>data[i + 2] << 16 | <uint32_t>data[i + 3] << 24
        k *= m
        k ^= k >> 24
        k *= m
        h = (h * m) ^ k
    if size & 3:
        for i in range(whole, size):
            h ^= <uint32_t>data[i] << (8 * (i - whole))
        h *= m
    h ^= h >> 13
    h *= m
    return h ^ (h >> 15)


def partitions(keys, int64_t count, int32_t partitions):
    """See `contract.Kernel.partitions`."""
    cdef _Buffers buffers = _Buffers()
    cdef Source source = buffers.source(keys)
    cdef const uint8_t *value = NULL
    cdef int64_t row, size
    result = PyBytes_FromStringAndSize(NULL, 4 * count)
    cdef int32_t *chosen = <int32_t *><char *>result
    with nogil:
        for row in range(count):
            size = value_at(&source, row, &value)
            if size < 0:
                chosen[row] = -1
            else:
                chosen[row] = <int32_t>(murmur2(value, size) & 0x7FFFFFFF) % partitions
    return result
