"""Schemas of the formats that registries know: what a registry needs of them, and what parses each."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from typing import Final, Protocol

from spark_klog.schemas.registry.schemas import References

AVRO: Final = "AVRO"
JSON: Final = "JSON"
PROTOBUF: Final = "PROTOBUF"
#: In the order in which Confluent's registry lists them.
TYPES: Final = (JSON, PROTOBUF, AVRO)


class InvalidSchema(ValueError):
    """A text that is not a schema of its format; the message says what is wrong, and where."""


class TooComplex(Exception):
    """Two schemas whose comparison would take too long; the message says of what they have too many."""


class ParsedSchema(Protocol):
    """A schema. Two with the same `canonical` are the same."""

    #: "AVRO", "JSON" or "PROTOBUF".
    schema_type: str

    def canonical(self) -> str:
        """The text as a registry stores it: without its author's white space."""
        ...

    def normalized(self) -> str:
        """A text in which what makes no difference, such as the order of properties, is always the same."""
        ...

    def formatted(self, form: str) -> str:
        """The text in a form that the format knows, `canonical` for any other."""
        ...

    def unreadable(self, writer: ParsedSchema) -> list[str]:
        """Why a reader with this schema can't read what `writer`, of the same format, wrote; [] if it can.

        Texts are Confluent's, {errorType:'...', description:'...', ...}, with READER and WRITER (below) in the places
        of what the caller calls the two. There are not more than `limited` leaves.
        """
        ...


#: Places in the texts of `ParsedSchema.unreadable`.
READER: Final = "\ue000"
WRITER: Final = "\ue001"
#: Differences of two schemas that are said.
MOST_DIFFERENCES: Final = 100
_MOST_LETTERS: Final = 4000


def reasons_of(reader: ParsedSchema, writer: ParsedSchema, reader_name: str, writer_name: str) -> list[str]:
    """`ParsedSchema.unreadable`, with what the caller calls the two."""
    return [text.replace(READER, reader_name).replace(WRITER, writer_name) for text in reader.unreadable(writer)]


def limited(texts: Iterable[str]) -> list[str]:
    """The first hundred of texts, and the first page of each: schemas of a few KB may differ in a million places."""
    return [
        text if len(text) <= _MOST_LETTERS else f"{text[:_MOST_LETTERS]}..." for text in islice(texts, MOST_DIFFERENCES)
    ]


def parse(schema_type: str, text: str, references: References, *, is_new: bool = False) -> ParsedSchema:
    """Parse a schema; `is_new` also refuses what registries once accepted, such as defaults of another type.

    `InvalidSchema`; `MissingPackage` if what parses this format is not installed.
    """
    if schema_type == AVRO:
        from spark_klog.registry.formats.avro import AvroSchema

        return AvroSchema(text, references, is_new=is_new)
    if schema_type == JSON:
        from spark_klog.registry.formats.json_schema import JsonSchema

        return JsonSchema(text, references)
    if schema_type == PROTOBUF:
        from spark_klog.registry.formats.protobuf import ProtobufSchema

        return ProtobufSchema(text, references)
    raise InvalidSchema(f"Invalid schema type {schema_type}")
