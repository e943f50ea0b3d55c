"""Python values, and columns of rows, → keys and values of records; see `client.serialization`."""

from __future__ import annotations

import threading
from functools import partial
from typing import TYPE_CHECKING, Any

from spark_klog.base.names import ROW_FORMATS
from spark_klog.client.serialization import Column, Context, Function, PlainType, Serialization
from spark_klog.errors import ConfigError, EncodeError, KlogError
from spark_klog.records.contract import Headers

if TYPE_CHECKING:
    import pyarrow as pa

    from spark_klog.schemas.row_serializing import RowSerializer


class Serializers:
    """Serializes the keys and values of a producer. Threads may share it.

    The schema of a topic's rows is looked up, or registered, with its first record, and kept.
    """

    def __init__(self, serialization: Serialization) -> None:
        self._serialization = serialization
        #: Also for a signal handler within a call: its producer's own `ConcurrentUse` comes later.
        self._lock = threading.RLock()
        self._by_topic: dict[tuple[Column, str], RowSerializer] = {}

    def record(self, topic: str, key: Any, value: Any, headers: Headers) -> tuple[Any, Any, Headers]:
        """Key, value and headers of a record as they are sent: bytes, or None for null.

        `EncodeError` if one of the two does not serialize; errors of the registry.
        """
        context_headers = list(headers)
        key = self._serialized("key", topic, key, context_headers)
        value = self._serialized("value", topic, value, context_headers)
        return key, value, tuple(context_headers)

    def _serialized(self, column: Column, topic: str, value: Any, headers: list[tuple[str, bytes | None]]) -> Any:
        chosen = self._serialization.by_column.get(column)
        if value is None or chosen is None:
            return value
        try:
            if isinstance(chosen, str):
                name = f"__{column}_schema_id"  # of a record that is copied: readers would take it for this one's
                headers[:] = [header for header in headers if header[0] != name]
                return self._row_serializer(column, topic).serialize(value)
            return _called(chosen, value, Context(topic, column, headers))
        except EncodeError as error:
            raise EncodeError(f"the {column} of a record for {topic} does not serialize: {error}") from error.__cause__

    def _row_serializer(self, column: Column, topic: str) -> RowSerializer:
        with self._lock:
            serializer = self._by_topic.get((column, topic))
            if serializer is None:
                from spark_klog.schemas.row_serializing import RowSerializer

                serializer = RowSerializer(self._serialization.write_format(column, topic))
                self._by_topic[column, topic] = serializer
            return serializer

    def table(self, rows: pa.Table | pa.RecordBatch, topic: str | None) -> pa.Table | pa.RecordBatch:
        """The rows of `Producer.send_arrow` with binary keys and values.

        `EncodeError` names the row that does not fit its schema, `SchemaError` the field; errors of the registry.
        """
        if not hasattr(rows, "schema"):
            return rows  # whose type is refused later
        from spark_klog.schemas.row_serializing import serialized_column

        for column in self._serialization.by_column:
            rows = serialized_column(rows, column, topic, partial(self._encoded, column))
        return rows

    def _encoded(self, column: Column, topic: str, values: pa.Array, first: int) -> pa.Array:
        """The binary column of a topic's rows, of which the first one has this number."""
        chosen = self._serialization.by_column[column]
        if isinstance(chosen, str):
            return self._row_serializer(column, topic).encode(values, first)
        if not isinstance(chosen, PlainType):
            raise ConfigError(
                f"{column}.serializer is a function, which takes no columns: call send, or set "
                f"{', '.join(ROW_FORMATS)} or a plain type"
            )
        from spark_klog.schemas.row_serializing import plain_column

        try:
            return plain_column(values, chosen.arrow, chosen.write, first)
        except EncodeError as error:
            raise EncodeError(f"column {column}, {error}") from error.__cause__


def _called(chosen: PlainType | Function, value: Any, context: Context) -> Any:
    try:
        data = chosen.write(value) if isinstance(chosen, PlainType) else chosen(value, context)
    except KlogError:
        raise
    except Exception as error:
        raise EncodeError(f"{type(error).__name__}: {error}") from error
    if data is not None and not isinstance(data, bytes | bytearray | memoryview):
        raise EncodeError(f"its serializer returns {type(data).__name__}, not bytes")
    return data
