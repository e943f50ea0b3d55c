# Messages of magic 0 and 1 (layout: message_set.py), and their CRC-32.

cdef enum:
    PREFIX_SIZE = 12  # offset and size, which the size does not count
    CRC_START = 16
    MAGIC_POSITION = 16
    HEADER_0 = 18  # bytes before the key
    HEADER_1 = 26
    SMALLEST_0 = 14  # the size field of a message with null key and value
    SMALLEST_1 = 22

# CRC_TABLES[n][byte] is the CRC-32 of `byte` followed by n zeros, so that sixteen bytes are looked up independently of
# each other ("slicing by 16").
cdef uint32_t[16][256] CRC_TABLES


cdef void fill_crc_tables() noexcept:
    cdef uint32_t crc
    cdef int byte, i
    for byte in range(256):
        crc = byte
        for i in range(8):
            crc = (crc >> 1) ^ (0xEDB88320U if crc & 1 else 0)  # the polynomial, its bits reversed
        CRC_TABLES[0][byte] = crc
    for i in range(1, 16):
        for byte in range(256):
            crc = CRC_TABLES[i - 1][byte]
            CRC_TABLES[i][byte] = CRC_TABLES[0][crc & 0xFF] ^ (crc >> 8)


fill_crc_tables()


cdef inline uint32_t little_32(const uint8_t *at) noexcept nogil:
    return at[0] | <uint32_t>at[1] << 8 | <uint32_t>at[2] << 16 | <uint32_t>at[3] << 24


cdef inline uint32_t four_bytes(int zeros, uint32_t word) noexcept nogil:
    """The CRC of four bytes, little endian in `word`, with `zeros` bytes after them."""
    return (CRC_TABLES[zeros + 3][word & 0xFF] ^ CRC_TABLES[zeros + 2][(word >> 8) & 0xFF]
            ^ CRC_TABLES[zeros + 1][(word >> 16) & 0xFF] ^ CRC_TABLES[zeros][word >> 24])


cdef uint32_t crc32_of(const uint8_t *at, int64_t size) noexcept nogil:
    cdef uint32_t crc = 0xFFFFFFFFU
    cdef const uint8_t *end = at + size
    while end - at >= 16:
        crc = (four_bytes(12, little_32(at) ^ crc) ^ four_bytes(8, little_32(at + 4))
               ^ four_bytes(4, little_32(at + 8)) ^ four_bytes(0, little_32(at + 12)))
        at += 16
    while at < end:
        crc = CRC_TABLES[0][(crc ^ at[0]) & 0xFF] ^ (crc >> 8)
        at += 1
    return crc ^ 0xFFFFFFFFU


cdef inline uint32_t big_32(const uint8_t *at) noexcept nogil:
    return <uint32_t>at[0] << 24 | <uint32_t>at[1] << 16 | <uint32_t>at[2] << 8 | at[3]


cdef inline int64_t big_64(const uint8_t *at) noexcept nogil:
    return <int64_t>(<uint64_t>big_32(at) << 32 | big_32(at + 4))


cdef struct Message:
    int64_t offset
    int64_t timestamp  # ms; -1 in magic 0
    int64_t size  # of the whole message
    uint32_t crc
    uint8_t magic
    uint8_t attributes
    int64_t key_size  # -1: null
    int64_t value_size
    const uint8_t *key
    const uint8_t *value


cdef inline int read_message(const uint8_t *at, int64_t left, Message *message) noexcept nogil:
    """Read the fields before the key; OK, or DAMAGED if no whole message of magic 0 or 1 begins at `at`."""
    cdef int64_t length
    if left < HEADER_0:
        return DAMAGED
    message.magic = at[MAGIC_POSITION]
    length = <int32_t>big_32(at + 8)
    if message.magic > 1 or length < (SMALLEST_1 if message.magic else SMALLEST_0) or length > left - PREFIX_SIZE:
        return DAMAGED
    # a message of SMALLEST_1 is longer than HEADER_1, so it has a timestamp
    message.offset = big_64(at)
    message.size = length + PREFIX_SIZE
    message.crc = big_32(at + PREFIX_SIZE)
    message.attributes = at[MAGIC_POSITION + 1]
    message.timestamp = big_64(at + HEADER_0) if message.magic else -1
    return OK


cdef inline int read_fields(const uint8_t *at, Message *message) noexcept nogil:
    """Read key and value of a message after `read_message`; DAMAGED unless they fill the rest of it exactly."""
    cdef const uint8_t *end = at + message.size
    at += HEADER_1 if message.magic else HEADER_0
    if end - at < 4:
        return DAMAGED
    message.key_size = <int32_t>big_32(at)
    message.key = at + 4
    at += 4
    if message.key_size < -1 or message.key_size > end - at:
        return DAMAGED
    if message.key_size > 0:
        at += message.key_size
    if end - at < 4:
        return DAMAGED
    message.value_size = <int32_t>big_32(at)
    message.value = at + 4
    at += 4
    if message.value_size < -1 or message.value_size > end - at:
        return DAMAGED
    if message.value_size > 0:
        at += message.value_size
    return OK if at == end else DAMAGED


def message_run(data, int64_t position, int64_t end):
    """See `contract.Kernel.message_run`."""
    cdef Py_buffer view
    cdef const uint8_t *at
    cdef int64_t left, length = 0
    cdef int first_magic = -1, magic
    if position < 0:
        raise ValueError(f"position {position}")
    PyObject_GetBuffer(data, &view, PyBUF_SIMPLE)
    try:
        with nogil:
            while True:
                left = view.len - position
                at = <const uint8_t *>view.buf + position
                if left <= MAGIC_POSITION:
                    break
                magic = at[MAGIC_POSITION]
                if first_magic < 0:
                    first_magic = magic
                if magic != first_magic or magic > 1:
                    break
                length = <int32_t>big_32(at + 8)
                if length < (SMALLEST_1 if magic else SMALLEST_0):
                    length = -1
                    break
                if length > left - PREFIX_SIZE:
                    break
                if at[MAGIC_POSITION + 1] & 0x07 or big_64(at) >= end:
                    break
                position += length + PREFIX_SIZE
    finally:
        PyBuffer_Release(&view)
    if length == -1:
        raise DecodeError(f"no batch at position {position}: its length is too small for a message")
    return position


# Where a walk failed: the position, and the message if it was one.
cdef struct End:
    int64_t position
    Message message
    uint32_t crc  # of the message's bytes


cdef int count_messages(Body *body, End *where) noexcept nogil:
    """Count the messages into `body.count`; `where.message` is the last one, or zeros. A state."""
    cdef int64_t position = 0
    while position < body.size:
        where.position = position
        if read_message(body.data + position, body.size - position, &where.message) != OK:
            return DAMAGED
        position += where.message.size
        body.count += 1
    return OK


cdef int walk_messages(const Body *body, Row *row, End *where) noexcept nogil:
    """Write the wanted rows of `body.count` messages; there must be room for all of them. A state."""
    cdef int64_t position = 0, timestamp, i, before = row.count
    cdef int32_t kind
    cdef const uint8_t *at
    cdef Message message
    for i in range(body.count):
        where.position = position
        at = body.data + position
        # read again in full: another thread may have changed a bytearray since they were counted
        if read_message(at, body.size - position, &message) != OK:
            return DAMAGED
        where.message = message
        where.crc = crc32_of(at + CRC_START, message.size - CRC_START)
        if where.crc != message.crc:
            return WRONG_CRC
        if message.magic != body.magic:
            return WRONG_MAGIC
        if message.attributes & 0x07:
            return HAS_CODEC
        if read_fields(at, &message) != OK:
            return DAMAGED
        position += message.size
        if not body.first <= message.offset <= body.last:
            continue
        timestamp = message.timestamp
        kind = -1
        if message.magic:
            kind = not body.is_inner and message.attributes >> 3 & 1
        if body.is_append_time:
            timestamp = body.append_time
            kind = 1
        write_row(row, <int64_t>(<uint64_t>message.offset + <uint64_t>body.shift), timestamp, kind,
                  message.key, message.key_size, message.value, message.value_size)
    if row.headers != NULL:
        add_no_headers(row.headers, row.count - before)
    return OK


cdef int set_range(Body *body, shift, first, end) except -1:
    """Select offsets in [first, end), which are `shift` plus those in the messages. Takes Python ints of any size."""
    low = max(first - shift, INT64_MIN)
    last = min(end - 1 - shift, INT64_MAX)
    if low > last:
        low, last = 1, 0
    body.first = low
    body.last = last
    body.shift = <int64_t><uint64_t>(shift & 0xFFFFFFFFFFFFFFFF)
    return 0
