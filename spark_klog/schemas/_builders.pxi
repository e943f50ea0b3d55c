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


cdef class _View:
    """A buffer of a caller, held; NULL if it is None."""

    cdef Py_buffer view
    cdef bint is_held

    def __cinit__(self, data):
        if data is not None:
            PyObject_GetBuffer(data, &self.view, PyBUF_SIMPLE)
            self.is_held = True

    def __dealloc__(self):
        if self.is_held:
            PyBuffer_Release(&self.view)

    cdef const void *data(self) noexcept:
        return self.view.buf if self.is_held else NULL

    cdef int holds(self, int64_t size, what) except -1:
        """`ValueError` unless there are that many bytes, or no buffer."""
        if self.is_held and self.view.len < size:
            raise ValueError(f"{what} of {self.view.len} bytes, {size} are needed")
        return 0


cdef class Builders:
    """Owns the builders of a decoder's columns.

    `layout` has four INT32 a column: kind, width, end, nullable (arrow_columns.py).
    """

    cdef Builder *_builders
    cdef int32_t _slots
    cdef int64_t _rows
    cdef bint _is_busy

    def __cinit__(self, layout, *_):
        cdef _View numbers = _View(layout)
        cdef const int32_t *at = <const int32_t *>numbers.data()
        cdef int32_t slot
        self._slots = <int32_t>(numbers.view.len // 16)
        self._builders = <Builder *>calloc(max(self._slots, 1), sizeof(Builder))
        if self._builders == NULL:
            raise MemoryError
        for slot in range(self._slots):
            self._builders[slot].kind = at[4 * slot]
            self._builders[slot].width = at[4 * slot + 1]
            self._builders[slot].end = at[4 * slot + 2]
            self._builders[slot].nullable = at[4 * slot + 3]

    def __dealloc__(self):
        cdef int32_t slot
        if self._builders != NULL:
            for slot in range(self._slots):
                release(&self._builders[slot].data)
                release(&self._builders[slot].offsets)
                release(&self._builders[slot].valid)
            free(self._builders)

    @property
    def rows(self):
        return self._rows

    cdef int _prepare(self, int64_t count) except -1:
        """Make room for the rows in the columns that have one value a row, and start the others. `MemoryError`."""
        cdef int32_t slot = 0
        cdef Builder *builder
        while slot < self._slots:
            builder = &self._builders[slot]
            if builder.nullable:
                prepare(&builder.valid, count)
            if builder.kind == KIND_FIXED or builder.kind == KIND_BOOLEAN:
                prepare(&builder.data, builder.width * count)
            elif builder.kind == KIND_VARIABLE or builder.kind == KIND_LIST:
                prepare(&builder.offsets, 4 * (count + 1))
            # the columns in a list are prepared with what they had the last time
            slot = builder.end if builder.kind == KIND_LIST else slot + 1
        for slot in range(self._slots):
            builder = &self._builders[slot]
            if builder.data.data == NULL and builder.data.usual:
                prepare(&builder.data, builder.data.usual)
            if builder.kind == KIND_VARIABLE or builder.kind == KIND_LIST:
                prepare(&builder.offsets, 4)
                if builder.offsets.size == 0:
                    memset(builder.offsets.data, 0, 4)
                    builder.offsets.size = 4
        return 0

    def finish(self):
        """The columns' buffers, by slot: (validity bitmap or None, nulls, offsets, data); empties the builders."""
        cdef int32_t slot
        cdef Builder *builder
        cdef int64_t nulls, zeros
        if self._is_busy:
            raise RuntimeError("the builders are in use by another thread")
        self._prepare(0)
        result = []
        for slot in range(self._slots):
            builder = &self._builders[slot]
            nulls = 0
            validity = packed(&builder.valid, &nulls) if builder.nullable else None
            builder.valid.size = 0
            if builder.kind == KIND_BOOLEAN:
                data = packed(&builder.data, &zeros)
                builder.data.size = 0
            else:
                data = taken(&builder.data)
            result.append((validity if nulls else None, nulls, taken(&builder.offsets), data))
        self._rows = 0
        return result
