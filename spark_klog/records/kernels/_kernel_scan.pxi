# Scans of batches of magic 2, never of their records: for a log headers and checksums (see reference.py), for a reader
# the order of offsets (see offset_order.py).

cdef enum:
    LEADER_EPOCH = 12
    BATCH_CRC = 17
    PRODUCER_START = 43


cdef inline void set_big(uint8_t *at, uint64_t value, int size) noexcept nogil:
    cdef int i
    for i in range(size):
        at[i] = <uint8_t>(value >> (8 * (size - 1 - i)))


cdef object new_tuple = tuple.__new__


cdef bytes bytes_of(Bytes *buffer):
    """Move the content into Python bytes, and release the buffer."""
    content = PyBytes_FromStringAndSize(<char *>buffer.data, buffer.size)
    release(buffer)
    return content


def scan_batches(data, int64_t position, state, target, int64_t next_offset, leader_epoch):
    """See `contract.Kernel.scan_batches`."""
    cdef Py_buffer view
    cdef uint8_t *at
    cdef uint8_t entry[12]
    cdef Batch batch
    cdef Bytes offsets, times
    cdef bint assigns = leader_epoch is not None
    cdef int32_t epoch = leader_epoch if assigns else 0
    cdef int64_t since, timestamp, timestamp_offset, indexed, base, start, interval, largest = 0, start_of_crc
    since, timestamp, timestamp_offset, indexed = state
    base, start, interval = target
    if position < 0:
        raise ValueError(f"position {position}")
    memset(&offsets, 0, sizeof(Bytes))
    memset(&times, 0, sizeof(Bytes))
    producers = []
    whole = memoryview(data)
    PyObject_GetBuffer(whole, &view, PyBUF_WRITABLE if assigns else PyBUF_SIMPLE)
    try:
        while True:
            at = <uint8_t *>view.buf + position
            if not read_batch(at, view.len - position, &batch):
                break
            if assigns:
                if batch.count != batch.last_offset - batch.base_offset + 1:
                    break
                batch.last_offset = next_offset + batch.count - 1
            elif batch.base_offset < next_offset:
                break
            if difference(batch.last_offset, base) > INT32_MAX or start + position > INT32_MAX:
                break
            start_of_crc = position + BATCH_CRC_START
            if batch_crc(at + BATCH_CRC_START, batch.size - BATCH_CRC_START, whole, start_of_crc) != batch.crc:
                break
            if assigns:
                set_big(at, <uint64_t>next_offset, 8)
                set_big(at + 12, <uint32_t>epoch, 4)
            if big_64(at + PRODUCER_START) >= 0:
                producers.append(position)
            if batch.max_timestamp > timestamp:
                timestamp = batch.max_timestamp
                timestamp_offset = batch.last_offset
            if since > interval:
                set_big(entry, <uint64_t>(batch.last_offset - base), 4)
                set_big(entry + 4, <uint64_t>(start + position), 4)
                if put(&offsets, entry, 8) < 0:
                    raise MemoryError
                if timestamp > indexed:
                    set_big(entry, <uint64_t>timestamp, 8)
                    set_big(entry + 8, <uint64_t>(timestamp_offset - base), 4)
                    if put(&times, entry, 12) < 0:
                        raise MemoryError
                    indexed = timestamp
                since = 0
            since += batch.size
            largest = max(largest, batch.size)
            position += batch.size
            next_offset = batch.last_offset + 1
    finally:
        PyBuffer_Release(&view)
        offset_entries = bytes_of(&offsets)
        time_entries = bytes_of(&times)
    # as their constructors do, which are written in Python
    after = new_tuple(IndexState, (since, timestamp, timestamp_offset, indexed))
    run = (position, next_offset, largest, after, offset_entries, time_entries, producers)
    return new_tuple(BatchRun, run)


def plain_produced(data, int64_t limit):
    """See `contract.Kernel.plain_produced`."""
    cdef Py_buffer view
    cdef Batch batch
    cdef Record record
    cdef const uint8_t *at
    cdef const uint8_t *stop
    cdef int64_t i
    PyObject_GetBuffer(data, &view, PyBUF_SIMPLE)
    try:
        at = <const uint8_t *>view.buf
        stop = at + view.len
        if not read_plain_batch(at, view.len, &batch) or batch.size != view.len:
            return None
        if batch.count < 1 or batch.count != batch.last_offset - batch.base_offset + 1:
            return None
        if batch.base_timestamp < -1 or batch.max_timestamp < -1 or batch.count > limit // SMALLEST_RECORD:
            return None
        at += BATCH_HEADER
        for i in range(batch.count):
            if not read_record(at, stop, &record) or record.delta != i:
                return None
            if record.header_count and add_headers(&record, NULL) != OK:
                return None
            if not record.header_count and record.headers != record.end:
                return None
            at = record.end
        return batch.max_timestamp if at == stop else None
    finally:
        PyBuffer_Release(&view)


cdef bint is_batch(const uint8_t *at, int64_t left) noexcept:
    """Whether a whole batch of any magic begins at `at`, however impossible its other fields are."""
    cdef int64_t size
    if left < PREFIX_SIZE + SMALLEST_0 or at[MAGIC_POSITION] > 2:
        return False
    size = <int64_t><int32_t>big_32(at + 8) + PREFIX_SIZE
    return (BATCH_HEADER if at[MAGIC_POSITION] == 2 else PREFIX_SIZE + SMALLEST_0) <= size <= left


def ordered_batches(data, int64_t log_end):
    """See `contract.Kernel.ordered_batches`."""
    cdef Py_buffer view
    cdef Batch batch
    cdef int64_t position = 0, last = 0, size = 0, first = 0, following = -1, before = -1, offsets = 0
    cdef uint8_t *at
    cdef bint is_intact = False
    PyObject_GetBuffer(data, &view, PyBUF_SIMPLE)
    try:
        while read_batch(<uint8_t *>view.buf + position, view.len - position, &batch):
            if batch.base_offset < following or batch.last_offset >= log_end:
                return None
            before, first, following = following, batch.base_offset, batch.last_offset + 1
            last, size = position, batch.size
            offsets += following - first
            position += size
        if is_batch(<uint8_t *>view.buf + position, view.len - position):
            return None
        if not size:
            return None
        at = <uint8_t *>view.buf + last
        crc = batch_crc(at + BATCH_CRC_START, size - BATCH_CRC_START, memoryview(data), last + BATCH_CRC_START)
        is_intact = crc == big_32(at + BATCH_CRC)
        epoch = <int32_t>big_32(at + LEADER_EPOCH)
    finally:
        PyBuffer_Release(&view)
    return OrderedBatches(offsets, before, last, size, first, following, epoch, is_intact)
