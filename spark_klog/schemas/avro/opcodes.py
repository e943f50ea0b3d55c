"""What a program of the native kernel is made of; `_avro.pyx` has the same numbers, and `VERSION` says so.

A program is INT32 numbers: an opcode and its arguments, then the next opcode. Positions (`to`, `next`) are indexes of
numbers from the program's start. `slot` is the number of a column (columns.py); `constant` and `size` are a range of
the program's constant bytes.
"""

from __future__ import annotations

from enum import IntEnum, auto

from spark_klog.columns.room import TOO_MANY_ABSENT

#: Raise it with every change of a number or of a meaning here or in `_avro.pyx`.
VERSION = 4


class Op(IntEnum):
    """Opcodes of decoding, each with its arguments."""

    END = 0
    #: slot: an int, as INT32
    INT = auto()
    #: slot: a long, as INT64
    LONG = auto()
    #: slot: an int, as INT64
    INT_LONG = auto()
    #: slot, is_int, multiplier, divisor: a number in another unit, as INT64
    SCALED = auto()
    #: slot, is_int, multiplier, divisor, unit: a time of day, in the column's width; `unit` is its parts of a second
    TIME = auto()
    #: slot, is_int: a number as FLOAT
    NUMBER_FLOAT = auto()
    #: slot, is_int: a number as DOUBLE
    NUMBER_DOUBLE = auto()
    #: slot: a float as FLOAT
    FOUR = auto()
    #: slot: a double as DOUBLE
    EIGHT = auto()
    #: slot: a float as DOUBLE
    FLOAT_DOUBLE = auto()
    #: slot
    BOOLEAN = auto()
    #: slot: a string or bytes, which must be UTF-8
    STRING = auto()
    #: slot: a string or bytes, whatever they are
    BYTES = auto()
    #: slot, size: a fixed, as binary
    FIXED_BYTES = auto()
    #: slot, size: a fixed, as fixed size binary
    FIXED = auto()
    #: slot, size, width, constant: a decimal of `size` bytes (-1: its size comes first) in `width` bytes, less than the
    #: constant, which has that width
    DECIMAL = auto()
    #: slot: a duration, as MONTH_DAY_NANO
    DURATION = auto()
    #: slot, n, n * (constant, size): an enum as its symbol; size -1: the reader has no such symbol
    ENUM = auto()
    #: slot, n, n * index: an enum as an index of the reader's symbols, INT32; -1: the reader has no such symbol
    ENUM_INDEX = auto()
    #: n, n * to
    UNION = auto()
    #: to
    JUMP = auto()
    #: slot: null, or zero, or empty, in the slot's column and those in it
    EMPTY = auto()
    #: slot: a struct that is not null
    PRESENT = auto()
    #: to: the position of the list's NEXT; its items' program follows
    LIST = auto()
    #: slot, smallest, to, room: the end of an item, of at least `smallest` bytes; `to` is the items' program, `room`
    #: what columns take for an item without its fields (columns/room.py). Slot -1: skip
    NEXT = auto()
    #: constant, size: read the constant until DEFAULT_END
    DEFAULT = auto()
    DEFAULT_END = auto()
    #: (none): the writer's branch does not match the reader's schema
    MISMATCH = auto()
    #: is_int
    SKIP_NUMBER = auto()
    SKIP_BYTES = auto()
    #: size
    SKIP_FIXED = auto()
    SKIP_BOOLEAN = auto()
    #: n
    SKIP_ENUM = auto()
    #: slot, is_text: bytes without their length, up to the record's end
    REST = auto()


class WriteOp(IntEnum):
    """Opcodes of encoding, each with its arguments; `slot` is the number of an Arrow array (encoder.py)."""

    END = 0
    #: constant, size: bytes as they are
    LITERAL = auto()
    #: slot, null, branch, to: a union's branch in one byte: if the slot is null, `null`, and go on at `to`
    BRANCH = auto()
    #: slot: an error if it is null
    REQUIRED = auto()
    #: slot: INT32 as an int or a long
    INT = auto()
    #: slot: INT64
    LONG = auto()
    #: slot, is_32, multiplier, divisor: a number in another unit
    SCALED = auto()
    #: slot: 4 or 8 bytes
    FOUR = auto()
    EIGHT = auto()
    BOOLEAN = auto()
    #: slot: a string or bytes, with its length
    BYTES = auto()
    #: slot, size: fixed size binary as bytes, with its length
    SIZED = auto()
    #: slot, size: binary as a fixed, which must have that size
    EXACT = auto()
    #: slot, size: fixed size binary as a fixed
    FIXED = auto()
    #: slot, width, size: a decimal of `width` bytes in `size` bytes; -1: as few as it needs, with their number
    DECIMAL = auto()
    #: slot: MONTH_DAY_NANO as a duration
    DURATION = auto()
    #: slot, n, n * (constant, size): a string as the index of a symbol
    ENUM = auto()
    #: slot, to: the position of the list's NEXT; its items' program follows
    LIST = auto()
    #: to: the end of an item; `to` is the items' program
    NEXT = auto()
    #: null, n, to, n * (slot, branch, to): a struct of members; if all are null go on at `to` after `null` (-1: error)
    MEMBERS = auto()
    #: to
    JUMP = auto()


class Reason(IntEnum):
    """Why a row does not decode."""

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


#: What users read, after the field's name.
TEXTS = {
    Reason.TRUNCATED: "the value is cut off, or was written with another schema",
    Reason.NUMBER_TOO_LONG: "a number of more than 64 bits",
    Reason.INT_TOO_LARGE: "an int of more than 32 bits",
    Reason.NEGATIVE_LENGTH: "a negative length",
    Reason.NO_SUCH_BRANCH: "the union has no such branch",
    Reason.BRANCH_MISMATCH: "the writer's branch of the union does not match the reader's schema",
    Reason.NO_SUCH_SYMBOL: "the writer's enum has no such symbol",
    Reason.SYMBOL_UNKNOWN: "the reader's enum has no such symbol, and no default",
    Reason.NOT_UTF8: "a string that is not UTF-8",
    Reason.LEFT_OVER: "bytes are left over: it was written with another schema",
    Reason.NOT_BOOLEAN: "a boolean that is neither 0 nor 1",
    Reason.DECIMAL_TOO_LARGE: "a decimal of no bytes, or with more digits than its precision",
    Reason.TIME_TOO_LARGE: "a time that is beyond what the column can hold",
    Reason.TOO_MANY_EMPTY_ITEMS: "too many items of no bytes",
    Reason.TOO_LARGE: "more than 2 GiB in one column of a batch",
    Reason.IS_NULL: "is null, which its Avro type is not: make it a union with null",
    Reason.NOT_A_SYMBOL: "is not a symbol of the enum",
    Reason.WRONG_SIZE: "does not have the size of the fixed",
    Reason.SEVERAL_MEMBERS: "has several members of the union that are not null",
    Reason.TOO_MANY_ABSENT: TOO_MANY_ABSENT,
}

#: Items of no bytes that a row may have, in all its arrays: nothing but this bounds them.
MAX_EMPTY_ITEMS = 1024
