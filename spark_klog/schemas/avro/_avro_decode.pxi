# Programs that read a row and append its values.

cdef extern from *:
    """
    #include <stdint.h>
    #include <string.h>
    /* The seven low bits of each byte, packed; for the bytes of a varint of up to eight. */
    static inline uint64_t klog_packed_sevens(uint64_t word) {
        word = ((word & 0x7f007f007f007f00ULL) >> 1) | (word & 0x007f007f007f007fULL);
        word = ((word & 0x3fff00003fff0000ULL) >> 2) | (word & 0x00003fff00003fffULL);
        return ((word & 0x0fffffff00000000ULL) >> 4) | (word & 0x000000000fffffffULL);
    }
    static inline int klog_trailing_zeros(uint64_t word) { return __builtin_ctzll(word); }
    static inline int klog_times(int64_t a, int64_t b, int64_t *product) {
        return __builtin_mul_overflow(a, b, product);
    }
    """
    uint64_t klog_packed_sevens(uint64_t word) noexcept nogil
    int klog_trailing_zeros(uint64_t word) noexcept nogil
    bint klog_times(int64_t a, int64_t b, int64_t *product) noexcept nogil


# What a position of the program needs to return to: a list that is being read, or the data around a default.
cdef struct Frame:
    int64_t left  # items of the block that are still to come, and the one that is being read
    int64_t total  # items of the list before and in the block
    const uint8_t *at
    const uint8_t *end
    const uint8_t *limit


cdef struct Code:
    const int32_t *numbers
    const uint8_t *constants


cdef enum:
    LARGEST_NUMBER = 10  # bytes of a varint


cdef const uint8_t *read_slowly(const uint8_t *at, const uint8_t *end, int64_t *value) noexcept nogil:
    """The position after a zig-zag varint; NULL if it is cut off, or of more than 64 bits, which sets `value` to 1."""
    cdef uint64_t result = 0
    cdef int shift = 0
    cdef uint8_t byte
    value[0] = 0
    while at < end:
        byte = at[0]
        at += 1
        if shift == 63 and byte > 1:
            value[0] = 1
            return NULL
        result |= <uint64_t>(byte & 0x7F) << shift
        if byte < 0x80:
            value[0] = <int64_t>(result >> 1) ^ -<int64_t>(result & 1)
            return at
        shift += 7
    return NULL


cdef const uint8_t *read_long_number(const uint8_t *at, const uint8_t *end, int64_t *value) noexcept nogil:
    """As `read_slowly`, fast for numbers of up to eight bytes that are not the last ones."""
    cdef uint64_t word, stops
    cdef int bits
    if end - at >= 8:
        memcpy(&word, at, 8)
        stops = ~word & <uint64_t>0x8080808080808080
        if stops:
            bits = klog_trailing_zeros(stops) + 1
            word = klog_packed_sevens(word & (<uint64_t>0xFFFFFFFFFFFFFFFF >> (64 - bits)))
            value[0] = <int64_t>(word >> 1) ^ -<int64_t>(word & 1)
            return at + (bits >> 3)
    return read_slowly(at, end, value)


cdef inline const uint8_t *read_number(const uint8_t *at, const uint8_t *end, int64_t *value) noexcept nogil:
    """As `read_slowly`, fast for a number of one byte."""
    if at < end and at[0] < 0x80:
        value[0] = <int64_t>(at[0] >> 1) ^ -<int64_t>(at[0] & 1)
        return at + 1
    return read_long_number(at, end, value)


cdef int append_decimal(Builder *builder, const uint8_t *at, int64_t size, const uint8_t *limit) noexcept nogil:
    """Append the big-endian two's complement number, which must be between -limit and limit, neither included."""
    cdef uint8_t value[32]
    cdef uint64_t words[4]
    cdef uint64_t limits[4]
    cdef uint8_t sign
    cdef int64_t i, width = builder.width
    cdef int count = builder.width // 8
    cdef uint64_t carry
    if size == 0:
        return DECIMAL_TOO_LARGE
    sign = 0xFF if at[0] & 0x80 else 0
    while size > width:
        if at[0] != sign:
            return DECIMAL_TOO_LARGE
        at += 1
        size -= 1
    memset(value, sign, 32)
    for i in range(size):
        value[i] = at[size - 1 - i]
    memcpy(words, value, 32)
    memset(limits, 0, 32)
    memcpy(limits, limit, width)
    if sign:  # the absolute value; a number of more bytes than the width without its sign gets larger than the limit
        carry = 1
        for i in range(count):
            words[i] = ~words[i] + carry
            carry = carry and words[i] == 0
    i = count - 1
    while i > 0 and words[i] == limits[i]:
        i -= 1
    if words[i] >= limits[i]:
        return DECIMAL_TOO_LARGE
    return append_fixed(builder, value)


cdef int append_duration(Builder *builder, const uint8_t *at) noexcept nogil:
    """Append months, days and milliseconds as months, days (INT32) and nanoseconds (INT64)."""
    cdef uint32_t given[3]
    cdef uint8_t value[16]
    cdef int64_t nanoseconds
    memcpy(given, at, 12)
    if given[0] > <uint32_t>INT32_MAX or given[1] > <uint32_t>INT32_MAX:
        return TIME_TOO_LARGE
    nanoseconds = <int64_t>given[2] * 1000000
    memcpy(value, at, 8)
    memcpy(value + 8, &nanoseconds, 8)
    return append_fixed(builder, value)


cdef int decode_row(const Code *program, Builder *builders, const uint8_t *at, const uint8_t *end,
                    const uint8_t *limit, int32_t *position) noexcept nogil:
    """Run a program over [at, end); all bytes up to `limit` can be read. A reason, and where the program was."""
    cdef const int32_t *code = program.numbers
    cdef const int32_t *pc = code
    cdef const uint8_t *after
    cdef Frame frames[MAX_DEPTH + 3]
    cdef Frame *frame = frames
    cdef Builder *builder
    cdef int64_t number = 0
    cdef int64_t empty_items = MAX_EMPTY_ITEMS
    cdef int64_t room = BASE_ROOM + ROOM_OF_A_BYTE * (end - at)
    cdef int32_t op, index
    cdef int state = OK
    cdef float single
    while True:
        op = pc[0]
        if op == OP_LONG:
            at = read_number(at, end, &number)
            if at == NULL:
                state = NUMBER_TOO_LONG if number else TRUNCATED
                break
            state = append_64(&builders[pc[1]], number)
            pc += 2
        elif op == OP_UNION:
            at = read_number(at, end, &number)
            if at == NULL:
                state = NUMBER_TOO_LONG if number else TRUNCATED
                break
            if number < 0 or number >= pc[1]:
                state = NO_SUCH_BRANCH
                break
            pc = code + pc[2 + number]
        elif op == OP_STRING or op == OP_BYTES:
            at = read_number(at, end, &number)
            if at == NULL:
                state = NUMBER_TOO_LONG if number else TRUNCATED
                break
            if number < 0:
                state = NEGATIVE_LENGTH
                break
            if number > end - at:
                state = TRUNCATED
                break
            if op == OP_STRING and not is_text(at, number):
                state = NOT_UTF8
                break
            state = append_bytes(&builders[pc[1]], at, number, limit)
            at += number
            pc += 2
        elif op == OP_INT or op == OP_INT_LONG:
            at = read_number(at, end, &number)
            if at == NULL:
                state = NUMBER_TOO_LONG if number else TRUNCATED
                break
            if number != <int32_t>number:
                state = INT_TOO_LARGE
                break
            if op == OP_INT:
                state = append_32(&builders[pc[1]], <int32_t>number)
            else:
                state = append_64(&builders[pc[1]], number)
            pc += 2
        elif op == OP_EIGHT:
            if end - at < 8:
                state = TRUNCATED
                break
            memcpy(&number, at, 8)
            state = append_64(&builders[pc[1]], number)
            at += 8
            pc += 2
        elif op == OP_FOUR:
            if end - at < 4:
                state = TRUNCATED
                break
            memcpy(&index, at, 4)
            state = append_32(&builders[pc[1]], index)
            at += 4
            pc += 2
        elif op == OP_JUMP:
            pc = code + pc[1]
        elif op == OP_EMPTY:
            state = append_empty(builders, pc[1])
            pc += 2
        elif op == OP_PRESENT:
            state = append_present(&builders[pc[1]])
            pc += 2
        elif op == OP_BOOLEAN:
            if at >= end:
                state = TRUNCATED
                break
            if at[0] > 1:
                state = NOT_BOOLEAN
                break
            state = append_boolean(&builders[pc[1]], at[0])
            at += 1
            pc += 2
        elif op == OP_SCALED or op == OP_TIME:
            at = read_number(at, end, &number)
            if at == NULL:
                state = NUMBER_TOO_LONG if number else TRUNCATED
                break
            if pc[2] and number != <int32_t>number:
                state = INT_TOO_LARGE
                break
            if klog_times(number, pc[3], &number):
                state = TIME_TOO_LARGE
                break
            if pc[4] > 1:  # towards the past
                number = number // pc[4] - (number % pc[4] < 0)
            if op == OP_SCALED:
                state = append_64(&builders[pc[1]], number)
                pc += 5
            else:
                if number < 0 or number >= <int64_t>86400 * pc[5]:
                    state = TIME_TOO_LARGE
                    break
                if builders[pc[1]].width == 4:
                    state = append_32(&builders[pc[1]], <int32_t>number)
                else:
                    state = append_64(&builders[pc[1]], number)
                pc += 6
        elif op == OP_ENUM or op == OP_ENUM_INDEX:
            at = read_number(at, end, &number)
            if at == NULL:
                state = NUMBER_TOO_LONG if number else TRUNCATED
                break
            if number < 0 or number >= pc[2]:
                state = NO_SUCH_SYMBOL
                break
            if op == OP_ENUM:
                index = pc[3 + 2 * number]
                number = pc[4 + 2 * number]
                if number < 0:
                    state = SYMBOL_UNKNOWN
                    break
                room -= number
                if room < 0:
                    state = TOO_MANY_ABSENT
                    break
                state = append_bytes(&builders[pc[1]], program.constants + index, number, program.constants + index)
                pc += 3 + 2 * pc[2]
            else:
                index = pc[3 + number]
                if index < 0:
                    state = SYMBOL_UNKNOWN
                    break
                state = append_32(&builders[pc[1]], index)
                pc += 3 + pc[2]
        elif op == OP_LIST:
            frame += 1
            frame.left = 1
            frame.total = 0
            pc = code + pc[1]
        elif op == OP_NEXT:
            frame.left -= 1
            if frame.left > 0:
                pc = code + pc[3]
                continue
            at = read_number(at, end, &number)
            if at == NULL:
                state = NUMBER_TOO_LONG if number else TRUNCATED
                break
            if number < 0:
                # a block whose size in bytes follows, for readers that skip it
                if number == INT64_MIN:
                    state = NEGATIVE_LENGTH
                    break
                frame.left = -number
                at = read_number(at, end, &number)
                if at == NULL:
                    state = NUMBER_TOO_LONG if number else TRUNCATED
                    break
                if number < 0:
                    state = NEGATIVE_LENGTH
                    break
                number = frame.left
            frame.left = number
            if number == 0:
                index = pc[1]
                if index >= 0:
                    builder = &builders[index]
                    number = last_end(builder) + frame.total
                    if number > INT32_MAX:
                        state = TOO_LARGE
                        break
                    if append_present(builder) < 0 or append_end(&builder.offsets, number) < 0:
                        state = NO_MEMORY
                        break
                frame -= 1
                pc += 5
                continue
            if pc[2] == 0:
                if number > empty_items:
                    state = TOO_MANY_EMPTY_ITEMS
                    break
                empty_items -= number
            elif number > end - at or number * pc[2] > end - at:
                state = TRUNCATED
                break
            room -= number * pc[4]
            if room < 0:
                state = TOO_MANY_ABSENT
                break
            frame.total += number
            pc = code + pc[3]
        elif op == OP_NUMBER_FLOAT or op == OP_NUMBER_DOUBLE:
            at = read_number(at, end, &number)
            if at == NULL:
                state = NUMBER_TOO_LONG if number else TRUNCATED
                break
            if pc[2] and number != <int32_t>number:
                state = INT_TOO_LARGE
                break
            if op == OP_NUMBER_FLOAT:
                state = append_float(&builders[pc[1]], <float>number)
            else:
                state = append_double(&builders[pc[1]], <double>number)
            pc += 3
        elif op == OP_FLOAT_DOUBLE:
            if end - at < 4:
                state = TRUNCATED
                break
            memcpy(&single, at, 4)
            state = append_double(&builders[pc[1]], <double>single)
            at += 4
            pc += 2
        elif op == OP_FIXED_BYTES or op == OP_FIXED:
            if end - at < pc[2]:
                state = TRUNCATED
                break
            if op == OP_FIXED:
                state = append_fixed(&builders[pc[1]], at)
            else:
                state = append_bytes(&builders[pc[1]], at, pc[2], limit)
            at += pc[2]
            pc += 3
        elif op == OP_DECIMAL:
            number = pc[2]
            if number < 0:
                at = read_number(at, end, &number)
                if at == NULL:
                    state = NUMBER_TOO_LONG if number else TRUNCATED
                    break
                if number < 0:
                    state = NEGATIVE_LENGTH
                    break
            if number > end - at:
                state = TRUNCATED
                break
            state = append_decimal(&builders[pc[1]], at, number, program.constants + pc[4])
            if state > OK:
                break
            at += number
            pc += 5
        elif op == OP_DURATION:
            if end - at < 12:
                state = TRUNCATED
                break
            state = append_duration(&builders[pc[1]], at)
            if state > OK:
                break
            at += 12
            pc += 2
        elif op == OP_DEFAULT:
            frame += 1
            frame.at = at
            frame.end = end
            frame.limit = limit
            at = program.constants + pc[1]
            end = limit = at + pc[2]
            pc += 3
        elif op == OP_DEFAULT_END:
            at = frame.at
            end = frame.end
            limit = frame.limit
            frame -= 1
            pc += 1
        elif op == OP_SKIP_NUMBER:
            at = read_number(at, end, &number)
            if at == NULL:
                state = NUMBER_TOO_LONG if number else TRUNCATED
                break
            if pc[1] and number != <int32_t>number:
                state = INT_TOO_LARGE
                break
            pc += 2
        elif op == OP_REST:
            number = end - at
            if pc[2] and not is_text(at, number):
                state = NOT_UTF8
                break
            state = append_bytes(&builders[pc[1]], at, number, limit)
            at = end
            pc += 3
        elif op == OP_SKIP_BYTES:
            at = read_number(at, end, &number)
            if at == NULL:
                state = NUMBER_TOO_LONG if number else TRUNCATED
                break
            if number < 0:
                state = NEGATIVE_LENGTH
                break
            if number > end - at:
                state = TRUNCATED
                break
            at += number
            pc += 1
        elif op == OP_SKIP_FIXED:
            if end - at < pc[1]:
                state = TRUNCATED
                break
            at += pc[1]
            pc += 2
        elif op == OP_SKIP_BOOLEAN:
            if at >= end:
                state = TRUNCATED
                break
            if at[0] > 1:
                state = NOT_BOOLEAN
                break
            at += 1
            pc += 1
        elif op == OP_SKIP_ENUM:
            at = read_number(at, end, &number)
            if at == NULL:
                state = NUMBER_TOO_LONG if number else TRUNCATED
                break
            if number < 0 or number >= pc[1]:
                state = NO_SUCH_SYMBOL
                break
            pc += 2
        elif op == OP_MISMATCH:
            state = BRANCH_MISMATCH
            break
        else:  # OP_END
            if at != end:
                state = LEFT_OVER
            break
        if state != OK:
            break
    position[0] = <int32_t>(pc - code)
    return state


cdef struct Failure:
    int32_t row
    int32_t program
    int32_t reason
    int32_t position


# Rows to decode; see `ColumnBuilders.decode`.
cdef struct Rows:
    const uint8_t *data
    int64_t size
    const int32_t *offsets
    const uint8_t *validity
    const int32_t *programs
    const int32_t *starts
    int64_t first
    int64_t count
    int64_t start


cdef int decode_rows(const Rows *rows, const Code *programs, int32_t program_count, Builder *builders, int64_t before,
                     Bytes *failures) noexcept nogil:
    """Decode all rows, after `before` of them in the builders. OK or NO_MEMORY."""
    cdef int64_t row, at, end
    cdef int32_t which = 0
    cdef int state
    cdef Failure failure
    cdef const uint8_t *limit = rows.data + rows.size
    for row in range(rows.count):
        at = rows.first + row
        if rows.programs != NULL:
            which = rows.programs[row]
        if which < 0 or which >= program_count or (
            rows.validity != NULL and not rows.validity[at >> 3] >> (at & 7) & 1
        ):
            if append_empty(builders, 0) < 0:
                return NO_MEMORY
            continue
        end = rows.offsets[at + 1]
        at = rows.offsets[at] + (rows.start if rows.starts == NULL else rows.starts[row])
        failure.position = 0
        if at < 0 or at > end or end > rows.size:
            state = TRUNCATED
        else:
            state = decode_row(&programs[which], builders, rows.data + at, rows.data + end, limit, &failure.position)
        if state == OK:
            continue
        truncate(builders, 0, before + row)
        if state == NO_MEMORY or append_empty(builders, 0) < 0:
            return NO_MEMORY
        failure.row = <int32_t>row
        failure.program = which
        failure.reason = state
        if put(failures, &failure, sizeof(Failure)) < 0:
            return NO_MEMORY
    return OK


cdef class ColumnBuilders(Builders):
    """Builders of a reader's columns, which programs of many writers append to."""

    def decode(self, programs, which, data, offsets, validity, int64_t first, int64_t count, starts, int64_t start):
        """Append `count` rows: values [first, first + count) of a binary column.

        `offsets` are INT32, `validity` a bitmap or None, as Arrow has them. `programs` are those of program.py.
        `which`, INT32 a row, is the program of each row, -1 for a row that is to be null; None: the first for all.
        A row's record begins `starts` (INT32 a row), or if that is None `start`, bytes into its value.
        Returns tuples (row, program, reason, position) of the rows that do not decode; they are null.
        """
        cdef _View data_view = _View(data), offset_view = _View(offsets), valid_view = _View(validity)
        cdef _View which_view = _View(which), start_view = _View(starts)
        cdef Rows rows
        cdef Code *codes
        cdef Bytes failures
        cdef int32_t program_count = <int32_t>len(programs)
        cdef int64_t i
        cdef int state
        cdef const Failure *failed
        if first < 0 or count < 0 or count > INT32_MAX - self._rows or first > INT32_MAX:
            raise ValueError(f"rows {first} to {first + count}")
        if start < INT32_MIN or start > INT32_MAX:
            raise ValueError(f"start {start}")
        offset_view.holds(4 * (first + count + 1), "offsets")
        valid_view.holds((first + count + 7) // 8, "validity")
        which_view.holds(4 * count, "programs of rows")
        start_view.holds(4 * count, "starts")
        rows.data = <const uint8_t *>data_view.data()
        rows.size = data_view.view.len
        rows.offsets = <const int32_t *>offset_view.data()
        rows.validity = <const uint8_t *>valid_view.data()
        rows.programs = <const int32_t *>which_view.data()
        rows.starts = <const int32_t *>start_view.data()
        rows.first, rows.count, rows.start = first, count, start
        if self._is_busy:
            raise RuntimeError("the builders are in use by another thread")
        views = []
        memset(&failures, 0, sizeof(Bytes))
        codes = <Code *>malloc(max(program_count, 1) * sizeof(Code))
        if codes == NULL:
            raise MemoryError
        self._is_busy = True
        try:
            for i in range(program_count):
                views += (_View(programs[i].code), _View(programs[i].constants))
                codes[i].numbers = <const int32_t *>(<_View>views[2 * i]).data()
                codes[i].constants = <const uint8_t *>(<_View>views[2 * i + 1]).data()
            self._prepare(count)
            with nogil:
                state = decode_rows(&rows, codes, program_count, self._builders, self._rows, &failures)
            if state != OK:
                truncate(self._builders, 0, self._rows)
                raise MemoryError
            self._rows += count
            failed = <const Failure *>failures.data
            return [
                (failed[i].row, failed[i].program, failed[i].reason, failed[i].position)
                for i in range(failures.size // <int64_t>sizeof(Failure))
            ]
        finally:
            self._is_busy = False
            free(codes)
            free(failures.data)
