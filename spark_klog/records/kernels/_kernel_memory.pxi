# Growing buffers, and reuse of the memory that Arrow is done with.
#
# A page fault costs far more than filling the page. So Arrow gets a full buffer without a copy, and when Arrow drops
# it, its memory becomes a spare for the next batch of columns.

cdef struct Bytes:
    uint8_t *data
    int64_t size
    int64_t capacity
    int64_t usual  # capacity to start the next buffer with


cdef struct Block:
    uint8_t *data
    int64_t capacity


cdef enum:
    MAX_SPARES = 32
    SMALLEST_SPARE = 64 * 1024  # malloc reuses smaller blocks well
    SMALLEST_BUFFER = 4096

# Spare blocks, the oldest first; use all of this with the GIL only.
cdef Block spares[MAX_SPARES]
cdef int spare_count = 0
cdef int64_t spare_bytes = 0
cdef int64_t spare_limit = 64 * 1024 * 1024


cdef Block without_spare(int index) noexcept:
    """Take a spare block out of the list."""
    global spare_count, spare_bytes
    cdef Block block = spares[index]
    spare_count -= 1
    spare_bytes -= block.capacity
    memmove(&spares[index], &spares[index + 1], (spare_count - index) * sizeof(Block))
    return block


cdef void give_back(uint8_t *data, int64_t capacity) noexcept:
    """Keep a block as a spare, or free it; if there are too many spares, free the oldest."""
    global spare_count, spare_bytes
    if capacity < SMALLEST_SPARE or capacity > spare_limit:
        free(data)
        return
    while spare_count == MAX_SPARES or spare_bytes + capacity > spare_limit:
        free(without_spare(0).data)
    spares[spare_count].data = data
    spares[spare_count].capacity = capacity
    spare_count += 1
    spare_bytes += capacity


cdef Block spare_block(int64_t capacity) noexcept:
    """Take the smallest spare block of at least `capacity` bytes; NULL if there is none, or `capacity` is small.

    Of equal ones take the newest: the CPU's cache may still have it.
    """
    cdef Block none
    cdef int best = -1, i
    memset(&none, 0, sizeof(Block))
    if capacity < SMALLEST_SPARE:
        return none
    for i in range(spare_count):
        if spares[i].capacity >= capacity and (best < 0 or spares[i].capacity <= spares[best].capacity):
            best = i
    return none if best < 0 else without_spare(best)


def limit_spare_memory(int64_t size):
    """Keep at most `size` bytes of spare memory (default 64 MiB), and free the rest.

    With 0 every buffer comes from malloc and goes back to it, for tools that watch malloc.
    """
    global spare_limit
    spare_limit = max(size, 0)
    while spare_bytes > spare_limit:
        free(without_spare(0).data)


cdef class Memory:
    """A filled buffer: owns its block, and gives it back when its last view is gone."""

    cdef Block _block
    cdef int64_t _size

    def __getbuffer__(self, Py_buffer *view, int flags):
        PyBuffer_FillInfo(view, self, self._block.data, self._size, 0, flags)

    def __dealloc__(self):
        if self._block.data != NULL:
            give_back(self._block.data, self._block.capacity)


cdef object taken(Bytes *buffer):
    """Move the content into a Python buffer."""
    cdef Memory memory
    if buffer.size == 0:
        return b""
    memory = Memory.__new__(Memory)
    memory._block.data = buffer.data
    memory._block.capacity = buffer.capacity
    memory._size = buffer.size
    # the next buffer will be similar; but one large body must not make all later buffers large
    buffer.usual = buffer.capacity if buffer.size > buffer.capacity / 4 else 2 * buffer.size
    buffer.data = NULL
    buffer.size = buffer.capacity = 0
    return memoryview(memory)


cdef inline int64_t grown_capacity(const Bytes *buffer, int64_t extra) noexcept nogil:
    """Capacity with room for `extra` more bytes: at least twice the current one, and that of the last buffer."""
    return max(buffer.size + extra, 2 * buffer.capacity, buffer.usual, <int64_t>SMALLEST_BUFFER)


cdef int reserve(Bytes *buffer, int64_t extra) noexcept nogil:
    """Make room for `extra` more bytes; -1 if out of memory."""
    cdef int64_t capacity
    cdef void *grown
    if buffer.data != NULL and extra <= buffer.capacity - buffer.size:
        return 0
    capacity = grown_capacity(buffer, extra)
    grown = realloc(buffer.data, capacity)
    if grown == NULL:
        return -1
    buffer.data = <uint8_t *>grown
    buffer.capacity = capacity
    return 0


cdef int prepare(Bytes *buffer, int64_t extra) except -1:
    """As `reserve`, but with the GIL: uses a spare block if there is one. `MemoryError`."""
    cdef Block block
    if buffer.data != NULL and extra <= buffer.capacity - buffer.size:
        return 0
    block = spare_block(grown_capacity(buffer, extra))
    if block.data == NULL:
        if reserve(buffer, extra) < 0:
            raise MemoryError
        return 0
    if buffer.data != NULL:
        memcpy(block.data, buffer.data, buffer.size)
        give_back(buffer.data, buffer.capacity)
    buffer.data = block.data
    buffer.capacity = block.capacity
    return 0


cdef void release(Bytes *buffer) noexcept:
    """Give the memory back; the buffer is not used again."""
    if buffer.data != NULL:
        give_back(buffer.data, buffer.capacity)


cdef inline int put(Bytes *buffer, const void *data, int64_t size) noexcept nogil:
    """Append bytes; -1 if out of memory."""
    if reserve(buffer, size) < 0:
        return -1
    if size:
        memcpy(buffer.data + buffer.size, data, size)
    buffer.size += size
    return 0
