"""How a column of records, key or value, becomes rows: which format, and the schema to read it as."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from typing import Any, Literal, NamedTuple
from uuid import UUID, uuid4

import pyarrow as pa

from spark_klog.base.names import Format
from spark_klog.errors import RegistryError, SchemaChanged, SchemaError
from spark_klog.records.contract import BinaryColumn, HeadersColumn
from spark_klog.schemas.codec import Codec, Decoder, codec_of
from spark_klog.schemas.decoder import RecordDecoder
from spark_klog.schemas.prefix import BARE, SchemaKey
from spark_klog.schemas.registry.client import NOT_THERE, RegistryClient, RegistrySettings
from spark_klog.schemas.registry.schemas import References, Schema
from spark_klog.schemas.rows import BadRow, Decoded, FieldPair, cut

Column = Literal["key", "value"]
#: How long the planning of a query waits for a registry: Spark can't stop the query meanwhile. Tasks wait longer.
PLANNING_MS = 30_000
#: Schemas, and programs of a writer's schema and a reader's, that a process keeps. Of a thousand fields they take some
#: 3 MB a schema with its decoder, and 0.2 MB a program.
_MOST_SCHEMAS, _MOST_PROGRAMS = 32, 250
#: What a stream does about records of a newer version of its subject: it reads them by its own schema, or ends.
Evolution = Literal["keep", "restart", "fail"]
_REMEDIES = {
    "keep": "the query's schema can't read one of them; start it again, from a new load(), to read by the new one",
    "restart": "start it again, from a new load(), to read by the new one (schemaEvolution=restart)",
    "fail": "set {}SchemaId to read by the new one, or schemaEvolution=keep (schemaEvolution=fail)",
}


@dataclass(frozen=True)
class ColumnFormat:
    """A column's format. Rows are those of one schema, the reader's: `text`, or that of `schema_id`, or the latest of
    `subject`.

    With a registry each record names its own schema, but for bare ones, which do not decode, or are of the latest
    version of `subject` (`RegistryConfig.has_bare`); without one all are bare records of the reader's. `is_permissive`
    makes rows that do not decode null, without a word. `message` and `validates` are those of `codec_of`.
    JSON that Spark reads by a DDL has the format "json", whose `text` may be `INFER` until its schema is inferred.
    `identity` are paths of fields by which rows are told apart, () of all: records of schemas by which different ones
    would become the same do not decode.
    `ends_at_unreadable`: rows of a newer version of the subject that do not decode are no bad rows, but end the query
    with `SchemaChanged`, as it loses none of them when it is started again.
    """

    column: Column
    format: Format | Literal["json"]
    registry: RegistrySettings | None = None
    text: str | None = None
    schema_id: int | None = None
    subject: str | None = None
    is_permissive: bool = False
    evolution: Evolution = "keep"
    message: str | None = None
    validates: bool = False
    ends_at_unreadable: bool = False
    identity: frozenset[tuple[str, ...]] = frozenset()

    @property
    def codec(self) -> Codec[Any]:
        return codec_of(self.format, self.message, validates=self.validates)

    def reader(self, schema_id: int | UUID | None = None, *, longest_ms: int | None = None) -> ReaderSchema:
        """The reader's schema, that of an id or GUID if given. Asks the registry, errors as of its client.

        `SchemaError` or `RegistryError` names the column, unless an id is given. `longest_ms` as of `registry_of`.
        """
        if self.text is not None:
            return ReaderSchema(self, self.text)
        assert self.registry is not None  # who makes a format without a text has one
        registry = self.registry.registry(longest_ms)
        is_asked = schema_id is not None
        schema_id = schema_id if is_asked else self.schema_id
        version = None
        try:
            if schema_id is not None:
                schema = registry.schema(schema_id, self.subject or "", is_new=True)
            else:
                assert self.subject is not None
                # Spark's processes live longer than a query, which may be one that a new version has ended: all is new
                latest = registry.latest(self.subject, is_new=True)
                schema, schema_id, version = latest.schema, latest.id, latest.version
            references = registry.references(schema, schema_id, self.subject or "", is_new=True)
            if self.evolution != "keep" and version is None:
                assert self.subject is not None  # the options require it
                version = registry.version_of(self.subject, schema, is_new=True)
                if version is None:
                    raise SchemaError(f"it is no version of subject {self.subject}, which schemaEvolution needs")
        except SchemaError as error:
            if is_asked:  # who asks for it names it
                raise
            raise SchemaError(f"the schema of column {self.column}, id {schema_id}: {error}") from None
        except RegistryError as error:
            if error.code not in NOT_THERE or self.subject is None:
                raise
            raise SchemaError(f"column {self.column}: {error}; name another subject, or a schema") from None
        if schema.format != self.format:
            raise SchemaError(f"column {self.column} is to be {self.format}, but its schema is {schema.format}")
        return ReaderSchema(self, schema.text, references, schema_id, version)

    def reader_of_version(self, version: int, schema_id: int, longest_ms: int | None = None) -> ReaderSchema | None:
        """The reader's schema, if it was looked up before as that version and id; None if they are another registry's.

        Errors as of `reader`.
        """
        assert self.registry is not None
        assert self.subject is not None
        registry = self.registry.registry(longest_ms)
        try:
            there = registry.version(self.subject, version)
        except RegistryError as error:
            if error.code not in NOT_THERE:
                raise
            return None
        if there.id != schema_id or there.schema.format != self.format:
            return None
        references = registry.references(there.schema, schema_id, self.subject, is_new=True)
        return ReaderSchema(self, there.schema.text, references, schema_id, version)


@dataclass(frozen=True)
class ReaderSchema:
    """The schema that a column is read as. `id` and `version` are the registry's, None of a text."""

    format: ColumnFormat
    text: str
    references: References = field(default_factory=dict)
    id: int | UUID | None = None
    version: int | None = None
    #: Of this look-up, which processes that decode have to know as new.
    query: str = field(default_factory=lambda: uuid4().hex, compare=False)

    @property
    def column(self) -> Column:
        return self.format.column

    @property
    def type(self) -> pa.DataType:
        """The type of its rows; `SchemaError` as of `decoder`. The registry is not asked."""
        return self._decoder(self._key(self.text, self.references)).type

    def of_message(self, rest: bytes) -> ReaderSchema:
        """The schema for records with `rest` after their ids, see `SchemaKey`: of Protobuf, with the message they are.

        `SchemaError` if there is no such message.
        """
        if not rest:
            return self
        message = self.format.codec.message_of(_schema(self._key(self.text, self.references)), rest)
        return self if message is None else replace(self, format=replace(self.format, message=message))

    def decoder(self, *, ends_at_bad: bool = False) -> ColumnDecoder:
        """A decoder, for one thread at a time. It asks the registry for other schemas than this one, and keeps them.

        `SchemaError` names the column if its schema has no Arrow type. `ends_at_bad` as of `RecordDecoder`.
        """
        reader = self._key(self.text, self.references)
        decoder = self._decoder(reader)
        settings = self.format.registry
        if settings is None:
            return ColumnDecoder(
                decoder.type, self.format.is_permissive, _bare(decoder, _program(reader, reader, None))
            )
        subject = self.format.subject or ""
        settings.registry().begin(self.query, is_registry=self.id is not None)

        def program_of(key: SchemaKey) -> Any:
            if key.id == self.id:
                return _program(reader, reader, key.rest)
            registry = settings.registry()
            schema: Schema
            schema_id: int | UUID
            rest: bytes | None
            if key == BARE:
                if not subject:
                    raise SchemaError("no subject is named")
                latest = registry.latest(subject)
                schema, schema_id, rest = latest.schema, latest.id, None
            else:
                schema, schema_id, rest = registry.schema(key.id, subject), key.id, key.rest
            if schema.format != self.format.format:
                raise SchemaError(f"it is {schema.format}, not {self.format.format}")
            self._check_version(registry, schema)
            writer = self._key(schema.text, registry.references(schema, schema_id, subject))
            if self.format.identity:
                pairs = partial(decoder.field_pairs, _schema(writer), rest)
                _check_identity(self.format.identity, pairs, lambda: self._is_older(registry, schema))
            return _program(reader, writer, rest)

        records = RecordDecoder(
            decoder,
            program_of,
            self.column,
            has_indexes=self.format.codec.has_indexes,
            has_bare=settings.registry().config.has_bare,
            ends_at_bad=ends_at_bad,
            advice_of=self._advice_of,
        )
        return ColumnDecoder(decoder.type, self.format.is_permissive, records.decode)

    def _key(self, text: str, references: References) -> _SchemaText:
        form = self.format
        return _SchemaText(form.format, form.message, form.validates, text, tuple(references.items()))

    def _decoder(self, reader: _SchemaText) -> Decoder[Any]:
        """A decoder of its own; its plan is that of all in this process that read by the same schema."""
        try:
            return _decoder(reader).another()
        except SchemaError as error:
            raise SchemaError(f"the schema of column {self.column}: {error}") from None

    def _advice_of(self, key: SchemaKey) -> str:
        """What to say of a row that does not decode: whether a newer schema than this one could.

        `SchemaChanged` if `ends_at_unreadable`.
        """
        settings, subject = self.format.registry, self.format.subject
        if key.id == self.id or self.version is None or self.format.schema_id is not None:
            return ""
        assert settings is not None
        assert subject is not None
        registry = settings.registry()
        try:
            schema = registry.latest(subject).schema if key == BARE else registry.schema(key.id, subject)
            version = registry.version_of(subject, schema)
        except (SchemaError, RegistryError):  # it is no schema, or this user may not ask
            return ""
        if version is None or version <= self.version:
            return ""
        if self.format.ends_at_unreadable:
            raise SchemaChanged(subject, version, self.version, _REMEDIES["keep"])
        return (
            f"; it is version {version} of subject {subject}, and is read by version {self.version}: start again to "
            "read by the new one"
        )

    def _is_older(self, registry: RegistryClient, schema: Schema) -> bool:
        """Whether a schema is known to be an older version of the subject."""
        if self.version is None or self.format.subject is None:
            return False
        version = registry.version_of(self.format.subject, schema)
        return version is not None and version < self.version

    def _check_version(self, registry: RegistryClient, schema: Schema) -> None:
        """Raise `SchemaChanged` if a schema is a newer version of the subject, and that is to end the query."""
        subject, evolution = self.format.subject, self.format.evolution
        if evolution == "keep" or subject is None or self.version is None:
            return
        version = registry.version_of(subject, schema)
        if version is not None and version > self.version:
            version = registry.version_of(subject, schema, is_new=True)  # it may have been taken back
        if version is not None and version > self.version:
            raise SchemaChanged(subject, version, self.version, _REMEDIES[evolution].format(self.column))


class _SchemaText(NamedTuple):
    """A schema's text, and what else says how it is parsed and read: by these a process keeps what it made of it."""

    format: Format | Literal["json"]
    message: str | None
    validates: bool
    text: str
    references: tuple[tuple[str, str], ...]

    @property
    def codec(self) -> Codec[Any]:
        return codec_of(self.format, self.message, validates=self.validates)


# each task of each micro-batch begins with these; for schemas of a hundred fields they take longer than its records
@lru_cache(_MOST_SCHEMAS)
def _schema(key: _SchemaText) -> Any:
    return key.codec.parse(key.text, dict(key.references))


@lru_cache(_MOST_SCHEMAS)
def _decoder(reader: _SchemaText) -> Decoder[Any]:
    return reader.codec.decoder(_schema(reader))


@lru_cache(_MOST_PROGRAMS)
def _program(reader: _SchemaText, writer: _SchemaText, rest: bytes | None) -> Any:
    return _decoder(reader).program(_schema(writer), rest)


Decode = Callable[[pa.Array | BinaryColumn, pa.Array | HeadersColumn | None], Decoded]


@dataclass(frozen=True)
class ColumnDecoder:
    """Decodes a column to rows of `type`; `is_permissive` if those of `Decoded.bad` are to be null."""

    type: pa.DataType
    is_permissive: bool
    decode: Decode


def _check_identity(
    identity: frozenset[tuple[str, ...]],
    pairs_of: Callable[[tuple[str, ...]], list[FieldPair]],
    is_older: Callable[[], bool],
) -> None:
    """`SchemaError` if different values of a writer's may become the same in the fields of `identity`.

    An older version may lack a field that the reader's version added: its keys differ by the others.
    """
    for record in sorted({path[:-1] for path in identity}):
        pairs = pairs_of(record)
        unread = [pair.written for pair in pairs if pair.written is not None and pair.read is None]
        if () in identity and unread:
            raise SchemaError(f"it has {', '.join(sorted(unread))}, without which different keys would be the same")
        key = [pair for pair in pairs if pair.read is not None and ({(), (*record, pair.read)} & identity)]
        missing = [pair.read for pair in key if pair.written is None and pair.read is not None]
        is_added = bool(missing) and not unread and len(missing) < len(key) and is_older()
        if missing and not is_added:
            raise SchemaError(
                f"it has no {', '.join(sorted(missing))}: by its default different keys would be the same"
            )
        if lossy := [pair for pair in key if pair.loss]:
            raise SchemaError(f"its {lossy[0].written or 'value'} {lossy[0].loss}: different keys would be the same")


def _bare(decoder: Decoder[Any], program: Any) -> Decode:
    def decode(values: pa.Array | BinaryColumn, headers: pa.Array | HeadersColumn | None) -> Decoded:
        decoded = decoder.decode(values, [program])
        return Decoded(decoded.values, [BadRow(row, cut(reason)) for row, reason in decoded.bad])

    return decode
