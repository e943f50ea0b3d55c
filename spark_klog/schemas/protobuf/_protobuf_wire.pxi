# Numbers and fields as bytes.

cdef extern from *:
    """
    #include <stdint.h>
    static inline int klog_pb_times(int64_t a, int64_t b, int64_t *product) {
        return __builtin_mul_overflow(a, b, product);
    }
    static inline int klog_pb_plus(int64_t a, int64_t b, int64_t *sum) {
        return __builtin_add_overflow(a, b, sum);
    }
    """
    bint klog_pb_times(int64_t a, int64_t b, int64_t *product) noexcept nogil
    bint klog_pb_plus(int64_t a, int64_t b, int64_t *sum) noexcept nogil


cdef enum:
    WIRE_VARINT = 0
    WIRE_EIGHT = 1
    WIRE_SIZED = 2
    WIRE_GROUP = 3
    WIRE_END = 4
    WIRE_FOUR = 5
    MAX_GROUPS = 100  # unknown groups in one another


# Where a reader is: `at` is NULL after an error, and `reason` says which.
cdef struct Cursor:
    const uint8_t *at
    const uint8_t *end
    int reason


cdef inline uint64_t failed(Cursor *cursor, int reason) noexcept nogil:
    cursor.reason = reason
    cursor.at = cursor.end
    return 0


cdef uint64_t read_long_varint(Cursor *cursor) noexcept nogil:
    """A varint of up to ten bytes; what is beyond 64 bits in the last one is ignored, as other readers do."""
    cdef uint64_t result = 0
    cdef int shift = 0
    cdef uint8_t byte
    while cursor.at < cursor.end:
        byte = cursor.at[0]
        cursor.at += 1
        if shift == 63 and byte >= 0x80:
            return failed(cursor, NUMBER_TOO_LONG)
        result |= <uint64_t>(byte & 0x7F) << shift
        if byte < 0x80:
            return result
        shift += 7
    return failed(cursor, TRUNCATED)


cdef inline uint64_t read_varint(Cursor *cursor) noexcept nogil:
    cdef const uint8_t *at = cursor.at
    if cursor.end - at >= 2:
        if at[0] < 0x80:
            cursor.at = at + 1
            return at[0]
        if at[1] < 0x80:
            cursor.at = at + 2
            return (at[0] & 0x7F) | <uint64_t>at[1] << 7
    return read_long_varint(cursor)


cdef inline uint32_t read_tag(Cursor *cursor) noexcept nogil:
    """A field's number and wire type; BAD_TAG if there is no such number or type."""
    cdef uint64_t tag = read_varint(cursor)
    if cursor.reason == OK and (tag > 0xFFFFFFFFu or tag >> 3 == 0 or tag & 7 > WIRE_FOUR):
        failed(cursor, BAD_TAG)
    return <uint32_t>tag


cdef inline int64_t read_size(Cursor *cursor) noexcept nogil:
    """The size of what follows, which is there."""
    cdef uint64_t size = read_varint(cursor)
    if cursor.reason == OK and size > <uint64_t>(cursor.end - cursor.at):
        return failed(cursor, TRUNCATED)
    return <int64_t>size


cdef void skip_plain(Cursor *cursor, uint32_t wire) noexcept nogil:
    """Skip a value of a wire type that is no group's."""
    cdef int64_t size
    if wire == WIRE_VARINT:
        read_varint(cursor)
        return
    if wire == WIRE_SIZED:
        size = read_size(cursor)
    else:
        size = 8 if wire == WIRE_EIGHT else 4
        if cursor.end - cursor.at < size:
            failed(cursor, TRUNCATED)
            return
    if cursor.reason == OK:
        cursor.at += size


cdef const uint8_t *skip_group(Cursor *cursor, uint32_t number) noexcept nogil:
    """Skip a group of that number, whose beginning has been read; return where the tag of its end begins."""
    cdef uint32_t open_groups[MAX_GROUPS]
    cdef int depth = 1
    cdef uint32_t tag
    cdef const uint8_t *at
    open_groups[0] = number
    while True:
        if cursor.at >= cursor.end:
            failed(cursor, TRUNCATED)
        at = cursor.at
        tag = read_tag(cursor)
        if cursor.reason != OK:
            return at
        if tag & 7 == WIRE_GROUP:
            if depth == MAX_GROUPS:
                failed(cursor, TOO_DEEP)
                return at
            open_groups[depth] = tag >> 3
            depth += 1
        elif tag & 7 == WIRE_END:
            depth -= 1
            if open_groups[depth] != tag >> 3:
                failed(cursor, BAD_GROUP)
                return at
            if depth == 0:
                return at
        else:
            skip_plain(cursor, tag & 7)
            if cursor.reason != OK:
                return at


cdef inline int64_t unzigzag(uint64_t value) noexcept nogil:
    return <int64_t>(value >> 1) ^ -<int64_t>(value & 1)
