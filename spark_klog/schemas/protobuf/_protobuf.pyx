# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
"""The native kernel of Protobuf: reads and writes messages by tables (tables.py) without Python objects and the GIL.

Memory safety, everywhere below:
- tables come from tables.py and are trusted; records are not;
- all reads are in [at, end): a size from the data is compared with the bytes left before it is used;
- messages nest as deep as the tables say, and unknown groups to a bound;
- a row that fails is cut off the builders again, to the lengths that the rows before it have.

_kernel_memory.pxi    growing buffers, their way to Arrow and back
_kernel_utf8.pxi      whether bytes are UTF-8
_builders.pxi         columns that values are appended to
_protobuf_wire.pxi    numbers and fields as bytes
_protobuf_decode.pxi  messages to columns
_protobuf_encode.pxi  columns to messages
"""

from libc.stdint cimport INT32_MAX, INT32_MIN, INT64_MAX, INT64_MIN, int32_t, int64_t, uint8_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free, malloc, realloc
from libc.string cimport memcmp, memcpy, memmove, memset

from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_FillInfo, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytes cimport PyBytes_FromStringAndSize

# As in tables.py, which says when to raise it.
VERSION = 4


# As in arrow_columns.py.
cdef enum:
    KIND_NOTHING
    KIND_FIXED
    KIND_BOOLEAN
    KIND_VARIABLE
    KIND_LIST
    KIND_STRUCT


# As in tables.py.
cdef enum:
    OP_INT32
    OP_INT64
    OP_SINT32
    OP_SINT64
    OP_BOOL
    OP_ENUM
    OP_FOUR
    OP_EIGHT
    OP_STRING
    OP_BYTES
    OP_MESSAGE
    OP_GROUP
    OP_TIMESTAMP
    OP_DURATION


cdef enum:
    SHAPE_SINGLE
    SHAPE_LIST
    SHAPE_MAP


cdef enum:
    NO_ENTRY = -2
    NO_MEMORY = -1
    OK = 0
    TRUNCATED = 1
    NUMBER_TOO_LONG = 2
    BAD_TAG = 3
    BAD_GROUP = 4
    NOT_UTF8 = 5
    MISSING = 6
    TIME_TOO_LARGE = 7
    TOO_LARGE = 8
    TOO_DEEP = 9
    IS_NULL = 10
    NOT_A_VALUE = 11
    TWO_OF_ONEOF = 12
    TOO_MANY_ABSENT = 13


# As in columns/room.py.
cdef enum:
    BASE_ROOM = 4 * 1024 * 1024
    ROOM_OF_A_BYTE = 64


include "../../records/kernels/_kernel_memory.pxi"
include "../../records/kernels/_kernel_utf8.pxi"
include "../_builders.pxi"
include "_protobuf_wire.pxi"
include "_protobuf_decode.pxi"
include "_protobuf_encode.pxi"
