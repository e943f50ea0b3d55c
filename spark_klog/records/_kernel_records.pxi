# Records of magic 2 (layout: reference.py).

cdef enum:
    SMALLEST_RECORD = 7  # length, attributes, four varints of a byte, no headers


cdef const uint8_t *read_long_varint(const uint8_t *at, const uint8_t *end, int64_t *value) noexcept nogil:
    """The position after a zig-zag varint of at most 64 bits, NULL where it is cut off or longer."""
    cdef uint64_t result = 0
    cdef int shift = 0
    cdef uint8_t byte
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


cdef inline const uint8_t *read_varint(const uint8_t *at, const uint8_t *end, int64_t *value) noexcept nogil:
    """As `read_long_varint`; nearly all have one byte or two."""
    cdef uint32_t number
    if end - at >= 2:
        number = at[0]
        if number < 0x80:
            value[0] = <int64_t>(number >> 1) ^ -<int64_t>(number & 1)
            return at + 1
        if at[1] < 0x80:
            number = (number & 0x7F) | <uint32_t>at[1] << 7
            value[0] = <int64_t>(number >> 1) ^ -<int64_t>(number & 1)
            return at + 2
    return read_long_varint(at, end, value)


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


# The headers of all rows: an end of each row's (INT32), whether it has any (one byte each), and the headers.
cdef struct Headers:
    Column names
    Column values
    Bytes ends
    Bytes valid
    int64_t nulls


cdef void truncate(Headers *headers, const Headers *before) noexcept:
    """Back to the sizes of before; the buffers may have moved since, their content has not changed."""
    truncate_column(&headers.names, &before.names)
    truncate_column(&headers.values, &before.values)
    headers.ends.size = before.ends.size
    headers.valid.size = before.valid.size
    headers.nulls = before.nulls


cdef void truncate_column(Column *column, const Column *before) noexcept:
    column.offsets.size = before.offsets.size
    column.data.size = before.data.size
    column.valid.size = before.valid.size
    column.nulls = before.nulls


cdef inline int add(Column *column, const uint8_t *value, int64_t size) noexcept nogil:
    """Append a value to a column for which no room was made; size -1 is null. A state."""
    cdef Pen pen
    cdef int64_t bytes = size if size > 0 else 0
    if bytes > INT32_MAX - column.data.size or column.valid.size == INT32_MAX:
        return TOO_LARGE
    if reserve(&column.data, bytes) < 0 or reserve(&column.offsets, 4) < 0 or reserve(&column.valid, 1) < 0:
        return NO_MEMORY
    pen = pen_of(column)
    write(&pen, value, size)
    keep_written(column, &pen)
    return OK


cdef int add_headers(Headers *headers, const uint8_t **start, const uint8_t *end, int64_t count,
                     bint wanted) noexcept nogil:
    """Walk, and where `wanted` keep, one record's headers; `start` moves behind them. A state."""
    cdef const uint8_t *at = start[0]
    cdef int64_t size, i
    cdef int32_t total
    cdef uint8_t is_valid = count > 0
    cdef int state = OK
    for i in range(count):
        at = read_varint(at, end, &size)
        if at == NULL or size < 0 or size > end - at:
            return DAMAGED
        if not is_utf8(at, size):
            return NOT_UTF8
        if wanted:
            state = add(&headers.names, at, size)
            if state != OK:
                return state
        at += size
        at = read_varint(at, end, &size)
        if at == NULL or size < -1 or size > end - at:
            return DAMAGED
        if wanted:
            state = add(&headers.values, at, size)
            if state != OK:
                return state
        if size > 0:
            at += size
    start[0] = at
    if wanted:
        total = <int32_t>headers.names.valid.size
        if put(&headers.ends, &total, 4) < 0 or put(&headers.valid, &is_valid, 1) < 0:
            return NO_MEMORY
        headers.nulls += not is_valid
    return OK


cdef void add_no_headers(Headers *headers, int64_t rows) noexcept:
    """Append rows without headers; there is room for them."""
    cdef int32_t *ends = <int32_t *>(headers.ends.data + headers.ends.size)
    cdef int32_t total = <int32_t>headers.names.valid.size
    cdef int64_t i
    for i in range(rows):
        ends[i] = total
    memset(headers.valid.data + headers.valid.size, 0, rows)
    headers.ends.size += 4 * rows
    headers.valid.size += rows
    headers.nulls += rows


cdef object headers_taken(Headers *headers):
    cdef int64_t total = headers.names.valid.size
    prepare_offsets(&headers.ends, 0)
    validity = bitmap(&headers.valid) if headers.nulls else None
    nulls = headers.nulls
    headers.nulls = 0
    headers.valid.size = 0
    return HeadersColumn(
        taken(&headers.ends), validity, nulls, column_taken(&headers.names), column_taken(&headers.values), total
    )


cdef int walk_records(const Body *body, Row *row, Headers *headers, bint with_headers, End *where) noexcept nogil:
    """Write the wanted records of a body; there is room for all of them, but for their headers. A state."""
    cdef const uint8_t *at = body.data
    cdef const uint8_t *stop = body.data + body.size
    cdef const uint8_t *end
    cdef const uint8_t *key
    cdef const uint8_t *value
    cdef int64_t length, time_delta, delta, key_size, value_size, header_count, timestamp, i
    cdef int32_t kind = body.is_append_time
    cdef int state
    cdef bint wanted
    for i in range(body.count):
        where.position = at - body.data
        at = read_varint(at, stop, &length)
        if at == NULL or length < 1 or length > stop - at:
            return DAMAGED
        end = at + length
        at = read_varint(at + 1, end, &time_delta)
        if at == NULL:
            return DAMAGED
        at = read_varint(at, end, &delta)
        if at == NULL or delta < 0 or delta > INT32_MAX:
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
        at = read_varint(at, end, &header_count)
        if at == NULL or header_count < 0 or header_count > end - at:
            return DAMAGED
        wanted = body.first <= delta <= body.last
        if header_count or (wanted and with_headers):
            state = add_headers(headers, &at, end, header_count, wanted and with_headers)
            if state != OK:
                return state
        if at != end:
            return DAMAGED
        if wanted:
            timestamp = <int64_t>(<uint64_t>body.base_timestamp + <uint64_t>time_delta)
            write_row(row, body.shift + delta, body.append_time if body.is_append_time else timestamp, kind,
                      key, key_size, value, value_size)
    where.position = at - body.data
    return OK if at == stop else LEFT_OVER
