"""How a column of rows becomes keys or values of records: by which schema, and under which subject it is registered."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any, Literal, NamedTuple

import pyarrow as pa

from spark_klog.errors import EncodeError, RegistryError, SchemaError
from spark_klog.schemas.codec import Encoder
from spark_klog.schemas.column_format import Column, ColumnFormat
from spark_klog.schemas.prefix import id_prefix
from spark_klog.schemas.registry.client import NOT_THERE, RegistryClient
from spark_klog.schemas.registry.schemas import References, Schema, Version

#: How the subject of a schema is called: by the topic, by the record's full name, by both.
Strategy = Literal["topic", "record", "topic-record"]
_CONFLICT = 409


class WriteAdvice(NamedTuple):
    """What errors advise, by the names that the user sets things with; `column` stands for key or value."""

    #: Of a subject that is not there.
    registers: str
    #: Of a schema that is not there, and is not to be registered.
    there: str
    #: Of a schema that is not compatible.
    latest: str
    #: Of rows of several topics.
    topics: str
    #: Of a schema without a name.
    named: str

    def of(self, column: Column) -> WriteAdvice:
        return WriteAdvice(*(text.replace("{column}", column) for text in self))


#: Of the source's and sink's options.
SPARK_ADVICE = WriteAdvice(
    "leave useLatestVersion out to register one",
    "set autoRegisterSchemas=true, useLatestVersion=true, or a schema that is there",
    "set useLatestVersion=true to write by the subject's schema",
    "set {column}Subject, or {column}SubjectNameStrategy=RecordNameStrategy",
    "set {column}Schema, or {column}Subject",
)


@dataclass(frozen=True)
class WriteFormat:
    """How to write a column: by the schema of `source`, or without one by that of the column's Arrow type.

    The schema is registered under its subject; if not `registers`, it must be there. With `uses_latest` the subject's
    latest version is written instead, to which the column must fit. `topic` is None if rows go to several topics.
    """

    source: ColumnFormat
    topic: str | None = None
    strategy: Strategy = "topic"
    registers: bool = True
    uses_latest: bool = False
    advice: WriteAdvice = SPARK_ADVICE

    @property
    def needs_type(self) -> bool:
        """Whether the schema is made of the column's type."""
        return self.source.text is None and self.source.schema_id is None and not self._names_latest

    def writer(self, kind: pa.DataType | None = None, *, longest_ms: int | None = None) -> WriterSchema:
        """The schema for a column of an Arrow type, registered if it has to be; errors as of the registry's client.

        `SchemaError` names the column, and what does not fit. A type that is not known yet (None, unless `needs_type`)
        is compared with the schema when the first rows are encoded. `longest_ms` as of `registry_of`.
        """
        try:
            return self._writer(kind, longest_ms)
        except SchemaError as error:
            raise SchemaError(f"column {self.source.column}: {error}") from None

    def _writer(self, kind: pa.DataType | None, longest_ms: int | None) -> WriterSchema:
        source = self.source
        text = source.text
        if self.needs_type:
            assert kind is not None
            text = source.codec.schema_of(kind)
        if source.registry is None:
            assert text is not None  # only a registry has ids and subjects
            return _checked(WriterSchema(source, text), kind)
        registry = source.registry.registry(longest_ms)
        key = sha256(pickle.dumps((self, text))).digest()  # what is in it may be secret
        return _checked(registry.or_before(key, lambda: self._looked_up(registry, text)), kind)

    def _looked_up(self, registry: RegistryClient, text: str | None) -> WriterSchema:
        """The schema as the registry has it now.

        Spark's processes live longer than a write, and subjects may be deleted between two of them.
        """
        source = self.source
        if source.schema_id is not None:
            subject, number = source.subject or "", source.schema_id
            try:
                schema = registry.schema(number, subject, is_new=True)
            except SchemaError as error:
                raise SchemaError(f"schema id {number}: {error}") from None
        elif self.uses_latest:
            subject = self._subject(text)
            latest = self._latest(registry, subject)
            schema, number = latest.schema, latest.id
        else:
            assert text is not None
            assert source.format != "json"  # it is for reading
            subject, schema = self._subject(text), Schema(text, source.format)
            number = self._registered(registry, subject, schema)
        if schema.format != source.format:
            raise SchemaError(f"it is to be {source.format}, but schema id {number} is {schema.format}")
        references = registry.references(schema, number, subject, is_new=True)
        return WriterSchema(source, schema.text, references, number)

    @property
    def _names_latest(self) -> bool:
        """Whether the subject, and so the schema, is known without a text."""
        return self.uses_latest and (self.source.subject is not None or self.strategy == "topic")

    def _subject(self, text: str | None) -> str:
        source = self.source
        if source.subject is not None:
            return source.subject
        if self.strategy != "record" and self.topic is None:
            raise SchemaError(
                "rows go to the topics of a column, so the subject is not known: "
                f"{self.advice.of(source.column).topics}"
            )
        if self.strategy == "topic":
            return f"{self.topic}-{source.column}"
        assert text is not None  # see `_names_latest`
        if self.strategy == "record" and self.needs_type and source.message is None:
            raise SchemaError(
                f"a schema that is made of the column's type has no name of its own, by which RecordNameStrategy calls "
                f"the subject: {self.advice.of(source.column).named}"
            )
        codec = source.codec
        name = codec.name(codec.parse(text))
        if not name:
            raise SchemaError("the schema has no name to call the subject by: it is no record, enum or fixed")
        return name if self.strategy == "record" else f"{self.topic}-{name}"

    def _latest(self, registry: RegistryClient, subject: str) -> Version:
        try:
            return registry.latest(subject, is_new=True)
        except RegistryError as error:
            if error.code not in NOT_THERE:
                raise
            hint = f"register a schema, name another subject, or {self.advice.of(self.source.column).registers}"
            text = f"column {self.source.column}: {error}; {hint}"
            raise RegistryError(text, error.status, error.code) from None

    def _registered(self, registry: RegistryClient, subject: str, schema: Schema) -> int:
        try:
            if self.registers:
                return registry.register(subject, schema)
            return registry.lookup(subject, schema)
        except RegistryError as error:
            why = str(error).removeprefix(f"subject {subject}: ")
            advice = self.advice.of(self.source.column)
            what = f"column {self.source.column} can't be written under subject {subject}: {why}"
            if error.status == _CONFLICT:
                hint = f"make the columns compatible, or {advice.latest}"
            elif error.code in NOT_THERE and not self.registers:
                hint = advice.there
            else:
                raise
            raise RegistryError(f"{what}; {hint}", error.status, error.code) from None


@dataclass(frozen=True)
class WriterSchema:
    """The schema that a column is written by; `id`, the registry's, stands before each record, None: nothing does."""

    source: ColumnFormat
    text: str
    references: References = field(default_factory=dict)
    id: int | None = None

    @property
    def column(self) -> Column:
        return self.source.column

    def encoder(self) -> ColumnEncoder:
        return ColumnEncoder(self)


class ColumnEncoder:
    """Encodes a column by a schema."""

    def __init__(self, writer: WriterSchema) -> None:
        self.column = writer.column
        self._codec = writer.source.codec
        self._schema = self._codec.parse(writer.text, writer.references)
        self._prefix = b"" if writer.id is None else id_prefix(writer.id)
        self._encoder: Encoder | None = None

    def value_writer(self) -> Callable[[Any], bytes] | None:
        """See `Codec.value_writer`."""
        return self._codec.value_writer(self._schema, self._prefix)

    def encode(self, values: pa.Array, first: int = 0) -> pa.Array:
        """The binary column of the records; null stays null.

        `EncodeError` names a row that does not fit, counted from `first`; `SchemaError` a field.
        """
        if self._encoder is None or self._encoder.type != values.type:
            self._encoder = self._codec.encoder(self._schema, values.type)
        try:
            return self._encoder.encode(values, self._prefix)
        except EncodeError as error:
            after = f", counted after {first} rows" if first else ""
            raise EncodeError(f"column {self.column}, {error}{after}") from None


def _checked(writer: WriterSchema, kind: pa.DataType | None) -> WriterSchema:
    codec = writer.source.codec
    schema = codec.parse(writer.text, writer.references)
    if kind is not None:
        codec.encoder(schema, kind)
    return writer
