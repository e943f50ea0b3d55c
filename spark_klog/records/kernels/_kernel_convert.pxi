# Conversion of records of magic 2 to messages of magic 0 and 1.


def message_set(body, int64_t position, int64_t count, int64_t most, int64_t base_offset, int64_t base_timestamp,
                append_time, int64_t first, int magic, bint is_inner):
    """See `contract.Kernel.message_set`."""
    cdef Views views = Views()
    cdef Record record
    cdef Bytes target
    cdef int64_t size = len(body), read = 0, records = 0, headers = 0, last = 0, latest = INT64_MIN, shift = 0
    cdef const uint8_t *start = views.address(body, size)
    cdef const uint8_t *at = start + position
    cdef const uint8_t *stop = start + size
    cdef int64_t timestamp, offset
    cdef bint is_append_time = append_time is not None
    cdef int64_t time_of_all = append_time if is_append_time else 0
    cdef int attributes = APPEND_TIME_BIT if is_append_time and magic and not is_inner else 0
    cdef int state = OK
    if not 0 <= position <= size:
        raise ValueError(f"position {position}")
    memset(&target, 0, sizeof(Bytes))
    try:
        # messages are larger than records, by 16 bytes or more
        prepare(&target, min(size - position, 64 * most) + 32 * min(count, most, (size - position) // SMALLEST_RECORD))
        with nogil:
            while read < count and read < most:
                if not read_record(at, stop, &record) or record.delta > INT64_MAX - base_offset:
                    state = DAMAGED
                    break
                if record.header_count:
                    state = add_headers(&record, NULL)
                elif record.headers != record.end:
                    state = DAMAGED
                if state != OK:
                    break
                at = record.end
                read += 1
                offset = base_offset + record.delta
                if offset < first:
                    continue
                timestamp = <int64_t>(<uint64_t>base_timestamp + <uint64_t>record.time_delta)
                if is_append_time:
                    timestamp = time_of_all
                if records == 0 and is_inner and magic:
                    shift = offset
                state = put_message(&target, &record, magic, attributes, offset - shift, timestamp)
                if state != OK:
                    break
                latest = max(latest, timestamp)
                last = offset
                records += 1
                headers += record.header_count
            if state == OK and read == count and at != stop:
                state = LEFT_OVER
        if state == NO_MEMORY:
            raise MemoryError
        if state == TOO_LARGE:
            raise DecodeError(f"record of offset {offset} is too large for a message")
        if state == LEFT_OVER:
            raise DecodeError(f"{stop - at} bytes left over after {count} records")
        if state != OK:
            raise DecodeError(f"record at position {at - start} is damaged or cut off")
        return new_tuple(MessageRun, (taken(&target), at - start, read, records, headers, last, latest))
    finally:
        release(&target)


cdef int put_message(Bytes *target, const Record *record, int magic, int attributes, int64_t offset,
                     int64_t timestamp) noexcept nogil:
    """Append a message. A state."""
    cdef int64_t head = HEADER_1 if magic else HEADER_0
    cdef int64_t size = head + 8 + max(record.key_size, <int64_t>0) + max(record.value_size, <int64_t>0)
    cdef uint8_t *at
    cdef uint8_t *field
    if size > INT32_MAX:
        return TOO_LARGE
    if reserve(target, size) < 0:
        return NO_MEMORY
    at = target.data + target.size
    set_big(at, <uint64_t>offset, 8)
    set_big(at + 8, <uint64_t>(size - PREFIX_SIZE), 4)
    at[MAGIC_POSITION] = <uint8_t>magic
    at[MAGIC_POSITION + 1] = <uint8_t>attributes
    if magic:
        set_big(at + HEADER_0, <uint64_t>timestamp, 8)
    field = put_field(at + head, record.key, record.key_size)
    put_field(field, record.value, record.value_size)
    set_big(at + PREFIX_SIZE, crc32_of(at + CRC_START, size - CRC_START), 4)
    target.size += size
    return OK


cdef inline uint8_t *put_field(uint8_t *at, const uint8_t *value, int64_t size) noexcept nogil:
    set_big(at, <uint64_t>size, 4)
    if size > 0:
        memcpy(at + 4, value, size)
        at += size
    return at + 4
