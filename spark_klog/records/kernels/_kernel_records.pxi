# Records of magic 2 (layout: reference.py).

cdef enum:
    SMALLEST_RECORD = 7  # length, attributes, four varints of one byte, no headers
    BATCH_HEADER = 61  # bytes before the records
    BATCH_CRC_START = 21
    APPEND_TIME_BIT = 0x08
    NOT_PLAIN_BITS = 0x37  # codec, transactional, control


# Header fields of a batch of magic 2 (layout: batch_v2.py).
cdef struct Batch:
    int64_t size  # of the whole batch
    int64_t base_offset
    int64_t last_offset
    int64_t base_timestamp
    int64_t max_timestamp
    int64_t count
    uint32_t crc
    bint is_append_time


cdef bint read_plain_batch(const uint8_t *at, int64_t left, Batch *batch) noexcept nogil:
    """As `read_batch`, but only for a batch without codec, transactional and control flag."""
    return read_batch(at, left, batch) and not at[BATCH_CRC_START + 1] & NOT_PLAIN_BITS


cdef bint read_batch(const uint8_t *at, int64_t left, Batch *batch) noexcept nogil:
    """Read a header; False unless a whole batch of magic 2 with a valid header begins at `at`."""
    cdef int64_t delta
    if left < BATCH_HEADER or at[MAGIC_POSITION] != 2:
        return False
    batch.size = <int64_t><int32_t>big_32(at + 8) + PREFIX_SIZE
    batch.base_offset = big_64(at)
    delta = <int32_t>big_32(at + 23)
    batch.count = <int32_t>big_32(at + 57)
    if not BATCH_HEADER <= batch.size <= left or batch.base_offset < 0 or delta < 0 or batch.count < 0:
        return False
    if batch.base_offset >= INT64_MAX - delta:
        return False
    batch.last_offset = batch.base_offset + delta
    batch.crc = big_32(at + 17)
    batch.is_append_time = at[BATCH_CRC_START + 1] & APPEND_TIME_BIT != 0
    batch.base_timestamp = big_64(at + 27)
    batch.max_timestamp = big_64(at + 35)
    return True


cdef const uint8_t *read_long_varint(const uint8_t *at, const uint8_t *end, int64_t *value) noexcept nogil:
    """The position after a zig-zag varint of at most 64 bits, NULL if it is cut off or longer."""
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
    """As `read_long_varint`, with a fast path for one or two bytes."""
    cdef uint32_t number
    cdef int64_t long_one = 0  # so that `value` itself can stay in a register
    if end - at >= 2:
        number = at[0]
        if number < 0x80:
            value[0] = <int64_t>(number >> 1) ^ -<int64_t>(number & 1)
            return at + 1
        if at[1] < 0x80:
            number = (number & 0x7F) | <uint32_t>at[1] << 7
            value[0] = <int64_t>(number >> 1) ^ -<int64_t>(number & 1)
            return at + 2
    at = read_long_varint(at, end, &long_one)
    value[0] = long_one
    return at


# A record; its headers lie between `headers` and `end`.
cdef struct Record:
    int64_t time_delta
    int64_t delta  # of the offset
    int64_t key_size  # -1: null
    int64_t value_size
    int64_t header_count
    const uint8_t *key
    const uint8_t *value
    const uint8_t *headers
    const uint8_t *end


cdef inline bint read_record(const uint8_t *at, const uint8_t *stop, Record *record) noexcept nogil:
    """Read a record except its headers; False if it is damaged or goes beyond `stop`."""
    cdef int64_t length
    at = read_varint(at, stop, &length)
    if at == NULL or length < 1 or length > stop - at:
        return False
    record.end = at + length
    at = read_varint(at + 1, record.end, &record.time_delta)
    if at == NULL:
        return False
    at = read_varint(at, record.end, &record.delta)
    if at == NULL or record.delta < 0 or record.delta > INT32_MAX:
        return False
    at = read_varint(at, record.end, &record.key_size)
    if at == NULL or record.key_size < -1 or record.key_size > record.end - at:
        return False
    record.key = at
    if record.key_size > 0:
        at += record.key_size
    at = read_varint(at, record.end, &record.value_size)
    if at == NULL or record.value_size < -1 or record.value_size > record.end - at:
        return False
    record.value = at
    if record.value_size > 0:
        at += record.value_size
    if record.end - at == 1 and at[0] == 0:  # no headers: by far the most frequent case
        record.header_count = 0
        record.headers = record.end
        return True
    record.headers = read_varint(at, record.end, &record.header_count)
    return record.headers != NULL and 0 <= record.header_count <= record.end - record.headers


cdef int add_name(Column *names, const uint8_t *at, int64_t size) noexcept nogil:
    """Append a header's name, with U+FFFD in place of invalid UTF-8. A state."""
    return add(names, at, size) if is_utf8(at, size) else add_replaced(names, at, size)


cdef int add_replaced(Column *names, const uint8_t *at, int64_t size) noexcept with gil:
    cdef bytes name
    try:
        name = (<const char *>at)[:size].decode("utf-8", "replace").encode()
    except MemoryError:
        return NO_MEMORY
    return add(names, <const uint8_t *><const char *>name, len(name))


cdef int add_headers(const Record *record, Headers *headers) noexcept nogil:
    """Walk a record's headers, which must fill it, and append them unless `headers` is NULL. A state."""
    cdef const uint8_t *at = record.headers
    cdef int64_t size, i
    cdef int32_t total
    cdef uint8_t is_valid = record.header_count > 0
    cdef int state = OK
    for i in range(record.header_count):
        at = read_varint(at, record.end, &size)
        if at == NULL or size < 0 or size > record.end - at:
            return DAMAGED
        if headers != NULL:
            state = add_name(&headers.names, at, size)
            if state != OK:
                return state
        at += size
        at = read_varint(at, record.end, &size)
        if at == NULL or size < -1 or size > record.end - at:
            return DAMAGED
        if headers != NULL:
            state = add(&headers.values, at, size)
            if state != OK:
                return state
        if size > 0:
            at += size
    if headers != NULL:
        total = <int32_t>headers.names.valid.size
        if put(&headers.ends, &total, 4) < 0 or put(&headers.valid, &is_valid, 1) < 0:
            return NO_MEMORY
    return OK if at == record.end else DAMAGED


cdef int walk_records(const Body *given, Row *rows, End *where) noexcept nogil:
    """Write the wanted records of a body; there must be room for all of them, except for headers. A state."""
    # copies, whose addresses no other function gets: the compiler keeps them in registers
    cdef Body body = given[0]
    cdef Row row = rows[0]
    cdef Record record
    cdef Record with_headers
    cdef const uint8_t *at = body.data
    cdef const uint8_t *stop = body.data + body.size
    cdef int64_t i, timestamp
    cdef int32_t kind = body.is_append_time
    cdef int state
    cdef bint wanted
    for i in range(body.count):
        if not read_record(at, stop, &record):
            where.position = at - body.data
            return DAMAGED
        wanted = body.first <= record.delta <= body.last
        if record.header_count or (wanted and row.headers != NULL):
            with_headers = record
            state = add_headers(&with_headers, row.headers if wanted else NULL)
            if state != OK:
                where.position = at - body.data
                return state
        elif record.headers != record.end:
            where.position = at - body.data
            return DAMAGED
        if wanted:
            timestamp = <int64_t>(<uint64_t>body.base_timestamp + <uint64_t>record.time_delta)
            write_row(&row, body.shift + record.delta, body.append_time if body.is_append_time else timestamp, kind,
                      record.key, record.key_size, record.value, record.value_size)
        at = record.end
    rows[0] = row
    where.position = at - body.data
    return OK if at == stop else LEFT_OVER
