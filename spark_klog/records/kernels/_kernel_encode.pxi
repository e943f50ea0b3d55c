# Encoding of columns as bodies of records, and partitions of keys.

cdef enum:
    MAX_VIEWS = 16
    MAX_VARINT = 10  # bytes
    USUAL_OVERHEAD = 16  # bytes of a record beside its columns


# A binary column to read. Its offsets come from outside and are checked value by value.
cdef struct Source:
    const uint8_t *offsets  # INT32; NULL: all values are null
    const uint8_t *data
    int64_t size
    const uint8_t *validity  # bits; NULL: no nulls


# The columns to encode.
cdef struct Columns:
    Source key
    Source value
    Source lists  # of headers: the start of each row's list, and which rows have one; no data
    Source names
    Source contents
    int64_t headers  # of all rows
    const uint8_t *timestamps  # INT64, ms


cdef class Views:
    """Holds the buffers of columns while the GIL is released."""

    cdef Py_buffer[MAX_VIEWS] _views
    cdef int _count

    cdef const uint8_t *address(self, buffer, int64_t needed) except? NULL:
        """The address of a buffer's bytes, NULL for None. `ValueError` if it has fewer than `needed` bytes."""
        if buffer is None:
            return NULL
        if self._count == MAX_VIEWS:
            raise ValueError("too many buffers")
        PyObject_GetBuffer(buffer, &self._views[self._count], PyBUF_SIMPLE)
        self._count += 1
        if self._views[self._count - 1].len < needed:
            raise ValueError(f"a column's buffer has {self._views[self._count - 1].len} bytes, {needed} are needed")
        return <const uint8_t *>self._views[self._count - 1].buf

    cdef Source source(self, column, int64_t count) except *:
        """A column of `count` values; None is a column of nulls. `ValueError` if its buffers are too small."""
        cdef Source result
        check_count(count)
        memset(&result, 0, sizeof(Source))
        if column is not None and count:
            result.offsets = self.address(column.offsets, 4 * (count + 1))
            result.data = self.address(column.data, 0)
            result.size = len(column.data)
            result.validity = self.address(column.validity, (count + 7) // 8)
        return result

    def __dealloc__(self):
        for i in range(self._count):
            PyBuffer_Release(&self._views[i])


cdef int check_count(int64_t count) except -1:
    """`ValueError` for a number of values that 32-bit offsets can't hold."""
    if not 0 <= count < INT32_MAX:
        raise ValueError(f"a column of {count} values")
    return 0


cdef inline int32_t int32_at(const uint8_t *values, int64_t row) noexcept nogil:
    cdef int32_t value
    memcpy(&value, values + 4 * row, 4)
    return value


cdef inline int64_t int64_at(const uint8_t *values, int64_t row) noexcept nogil:
    cdef int64_t value
    memcpy(&value, values + 8 * row, 8)
    return value


cdef inline bint is_null(const Source *source, int64_t row) noexcept nogil:
    return source.offsets == NULL or (source.validity != NULL and not (source.validity[row >> 3] >> (row & 7)) & 1)


cdef inline int64_t value_at(const Source *source, int64_t row, const uint8_t **value) noexcept nogil:
    """Size of a value, -1 for null; DAMAGED if its offsets lie outside the column's data."""
    cdef int64_t start, end
    if is_null(source, row):
        return -1
    start = int32_at(source.offsets, row)
    end = int32_at(source.offsets, row + 1)
    if start < 0 or start > end or end > source.size:
        return DAMAGED
    value[0] = source.data + start
    return end - start


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


cdef inline int64_t field_size(int64_t size) noexcept nogil:
    return varint_size(size) + (size if size > 0 else 0)


cdef inline uint8_t *write_field(uint8_t *at, const uint8_t *value, int64_t size) noexcept nogil:
    at = write_varint(at, size)
    if size > 0:
        memcpy(at, value, size)
        at += size
    return at


def encode(columns, int64_t start, int64_t target):
    """See `contract.Kernel.encode`. `ValueError` if the columns' buffers do not match each other."""
    cdef Views views = Views()
    cdef Columns source
    cdef int64_t count = columns.count
    cdef int64_t base, maximum, timestamp, expected, row = start
    cdef Bytes body
    cdef int state = OK
    check_count(count)
    if not 0 <= start < count:
        raise IndexError(f"row {start} of {count}")
    memset(&body, 0, sizeof(Bytes))
    memset(&source, 0, sizeof(Columns))
    source.key = views.source(columns.key, count)
    source.value = views.source(columns.value, count)
    headers = columns.headers
    if headers is not None:
        source.headers = headers.total
        source.lists.offsets = views.address(headers.offsets, 4 * (count + 1))
        source.lists.validity = views.address(headers.validity, (count + 7) // 8)
        source.names = views.source(headers.keys, source.headers)
        source.contents = views.source(headers.values, source.headers)
    source.timestamps = views.address(columns.timestamp, 8 * count)
    if source.timestamps == NULL:
        raise ValueError("columns have no timestamp; encode needs one")
    base = maximum = int64_at(source.timestamps, start)
    expected = source.key.size + source.value.size + source.names.size + source.contents.size + USUAL_OVERHEAD * count
    if expected > target:
        expected = min(expected, target + target // 16)  # the last record goes beyond it
    try:
        prepare(&body, expected)
        with nogil:
            while row < count and body.size < target:
                timestamp = int64_at(source.timestamps, row)
                state = put_record(&body, &source, row, row - start, <int64_t>(<uint64_t>timestamp - <uint64_t>base))
                if state != OK:
                    break
                if timestamp > maximum:
                    maximum = timestamp
                row += 1
        if state == NO_MEMORY:
            raise MemoryError
        if state != OK:
            raise ValueError(f"offsets of row {row} lie outside its column's data")
        return taken(&body), row, base, maximum
    finally:
        release(&body)


cdef int put_record(Bytes *body, const Columns *source, int64_t row, int64_t offset_delta,
                    int64_t timestamp_delta) noexcept nogil:
    """Append one record: compute its size, then write it. A state."""
    cdef const uint8_t *key = NULL
    cdef const uint8_t *value = NULL
    cdef const uint8_t *name = NULL
    cdef const uint8_t *content = NULL
    cdef int64_t key_size = value_at(&source.key, row, &key)
    cdef int64_t value_size = value_at(&source.value, row, &value)
    cdef int64_t first = 0, last = 0, i, size, name_size, content_size
    cdef uint8_t *at
    if key_size == DAMAGED or value_size == DAMAGED:
        return DAMAGED
    if not is_null(&source.lists, row):
        first = int32_at(source.lists.offsets, row)
        last = int32_at(source.lists.offsets, row + 1)
        if first < 0 or first > last or last > source.headers:
            return DAMAGED
    size = 1 + varint_size(timestamp_delta) + varint_size(offset_delta) + field_size(key_size)
    size += field_size(value_size) + varint_size(last - first)
    for i in range(first, last):
        name_size = value_at(&source.names, i, &name)
        content_size = value_at(&source.contents, i, &content)
        if name_size == DAMAGED or content_size == DAMAGED:
            return DAMAGED
        size += field_size(name_size if name_size > 0 else 0) + field_size(content_size)
    if reserve(body, size + MAX_VARINT) < 0:
        return NO_MEMORY
    at = write_varint(body.data + body.size, size)
    at[0] = 0
    at = write_varint(at + 1, timestamp_delta)
    at = write_varint(at, offset_delta)
    at = write_field(at, key, key_size)
    at = write_field(at, value, value_size)
    at = write_varint(at, last - first)
    for i in range(first, last):
        name_size = value_at(&source.names, i, &name)
        at = write_field(at, name, name_size if name_size > 0 else 0)
        content_size = value_at(&source.contents, i, &content)
        at = write_field(at, content, content_size)
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
        k = little_32(data + i) * m
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
    """See `contract.Kernel.partitions`. `ValueError` if the column's buffers do not match each other."""
    cdef Views views = Views()
    cdef Source source = views.source(keys, count)
    cdef const uint8_t *key = NULL
    cdef int64_t row, size = 0
    if partitions < 1:
        raise ValueError(f"{partitions} partitions")
    result = PyBytes_FromStringAndSize(NULL, 4 * count)
    cdef int32_t *chosen = <int32_t *><char *>result
    with nogil:
        for row in range(count):
            size = value_at(&source, row, &key)
            if size == DAMAGED:
                break
            chosen[row] = -1 if size < 0 else <int32_t>(murmur2(key, size) & 0x7FFFFFFF) % partitions
    if size == DAMAGED:
        raise ValueError("offsets of a key lie outside its column's data")
    return result
