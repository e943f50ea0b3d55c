"""Keys or values of records → Arrow, each record by the schema that it names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, Literal

import numpy as np
import pyarrow as pa

from spark_klog.errors import SchemaError
from spark_klog.records.contract import BinaryColumn, HeadersColumn
from spark_klog.schemas.codec import Decoder, S
from spark_klog.schemas.prefix import SchemaKey, schema_keys
from spark_klog.schemas.registry.client import UnknownSchema
from spark_klog.schemas.rows import BadRow, Decoded, cut


class RecordDecoder(Generic[S]):
    """Decodes a column of records to the Arrow type of one reader's schema, `type`.

    `writer_of` returns the schema of an id or GUID, once for each; a `SchemaError` of it makes the rows of that schema
    bad, for good, but `UnknownSchema` only now. Any other error (a registry that is down) is raised, and the schema is
    asked for again the next time.
    `column` is what is decoded: its name chooses the header that has the id. `has_indexes` if message indexes follow
    an id, as in Protobuf. `advice_of` returns what else to say of bad rows of a schema, or raises an error instead.
    """

    def __init__(
        self,
        decoder: Decoder[S],
        writer_of: Callable[[SchemaKey], S],
        column: Literal["key", "value"] = "value",
        *,
        has_indexes: bool = False,
        advice_of: Callable[[SchemaKey], str] = lambda _: "",
    ) -> None:
        self._has_indexes, self._advice_of = has_indexes, advice_of
        self._decoder = decoder
        self._writer_of = writer_of
        self._column = column
        self.type: pa.DataType = decoder.type
        #: The program of each schema, or why it has none.
        self._programs: dict[SchemaKey, Any] = {}

    def decode(self, values: pa.Array | BinaryColumn, headers: pa.Array | HeadersColumn | None = None) -> Decoded:
        """Decode a binary column; `headers` are those of the same records, None if there are none to look at.

        A row that does not decode is null, and in the result's `bad` with its reason, which names its schema.
        """
        keys, which, starts, bad = schema_keys(values, headers, self._column, has_indexes=self._has_indexes)
        programs: list[Any] = []
        # by schema the number of its program; the last is for rows without a schema
        numbers = np.full(len(keys) + 1, -1, np.int32)
        for number, key in enumerate(keys):
            program = self._program(key)
            if isinstance(program, str):
                reason = f"{key}: {program}{self._advice_of(key)}"
                bad += [BadRow(row, reason) for row in np.flatnonzero(which == number).tolist()]
            else:
                numbers[number] = len(programs)
                programs.append(program)
        decoded = self._decoder.decode(values, programs, pa.py_buffer(numbers[which]), pa.py_buffer(starts))
        advice = {number: self._advice_of(keys[number]) for number in {int(which[row]) for row, _ in decoded.bad}}
        for row, reason in decoded.bad:
            number = int(which[row])
            bad.append(BadRow(row, f"{keys[number]}: {cut(reason)}{advice[number]}"))
        return Decoded(decoded.values, sorted(bad))

    def _program(self, key: SchemaKey) -> Any:
        if key not in self._programs:
            try:
                self._programs[key] = self._decoder.program(self._writer_of(key), key.rest)
            except UnknownSchema as error:
                return str(error)
            except SchemaError as error:
                self._programs[key] = cut(str(error))
        return self._programs[key]
