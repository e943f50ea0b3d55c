# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
"""The native kernel of Avro: runs programs (opcodes.py) without Python objects and without the GIL.

Memory safety, everywhere below:
- programs come from program.py and are trusted; records are not;
- all reads are in [at, end): a size from the data is compared with the bytes left before it is used;
- an array is not allocated by its count: its items are appended one by one, and each has a byte, or one of a few
  items without bytes that a row may have;
- a row that fails is cut off the builders again, to the lengths that the rows before it have.

_kernel_memory.pxi   growing buffers, their way to Arrow and back
_kernel_utf8.pxi     whether bytes are UTF-8
_builders.pxi        columns that values are appended to
_avro_decode.pxi     programs that read
_avro_encode.pxi     programs that write
"""

from libc.stdint cimport INT32_MAX, INT32_MIN, INT64_MAX, INT64_MIN, int32_t, int64_t, uint8_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free, malloc, realloc
from libc.string cimport memcmp, memcpy, memmove, memset

from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_FillInfo, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytes cimport PyBytes_FromStringAndSize

# As in opcodes.py, which says when to raise it.
VERSION = 4


cdef enum:
    MAX_DEPTH = 64  # as in schema.py
    MAX_EMPTY_ITEMS = 1024
    # as in columns/room.py
    BASE_ROOM = 4 * 1024 * 1024
    ROOM_OF_A_BYTE = 64


# As in opcodes.py.
cdef enum:
    OP_END
    OP_INT
    OP_LONG
    OP_INT_LONG
    OP_SCALED
    OP_TIME
    OP_NUMBER_FLOAT
    OP_NUMBER_DOUBLE
    OP_FOUR
    OP_EIGHT
    OP_FLOAT_DOUBLE
    OP_BOOLEAN
    OP_STRING
    OP_BYTES
    OP_FIXED_BYTES
    OP_FIXED
    OP_DECIMAL
    OP_DURATION
    OP_ENUM
    OP_ENUM_INDEX
    OP_UNION
    OP_JUMP
    OP_EMPTY
    OP_PRESENT
    OP_LIST
    OP_NEXT
    OP_DEFAULT
    OP_DEFAULT_END
    OP_MISMATCH
    OP_SKIP_NUMBER
    OP_SKIP_BYTES
    OP_SKIP_FIXED
    OP_SKIP_BOOLEAN
    OP_SKIP_ENUM
    OP_REST


cdef enum:
    WRITE_END
    WRITE_LITERAL
    WRITE_BRANCH
    WRITE_REQUIRED
    WRITE_INT
    WRITE_LONG
    WRITE_SCALED
    WRITE_FOUR
    WRITE_EIGHT
    WRITE_BOOLEAN
    WRITE_BYTES
    WRITE_SIZED
    WRITE_EXACT
    WRITE_FIXED
    WRITE_DECIMAL
    WRITE_DURATION
    WRITE_ENUM
    WRITE_LIST
    WRITE_NEXT
    WRITE_MEMBERS
    WRITE_JUMP


cdef enum:
    KIND_NOTHING
    KIND_FIXED
    KIND_BOOLEAN
    KIND_VARIABLE
    KIND_LIST
    KIND_STRUCT


cdef enum:
    NO_MEMORY = -1
    OK = 0
    TRUNCATED = 1
    NUMBER_TOO_LONG = 2
    INT_TOO_LARGE = 3
    NEGATIVE_LENGTH = 4
    NO_SUCH_BRANCH = 5
    BRANCH_MISMATCH = 6
    NO_SUCH_SYMBOL = 7
    SYMBOL_UNKNOWN = 8
    NOT_UTF8 = 9
    LEFT_OVER = 10
    NOT_BOOLEAN = 11
    DECIMAL_TOO_LARGE = 12
    TIME_TOO_LARGE = 13
    TOO_MANY_EMPTY_ITEMS = 14
    TOO_LARGE = 15
    IS_NULL = 16
    NOT_A_SYMBOL = 17
    WRONG_SIZE = 18
    SEVERAL_MEMBERS = 19
    TOO_MANY_ABSENT = 20


include "../../records/kernels/_kernel_memory.pxi"
include "../../records/kernels/_kernel_utf8.pxi"
include "../_builders.pxi"
include "_avro_decode.pxi"
include "_avro_encode.pxi"
