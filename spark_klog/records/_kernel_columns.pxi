# Columns while they grow, and the rows that are written to them.

# A column of bytes: offsets (INT32, one more than values), data, one byte a value that says whether it is not null.
cdef struct Column:
    Bytes offsets
    Bytes data
    Bytes valid
    int64_t nulls


cdef void release(Column *column) noexcept:
    free(column.offsets.data)
    free(column.data.data)
    free(column.valid.data)


cdef int prepare_offsets(Bytes *offsets, int64_t values) except -1:
    """Room for the ends of more values; the zero before the first one is there afterwards. `MemoryError`."""
    prepare(offsets, 4 * (values + 1))
    if offsets.size == 0:
        memset(offsets.data, 0, 4)
        offsets.size = 4
    return 0


cdef int prepare_column(Column *column, int64_t values, int64_t size) except -1:
    """Room for more values, of `size` bytes all together; `MemoryError`."""
    prepare_offsets(&column.offsets, values)
    prepare(&column.data, size)
    prepare(&column.valid, values)
    return 0


cdef bytes bitmap(Bytes *valid):
    """The bytes of `valid` as bits; it is empty afterwards, its memory stays for the next values."""
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
    valid.size = 0
    return packed


cdef object column_taken(Column *column):
    prepare_column(column, 0, 0)
    validity = bitmap(&column.valid) if column.nulls else None
    result = BinaryColumn(taken(&column.offsets), taken(&column.data), validity, column.nulls)
    column.valid.size = 0
    column.nulls = 0
    return result


# Where the next value of a column goes. There is room: it has been made for all values of a body.
cdef struct Pen:
    int32_t *ends
    uint8_t *valid
    uint8_t *data
    const uint8_t *start
    int64_t nulls


cdef inline Pen pen_of(Column *column) noexcept nogil:
    cdef Pen pen
    pen.ends = <int32_t *>(column.offsets.data + column.offsets.size)
    pen.valid = column.valid.data + column.valid.size
    pen.start = column.data.data
    pen.data = column.data.data + column.data.size
    pen.nulls = column.nulls
    return pen


cdef inline void write(Pen *pen, const uint8_t *value, int64_t size) noexcept nogil:
    """Append a value; size -1 is null."""
    if size > 0:
        memcpy(pen.data, value, size)
        pen.data += size
    pen.ends[0] = <int32_t>(pen.data - pen.start)
    pen.ends += 1
    pen.valid[0] = size >= 0
    pen.valid += 1
    pen.nulls += size < 0


cdef inline void keep_written(Column *column, const Pen *pen) noexcept nogil:
    column.offsets.size = <uint8_t *>pen.ends - column.offsets.data
    column.valid.size = pen.valid - column.valid.data
    column.data.size = pen.data - pen.start
    column.nulls = pen.nulls


# Where the next row goes; NULL for a column that is not asked for.
cdef struct Row:
    Pen key, value
    int64_t *offset
    int64_t *timestamp
    int32_t *kind
    int64_t count


cdef inline void write_row(Row *row, int64_t offset, int64_t timestamp, int32_t kind, const uint8_t *key,
                           int64_t key_size, const uint8_t *value, int64_t value_size) noexcept nogil:
    if row.key.ends != NULL:
        write(&row.key, key, key_size)
    if row.value.ends != NULL:
        write(&row.value, value, value_size)
    if row.offset != NULL:
        row.offset[row.count] = offset
    if row.timestamp != NULL:
        row.timestamp[row.count] = timestamp
    if row.kind != NULL:
        row.kind[row.count] = kind
    row.count += 1


# A body, and what is wanted of it; see the arguments of `contract.ColumnBuilder`.
cdef struct Body:
    const uint8_t *data
    int64_t size
    int64_t count
    int64_t shift  # what is added to the offsets that the body states, to have the records' offsets
    int64_t base_timestamp
    int64_t append_time
    bint is_append_time
    int64_t first, last  # range of the wanted offsets as the body states them, `last` is one of them
    uint8_t magic
