# Messages to columns: the fields of a message are first sought, the last value of each counting, then appended in the
# order of the columns. Elements of a list are read where they stand when their column is appended: where that is, is
# noted, so that the fields between them are not read again. So it is of messages that are there several times.

cdef struct Message:
    int32_t first_field
    int32_t field_count
    int32_t first_number  # of the table from numbers to fields
    int32_t number_count
    int32_t first_large  # fields of larger numbers: pairs of number and field, by number
    int32_t large_count
    int32_t first_oneof
    int32_t oneof_count
    int32_t slot
    int32_t empty_bytes  # that columns take for a message without fields


cdef struct Field:
    int32_t number
    int32_t op
    int32_t wire
    int32_t shape
    int32_t slot
    int32_t nullable
    int32_t required
    int32_t oneof  # -1: of none
    int32_t message  # -1: no message
    int32_t enum_first  # of the numbers and names of an enum
    int32_t enum_count
    int32_t enum_closed
    int32_t text  # of the constants: the default of a string or of bytes, the beginning of an unknown enum's names
    int32_t text_size
    int32_t default_low  # the bits of the default of a number
    int32_t default_high


# What a message has of a field.
cdef struct Seen:
    int64_t count
    uint64_t value  # of a number
    const uint8_t *at  # of bytes and of the last message
    int64_t size
    int64_t run  # the number, from 1, of the first run; 0: none
    int64_t last_run


# Elements of a list that follow each other, with their tags; or a message that is not the last one.
cdef struct Run:
    const uint8_t *at
    const uint8_t *end
    int64_t next  # the number of the field's next run; 0: none


cdef struct Tables:
    const Message *messages
    const Field *fields
    const int32_t *numbers
    const int32_t *enums  # number, text, size of each value
    const uint8_t *constants
    Seen *seen  # by field
    int32_t *current  # by oneof: its field, -1
    Bytes runs  # of the messages that are being read
    const uint8_t *data  # all records
    const uint8_t *limit
    Builder *builders
    int32_t position  # the field of an error
    int64_t room  # bytes of columns that a row's elements may take yet, see columns/room.py
    bint has_unknown  # whether the message that was sought last has fields that it does not know


cdef inline int32_t field_of(const Tables *tables, const Message *message, uint32_t number) noexcept nogil:
    """The field of a number, -1 if the message has none. Less: it has no column, but is of oneof (-2 - it) / 2.

    Of the rest of that division 1 is a group.
    """
    cdef int32_t low, high, middle
    cdef const int32_t *large
    if number < <uint32_t>message.number_count:
        return tables.numbers[message.first_number + number]
    low, high = 0, message.large_count
    large = tables.numbers + message.first_large
    while low < high:
        middle = (low + high) >> 1
        if <uint32_t>large[2 * middle] == number:
            return large[2 * middle + 1]
        if <uint32_t>large[2 * middle] < number:
            low = middle + 1
        else:
            high = middle
    return -1


cdef inline int32_t enum_index(const Tables *tables, const Field *field, int32_t number) noexcept nogil:
    """The place of an enum's value among its `enum_count`, -1 if it has none of that number. They are in order."""
    cdef int32_t low = 0, high = field.enum_count, middle
    cdef const int32_t *values = tables.enums + 3 * field.enum_first
    if 0 <= number < high and values[3 * number] == number:
        return number
    while low < high:
        middle = (low + high) >> 1
        if values[3 * middle] == number:
            return middle
        if values[3 * middle] < number:
            low = middle + 1
        else:
            high = middle
    return -1


cdef inline bint is_packable(int32_t op) noexcept nogil:
    return op <= OP_EIGHT


cdef inline uint64_t read_plain(Cursor *cursor, int32_t wire) noexcept nogil:
    """The bits of a number."""
    cdef uint64_t value = 0
    cdef int64_t size
    if wire == WIRE_VARINT:
        return read_varint(cursor)
    size = 8 if wire == WIRE_EIGHT else 4
    if cursor.end - cursor.at < size:
        return failed(cursor, TRUNCATED)
    if wire == WIRE_EIGHT:
        memcpy(&value, cursor.at, 8)
    else:
        memcpy(&value, cursor.at, 4)
    cursor.at += size
    return value


cdef inline void read_content(Cursor *cursor, const Field *field, const uint8_t **at, int64_t *size) noexcept nogil:
    """What is in a field of a size, or in a group."""
    cdef const uint8_t *stop
    if field.wire == WIRE_GROUP:
        at[0] = cursor.at
        stop = skip_group(cursor, field.number)
        size[0] = stop - at[0]
    else:
        size[0] = read_size(cursor)
        at[0] = cursor.at
        if cursor.reason == OK:
            cursor.at += size[0]


cdef inline Run *run_of(const Tables *tables, int64_t number) noexcept nogil:
    return <Run *>tables.runs.data + number - 1


cdef int add_run(Tables *tables, Seen *seen, const uint8_t *at, const uint8_t *end) noexcept nogil:
    """Note where something of a field stands. NO_MEMORY or OK."""
    cdef Run run
    cdef int64_t number
    if seen.run and run_of(tables, seen.last_run).end == at:
        run_of(tables, seen.last_run).end = end
        return OK
    run.at, run.end, run.next = at, end, 0
    if put(&tables.runs, &run, sizeof(Run)) < 0:
        return NO_MEMORY
    number = tables.runs.size // <int64_t>sizeof(Run)
    if seen.run:
        run_of(tables, seen.last_run).next = number
    else:
        seen.run = number
    seen.last_run = number
    return OK


cdef int seek_fields(Tables *tables, const Message *message, Cursor *cursor) noexcept nogil:
    """Read what a message has of each of its fields. A reason."""
    cdef uint32_t tag
    cdef int32_t index, wire
    cdef const Field *field
    cdef Seen *seen
    cdef uint64_t value
    cdef const uint8_t *start
    cdef bint has_unknown = False
    memset(tables.seen + message.first_field, 0, message.field_count * sizeof(Seen))
    for index in range(message.oneof_count):
        tables.current[message.first_oneof + index] = -1
    while cursor.at < cursor.end:
        start = cursor.at
        tag = read_tag(cursor)
        if cursor.reason != OK:
            return cursor.reason
        wire = tag & 7
        index = field_of(tables, message, tag >> 3)
        if index >= 0:
            field = &tables.fields[index]
            seen = &tables.seen[index]
            if wire == field.wire:
                if field.shape != SHAPE_SINGLE:
                    if wire == WIRE_GROUP:
                        skip_group(cursor, field.number)
                    else:
                        skip_plain(cursor, wire)
                    if cursor.reason == OK and add_run(tables, seen, start, cursor.at) != OK:
                        return NO_MEMORY
                elif field.op <= OP_EIGHT:
                    value = read_plain(cursor, wire)
                    if field.enum_closed and cursor.reason == OK and enum_index(tables, field, <int32_t>value) < 0:
                        has_unknown = True
                        continue
                    seen.value = value
                else:
                    if field.oneof >= 0 and tables.current[field.oneof] != index:
                        seen.count = seen.run = 0
                    if field.op >= OP_MESSAGE and seen.count and (
                        add_run(tables, seen, seen.at, seen.at + seen.size) != OK
                    ):
                        return NO_MEMORY
                    read_content(cursor, field, &seen.at, &seen.size)
                if cursor.reason != OK:
                    tables.position = index
                    return cursor.reason
                seen.count += 1
                if field.oneof >= 0 and tables.current[field.oneof] != index:
                    if tables.current[field.oneof] >= 0:
                        tables.seen[tables.current[field.oneof]].count = 0
                    tables.current[field.oneof] = index
                continue
            if wire == WIRE_SIZED and field.shape == SHAPE_LIST and is_packable(field.op):
                skip_plain(cursor, wire)
                if cursor.reason != OK:
                    tables.position = index
                    return cursor.reason
                if add_run(tables, seen, start, cursor.at) != OK:
                    return NO_MEMORY
                seen.count += 1
                continue
        elif index < -1 and wire == (WIRE_GROUP if (-2 - index) & 1 else WIRE_SIZED):
            index = (-2 - index) >> 1
            if tables.current[index] >= 0:
                tables.seen[tables.current[index]].count = 0
                tables.current[index] = -1
        has_unknown = True
        if wire == WIRE_GROUP:
            skip_group(cursor, tag >> 3)
        elif wire == WIRE_END:
            return BAD_GROUP
        else:
            skip_plain(cursor, wire)
        if cursor.reason != OK:
            return cursor.reason
    tables.has_unknown = has_unknown
    return OK


cdef int append_enum(const Tables *tables, const Field *field, Builder *builder, int32_t number) noexcept nogil:
    """Append the name of a number; of an open enum also of one that it does not have."""
    cdef int32_t index = enum_index(tables, field, number)
    cdef const int32_t *value
    cdef uint8_t name[16]
    cdef int64_t size = 0, rest
    cdef int state
    if index >= 0:
        value = tables.enums + 3 * (field.enum_first + index)
        return append_bytes(builder, tables.constants + value[1], value[2], tables.constants + value[1] + value[2])
    # the digits from behind
    rest = number if number >= 0 else -<int64_t>number
    while rest or not size:
        size += 1
        name[16 - size] = <uint8_t>(48 + rest % 10)
        rest //= 10
    if number < 0:
        size += 1
        name[16 - size] = 45
    state = append_bytes(builder, tables.constants + field.text, field.text_size,
                         tables.constants + field.text + field.text_size)
    if state != OK:
        return state
    if put(&builder.data, name + 16 - size, size) < 0:
        return NO_MEMORY
    builder.offsets.size -= 4
    return append_end(&builder.offsets, builder.data.size)


cdef inline int append_number(const Tables *tables, const Field *field, Builder *builder, uint64_t value) noexcept nogil:
    if field.op == OP_INT32 or field.op == OP_FOUR:
        return append_32(builder, <int32_t>value)
    if field.op == OP_INT64 or field.op == OP_EIGHT:
        return append_64(builder, <int64_t>value)
    if field.op == OP_BOOL:
        return append_boolean(builder, value != 0)
    if field.op == OP_SINT32:
        return append_32(builder, <int32_t>unzigzag(<uint32_t>value))
    if field.op == OP_SINT64:
        return append_64(builder, unzigzag(value))
    return append_enum(tables, field, builder, <int32_t>value)


cdef int append_time(Builder *builder, const uint8_t *at, int64_t size) noexcept nogil:
    """Append the microseconds of a Timestamp or a Duration, rounded down."""
    cdef Cursor cursor
    cdef uint32_t tag
    cdef int64_t seconds = 0, micros
    cdef int32_t nanos = 0
    cursor.at, cursor.end, cursor.reason = at, at + size, OK
    while cursor.at < cursor.end:
        tag = read_tag(&cursor)
        if tag == 8:
            seconds = <int64_t>read_varint(&cursor)
        elif tag == 16:
            nanos = <int32_t>read_varint(&cursor)
        elif cursor.reason == OK:
            if tag & 7 == WIRE_GROUP:
                skip_group(&cursor, tag >> 3)
            elif tag & 7 == WIRE_END:
                return BAD_GROUP
            else:
                skip_plain(&cursor, tag & 7)
    if cursor.reason != OK:
        return cursor.reason
    micros = nanos // 1000
    if nanos < 0 and micros * 1000 != nanos:  # C rounds towards zero
        micros -= 1
    if klog_pb_times(seconds, 1000000, &seconds) or klog_pb_plus(seconds, micros, &seconds):
        return TIME_TOO_LARGE
    return append_64(builder, seconds)


cdef int append_content(Tables *tables, const Field *field, int32_t slot, const uint8_t *at, int64_t size) noexcept nogil:
    """Append what has a size, or is a group."""
    cdef bint inside
    if field.op == OP_STRING and not is_text(at, size):
        return NOT_UTF8
    if field.op == OP_STRING or field.op == OP_BYTES:
        inside = tables.data <= at <= tables.limit
        return append_bytes(&tables.builders[slot], at, size, tables.limit if inside else at + size)
    if field.op == OP_TIMESTAMP or field.op == OP_DURATION:
        return append_time(&tables.builders[slot], at, size)
    return decode_message(tables, &tables.messages[field.message], at, at + size, field.shape == SHAPE_MAP)


cdef int append_merged(Tables *tables, const Field *field, const Seen *seen) noexcept nogil:
    """Append a message that is there several times: all their fields, one after the other."""
    cdef Run run
    cdef uint8_t *merged
    cdef int64_t total = seen.size, number = seen.run
    cdef int state
    while number:
        run = run_of(tables, number)[0]
        total += run.end - run.at
        number = run.next
    merged = <uint8_t *>malloc(max(total, 1))
    if merged == NULL:
        return NO_MEMORY
    total, number = 0, seen.run
    while number:
        run = run_of(tables, number)[0]
        memcpy(merged + total, run.at, run.end - run.at)
        total += run.end - run.at
        number = run.next
    memcpy(merged + total, seen.at, seen.size)
    state = append_content(tables, field, field.slot, merged, total + seen.size)
    free(merged)
    return state


cdef int append_single(Tables *tables, const Field *field, const Seen *seen) noexcept nogil:
    cdef Builder *builder = &tables.builders[field.slot]
    cdef uint64_t value
    cdef const uint8_t *text
    if seen.count == 0:
        if field.required:
            return MISSING
        if field.nullable:
            return NO_MEMORY if append_empty(tables.builders, field.slot) < 0 else OK
        if field.op > OP_EIGHT:
            text = tables.constants + field.text
            return append_content(tables, field, field.slot, text, field.text_size)
        value = <uint32_t>field.default_low | <uint64_t><uint32_t>field.default_high << 32
        return append_number(tables, field, builder, value)
    if field.op <= OP_EIGHT:
        return append_number(tables, field, builder, seen.value)
    if seen.count > 1 and field.op >= OP_MESSAGE:
        return append_merged(tables, field, seen)
    return append_content(tables, field, field.slot, seen.at, seen.size)


cdef int append_items(Tables *tables, const Field *field, const Seen *seen) noexcept nogil:
    """Append the elements of a list or the entries of a map, and its end."""
    cdef Builder *builder = &tables.builders[field.slot]
    cdef int32_t slot = field.slot + 1
    cdef int64_t length = last_end(builder)
    cdef int64_t number = seen.run
    cdef Run run
    cdef Cursor cursor, packed_items
    cdef const uint8_t *at
    cdef int64_t size
    cdef uint64_t value
    cdef uint32_t tag
    cdef int state
    cdef int64_t text_bytes = tables.builders[slot].data.size
    if append_present(builder) < 0:
        return NO_MEMORY
    while number:
        run = run_of(tables, number)[0]  # a copy: runs of messages in it are added behind, and may move all
        number = run.next
        cursor.at, cursor.end, cursor.reason = run.at, run.end, OK
        while cursor.at < cursor.end:
            tag = read_tag(&cursor)
            if not is_packable(field.op):
                read_content(&cursor, field, &at, &size)
                if field.message >= 0:
                    tables.room -= tables.messages[field.message].empty_bytes
                    if tables.room < 0:
                        return TOO_MANY_ABSENT
                state = append_content(tables, field, slot, at, size)
                if state == NO_ENTRY:
                    continue
                if state != OK:
                    return state
                length += 1
                continue
            packed_items.reason = OK
            if <int32_t>(tag & 7) == field.wire:
                packed_items.at, packed_items.end = cursor.at, cursor.end
            else:
                size = read_size(&cursor)
                packed_items.at, packed_items.end = cursor.at, cursor.at + size
            while packed_items.at < packed_items.end:
                value = read_plain(&packed_items, field.wire)
                if packed_items.reason != OK:
                    return packed_items.reason
                if not field.enum_closed or enum_index(tables, field, <int32_t>value) >= 0:
                    state = append_number(tables, field, &tables.builders[slot], value)
                    if state != OK:
                        return state
                    if field.op == OP_ENUM:
                        tables.room -= tables.builders[slot].data.size - text_bytes
                        text_bytes = tables.builders[slot].data.size
                        if tables.room < 0:
                            return TOO_MANY_ABSENT
                    length += 1
                if <int32_t>(tag & 7) == field.wire:
                    break
            cursor.at = packed_items.at
    if length > INT32_MAX:
        return TOO_LARGE
    return append_end(&builder.offsets, length)


cdef int decode_message(
    Tables *tables, const Message *message, const uint8_t *at, const uint8_t *end, bint is_entry
) noexcept nogil:
    """Append a message to its columns. A reason; NO_ENTRY if it is an entry of a map that does not count.

    That is one with a value of a closed enum that this has not; with unknown fields none does, as in google.protobuf.
    """
    cdef Cursor cursor
    cdef int32_t index
    cdef const Field *field
    cdef int64_t runs_before = tables.runs.size
    cdef int state
    cursor.at, cursor.end, cursor.reason = at, end, OK
    state = seek_fields(tables, message, &cursor)
    if state != OK:
        return state
    if is_entry and tables.has_unknown:
        tables.runs.size = runs_before
        return NO_ENTRY
    if append_present(&tables.builders[message.slot]) < 0:
        return NO_MEMORY
    for index in range(message.first_field, message.first_field + message.field_count):
        field = &tables.fields[index]
        tables.position = index
        if field.shape == SHAPE_SINGLE:
            state = append_single(tables, field, &tables.seen[index])
        else:
            state = append_items(tables, field, &tables.seen[index])
        if state != OK:
            return state
    tables.runs.size = runs_before
    return OK


cdef struct Failure:
    int32_t row
    int32_t reason
    int32_t position


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


cdef int decode_rows(const Rows *rows, Tables *tables, int64_t before, Bytes *failures) noexcept nogil:
    """Append all rows after the `before` ones; NO_MEMORY or OK."""
    cdef int64_t row, at, end
    cdef int state
    cdef Failure failure
    for row in range(rows.count):
        at = rows.first + row
        if (rows.programs != NULL and rows.programs[row] < 0) or (
            rows.validity != NULL and not rows.validity[at >> 3] >> (at & 7) & 1
        ):
            if append_empty(tables.builders, 0) < 0:
                return NO_MEMORY
            continue
        end = rows.offsets[at + 1]
        at = rows.offsets[at] + (rows.start if rows.starts == NULL else rows.starts[row])
        tables.position = -1
        tables.runs.size = 0  # a row that failed has left its runs
        if at < 0 or at > end or end > rows.size:
            state = TRUNCATED
        else:
            tables.room = BASE_ROOM + ROOM_OF_A_BYTE * (end - at)
            state = decode_message(tables, &tables.messages[0], rows.data + at, rows.data + end, False)
        if state == OK:
            continue
        truncate(tables.builders, 0, before + row)
        if state == NO_MEMORY or append_empty(tables.builders, 0) < 0:
            return NO_MEMORY
        failure.row = <int32_t>row
        failure.reason = state
        failure.position = tables.position
        if put(failures, &failure, sizeof(Failure)) < 0:
            return NO_MEMORY
    return OK


cdef class ColumnBuilders(Builders):
    """Builders of a message's columns."""

    cdef Tables _tables
    cdef list _views

    def __cinit__(self, layout, tables):
        """`tables` are those of `tables.MessageTables`."""
        cdef int64_t fields
        memset(&self._tables, 0, sizeof(Tables))
        self._views = [
            _View(one) for one in (tables.messages, tables.fields, tables.numbers, tables.enums, tables.constants)
        ]
        self._tables.messages = <const Message *>(<_View>self._views[0]).data()
        self._tables.fields = <const Field *>(<_View>self._views[1]).data()
        self._tables.numbers = <const int32_t *>(<_View>self._views[2]).data()
        self._tables.enums = <const int32_t *>(<_View>self._views[3]).data()
        self._tables.constants = <const uint8_t *>(<_View>self._views[4]).data()
        self._tables.builders = self._builders
        fields = (<_View>self._views[1]).view.len // <int64_t>sizeof(Field)
        self._tables.seen = <Seen *>calloc(fields + 1, sizeof(Seen))
        self._tables.current = <int32_t *>calloc(tables.oneof_count + 1, sizeof(int32_t))
        if self._tables.seen == NULL or self._tables.current == NULL:
            raise MemoryError

    def __dealloc__(self):
        free(self._tables.seen)
        free(self._tables.current)

    def decode(self, which, data, offsets, validity, int64_t first, int64_t count, starts, int64_t start):
        """Append `count` rows: values [first, first + count) of a binary column.

        `offsets` are INT32, `validity` a bitmap or None, as Arrow has them. `which`, INT32 a row, is negative for a row
        that is to be null. A row's record begins `starts` (INT32 a row), or if that is None `start`, bytes into its
        value. Returns tuples (row, reason, field) of the rows that do not decode; they are null.
        """
        cdef _View data_view = _View(data), offset_view = _View(offsets), valid_view = _View(validity)
        cdef _View which_view = _View(which), start_view = _View(starts)
        cdef Rows rows
        cdef Bytes failures
        cdef int64_t i
        cdef int state
        cdef const Failure *failed_rows
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
        memset(&failures, 0, sizeof(Bytes))
        self._is_busy = True
        try:
            self._prepare(count)
            self._tables.data = rows.data
            self._tables.limit = rows.data + rows.size
            with nogil:
                state = decode_rows(&rows, &self._tables, self._rows, &failures)
            if state != OK:
                truncate(self._builders, 0, self._rows)
                raise MemoryError
            self._rows += count
            failed_rows = <const Failure *>failures.data
            return [
                (failed_rows[i].row, failed_rows[i].reason, failed_rows[i].position)
                for i in range(failures.size // <int64_t>sizeof(Failure))
            ]
        finally:
            self._is_busy = False
            free(failures.data)
            free(self._tables.runs.data)
            memset(&self._tables.runs, 0, sizeof(Bytes))
