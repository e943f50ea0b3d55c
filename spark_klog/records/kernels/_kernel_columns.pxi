# Growing columns, and the rows that are written to them.

# A binary column: offsets (INT32, one more than values), data, and a byte per value (0: null).
cdef struct Column:
    Bytes offsets
    Bytes data
    Bytes valid


cdef void release_column(Column *column) noexcept:
    release(&column.offsets)
    release(&column.data)
    release(&column.valid)


cdef int prepare_offsets(Bytes *offsets, int64_t values) except -1:
    """Make room for the ends of more values, and write the zero before the first one. `MemoryError`."""
    prepare(offsets, 4 * (values + 1))
    if offsets.size == 0:
        memset(offsets.data, 0, 4)
        offsets.size = 4
    return 0


cdef int prepare_column(Column *column, int64_t values, int64_t size) except -1:
    """Make room for more values, of `size` bytes in total; `MemoryError`."""
    prepare_offsets(&column.offsets, values)
    prepare(&column.data, size)
    prepare(&column.valid, values)
    return 0


cdef int64_t nulls_in(const Bytes *valid) noexcept:
    cdef int64_t i, nulls = 0
    for i in range(valid.size):
        nulls += not valid.data[i]
    return nulls


cdef bytes bitmap(const Bytes *valid):
    cdef int64_t count = valid.size
    cdef int64_t i
    cdef const uint8_t *at = valid.data
    packed = PyBytes_FromStringAndSize(NULL, (count + 7) // 8)
    cdef uint8_t *bits = <uint8_t *><char *>packed
    for i in range(count // 8):
        bits[i] = (at[0] | at[1] << 1 | at[2] << 2 | at[3] << 3 | at[4] << 4 | at[5] << 5 | at[6] << 6 | at[7] << 7)
        at += 8
    if count & 7:
        bits[count // 8] = 0
        for i in range(count & 7):
            bits[count // 8] |= at[i] << i
    return packed


cdef object column_taken(Column *column):
    """Move the column into a `BinaryColumn`; `valid` keeps its memory."""
    prepare_column(column, 0, 0)
    nulls = nulls_in(&column.valid)
    validity = bitmap(&column.valid) if nulls else None
    column.valid.size = 0
    return BinaryColumn(taken(&column.offsets), taken(&column.data), validity, nulls)


# Write pointers into a column, which has room for all values of a body.
cdef struct Pen:
    int32_t *offsets
    uint8_t *valid
    uint8_t *data
    int64_t size  # of the data so far


cdef inline Pen pen_of(Column *column) noexcept nogil:
    cdef Pen pen
    pen.offsets = <int32_t *>column.offsets.data
    pen.valid = column.valid.data
    pen.data = column.data.data
    pen.size = column.data.size
    return pen


cdef inline void write(Pen *pen, int64_t index, const uint8_t *value, int64_t size) noexcept nogil:
    """Write the value at `index`; size -1 is null."""
    if size > 0:
        memcpy(pen.data + pen.size, value, size)
        pen.size += size
    pen.offsets[index + 1] = <int32_t>pen.size
    pen.valid[index] = size >= 0


cdef inline void keep_written(Column *column, const Pen *pen, int64_t values) noexcept nogil:
    """Make what was written part of the column, which now has `values` values."""
    column.offsets.size = 4 * (values + 1)
    column.valid.size = values
    column.data.size = pen.size


# The headers of all rows: the end of each row's list (INT32), a byte per row (0: none), and the headers.
cdef struct Headers:
    Column names
    Column values
    Bytes ends
    Bytes valid


cdef void truncate(Headers *headers, const Headers *before) noexcept:
    """Restore the sizes in `before`; the buffers may have moved since, but keep their content."""
    truncate_column(&headers.names, &before.names)
    truncate_column(&headers.values, &before.values)
    headers.ends.size = before.ends.size
    headers.valid.size = before.valid.size


cdef void truncate_column(Column *column, const Column *before) noexcept:
    column.offsets.size = before.offsets.size
    column.data.size = before.data.size
    column.valid.size = before.valid.size


cdef inline int add(Column *column, const uint8_t *value, int64_t size) noexcept nogil:
    """Append a value, growing the column; size -1 is null. A state."""
    cdef Pen pen
    cdef int64_t bytes = size if size > 0 else 0
    if bytes > INT32_MAX - column.data.size or column.valid.size == INT32_MAX:
        return TOO_LARGE
    if reserve(&column.data, bytes) < 0 or reserve(&column.offsets, 4) < 0 or reserve(&column.valid, 1) < 0:
        return NO_MEMORY
    pen = pen_of(column)
    write(&pen, column.valid.size, value, size)
    keep_written(column, &pen, column.valid.size + 1)
    return OK


cdef void add_no_headers(Headers *headers, int64_t rows) noexcept nogil:
    """Append rows without headers; there is room for them."""
    cdef int32_t *ends = <int32_t *>(headers.ends.data + headers.ends.size)
    cdef int32_t total = <int32_t>headers.names.valid.size
    cdef int64_t i
    for i in range(rows):
        ends[i] = total
    memset(headers.valid.data + headers.valid.size, 0, rows)
    headers.ends.size += 4 * rows
    headers.valid.size += rows


cdef object headers_taken(Headers *headers):
    cdef int64_t total = headers.names.valid.size
    prepare_offsets(&headers.ends, 0)
    nulls = nulls_in(&headers.valid)
    validity = bitmap(&headers.valid) if nulls else None
    headers.valid.size = 0
    return HeadersColumn(
        taken(&headers.ends), validity, nulls, column_taken(&headers.names), column_taken(&headers.values), total
    )


# Write position of the next row; NULL for a column that is not requested.
cdef struct Row:
    Pen key, value
    int64_t *offset
    int64_t *timestamp
    int32_t *kind
    Headers *headers
    int64_t count  # rows so far


cdef inline void write_row(Row *row, int64_t offset, int64_t timestamp, int32_t kind, const uint8_t *key,
                           int64_t key_size, const uint8_t *value, int64_t value_size) noexcept nogil:
    if row.key.offsets != NULL:
        write(&row.key, row.count, key, key_size)
    if row.value.offsets != NULL:
        write(&row.value, row.count, value, value_size)
    if row.offset != NULL:
        row.offset[row.count] = offset
    if row.timestamp != NULL:
        row.timestamp[row.count] = timestamp
    if row.kind != NULL:
        row.kind[row.count] = kind
    row.count += 1


# A body and the range to take from it; see the arguments of `contract.ColumnBuilder`.
cdef struct Body:
    const uint8_t *data
    int64_t size
    int64_t count
    int64_t shift  # a record's offset minus the offset that the body states
    int64_t base_timestamp
    int64_t append_time
    bint is_append_time
    bint is_inner
    int64_t first, last  # range of wanted offsets as the body states them, inclusive
    uint8_t magic
