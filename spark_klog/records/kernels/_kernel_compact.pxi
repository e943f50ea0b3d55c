# Compaction: the table of the keys' last offsets (layout: contract.py), and batches that lose records.

cdef extern from *:
    """
    #if defined(__GNUC__) || defined(__clang__)
      #define KLOG_PREFETCH(at) __builtin_prefetch(at)
    #else
      #define KLOG_PREFETCH(at) ((void)(at))
    #endif
    """
    void KLOG_PREFETCH(const void *at) nogil

cdef enum:
    DIGEST_SIZE = 16
    SLOT_SIZE = 24
    AT_ONCE = 32  # keys whose slots are fetched from memory at the same time
    BATCH_ATTRIBUTES = 21
    KEPT_BITS = 0x38  # timestamp type, transactional, control
    HORIZON_BIT = 0x40

# The state of a walk that found a record or a key that the caller must look at.
cdef enum:
    FULL = -10


cdef struct Digest:
    uint64_t first
    uint64_t second


cdef struct Table:
    uint8_t *slots
    uint64_t count
    uint64_t size  # slots in use
    uint64_t capacity
    uint64_t secret_first, secret_second


cdef int open_table(Table *table, Views views, offsets) except -1:
    """Read the attributes of a `contract.KeyOffsets`. `ValueError` if they do not match each other."""
    cdef bytes secret = offsets.secret
    if len(secret) != DIGEST_SIZE or offsets.slots < 2:
        raise ValueError("a table needs a secret of 16 bytes and two slots")
    table.count = offsets.slots
    table.size = offsets.size
    table.capacity = offsets.capacity
    table.slots = <uint8_t *>views.address(offsets.table, table.count * SLOT_SIZE)
    if table.slots == NULL or views._views[views._count - 1].readonly:
        raise ValueError("a table can't be written to")
    memcpy(&table.secret_first, <const char *>secret, 8)
    memcpy(&table.secret_second, <const char *>secret + 8, 8)
    return 0


cdef inline uint64_t rotated(uint64_t value, int bits) noexcept nogil:
    return value << bits | value >> (64 - bits)


cdef inline void sip_rounds(uint64_t *v, int rounds) noexcept nogil:
    cdef int i
    for i in range(rounds):
        v[0] += v[1]
        v[2] += v[3]
        v[1] = rotated(v[1], 13) ^ v[0]
        v[3] = rotated(v[3], 16) ^ v[2]
        v[0] = rotated(v[0], 32) + v[3]
        v[2] += v[1]
        v[3] = rotated(v[3], 21) ^ v[0]
        v[1] = rotated(v[1], 17) ^ v[2]
        v[2] = rotated(v[2], 32)


cdef inline void sip_absorb(uint64_t *v, uint64_t word) noexcept nogil:
    v[3] ^= word
    sip_rounds(v, 2)
    v[0] ^= word


cdef Digest digest_of(const Table *table, const uint8_t *key, int64_t size) noexcept nogil:
    """SipHash-2-4 with 128 bits."""
    cdef uint64_t[4] v
    cdef uint64_t word
    cdef int64_t i, whole = size & ~7
    cdef Digest digest
    v[0] = table.secret_first ^ 0x736F6D6570736575U
    v[1] = table.secret_second ^ 0x646F72616E646F6DU ^ 0xEE
    v[2] = table.secret_first ^ 0x6C7967656E657261U
    v[3] = table.secret_second ^ 0x7465646279746573U
    for i in range(0, whole, 8):
        memcpy(&word, key + i, 8)
        sip_absorb(v, word)
    word = <uint64_t>size << 56
    for i in range(whole, size):
        word |= <uint64_t>key[i] << 8 * (i & 7)
    sip_absorb(v, word)
    v[2] ^= 0xEE
    sip_rounds(v, 4)
    digest.first = v[0] ^ v[1] ^ v[2] ^ v[3]
    v[1] ^= 0xDD
    sip_rounds(v, 4)
    digest.second = v[0] ^ v[1] ^ v[2] ^ v[3]
    KLOG_PREFETCH(table.slots + digest.first % table.count * SLOT_SIZE)
    return digest


cdef uint8_t *slot_of(const Table *table, const Digest *digest, int64_t *after) noexcept nogil:
    """The digest's slot, or the free one for it, and its offset + 1; NULL and 0 if others have all slots."""
    cdef uint64_t slot = digest.first % table.count
    cdef uint64_t step = 0, i
    cdef uint8_t *at
    cdef Digest stored
    for i in range(table.count):
        at = table.slots + slot * SLOT_SIZE
        memcpy(&stored, at, DIGEST_SIZE)
        memcpy(after, at + DIGEST_SIZE, 8)
        if after[0] == 0 or (stored.first == digest.first and stored.second == digest.second):
            return at
        if i == 0:
            step = digest.second % (table.count - 1) + 1
        slot += step
        if slot >= table.count:
            slot -= table.count
    after[0] = 0
    return NULL


cdef bint put_offset(Table *table, const Digest *digest, int64_t offset) noexcept nogil:
    """Set a key's offset; False if the table is full and does not have the key."""
    cdef int64_t after
    cdef uint8_t *at = slot_of(table, digest, &after)
    if at == NULL or (after == 0 and table.size >= table.capacity):
        return False
    table.size += after == 0
    after = offset + 1
    memcpy(at, digest, DIGEST_SIZE)
    memcpy(at + DIGEST_SIZE, &after, 8)
    return True


cdef inline bint is_last(const Table *table, const Digest *digest, int64_t offset) noexcept nogil:
    """Whether the table has no later offset for the key."""
    cdef int64_t after
    slot_of(table, digest, &after)
    return offset >= after - 1


def put_keys(offsets, columns):
    """See `contract.Kernel.put_keys`. `ValueError` if the columns' buffers do not match each other."""
    cdef Views views = Views()
    cdef Table table
    cdef int64_t count = columns.count, row = 0, many, i, offset = 0
    cdef int64_t[AT_ONCE] sizes
    cdef Digest[AT_ONCE] digests
    cdef const uint8_t *key = NULL
    cdef const uint8_t *numbers = views.address(columns.offset, 8 * count)
    cdef Source source = views.source(columns.key, count)
    cdef int state = OK
    open_table(&table, views, offsets)
    with nogil:
        while row < count and state == OK:
            many = min(count - row, <int64_t>AT_ONCE)
            for i in range(many):
                sizes[i] = value_at(&source, row + i, &key)
                if sizes[i] == DAMAGED:
                    state = DAMAGED
                    break
                if sizes[i] >= 0:
                    digests[i] = digest_of(&table, key, sizes[i])
            if state == DAMAGED:
                break
            for i in range(many):
                offset = int64_at(numbers, row + i)
                if sizes[i] >= 0 and not put_offset(&table, &digests[i], offset):
                    state = FULL
                    break
            row += many
    offsets.size = table.size
    if state == DAMAGED:
        raise ValueError("offsets of a key lie outside its column's data")
    return offset if state == FULL else None


# What was found out about the records of a batch, or of several.
cdef struct Tally:
    int64_t kept
    int64_t tombstones  # among the kept ones
    int64_t without_key


cdef inline bint is_kept(const Table *table, const Digest *digest, int64_t offset, bint has_key, bint has_value,
                         int64_t end, bint retains_tombstones, Tally *tally) noexcept nogil:
    cdef bint kept = True
    if offset < end:
        if has_key:
            kept = (has_value or retains_tombstones) and is_last(table, digest, offset)
        else:
            kept = False
            tally.without_key += 1
    tally.kept += kept
    tally.tombstones += kept and not has_value
    return kept


def kept_rows(offsets, columns, int64_t end, bint retains_tombstones):
    """See `contract.Kernel.kept_rows`. `ValueError` if the columns' buffers do not match each other."""
    cdef Views views = Views()
    cdef Table table
    cdef Tally tally
    cdef int64_t count = columns.count, row = 0, many, i
    cdef int64_t[AT_ONCE] sizes
    cdef Digest[AT_ONCE] digests
    cdef const uint8_t *key = NULL
    cdef const uint8_t *numbers = views.address(columns.offset, 8 * count)
    cdef Source keys = views.source(columns.key, count)
    cdef Source values = views.source(columns.value, count)
    cdef int state = OK
    open_table(&table, views, offsets)
    memset(&tally, 0, sizeof(Tally))
    flags = PyBytes_FromStringAndSize(NULL, count)
    cdef uint8_t *flag = <uint8_t *><char *>flags
    with nogil:
        while row < count and state == OK:
            many = min(count - row, <int64_t>AT_ONCE)
            for i in range(many):
                sizes[i] = value_at(&keys, row + i, &key)
                if sizes[i] == DAMAGED:
                    state = DAMAGED
                    break
                if sizes[i] >= 0:
                    digests[i] = digest_of(&table, key, sizes[i])
            if state == DAMAGED:
                break
            for i in range(many):
                flag[row + i] = is_kept(&table, &digests[i], int64_at(numbers, row + i), sizes[i] >= 0,
                                        not is_null(&values, row + i), end, retains_tombstones, &tally)
            row += many
    if state == DAMAGED:
        raise ValueError("offsets of a key lie outside its column's data")
    return flags, tally.tombstones > 0, tally.without_key


# A body of which some records are kept. The base timestamp is given, or becomes that of the first kept record.
cdef struct Retained:
    const uint8_t *body
    int64_t size
    int64_t count
    const uint8_t *flags
    int64_t base_timestamp
    int64_t append_time
    bint is_append_time
    bint has_base
    int64_t base
    int64_t latest


cdef int put_retained(Bytes *target, Retained *retained) noexcept nogil:
    """Append the kept records; the timestamps are relative to the new base. A state."""
    cdef const uint8_t *at = retained.body
    cdef const uint8_t *stop = at + retained.size
    cdef const uint8_t *end
    cdef const uint8_t *rest
    cdef uint8_t *out
    cdef int64_t i, length, delta, timestamp
    retained.latest = -1
    for i in range(retained.count):
        at = read_varint(at, stop, &length)
        if at == NULL or length < 1 or length > stop - at:
            return DAMAGED
        end = at + length
        if retained.flags[i]:
            rest = read_varint(at + 1, end, &delta)
            if rest == NULL:
                return DAMAGED
            timestamp = <int64_t>(<uint64_t>retained.base_timestamp + <uint64_t>delta)
            if retained.is_append_time:
                timestamp = retained.append_time
            if not retained.has_base:
                retained.has_base = True
                retained.base = timestamp
            retained.latest = max(retained.latest, timestamp)
            delta = <int64_t>(<uint64_t>timestamp - <uint64_t>retained.base)
            length = 1 + varint_size(delta) + (end - rest)
            if reserve(target, length + MAX_VARINT) < 0:
                return NO_MEMORY
            out = write_varint(target.data + target.size, length)
            out[0] = at[0]
            out = write_varint(out + 1, delta)
            memcpy(out, rest, end - rest)
            target.size = out + (end - rest) - target.data
        at = end
    return OK if at == stop else LEFT_OVER


def retained(body, flags, int64_t base_timestamp, append_time, base):
    """See `contract.Kernel.retained`."""
    cdef Views views = Views()
    cdef Retained task
    cdef Bytes target
    cdef int state
    memset(&task, 0, sizeof(Retained))
    memset(&target, 0, sizeof(Bytes))
    task.count = len(flags)
    task.flags = views.address(flags, task.count)
    task.size = len(body)
    task.body = views.address(body, task.size)
    task.base_timestamp = base_timestamp
    task.is_append_time = append_time is not None
    task.append_time = append_time if task.is_append_time else 0
    task.has_base = base is not None
    task.base = base if task.has_base else -1
    try:
        prepare(&target, task.size)
        with nogil:
            state = put_retained(&target, &task)
        if state == NO_MEMORY:
            raise MemoryError
        if state != OK:
            raise DecodeError(f"a body does not have {task.count} records")
        return taken(&target), task.base, task.latest
    finally:
        release(&target)


cdef int walk_kept(const Table *table, const Batch *batch, const uint8_t *at, int64_t end, bint retains_tombstones,
                   uint8_t *flags, Tally *tally) noexcept nogil:
    """Set the flag of each record of a plain batch at `at`. A state."""
    cdef const uint8_t *stop = at + batch.size
    cdef Record record
    cdef Digest[AT_ONCE] digests
    cdef int64_t[AT_ONCE] numbers
    cdef bint[AT_ONCE] have_key
    cdef bint[AT_ONCE] have_value
    cdef int64_t row = 0, many, i
    at += BATCH_HEADER
    while row < batch.count:
        many = min(batch.count - row, <int64_t>AT_ONCE)
        for i in range(many):
            if not read_record(at, stop, &record) or record.delta > INT64_MAX - 1 - batch.base_offset:
                return DAMAGED
            if record.header_count:
                if add_headers(&record, NULL) != OK:
                    return DAMAGED
            elif record.headers != record.end:
                return DAMAGED
            at = record.end
            numbers[i] = batch.base_offset + record.delta
            have_key[i] = record.key_size >= 0
            have_value[i] = record.value_size >= 0
            if have_key[i]:
                digests[i] = digest_of(table, record.key, record.key_size)
        for i in range(many):
            flags[row + i] = is_kept(table, &digests[i], numbers[i], have_key[i], have_value[i], end,
                                     retains_tombstones, tally)
        row += many
    return OK if at == stop else LEFT_OVER


cdef int put_batch(Bytes *target, const uint8_t *at, const Batch *batch, const uint8_t *flags, int64_t kept,
                   bint has_horizon, int64_t horizon) noexcept nogil:
    """Append a plain batch with its kept records, at least one. A state."""
    cdef Retained task
    cdef int64_t start = target.size
    cdef uint8_t *head
    cdef int state
    memset(&task, 0, sizeof(Retained))
    task.body = at + BATCH_HEADER
    task.size = batch.size - BATCH_HEADER
    task.count = batch.count
    task.flags = flags
    task.base_timestamp = batch.base_timestamp
    task.is_append_time = batch.is_append_time
    task.append_time = batch.max_timestamp
    task.has_base = has_horizon
    task.base = horizon
    if put(target, at, BATCH_HEADER) < 0:
        return NO_MEMORY
    state = put_retained(target, &task)
    if state != OK or target.size - start > INT32_MAX:
        target.size = start
        return state if state != OK else TOO_LARGE
    head = target.data + start
    set_big(head + 8, <uint64_t>(target.size - start - PREFIX_SIZE), 4)
    set_big(head + BATCH_ATTRIBUTES, at[BATCH_ATTRIBUTES + 1] & KEPT_BITS | (HORIZON_BIT if has_horizon else 0), 2)
    set_big(head + 27, <uint64_t>task.base, 8)
    set_big(head + 35, <uint64_t>task.latest, 8)
    set_big(head + 57, <uint64_t>kept, 4)
    set_big(head + BATCH_CRC, crc32c_of(head + BATCH_CRC_START, target.size - start - BATCH_CRC_START), 4)
    return OK


cdef bint is_among(const uint8_t *numbers, int64_t count, int64_t number) noexcept nogil:
    """Whether sorted numbers (INT64) have this one."""
    cdef int64_t low = 0, middle
    while low < count:
        middle = (low + count) // 2
        if int64_at(numbers, middle) < number:
            low = middle + 1
        elif int64_at(numbers, middle) > number:
            count = middle
        else:
            return True
    return False


def clean_batches(offsets, data, limits):
    """See `contract.Kernel.clean_batches`."""
    cdef Views views = Views()
    cdef Table table
    cdef Batch batch
    cdef Tally tally, before
    cdef Bytes target, flags
    cdef const uint8_t *at
    cdef int64_t size = len(data), position = 0, read = 0, written = 0
    cdef int64_t end = limits.end, now = limits.now, horizon = limits.horizon
    cdef int64_t kept
    cdef const uint8_t *start = views.address(data, size)
    cdef int64_t staying = len(limits.stays) // 8
    cdef const uint8_t *stays = views.address(limits.stays, 8 * staying)
    cdef bint has_horizon
    cdef int state = OK
    open_table(&table, views, offsets)
    memset(&tally, 0, sizeof(Tally))
    memset(&target, 0, sizeof(Bytes))
    memset(&flags, 0, sizeof(Bytes))
    try:
        prepare(&target, size)
        with nogil:
            while state == OK:
                at = start + position
                if not read_plain_batch(at, size - position, &batch) or batch.count > batch.size // SMALLEST_RECORD:
                    break
                if crc32c_of(at + BATCH_CRC_START, batch.size - BATCH_CRC_START) != batch.crc:
                    break
                kept = batch.count
                before = tally
                has_horizon = at[BATCH_ATTRIBUTES + 1] & HORIZON_BIT != 0
                if batch.count and batch.base_offset < end:
                    flags.size = 0
                    if reserve(&flags, batch.count) < 0:
                        state = NO_MEMORY
                        break
                    tally.kept = tally.tombstones = 0
                    if walk_kept(&table, &batch, at, end, not (has_horizon and batch.base_timestamp <= now),
                                 flags.data, &tally) != OK:
                        tally = before
                        break
                    kept = tally.kept
                if kept == 0:
                    if is_among(stays, staying, batch.last_offset):
                        tally = before
                        break
                elif batch.base_offset < end and not has_horizon and tally.tombstones and batch.last_offset < end:
                    state = put_batch(&target, at, &batch, flags.data, kept, True, horizon)
                elif kept == batch.count:
                    if put(&target, at, batch.size) < 0:
                        state = NO_MEMORY
                else:
                    state = put_batch(&target, at, &batch, flags.data, kept, has_horizon, batch.base_timestamp)
                if state != OK:
                    tally = before
                    break
                read += 1
                written += kept > 0
                position += batch.size
        if state == NO_MEMORY:
            raise MemoryError
        return new_tuple(CleanedRun, (position, taken(&target), read, written, tally.without_key))
    finally:
        release(&target)
        release(&flags)
