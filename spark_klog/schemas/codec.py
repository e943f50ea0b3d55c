"""What a format of records is to the rest: it parses its schemas, and makes decoders and encoders of them."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Literal, Protocol, TypeVar

import pyarrow as pa

from spark_klog.base.names import Format
from spark_klog.records.contract import BinaryColumn
from spark_klog.schemas.registry.schemas import NO_REFERENCES, References
from spark_klog.schemas.rows import Decoded, FieldPair
from spark_klog.wire.primitives import Buffer

#: What is no schema of any format: a path or URI, and not a comment of Protobuf.
_FILE = re.compile(r"(?!//|/\*)([^\s{}\[\]\"';]*[/\\][^\n{}\[\]\"';]*|[^\n{}\[\]\"';]+\.(avsc|proto|json))")
#: A parsed schema of a format.
S = TypeVar("S")
_S_contra = TypeVar("_S_contra", contravariant=True)


class Decoder(Protocol[_S_contra]):
    """Decodes a binary column to rows of one schema, the reader's. One thread at a time uses it, but for programs."""

    type: pa.DataType

    def another(self) -> Decoder[_S_contra]:
        """A decoder of the same schema, by the same programs, for another thread."""
        ...

    def program(self, writer: _S_contra, rest: bytes | None = None) -> Any:
        """How rows of `writer` are read.

        `rest` is what records have after the schema's id (`prefix.SchemaKey`), None if they have no id.
        `SchemaError` if no value of that schema can be read by the reader's.
        """
        ...

    def field_pairs(self, writer: _S_contra, rest: bytes | None, path: tuple[str, ...]) -> list[FieldPair]:
        """The fields of the record in the reader's fields of `path`, beside those of `writer`; `rest` as of `program`.

        None if one of them has no such record. A value that is no record is a pair of fields without names, if it has
        a loss. `SchemaError` as of `program`.
        """
        ...

    def decode(
        self,
        values: pa.Array | BinaryColumn,
        programs: Sequence[Any],
        which: Buffer | None = None,
        starts: int | Buffer = 0,
    ) -> Decoded:
        """Decode rows: by INT32 `which` of each row, its program (-1: the row is to be null), None: all by the first.

        `starts` is where records begin in their values, in bytes: one number, or INT32 a row.
        """
        ...


class Encoder(Protocol):
    """Encodes Arrow columns of one type, `type`, by one schema."""

    type: pa.DataType

    def encode(self, values: pa.Array, prefix: bytes = b"") -> pa.Array:
        """The binary column of the records; null stays null. `prefix` has the schema's id, and stands before each.

        `EncodeError` names the row and the field that do not fit.
        """
        ...


class Codec(Protocol[S]):
    """A format. All methods raise `SchemaError`; `MissingPackage` if a package of the format is not installed.

    `has_indexes` if message indexes follow a record's schema id.
    """

    has_indexes: ClassVar[bool]

    def parse(self, text: str, references: References = NO_REFERENCES) -> S:
        """The schema of a text."""
        ...

    def name(self, schema: S) -> str:
        """The full name by which subjects are called, "" if a schema has none."""
        ...

    def decoder(self, reader: S) -> Decoder[S]: ...

    def encoder(self, schema: S, kind: pa.DataType) -> Encoder:
        """An encoder of columns of an Arrow type, which has to fit."""
        ...

    def value_writer(self, schema: S, prefix: bytes) -> Callable[[Any], bytes] | None:
        """What writes single Python values, `EncodeError` for one that does not fit, if the format has its own.

        The others' values go through a column of one row: `values.ValueColumn`.
        """
        ...

    def message_of(self, schema: S, rest: bytes) -> str | None:
        """The message of records with `rest` after their ids (`prefix.SchemaKey`); None if the format has none."""
        ...

    def schema_of(self, kind: pa.DataType) -> str:
        """The text of a schema for a column's Arrow type."""
        ...


def names_file(text: str) -> bool:
    """Whether a text that is to be a schema, of any format, looks like the name of a file instead."""
    return bool(_FILE.fullmatch(text.strip()))


def codec_of(name: Format | Literal["json"], message: str | None = None, *, validates: bool = False) -> Codec[Any]:
    """The codec of a format.

    `message` is which of a Protobuf schema's messages records are, by default the first. With `validates` JSON records
    are checked in full against their schemas. "json" is JSON by a DDL, which is read only.
    """
    match name:
        case "avro":
            from spark_klog.schemas.avro.codec import AvroCodec

            return AvroCodec()
        case "protobuf":
            from spark_klog.schemas.protobuf.codec import ProtobufCodec

            return ProtobufCodec(message)
        case "json-schema":
            from spark_klog.schemas.json_schema.codec import JsonSchemaCodec

            return JsonSchemaCodec(validates=validates)
        case "json":
            from spark_klog.schemas.json_schema.codec import JsonCodec

            return JsonCodec()
