# Columns that values are appended to, in preorder: a column, then those in it.
#
# A struct's columns have its length; the length of a list's items is the end of its last list. So the length of every
# column follows from the number of rows, and a row is cut off without knowing what it had appended.

cdef struct Builder:
    Bytes data
    Bytes offsets  # ends of values or of lists, INT32, after a zero
    Bytes valid  # a byte a value, 0: null
    int32_t kind
    int32_t width
    int32_t end  # slot after those in it
    bint nullable


cdef inline int room(Bytes *buffer, int64_t extra) noexcept nogil:
    """Make room for more than 0 bytes; -1 if out of memory."""
    if buffer.capacity - buffer.size >= extra:
        return 0
    return reserve(buffer, extra)


cdef inline int append_present(Builder *builder) noexcept nogil:
    """Mark the next value as not null; -1 if out of memory."""
    if builder.nullable:
        if room(&builder.valid, 1) < 0:
            return -1
        builder.valid.data[builder.valid.size] = 1
        builder.valid.size += 1
    return 0


cdef inline int append_32(Builder *builder, int32_t value) noexcept nogil:
    if append_present(builder) < 0 or room(&builder.data, 4) < 0:
        return NO_MEMORY
    memcpy(builder.data.data + builder.data.size, &value, 4)
    builder.data.size += 4
    return OK


cdef inline int append_64(Builder *builder, int64_t value) noexcept nogil:
    if append_present(builder) < 0 or room(&builder.data, 8) < 0:
        return NO_MEMORY
    memcpy(builder.data.data + builder.data.size, &value, 8)
    builder.data.size += 8
    return OK


cdef inline int append_double(Builder *builder, double value) noexcept nogil:
    cdef int64_t bits
    memcpy(&bits, &value, 8)
    return append_64(builder, bits)


cdef inline int append_float(Builder *builder, float value) noexcept nogil:
    cdef int32_t bits
    memcpy(&bits, &value, 4)
    return append_32(builder, bits)


cdef inline int append_boolean(Builder *builder, uint8_t value) noexcept nogil:
    if append_present(builder) < 0 or room(&builder.data, 1) < 0:
        return NO_MEMORY
    builder.data.data[builder.data.size] = value
    builder.data.size += 1
    return OK


cdef int append_fixed(Builder *builder, const uint8_t *value) noexcept nogil:
    """Append `width` bytes."""
    if append_present(builder) < 0:
        return NO_MEMORY
    if builder.width:
        if room(&builder.data, builder.width) < 0:
            return NO_MEMORY
        memcpy(builder.data.data + builder.data.size, value, builder.width)
        builder.data.size += builder.width
    return OK


cdef inline int append_end(Bytes *offsets, int64_t end) noexcept nogil:
    cdef int32_t number = <int32_t>end
    if room(offsets, 4) < 0:
        return NO_MEMORY
    memcpy(offsets.data + offsets.size, &number, 4)
    offsets.size += 4
    return OK


cdef enum:
    WORD = 16  # bytes that are copied at once, whatever a short value has


cdef inline int append_bytes(Builder *builder, const uint8_t *value, int64_t size, const uint8_t *limit) noexcept nogil:
    """Append a value of a variable size; all bytes up to `limit` can be read."""
    if size > INT32_MAX - builder.data.size:
        return TOO_LARGE
    if append_present(builder) < 0 or room(&builder.data, size + WORD) < 0:
        return NO_MEMORY
    if size <= WORD and limit - value >= WORD:
        memcpy(builder.data.data + builder.data.size, value, WORD)
    elif size:
        memcpy(builder.data.data + builder.data.size, value, size)
    builder.data.size += size
    return append_end(&builder.offsets, builder.data.size)


cdef inline int64_t last_end(const Builder *builder) noexcept nogil:
    cdef int32_t end
    memcpy(&end, builder.offsets.data + builder.offsets.size - 4, 4)
    return end


cdef int append_empty(Builder *builders, int32_t slot) noexcept nogil:
    """Append null, or if the column has no nulls zero or an empty value, to a column and those in it."""
    cdef int32_t stop = builders[slot].end
    cdef Builder *builder
    cdef uint8_t zero = 0
    while slot < stop:
        builder = &builders[slot]
        slot += 1
        if builder.kind == KIND_NOTHING:
            continue
        if builder.nullable and put(&builder.valid, &zero, 1) < 0:
            return NO_MEMORY
        if builder.kind == KIND_FIXED or builder.kind == KIND_BOOLEAN:
            if builder.width:
                if room(&builder.data, builder.width) < 0:
                    return NO_MEMORY
                memset(builder.data.data + builder.data.size, 0, builder.width)
                builder.data.size += builder.width
        elif builder.kind != KIND_STRUCT:
            if append_end(&builder.offsets, last_end(builder)) < 0:
                return NO_MEMORY
            slot = builder.end
    return OK


cdef void truncate(Builder *builders, int32_t slot, int64_t length) noexcept nogil:
    """Cut a column, and those in it, to a length that it had before."""
    cdef Builder *builder = &builders[slot]
    cdef int32_t child, end
    if builder.nullable:
        builder.valid.size = length
    if builder.kind == KIND_FIXED or builder.kind == KIND_BOOLEAN:
        builder.data.size = builder.width * length
    elif builder.kind == KIND_VARIABLE or builder.kind == KIND_LIST:
        builder.offsets.size = 4 * (length + 1)
        memcpy(&end, builder.offsets.data + 4 * length, 4)
        if builder.kind == KIND_LIST:
            truncate(builders, slot + 1, end)
        else:
            builder.data.size = end
    elif builder.kind == KIND_STRUCT:
        child = slot + 1
        while child < builder.end:
            truncate(builders, child, length)
            child = builders[child].end


cdef bytes packed(const Bytes *flags, int64_t *zeros):
    """A bit a byte, the least significant first; and the number of bytes that are 0."""
    cdef int64_t count = flags.size
    cdef int64_t i, ones = 0
    cdef uint64_t eight
    cdef uint8_t byte
    result = PyBytes_FromStringAndSize(NULL, (count + 7) // 8)
    cdef uint8_t *bits = <uint8_t *><char *>result
    for i in range(count // 8):
        memcpy(&eight, flags.data + 8 * i, 8)
        # each byte is 0 or 1: the product's highest byte gathers them, its lowest bytes' sum counts them
        bits[i] = <uint8_t>((eight * <uint64_t>0x0102040810204080) >> 56)
        ones += <int64_t>((eight * <uint64_t>0x0101010101010101) >> 56)
    if count & 7:
        byte = 0
        for i in range(count & 7):
            byte |= flags.data[(count & ~<int64_t>7) + i] << i
            ones += flags.data[(count & ~<int64_t>7) + i]
        bits[count // 8] = byte
    zeros[0] = count - ones
    return result
