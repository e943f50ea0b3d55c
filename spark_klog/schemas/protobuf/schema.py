"""A Protobuf schema: the files of a text, and the message that its records are."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from spark_klog.errors import SchemaError
from spark_klog.schemas.protoc.files import has_map_entries, parse_proto
from spark_klog.schemas.registry.schemas import References

#: Schemas that a process keeps: protoc takes some tenths of a second for each.
_MOST_SCHEMAS = 1000
Indexes = tuple[int, ...]


@dataclass(frozen=True, eq=False)
class ProtobufSchema:
    """Records are `message`, a google.protobuf Descriptor, which is in the file of the schema, or in one in it.

    `numbered` has the messages of the file by their indexes, (0,) is the first, (0, 1) the second in it. Messages of
    the entries of maps count if the text has them, as for Confluent's clients: that of a descriptor does.
    """

    message: Any
    indexes: Indexes
    numbered: dict[Indexes, Any]
    #: The same by the other way to count: a client may have made its schema of the other form.
    numbered_otherwise: dict[Indexes, Any]

    @property
    def name(self) -> str:
        return str(self.message.full_name)

    def message_of(self, indexes: Indexes) -> Any:
        """The message of these indexes; `SchemaError` if there is none."""
        message = self.numbered.get(indexes) or self.numbered_otherwise.get(indexes)
        if message is None:
            raise SchemaError(f"its file has no message {'/'.join(map(str, indexes))}, counted from 0")
        return message


def parse_schema(text: str, references: References, message: str | None = None) -> ProtobufSchema:
    """The schema of a text, which is compiled once a process; `message` is its full or short name, None: the first.

    `text` is a .proto text, or its FileDescriptorProto in base64; `references` are the files that it imports, by path.
    `SchemaError` if it does not compile, or has no such message; `SchemaTimedOut`; `MissingPackage` without
    grpcio-tools.
    """
    return _parse(text, tuple(references.items()), message)


@lru_cache(_MOST_SCHEMAS)
def _parse(text: str, references: tuple[tuple[str, str], ...], message: str | None) -> ProtobufSchema:
    numbered, numbered_otherwise = _files(text, references)
    if not numbered:
        raise SchemaError("the file has no message")
    if message is None:
        chosen: list[Indexes] = [(0,)]
    else:
        chosen = [at for at, each in numbered.items() if each.full_name == message]
        chosen = chosen or [at for at, each in numbered.items() if each.name == message]
    if len(chosen) != 1:
        names = ", ".join(each.full_name for each in numbered.values())
        raise SchemaError(f"the file has {len(chosen) or 'no'} messages {message}, but {names}")
    return ProtobufSchema(numbered[chosen[0]], chosen[0], numbered, numbered_otherwise)


@lru_cache(_MOST_SCHEMAS)
def _files(text: str, references: tuple[tuple[str, str], ...]) -> tuple[dict[Indexes, Any], dict[Indexes, Any]]:
    """The messages of a text by their indexes, and by the other way to count."""
    from google.protobuf.descriptor_pool import DescriptorPool

    text, files = parse_proto(text, dict(references))
    pool = DescriptorPool()  # of its own: names may mean something else in another schema
    for file in files:
        try:
            pool.AddSerializedFile(file.SerializeToString())
        except TypeError as error:
            raise SchemaError(f"file {file.name}: {error}") from None
    root = files[-1]
    prefix = f"{root.package}." if root.package else ""
    is_counted = has_map_entries(text)
    numbered, otherwise = (
        {at: pool.FindMessageTypeByName(name) for at, name in _numbered(root.message_type, (), prefix, counts_entries)}
        for counts_entries in (is_counted, not is_counted)
    )
    return numbered, otherwise


def _numbered(messages: Any, above: Indexes, prefix: str, counts_entries: bool) -> Iterator[tuple[Indexes, str]]:
    """Indexes and full name of each message, one before those in it."""
    counted = [message for message in messages if counts_entries or not message.options.map_entry]
    for index, message in enumerate(counted):
        at = (*above, index)
        yield at, prefix + message.name
        yield from _numbered(message.nested_type, at, f"{prefix}{message.name}.", counts_entries)
