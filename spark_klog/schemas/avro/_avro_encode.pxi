# Programs that write a row of Arrow arrays. The arrays are valid, and have the types that the program was compiled for.

# An Arrow array: value `index` of it stands at `offset + index`.
cdef struct Input:
    const uint8_t *data
    const int32_t *offsets
    const uint8_t *validity
    const uint8_t *limit  # end of the data
    int64_t offset


# A list that is being written.
cdef struct ListFrame:
    int64_t index  # of the list
    int64_t end  # of its items


cdef inline bint is_null(const Input *given, int64_t index) noexcept nogil:
    index += given.offset
    return given.validity != NULL and not given.validity[index >> 3] >> (index & 7) & 1


cdef enum:
    SLACK = 64  # room that every opcode has: more than a number and a word, or a decimal with its length


cdef inline uint8_t *put_number(uint8_t *to, int64_t value) noexcept nogil:
    """Write a zig-zag varint, of at most LARGEST_NUMBER bytes; the position after it."""
    cdef uint64_t number = (<uint64_t>value << 1) ^ <uint64_t>(value >> 63)
    while number >= 0x80:
        to[0] = <uint8_t>(number | 0x80)
        to += 1
        number >>= 7
    to[0] = <uint8_t>number
    return to + 1


cdef uint8_t *grown(Bytes *out, const uint8_t *to, int64_t extra) noexcept nogil:
    """Make room for `extra` bytes and the slack after `to`; where that is then, NULL if out of memory."""
    out.size = to - out.data
    if reserve(out, extra + SLACK) < 0:
        return NULL
    return out.data + out.size


cdef uint8_t *put_decimal(uint8_t *to, const uint8_t *value, int64_t width, int64_t size) noexcept nogil:
    """Write a little-endian number as a big-endian one of `size` bytes, or if that is -1 of as few as it needs.

    The position after it; NULL if it needs more bytes.
    """
    cdef uint8_t sign = 0xFF if value[width - 1] & 0x80 else 0
    cdef int64_t used = width
    cdef int64_t i
    while used > 1 and value[used - 1] == sign and (value[used - 2] & 0x80) == (sign & 0x80):
        used -= 1
    if size >= 0 and used > size:
        return NULL
    if size < 0:
        to = put_number(to, used)
        size = used
    for i in range(size):
        to[i] = value[size - 1 - i] if size - 1 - i < used else sign
    return to + size


cdef uint8_t *put_duration(uint8_t *to, const uint8_t *value) noexcept nogil:
    """Write MONTH_DAY_NANO as a duration; the position after it, NULL if it is none."""
    cdef int32_t given[2]
    cdef int64_t nanoseconds
    cdef uint32_t milliseconds
    memcpy(given, value, 8)
    memcpy(&nanoseconds, value + 8, 8)
    if given[0] < 0 or given[1] < 0 or nanoseconds < 0 or nanoseconds // 1000000 > <int64_t>0xFFFFFFFF:
        return NULL
    milliseconds = <uint32_t>(nanoseconds // 1000000)
    memcpy(to, value, 8)
    memcpy(to + 8, &milliseconds, 4)
    return to + 12


cdef int encode_row(const Code *program, const Input *inputs, int64_t index, Bytes *out, int32_t *position) noexcept nogil:
    """Append the row of that index. A reason, and where the program was."""
    cdef const int32_t *code = program.numbers
    cdef const int32_t *pc = code
    cdef ListFrame frames[MAX_DEPTH + 3]
    cdef ListFrame *frame = frames
    cdef const Input *given = inputs
    cdef const uint8_t *value = NULL
    cdef uint8_t *to = out.data + out.size
    cdef uint8_t *after
    cdef const uint8_t *full = out.data + out.capacity - SLACK
    cdef int64_t copied = 0  # bytes at `value` that the last opcode leaves to write
    cdef int64_t number = 0, at
    cdef int32_t op, short_number, i, chosen
    cdef int state = OK
    while True:
        if copied:
            if copied > full - to:
                to = grown(out, to, copied)
                if to == NULL:
                    state = NO_MEMORY
                    break
                full = out.data + out.capacity - SLACK
            memcpy(to, value, copied)
            to += copied
            copied = 0
        if to > full:
            to = grown(out, to, 0)
            if to == NULL:
                state = NO_MEMORY
                break
            full = out.data + out.capacity - SLACK
        op = pc[0]
        if op == WRITE_END:
            break
        if op != WRITE_LITERAL and op != WRITE_NEXT and op != WRITE_MEMBERS and op != WRITE_JUMP:
            given = &inputs[pc[1]]
        if op == WRITE_LONG:
            memcpy(&number, given.data + 8 * (given.offset + index), 8)
            to = put_number(to, number)
            pc += 2
        elif op == WRITE_INT:
            memcpy(&short_number, given.data + 4 * (given.offset + index), 4)
            to = put_number(to, short_number)
            pc += 2
        elif op == WRITE_REQUIRED:
            if is_null(given, index):
                state = IS_NULL
                break
            pc += 2
        elif op == WRITE_BRANCH:
            if is_null(given, index):
                to[0] = <uint8_t>pc[2]
                to += 1
                pc = code + pc[4]
            else:
                if pc[3] >= 0:
                    to[0] = <uint8_t>pc[3]
                    to += 1
                pc += 5
        elif op == WRITE_BYTES:
            at = given.offset + index
            value = given.data + given.offsets[at]
            number = given.offsets[at + 1] - given.offsets[at]
            to = put_number(to, number)
            pc += 2
            if number <= WORD and given.limit - value >= WORD:
                memcpy(to, value, WORD)
                to += number
                continue
            copied = number
        elif op == WRITE_EIGHT:
            memcpy(to, given.data + 8 * (given.offset + index), 8)
            to += 8
            pc += 2
        elif op == WRITE_FOUR:
            memcpy(to, given.data + 4 * (given.offset + index), 4)
            to += 4
            pc += 2
        elif op == WRITE_BOOLEAN:
            at = given.offset + index
            to[0] = given.data[at >> 3] >> (at & 7) & 1
            to += 1
            pc += 2
        elif op == WRITE_SCALED:
            at = given.offset + index
            if pc[2]:
                memcpy(&short_number, given.data + 4 * at, 4)
                number = short_number
            else:
                memcpy(&number, given.data + 8 * at, 8)
            if klog_times(number, pc[3], &number):
                state = TIME_TOO_LARGE
                break
            if pc[4] > 1:  # towards the past
                number = number // pc[4] - (number % pc[4] < 0)
            to = put_number(to, number)
            pc += 5
        elif op == WRITE_ENUM:
            at = given.offset + index
            value = given.data + given.offsets[at]
            number = given.offsets[at + 1] - given.offsets[at]
            chosen = -1
            for i in range(pc[2]):
                if pc[4 + 2 * i] == number and memcmp(program.constants + pc[3 + 2 * i], value, number) == 0:
                    chosen = i
                    break
            if chosen < 0:
                state = NOT_A_SYMBOL
                break
            to = put_number(to, chosen)
            pc += 3 + 2 * pc[2]
        elif op == WRITE_LITERAL:
            value = program.constants + pc[1]
            copied = pc[2]
            pc += 3
        elif op == WRITE_JUMP:
            pc = code + pc[1]
        elif op == WRITE_LIST:
            at = given.offset + index
            number = given.offsets[at + 1] - given.offsets[at]
            to = put_number(to, number)  # 0: the end of the blocks
            if number == 0:
                pc = code + pc[2] + 2
            else:
                frame += 1
                frame.index = index
                frame.end = given.offsets[at + 1]
                index = given.offsets[at]
                pc += 3
        elif op == WRITE_NEXT:
            index += 1
            if index < frame.end:
                pc = code + pc[1]
            else:
                to[0] = 0
                to += 1
                index = frame.index
                frame -= 1
                pc += 2
        elif op == WRITE_SIZED or op == WRITE_FIXED:
            value = given.data + pc[2] * (given.offset + index)
            copied = pc[2]
            if op == WRITE_SIZED:
                to = put_number(to, copied)
            pc += 3
        elif op == WRITE_EXACT:
            at = given.offset + index
            number = given.offsets[at]
            if given.offsets[at + 1] - number != pc[2]:
                state = WRONG_SIZE
                break
            value = given.data + number
            copied = pc[2]
            pc += 3
        elif op == WRITE_DECIMAL:
            if pc[3] > SLACK and to + pc[3] > full:
                to = grown(out, to, pc[3])
                if to == NULL:
                    state = NO_MEMORY
                    break
                full = out.data + out.capacity - SLACK
            after = put_decimal(to, given.data + pc[2] * (given.offset + index), pc[2], pc[3])
            if after == NULL:
                state = DECIMAL_TOO_LARGE
                break
            to = after
            pc += 4
        elif op == WRITE_DURATION:
            after = put_duration(to, given.data + 16 * (given.offset + index))
            if after == NULL:
                state = TIME_TOO_LARGE
                break
            to = after
            pc += 2
        elif op == WRITE_MEMBERS:
            chosen = -1
            for i in range(pc[2]):
                if not is_null(&inputs[pc[4 + 3 * i]], index):
                    if chosen >= 0:
                        state = SEVERAL_MEMBERS
                        break
                    chosen = i
            if chosen < 0 and pc[1] < 0:
                state = IS_NULL
            if state != OK:
                break
            if chosen < 0:
                to[0] = <uint8_t>pc[1]
                pc = code + pc[3]
            else:
                to[0] = <uint8_t>pc[5 + 3 * chosen]
                pc = code + pc[6 + 3 * chosen]
            to += 1
    if to != NULL:
        out.size = to - out.data
    position[0] = <int32_t>(pc - code)
    return state


cdef struct Written:
    int64_t row
    int32_t reason
    int32_t position


cdef int encode_rows(const Code *program, const Input *inputs, int64_t count, const uint8_t *prefix, int64_t prefix_size,
                     Bytes *out, int32_t *offsets, Written *failed) noexcept nogil:
    """Append all rows, each after the prefix, and write their ends; a row that is null has no bytes. A reason."""
    cdef int64_t row
    cdef int state = OK
    offsets[0] = 0
    for row in range(count):
        if not is_null(&inputs[0], row):
            failed.position = 0
            state = put(out, prefix, prefix_size)
            if state == OK:
                state = encode_row(program, inputs, row, out, &failed.position)
            if state == OK and out.size > INT32_MAX:
                state = TOO_LARGE
            if state != OK:
                failed.row = row
                failed.reason = state
                return state
        offsets[row + 1] = <int32_t>out.size
    return OK


def encode(program, inputs, int64_t count, prefix):
    """Write `count` rows of Arrow arrays by a `WriteProgram`, each after the bytes of `prefix`.

    `inputs` has for each of the program's slots (data, offsets, validity, offset): buffers or None. Returns
    (offsets, data); a null row has no bytes. If a row fails: (row, reason, position) instead.
    """
    cdef _View code_view = _View(program.code), constant_view = _View(program.constants), prefix_view = _View(prefix)
    cdef Code code
    cdef const uint8_t *before = <const uint8_t *>prefix_view.data()
    cdef int64_t before_size = prefix_view.view.len
    cdef Input *given
    cdef Bytes out, offsets
    cdef Written failed
    cdef int64_t i, slots = len(inputs)
    cdef int state
    if count < 0 or count >= INT32_MAX:
        raise ValueError(f"{count} rows")
    memset(&out, 0, sizeof(Bytes))
    memset(&offsets, 0, sizeof(Bytes))
    memset(&failed, 0, sizeof(Written))
    code.numbers = <const int32_t *>code_view.data()
    code.constants = <const uint8_t *>constant_view.data()
    given = <Input *>calloc(slots + 1, sizeof(Input))
    if given == NULL:
        raise MemoryError
    views = []
    try:
        for i in range(slots):
            data, ends, validity, offset = inputs[i]
            views += (_View(data), _View(ends), _View(validity))
            given[i].data = <const uint8_t *>(<_View>views[3 * i]).data()
            given[i].offsets = <const int32_t *>(<_View>views[3 * i + 1]).data()
            given[i].validity = <const uint8_t *>(<_View>views[3 * i + 2]).data()
            given[i].limit = given[i].data + (<_View>views[3 * i]).view.len
            given[i].offset = offset
        prepare(&offsets, 4 * (count + 1))
        prepare(&out, count * (before_size + 32) + SLACK)
        with nogil:
            state = encode_rows(&code, given, count, before, before_size, &out, <int32_t *>offsets.data, &failed)
        if state == NO_MEMORY:
            raise MemoryError
        if state != OK:
            return failed.row, failed.reason, failed.position
        offsets.size = 4 * (count + 1)
        return taken(&offsets), taken(&out)
    finally:
        release(&offsets)
        release(&out)
        free(given)
