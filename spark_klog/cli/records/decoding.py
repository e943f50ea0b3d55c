"""Keys and values of Arrow batches, decoded to text: `klog consume -s`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple
from uuid import UUID

import click
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from spark_klog.base.cache import Newest
from spark_klog.cli.output import escaped
from spark_klog.cli.records.arrow_form import json_field, lengths
from spark_klog.cli.records.serdes import PackFormat, Serdes
from spark_klog.errors import KlogError, SchemaError
from spark_klog.schemas.column_format import Column, ColumnDecoder, ColumnFormat
from spark_klog.schemas.json_schema.texts import json_texts, texts_array
from spark_klog.schemas.prefix import SchemaKey, SchemaKeys, schema_keys
from spark_klog.schemas.registry.client import UnknownSchema
from spark_klog.schemas.rows import BadRow

#: Records that do not decode and are named, before they are only counted.
_MOST_NAMED = 20
#: Schemas whose decoders are kept: bytes that are no records may look like any number of ids.
_MOST_SCHEMAS = 1000

_NULL = pa.nulls(1, pa.large_binary())[0]


class Undecoded(NamedTuple):
    """A record that does not decode; `is_unknown` if the registry does not have its schema: it may be the wrong one."""

    topic: str
    partition: int
    offset: int
    reason: str
    is_unknown: bool = False

    def __str__(self) -> str:
        return f"{self.topic}-{self.partition}, offset {self.offset}: {self.reason}"


class RecordTexts:
    """Makes text of the keys and values of batches: of JSON, or what a pack string says.

    Batches keep their columns; `key_size`, `value_size` and `key_schema_id`, `value_schema_id` are added for those that
    are decoded. Errors as of the registry's client, if the registry is down or refuses.
    """

    def __init__(self, serdes: Serdes, *, ascii: bool = False) -> None:
        """With `ascii` JSON has no other characters, for terminals."""
        self._columns: list[_SchemaColumn | _PackedColumn] = [_SchemaColumn(one, ascii) for one in serdes.by_schema]
        self._columns += [_PackedColumn(column, form) for column, form in serdes.packed]
        self._undecoded = 0

    def decode(self, batch: pa.RecordBatch) -> tuple[pa.RecordBatch, list[Undecoded]]:
        """The records that decode, and the others in order of their offsets."""
        reasons: dict[int, str] = {}
        unknown: set[int] = set()
        for column in self._columns:
            sizes = lengths(batch, column.name).cast(pa.int64())
            made, bad = column.decode(batch)
            for row, reason in bad:
                reasons.setdefault(row, f"{column.name}: {reason}")
            unknown |= made.unknown
            index = batch.schema.get_field_index(column.name)
            field = json_field(column.name) if made.is_json else pa.field(column.name, pa.large_binary())
            batch = batch.set_column(index, field, made.texts).append_column(f"{column.name}_size", sizes)
            if made.ids is not None:
                batch = batch.append_column(f"{column.name}_schema_id", made.ids)
        if not reasons:
            return batch, []
        topics, partitions, offsets = (batch.column(name) for name in ("topic", "partition", "offset"))
        undecoded = [
            Undecoded(topics[row].as_py(), partitions[row].as_py(), offsets[row].as_py(), reasons[row], row in unknown)
            for row in sorted(reasons)
        ]
        keeps = np.ones(batch.num_rows, np.bool_)
        keeps[list(reasons)] = False
        return batch.take(_integers(np.flatnonzero(keeps))), undecoded

    def report(self, undecoded: Sequence[Undecoded]) -> None:
        """Say on stderr what does not decode, a line each; of many only how many."""
        for one in undecoded[: max(0, _MOST_NAMED - self._undecoded)]:
            click.echo(f"klog: {escaped(str(one))}", err=True)
        self._undecoded += len(undecoded)

    def end(self) -> None:
        """`KlogError` if there was anything to report."""
        if self._undecoded:
            unnamed = f", of which the first {_MOST_NAMED} are named" if self._undecoded > _MOST_NAMED else ""
            records = "1 record does" if self._undecoded == 1 else f"{self._undecoded:,} records do"
            raise KlogError(f"{records} not decode{unnamed}")


class _Texts(NamedTuple):
    """A decoded column, large_binary, null for a null; `ids` are the schemas', as JSON.

    `unknown` are the bad rows whose schemas the registry does not have.
    """

    texts: pa.Array
    is_json: bool
    ids: pa.Array | None = None
    unknown: frozenset[int] = frozenset()


class _PackedColumn:
    def __init__(self, name: Column, form: PackFormat) -> None:
        self.name, self._form = name, form

    def decode(self, batch: pa.RecordBatch) -> tuple[_Texts, list[BadRow]]:
        texts, bad = [], []
        for row, data in enumerate(batch.column(self.name).to_pylist()):
            text = None
            if data is not None:
                text, reason = self._form.unpack(data)
                if text is None:
                    bad.append(BadRow(row, reason))
            texts.append(text)
        return _Texts(pa.array(texts, pa.large_binary()), self._form.is_number), bad


class _SchemaColumn:
    """Decodes each record by the schema that wrote it, unless the user names one that all are read by."""

    def __init__(self, form: ColumnFormat, ascii: bool) -> None:
        self.name, self._form, self._ascii = form.column, form, ascii
        self._has_registry = form.registry is not None
        self._decoder = form.reader().decoder() if form.text is not None or form.schema_id is not None else None
        #: The decoder of each schema, or why it has none.
        self._by_schema: Newest[SchemaKey, ColumnDecoder | str] = Newest(_MOST_SCHEMAS)

    def decode(self, batch: pa.RecordBatch) -> tuple[_Texts, list[BadRow]]:
        values = batch.column(self.name)
        if not self._has_registry:
            assert self._decoder is not None  # the options require a schema
            texts, bad = self._texts(self._decoder, values, None)
            return _Texts(texts, True), bad
        headers = batch.column("headers")
        found = schema_keys(values, headers, self.name, has_indexes=self._form.codec.has_indexes)
        ids = texts_array([_id_text(key.id) for key in found.keys])
        ids = ids.take(_integers(found.which))
        if self._decoder is not None:
            texts, bad = self._texts(self._decoder, values, headers)
            bad, unknown = self._explained(found, bad)
            return _Texts(texts, True, ids, unknown), bad
        if len(found.keys) == 1:
            texts, bad = self._of_schema(found.keys[0], values, headers)
            bad, unknown = self._explained(found, bad)
            return _Texts(texts, True, ids, unknown), bad
        bad = list(found.bad)
        pieces, places = [], []
        for number, key in enumerate(found.keys):
            rows = np.flatnonzero(found.which == number)
            taken = _integers(rows)
            texts, wrong = self._of_schema(key, values.take(taken), headers.take(taken))
            pieces.append(texts)
            places.append(rows)
            bad += [BadRow(int(rows[row]), reason) for row, reason in wrong]
        order = np.full(len(values), -1, np.int64)
        if places:
            every = np.concatenate(places)
            order[every] = np.arange(len(every))
        joined = pa.concat_arrays(pieces) if pieces else pa.array([], pa.large_binary())
        bad, unknown = self._explained(found, bad)
        return _Texts(joined.take(_integers(order)), True, ids, unknown), bad

    def _explained(self, found: SchemaKeys, bad: list[BadRow]) -> tuple[list[BadRow], frozenset[int]]:
        """The bad rows, and those whose schemas the registry does not have; what it has told is not asked again."""
        if not bad:
            return bad, frozenset()
        assert self._form.registry is not None
        registry = self._form.registry.registry()
        keys, which = found.keys, found.which
        unknown, reasons = set[int](), dict[int, str]()
        for number in {int(which[row]) for row, _ in bad} - {-1}:
            try:
                schema = registry.schema(keys[number].id, self._form.subject or "")
            except UnknownSchema as error:
                unknown.add(number)
                reasons[number] = f"{keys[number]}: {error}"
            except SchemaError:
                continue
            else:
                if schema.format != self._form.format:
                    reasons[number] = f"{keys[number]}: it is {schema.format}, not {self._form.format}"
        explained = [BadRow(row, reasons.get(int(which[row]), reason)) for row, reason in bad]
        return explained, frozenset(row for row, _ in bad if int(which[row]) in unknown)

    def _of_schema(self, key: SchemaKey, values: pa.Array, headers: pa.Array) -> tuple[pa.Array, list[BadRow]]:
        """Decode rows of one schema, among which there may be nulls and rows without a schema."""
        decoder = self._by_schema.get(key)
        if decoder is None:
            try:
                decoder = self._form.reader(key.id).of_message(key.rest).decoder()
            except SchemaError as error:
                decoder = f"{key}: {error}"
            self._by_schema[key] = decoder
        if isinstance(decoder, str):
            which = schema_keys(values, headers, self.name, has_indexes=self._form.codec.has_indexes)
            bad = [BadRow(int(row), decoder) for row in np.flatnonzero(which.which == 0)]
            return pa.nulls(len(values), pa.large_binary()), sorted([*bad, *which.bad])
        return self._texts(decoder, values, headers)

    def _texts(self, decoder: ColumnDecoder, values: Any, headers: Any) -> tuple[pa.Array, list[BadRow]]:
        decoded = decoder.decode(values, headers)
        texts = json_texts(decoded.values, self._ascii, base64=self._form.format == "json-schema")
        # a null of the schema's own is JSON's null; without a record there is no text
        return pc.if_else(values.is_null(), _NULL, texts), decoded.bad


def _integers(values: np.ndarray[Any, np.dtype[Any]]) -> pa.Array:
    """Whole numbers, null where they are negative; `pa.array` would import pandas."""
    valid = values >= 0
    bits = None if valid.all() else pa.py_buffer(np.packbits(valid, bitorder="little"))
    return pa.Array.from_buffers(pa.int64(), len(values), [bits, pa.py_buffer(values.astype(np.int64))])


def _id_text(key: int | UUID) -> bytes:
    return b"%d" % key if isinstance(key, int) else b'"%s"' % str(key).encode()
