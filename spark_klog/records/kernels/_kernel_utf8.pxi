# UTF-8, as Python decodes it.

cdef bint is_utf8(const uint8_t *at, int64_t size) noexcept nogil:
    """Whether Python decodes these bytes: no surrogates, no overlong forms, at most U+10FFFF."""
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


cdef inline bint is_text(const uint8_t *at, int64_t size) noexcept nogil:
    """As `is_utf8`, fast for ASCII."""
    cdef uint64_t word, last
    cdef int64_t i
    if size >= 8:
        memcpy(&word, at + size - 8, 8)
        for i in range(size >> 3):
            memcpy(&last, at + 8 * i, 8)
            word |= last
        if not word & <uint64_t>0x8080808080808080:
            return True
    return is_utf8(at, size)
