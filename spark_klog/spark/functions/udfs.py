"""What the functions for columns run in Spark's Python workers: one Arrow array in, one out.

A function's schema travels with it, so that no worker asks the registry for it. Spark pickles functions, so what is in
them, such as a password, is in no plan. A worker keeps what it has made of a schema for later batches and tasks.
"""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from hashlib import sha256
from typing import Any, TypeVar
from uuid import uuid4

import pyarrow as pa

from spark_klog.base.cache import Newest
from spark_klog.errors import ConfigError, DecodeError, EncodeError, SchemaError
from spark_klog.schemas.column_format import ReaderSchema
from spark_klog.schemas.column_writing import ColumnEncoder, WriteFormat, WriterSchema

_T = TypeVar("_T")
#: The types of records and their headers.
INPUTS = (pa.binary(), pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())])))
#: Decoders and encoders that no batch uses now, by their function's schema and settings; the oldest first.
_kept: Newest[bytes, Any] = Newest(32)
_lock = threading.Lock()


class FromRecords:
    """Rows of records. `name` is the function's, which plans show."""

    def __init__(self, name: str, reader: ReaderSchema) -> None:
        self.__name__ = name
        self._reader, self._key = reader, _key(reader)

    def __call__(self, values: pa.Array, headers: pa.Array | None = None) -> pa.Array:
        values = _plain(values)
        if not pa.types.is_binary(values.type):
            raise ConfigError(f"{self.__name__}: the column is {values.type}, not binary: cast it")
        if headers is not None:
            headers = _headers(self.__name__, headers)

        with _kept_for(self._key, self._reader.decoder) as decoder:
            rows, bad = decoder.decode(values, headers)
        if bad and not decoder.is_permissive:
            row, reason = bad[0]
            more = f" ({len(bad) - 1} more of its batch do not)" if len(bad) > 1 else ""
            raise DecodeError(
                f"{self.__name__}: row {row} of a batch of {len(values)} does not decode: {reason}{more}; "
                "mode=PERMISSIVE makes such rows null"
            )
        return rows


class ToRecords:
    """Records of rows, by a schema, or by one that is made of the column's type once that is known."""

    def __init__(self, name: str, writer: WriterSchema | WriteFormat) -> None:
        self.__name__ = name
        # by the call, too: workers outlive queries, and the next one registers its schema anew
        self._writer, self._key = writer, _key(writer) + uuid4().bytes

    def __call__(self, values: pa.Array) -> pa.Array:
        def encoder() -> ColumnEncoder:
            writer = self._writer
            return (writer.writer(values.type) if isinstance(writer, WriteFormat) else writer).encoder()

        try:
            with _kept_for(self._key + str(values.type).encode(), encoder) as made:
                return made.encode(values)
        except (EncodeError, SchemaError) as error:
            raise type(error)(f"{self.__name__}: {error}") from None


def _key(schema: ReaderSchema | WriterSchema | WriteFormat) -> bytes:
    return sha256(pickle.dumps(schema)).digest()


@contextmanager
def _kept_for(key: bytes, make: Callable[[], _T]) -> Iterator[_T]:
    """What was made for a key, which no other thread has meanwhile."""
    kept = _kept.pop(key, None) or make()
    try:
        yield kept
    finally:
        with _lock:
            _kept[key] = kept


def _plain(values: pa.Array) -> pa.Array:
    """Binary instead of large binary, which Spark sends if spark.sql.execution.arrow.useLargeVarTypes is set."""
    return values.cast(pa.binary()) if pa.types.is_large_binary(values.type) else values


def _headers(name: str, headers: pa.Array) -> pa.Array:
    if headers.type == INPUTS[1]:
        return headers
    try:
        return headers.cast(INPUTS[1])
    except pa.ArrowException as error:
        kind = headers.type
        raise ConfigError(f"{name}: headers are {kind}, not an array of structs of key and value: {error}") from None
