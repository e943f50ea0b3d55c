# Columns to messages, in one pass: the size of a message stands before it, and is written when the message is.

# An Arrow array.
cdef struct Input:
    const uint8_t *data
    const int32_t *offsets
    const uint8_t *validity
    int64_t offset


cdef struct WriteMessage:
    int32_t first_field
    int32_t field_count


cdef struct WriteField:
    int32_t number
    int32_t op
    int32_t wire
    int32_t shape
    int32_t slot
    int32_t message  # -1: no message
    int32_t nullable  # it may be absent
    int32_t skips_zero  # zero, or nothing, is absent
    int32_t is_packed
    int32_t is_unsigned  # a varint of 32 bits without a sign
    int32_t enum_first
    int32_t enum_count
    int32_t text  # the beginning of the names of an open enum's unknown numbers
    int32_t text_size  # -1: a closed enum
    int32_t before  # the field before it of its oneof, -1


cdef struct WriteTables:
    const WriteMessage *messages
    const WriteField *fields
    const int32_t *enums
    const uint8_t *constants
    const Input *inputs
    int32_t position  # the field of an error


cdef inline bint is_null(const Input *given, int64_t index) noexcept nogil:
    cdef int64_t at = given.offset + index
    return given.validity != NULL and not given.validity[at >> 3] >> (at & 7) & 1


cdef inline int put_varint(Bytes *out, uint64_t value) noexcept nogil:
    if room(out, 10) < 0:
        return NO_MEMORY
    while value >= 0x80:
        out.data[out.size] = <uint8_t>(value | 0x80)
        out.size += 1
        value >>= 7
    out.data[out.size] = <uint8_t>value
    out.size += 1
    return OK


cdef inline int put_tag(Bytes *out, const WriteField *field, int32_t wire) noexcept nogil:
    return put_varint(out, <uint32_t>field.number << 3 | <uint32_t>wire)


cdef int put_size_before(Bytes *out, int64_t begin) noexcept nogil:
    """Write the size of what is after `begin` and a byte that was left free there."""
    cdef uint64_t size = out.size - begin - 1, left = size
    cdef int64_t more = 0
    while left >= 0x80:
        more += 1
        left >>= 7
    if more:
        if room(out, more) < 0:
            return NO_MEMORY
        memmove(out.data + begin + 1 + more, out.data + begin + 1, size)
        out.size += more
    left = size
    while left >= 0x80:
        out.data[begin] = <uint8_t>(left | 0x80)
        begin += 1
        left >>= 7
    out.data[begin] = <uint8_t>left
    return OK


cdef inline int begin_size(Bytes *out, int64_t *begin) noexcept nogil:
    begin[0] = out.size
    if room(out, 1) < 0:
        return NO_MEMORY
    out.size += 1
    return OK


cdef int enum_number(const WriteTables *tables, const WriteField *field, const uint8_t *name, int64_t size,
                     int32_t *number) noexcept nogil:
    """The number of a name; NOT_A_VALUE if it is none."""
    cdef const int32_t *value = tables.enums + 3 * field.enum_first
    cdef int32_t i
    cdef int64_t result = 0, at, digits
    cdef bint is_negative
    for i in range(field.enum_count):
        if value[3 * i + 2] == size and memcmp(tables.constants + value[3 * i + 1], name, size) == 0:
            number[0] = value[3 * i]
            return OK
    at = field.text_size
    if at < 0 or size <= at or memcmp(tables.constants + field.text, name, at) != 0:
        return NOT_A_VALUE
    is_negative = name[at] == 45
    at += is_negative
    digits = size - at
    if not 0 < digits <= 10 or (name[at] == 48 and (digits > 1 or is_negative)):
        return NOT_A_VALUE
    while at < size:
        if not 48 <= name[at] <= 57:
            return NOT_A_VALUE
        result = 10 * result + name[at] - 48
        at += 1
    result = -result if is_negative else result
    if not INT32_MIN <= result <= INT32_MAX:
        return NOT_A_VALUE
    for i in range(field.enum_count):
        if value[3 * i] == result:
            return NOT_A_VALUE
    number[0] = <int32_t>result
    return OK


cdef inline int read_number(const WriteTables *tables, const WriteField *field, const Input *given, int64_t index,
                            uint64_t *bits) noexcept nogil:
    """The number to write: a varint's value, or the four or eight bytes."""
    cdef int64_t at = given.offset + index, eight
    cdef int32_t four
    if field.op == OP_BOOL:
        bits[0] = given.data[at >> 3] >> (at & 7) & 1
    elif field.op == OP_ENUM:
        four = 0
        if enum_number(tables, field, given.data + given.offsets[at], given.offsets[at + 1] - given.offsets[at],
                       &four) != OK:
            return NOT_A_VALUE
        bits[0] = <uint64_t><int64_t>four
    elif field.op == OP_INT64 or field.op == OP_EIGHT or field.op == OP_SINT64:
        memcpy(&eight, given.data + 8 * at, 8)
        bits[0] = <uint64_t>eight << 1 ^ <uint64_t>(eight >> 63) if field.op == OP_SINT64 else <uint64_t>eight
    else:
        memcpy(&four, given.data + 4 * at, 4)
        if field.op == OP_SINT32:
            bits[0] = <uint32_t>four << 1 ^ <uint32_t>(four >> 31)
        elif field.op == OP_FOUR or field.is_unsigned:
            bits[0] = <uint32_t>four
        else:
            bits[0] = <uint64_t><int64_t>four
    return OK


cdef inline int put_number(Bytes *out, const WriteField *field, uint64_t bits) noexcept nogil:
    if field.wire == WIRE_VARINT:
        return put_varint(out, bits)
    if room(out, 8) < 0:
        return NO_MEMORY
    memcpy(out.data + out.size, &bits, 8)
    out.size += 4 if field.wire == WIRE_FOUR else 8
    return OK


cdef int put_time(Bytes *out, int64_t micros, bint is_duration) noexcept nogil:
    """A Timestamp or a Duration of microseconds, with its size; it has at most 22 bytes."""
    cdef int64_t begin = 0
    cdef int64_t seconds = micros // 1000000, rest = micros % 1000000
    if rest < 0 and not is_duration:  # C rounds towards zero; a Duration's parts have one sign
        seconds -= 1
        rest += 1000000
    if begin_size(out, &begin) < 0 or room(out, 24) < 0:
        return NO_MEMORY
    if seconds:
        out.data[out.size] = 8
        out.size += 1
        if put_varint(out, <uint64_t>seconds) < 0:
            return NO_MEMORY
    if rest:
        if put_varint(out, 16) < 0 or put_varint(out, <uint64_t>(rest * 1000)) < 0:
            return NO_MEMORY
    return put_size_before(out, begin)


cdef int put_value(WriteTables *tables, const WriteField *field, const Input *given, int64_t index, bint skips_zero,
                   Bytes *out) noexcept nogil:
    """Write a value that is not null, with its tag."""
    cdef uint64_t bits
    cdef int64_t at = given.offset + index, size, begin = 0
    cdef int state
    if field.op <= OP_EIGHT:
        state = read_number(tables, field, given, index, &bits)
        if state != OK or (skips_zero and bits == 0):
            return state
        if put_tag(out, field, field.wire) < 0:
            return NO_MEMORY
        return put_number(out, field, bits)
    if field.op == OP_STRING or field.op == OP_BYTES:
        size = given.offsets[at + 1] - given.offsets[at]
        if skips_zero and size == 0:
            return OK
        if put_tag(out, field, WIRE_SIZED) < 0 or put_varint(out, <uint64_t>size) < 0:
            return NO_MEMORY
        return put(out, given.data + given.offsets[at], size) if size else OK
    if put_tag(out, field, field.wire) < 0:
        return NO_MEMORY
    if field.op == OP_TIMESTAMP or field.op == OP_DURATION:
        memcpy(&size, given.data + 8 * at, 8)
        return put_time(out, size, field.op == OP_DURATION)
    if field.op == OP_GROUP:
        state = encode_message(tables, &tables.messages[field.message], index, out)
        return put_tag(out, field, WIRE_END) if state == OK else state
    if begin_size(out, &begin) < 0:
        return NO_MEMORY
    state = encode_message(tables, &tables.messages[field.message], index, out)
    return put_size_before(out, begin) if state == OK else state


cdef int put_items(WriteTables *tables, const WriteField *field, int32_t number, int64_t index,
                   Bytes *out) noexcept nogil:
    """Write the elements of a list or the entries of a map."""
    cdef const Input *given = &tables.inputs[field.slot]
    cdef const Input *items = given + 1
    cdef int64_t i = given.offsets[given.offset + index], stop = given.offsets[given.offset + index + 1], begin = 0
    cdef uint64_t bits
    cdef int state
    if i == stop:
        return OK
    if field.is_packed and (put_tag(out, field, WIRE_SIZED) < 0 or begin_size(out, &begin) < 0):
        return NO_MEMORY
    while i < stop:
        tables.position = number
        if field.shape == SHAPE_MAP:
            if put_tag(out, field, WIRE_SIZED) < 0 or begin_size(out, &begin) < 0:
                return NO_MEMORY
            state = encode_message(tables, &tables.messages[field.message], i, out)
            if state == OK:
                state = put_size_before(out, begin)
        elif is_null(items, i):
            return IS_NULL
        elif field.is_packed:
            state = read_number(tables, field, items, i, &bits)
            if state == OK:
                state = put_number(out, field, bits)
        else:
            state = put_value(tables, field, items, i, False, out)
        if state != OK:
            return state
        i += 1
    return put_size_before(out, begin) if field.is_packed else OK


cdef int encode_message(WriteTables *tables, const WriteMessage *message, int64_t index, Bytes *out) noexcept nogil:
    """Write the fields of a message: row `index` of its columns. A reason."""
    cdef int32_t number, before
    cdef const WriteField *field
    cdef int state
    for number in range(message.first_field, message.first_field + message.field_count):
        field = &tables.fields[number]
        tables.position = number
        if is_null(&tables.inputs[field.slot], index):
            if field.nullable or field.shape != SHAPE_SINGLE:
                continue
            return IS_NULL
        before = field.before
        while before >= 0:
            if not is_null(&tables.inputs[tables.fields[before].slot], index):
                return TWO_OF_ONEOF
            before = tables.fields[before].before
        if field.shape == SHAPE_SINGLE:
            state = put_value(tables, field, &tables.inputs[field.slot], index, field.skips_zero, out)
        else:
            state = put_items(tables, field, number, index, out)
        if state != OK:
            return state
    return OK


cdef int encode_rows(WriteTables *tables, int64_t count, const uint8_t *prefix, int64_t prefix_size, Bytes *out,
                     int32_t *offsets, int64_t *row) noexcept nogil:
    """Write all rows, each after the prefix, and their ends; a row that is null has no bytes. A reason."""
    cdef int state
    offsets[0] = 0
    for row[0] in range(count):
        if not is_null(&tables.inputs[0], row[0]):
            tables.position = -1
            state = put(out, prefix, prefix_size)
            if state == OK:
                state = encode_message(tables, &tables.messages[0], row[0], out)
            if state == OK and out.size > INT32_MAX:
                state = TOO_LARGE
            if state != OK:
                return state
        offsets[row[0] + 1] = <int32_t>out.size
    return OK


def encode(tables, inputs, int64_t count, prefix):
    """Write `count` rows of Arrow arrays by the tables of encoder.py, each after the bytes of `prefix`.

    `inputs` has for each of the tables' slots (data, offsets, validity, offset): buffers or None. Returns
    (offsets, data); a null row has no bytes. If a row fails: (row, reason, field) instead.
    """
    cdef _View messages = _View(tables.messages), fields = _View(tables.fields), enums = _View(tables.enums)
    cdef _View constants = _View(tables.constants), prefix_view = _View(prefix)
    cdef const uint8_t *before = <const uint8_t *>prefix_view.data()
    cdef int64_t before_size = prefix_view.view.len
    cdef WriteTables given
    cdef Input *arrays
    cdef Bytes out, offsets
    cdef int64_t i, row = 0, slots = len(inputs)
    cdef int state
    if count < 0 or count >= INT32_MAX:
        raise ValueError(f"{count} rows")
    memset(&out, 0, sizeof(Bytes))
    memset(&offsets, 0, sizeof(Bytes))
    memset(&given, 0, sizeof(WriteTables))
    arrays = <Input *>calloc(slots + 1, sizeof(Input))
    if arrays == NULL:
        raise MemoryError
    given.messages = <const WriteMessage *>messages.data()
    given.fields = <const WriteField *>fields.data()
    given.enums = <const int32_t *>enums.data()
    given.constants = <const uint8_t *>constants.data()
    given.inputs = arrays
    views = []
    try:
        for i in range(slots):
            data, ends, validity, offset = inputs[i]
            views += (_View(data), _View(ends), _View(validity))
            arrays[i].data = <const uint8_t *>(<_View>views[3 * i]).data()
            arrays[i].offsets = <const int32_t *>(<_View>views[3 * i + 1]).data()
            arrays[i].validity = <const uint8_t *>(<_View>views[3 * i + 2]).data()
            arrays[i].offset = offset
        prepare(&offsets, 4 * (count + 1))
        prepare(&out, count * (before_size + 32) + 64)
        with nogil:
            state = encode_rows(&given, count, before, before_size, &out, <int32_t *>offsets.data, &row)
        if state == NO_MEMORY:
            raise MemoryError
        if state != OK:
            return row, state, given.position
        offsets.size = 4 * (count + 1)
        return taken(&offsets), taken(&out)
    finally:
        release(&offsets)
        release(&out)
        free(arrays)
