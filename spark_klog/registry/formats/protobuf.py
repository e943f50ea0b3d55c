"""Protobuf schemas for a registry: a .proto text, or a serialized FileDescriptorProto in base64.

They are compared by the rules of Confluent's registry: fields are those with the same number, so names may change, and
so may types that have the same form on the wire.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

from spark_klog.errors import SchemaError
from spark_klog.registry.formats import PROTOBUF, READER, WRITER, InvalidSchema, ParsedSchema, limited
from spark_klog.schemas.protoc.files import parse_proto
from spark_klog.schemas.registry.schemas import References

_GROUP, _MESSAGE, _ENUM = 10, 11, 14
_REQUIRED, _REPEATED = 2, 3
#: Scalar types by what they are on the wire (FieldDescriptorProto.Type).
_SCALAR_KINDS: Final = {
    **dict.fromkeys((3, 4, 5, 8, 13, _ENUM), "number"),
    **dict.fromkeys((17, 18), "signed number"),
    **dict.fromkeys((9, 12), "string or bytes"),
    **dict.fromkeys((7, 15), "fixed32"),
    **dict.fromkeys((6, 16), "fixed64"),
    1: "double",
    2: "float",
}
#: Texts of changes after which a reader with the new schema does not understand what the old one wrote.
_TEXTS: Final = {
    "PACKAGE_CHANGED": "The package at '{path}' in the {new} schema does not match the package in the {old} schema",
    "MESSAGE_REMOVED": "The {new} schema is missing a MESSAGE type at path '{path}' in the {old} schema",
    "FIELD_KIND_CHANGED": "The type of a field at path '{path}' in the {new} schema does not match the {old} schema",
    "FIELD_SCALAR_KIND_CHANGED": (
        "The kind of a SCALAR field at path '{path}' in the {new} schema does not match its kind in the {old} schema"
    ),
    "FIELD_NAMED_TYPE_CHANGED": (
        "The type of a MESSAGE field at path '{path}' in the {new} schema does not match its type in the {old} schema"
    ),
    "FIELD_NUMERIC_LABEL_CHANGED": (
        "The label for a NUMERIC field at path '{path}' in the {new} schema does not match its label in the {old} "
        "schema"
    ),
    "REQUIRED_FIELD_ADDED": "A required field  at path '{path}' in the {new} schema is missing in the {old} schema",
    "REQUIRED_FIELD_REMOVED": "The {new} schema is missing a required field at path: '{path}' in the {old} schema",
    "ONEOF_FIELD_REMOVED": "The {new} schema is missing a oneof field at path '{path}' in the {old} schema",
    "MULTIPLE_FIELDS_MOVED_TO_ONEOF": (
        "Multiple fields in the oneof at path '{path}' in the {new} schema are outside a oneof in the {old} schema"
    ),
    "FIELD_MOVED_TO_EXISTING_ONEOF": (
        "A field in the oneof at path '{path}' in the {new} schema is outside an existing oneof in the {old} schema"
    ),
}


class ProtobufSchema:
    """A Protobuf schema. `InvalidSchema` if the text does not compile; `SchemaTimedOut`."""

    schema_type = PROTOBUF

    def __init__(self, text: str, references: References) -> None:
        try:
            self._text, files = parse_proto(text, references)
        except SchemaError as error:
            raise InvalidSchema(str(error)) from None
        #: The FileDescriptorProto of the schema, and those of all files that it needs.
        self.file: Any = files[-1]
        self.files: list[Any] = files

    @cached_property
    def _canonical(self) -> str:
        from spark_klog.schemas.protoc.text import proto_text

        return proto_text(self.file, self.files, self._text)

    def canonical(self) -> str:
        return self._canonical

    def normalized(self) -> str:
        from spark_klog.schemas.protoc.text import normal, proto_text

        return proto_text(normal(self.file), self.files, "", is_normal=True)

    def formatted(self, form: str) -> str:
        """`serialized` is the FileDescriptorProto in base64, which has no comments and no places of the text."""
        if form != "serialized":
            return self.canonical()
        bare = type(self.file)()
        bare.CopyFrom(self.file)
        bare.ClearField("source_code_info")
        return base64.b64encode(bare.SerializeToString()).decode()

    def unreadable(self, writer: ParsedSchema) -> list[str]:
        assert isinstance(writer, ProtobufSchema)
        changes = differences(writer.files, self.files)
        return limited(change.text() for change in changes if not change.is_compatible)


@dataclass(frozen=True)
class Change:
    """A difference; `path` is that of messages, oneofs and the field's number, `kind` Confluent's name."""

    kind: str
    path: str

    @property
    def is_compatible(self) -> bool:
        return self.kind not in _TEXTS

    def text(self) -> str:
        described = _TEXTS[self.kind].format(path=self.path, new=READER, old=WRITER)
        return f'{{errorType:"{self.kind}", description:"{described}"}}'


def differences(old: list[Any], new: list[Any]) -> list[Change]:
    """The changes from one schema to another: a FileDescriptorProto each, after those of the files that it needs."""
    return list(_Comparison(_Types(old), _Types(new)).files(old[-1], new[-1]))


class _Types:
    """The messages of a schema and of what it imports, by full name with a leading dot."""

    def __init__(self, files: list[Any]) -> None:
        self.messages: dict[str, Any] = {}
        #: Names without their package, and whether the schema imports them.
        self.local_names: dict[str, str] = {}
        self.imported: set[str] = set()
        #: Syntax of each message's file.
        self.is_proto3: dict[int, bool] = {}
        for file in files:
            before = set(self.messages)
            prefix = f".{file.package}" if file.package else ""
            for message in file.message_type:
                self._add(message, prefix, prefix, file.syntax == "proto3")
            if file is not files[-1]:
                self.imported |= self.messages.keys() - before

    def _add(self, message: Any, prefix: str, package: str, is_proto3: bool) -> None:
        name = f"{prefix}.{message.name}"
        self.messages[name] = message
        self.local_names[name] = name[len(package) + 1 :]
        self.is_proto3[id(message)] = is_proto3
        for nested in message.nested_type:
            self._add(nested, name, package, is_proto3)

    def entry(self, field: Any) -> Any | None:
        """The message of a map's entries, if the field is a map."""
        message = self.messages.get(field.type_name) if field.type == _MESSAGE else None
        return message if message is not None and message.options.map_entry else None


class _Comparison:
    def __init__(self, old: _Types, new: _Types) -> None:
        self._old, self._new = old, new
        #: Messages of `old` that are being compared.
        self._under_way: set[int] = set()
        #: Pairs of imported messages that fields have, and whether they are compatible: each is compared once.
        self._compared: dict[tuple[int, int], bool] = {}

    def files(self, old: Any, new: Any) -> Iterator[Change]:
        if old.package != new.package:
            yield Change("PACKAGE_CHANGED", "#/")
        yield from self._types(old.message_type, new.message_type, old.enum_type, new.enum_type, ())

    def _types(self, olds: Any, news: Any, old_enums: Any, new_enums: Any, path: tuple[str, ...]) -> Iterator[Change]:
        before, after = ({each.name: (n, each) for n, each in enumerate(_declared(side))} for side in (olds, news))
        yield from _by_name("MESSAGE", before, after, path, self._placed)
        was, now = ({enum.name: enum for enum in side} for side in (old_enums, new_enums))
        yield from _by_name("ENUM", was, now, path, _enums)

    def _placed(self, old: tuple[int, Any], new: tuple[int, Any], path: tuple[str, ...]) -> Iterator[Change]:
        yield from self._messages(old[1], new[1], path)
        if old[0] != new[0]:
            yield _change("MESSAGE_MOVED", path)

    def _messages(self, old: Any, new: Any, path: tuple[str, ...]) -> Iterator[Change]:
        if id(old) not in self._under_way:
            self._under_way.add(id(old))
            yield from self._fields(old, new, path)
            self._under_way.discard(id(old))
        yield from self._types(old.nested_type, new.nested_type, old.enum_type, new.enum_type, path)

    def _fields(self, old: Any, new: Any, path: tuple[str, ...]) -> Iterator[Change]:
        before, after = ({field.number: field for field in message.field} for message in (old, new))
        old_oneofs, new_oneofs = _oneofs(old), _oneofs(new)
        old_oneof, new_oneof = (
            {number: name for name, numbers in oneofs.items() for number in numbers}
            for oneofs in (old_oneofs, new_oneofs)
        )
        gone = {
            name
            for name, numbers in old_oneofs.items()
            if name not in new_oneofs and not any(number in after for number in numbers)
        }
        for name, numbers in new_oneofs.items():
            groups = {old_oneof.get(number, number) for number in numbers if number in before}
            moved = sum(number in before and number not in old_oneof for number in numbers)
            if len(groups) > 1:
                kind = "MULTIPLE_FIELDS_MOVED_TO_ONEOF" if moved > 1 else "FIELD_MOVED_TO_EXISTING_ONEOF"
                yield _change(kind, (*path, name))
        for name in sorted(old_oneofs.keys() ^ new_oneofs.keys()):
            yield _change("ONEOF_REMOVED" if name in old_oneofs else "ONEOF_ADDED", (*path, name))
        for number in sorted(before.keys() | after.keys()):
            was, now = old_oneof.get(number), new_oneof.get(number)
            if number not in before or number not in after:
                is_gone = number in before
                field, oneof, change = (before[number], was, "REMOVED") if is_gone else (after[number], now, "ADDED")
                if oneof is None:
                    yield _change(f"{'REQUIRED_' * (field.label == _REQUIRED)}FIELD_{change}", (*path, str(number)))
                elif not is_gone or oneof not in gone:
                    yield _change(f"ONEOF_FIELD_{change}", (*path, oneof, str(number)))
            else:
                if was is not None and now is None:
                    yield _change("ONEOF_FIELD_MOVED_TO_TOP_LEVEL", (*path, str(number)))
                place = (*path, str(number)) if now is None else (*path, now, str(number))
                labels = self._label(before[number], self._old, old), self._label(after[number], self._new, new)
                if before[number].name != after[number].name:
                    yield _change("FIELD_NAME_CHANGED", place)
                yield from self._field(before[number], after[number], labels, place)

    @staticmethod
    def _label(field: Any, types: _Types, message: Any) -> int | None:
        """The label that the text has; None if it has none."""
        if field.label in (_REPEATED, _REQUIRED) or field.proto3_optional:
            return int(field.label)
        if types.is_proto3[id(message)] or field.HasField("oneof_index"):
            return None
        return int(field.label)

    def _field(
        self, old: Any, new: Any, labels: tuple[int | None, int | None], path: tuple[str, ...]
    ) -> Iterator[Change]:
        entry, new_entry = self._old.entry(old), self._new.entry(new)
        kinds = _kind(old, entry), _kind(new, new_entry)
        if kinds[0] != kinds[1]:
            yield _change("FIELD_KIND_CHANGED", path)
        elif entry is not None:
            assert new_entry is not None
            for before, after in zip(entry.field, new_entry.field, strict=True):
                yield from self._field(before, after, (None, None), path)
        elif kinds[0] == "scalar":
            kind = _SCALAR_KINDS[old.type]
            if kind != _SCALAR_KINDS[new.type]:
                yield _change("FIELD_SCALAR_KIND_CHANGED", path)
            elif None not in labels and labels[0] != labels[1]:
                is_text = kind == "string or bytes"
                yield _change("FIELD_STRING_OR_BYTES_LABEL_CHANGED" if is_text else "FIELD_NUMERIC_LABEL_CHANGED", path)
        else:
            yield from self._named(old.type_name, new.type_name, path)

    def _named(self, old: str, new: str, path: tuple[str, ...]) -> Iterator[Change]:
        """Types of a field, which are messages: the same, or imported ones that are compatible."""
        name = self._old.local_names[old]
        if name != self._new.local_names[new]:
            yield _change("FIELD_NAMED_TYPE_CHANGED", path)
        elif old in self._old.imported or new in self._new.imported:
            before, after = self._old.messages[old], self._new.messages[new]
            pair = id(before), id(after)
            if pair not in self._compared:
                self._compared[pair] = True
                changes = list(self._messages(before, after, tuple(name.split("."))))
                self._compared[pair] = all(change.is_compatible for change in changes)
                yield from changes
            if not self._compared[pair]:
                yield _change("FIELD_NAMED_TYPE_CHANGED", path)


def _change(kind: str, path: tuple[str, ...]) -> Change:
    return Change(kind, "#/" + "/".join(path))


def _by_name(
    kind: str,
    olds: dict[str, Any],
    news: dict[str, Any],
    path: tuple[str, ...],
    compare: Callable[[Any, Any, tuple[str, ...]], Iterator[Change]],
) -> Iterator[Change]:
    """The changes of types of a kind: those that only one side has, and of the others what `compare` says."""
    for name in dict.fromkeys((*olds, *news)):
        if name in olds and name in news:
            yield from compare(olds[name], news[name], (*path, name))
        else:
            yield _change(f"{kind}_{'REMOVED' if name in olds else 'ADDED'}", (*path, name))


def _declared(messages: Any) -> list[Any]:
    """Messages that the text declares, without those of maps' entries."""
    return [message for message in messages if not message.options.map_entry]


def _kind(field: Any, entry: Any | None) -> str:
    if entry is not None:
        return "map"
    return "message" if field.type in (_MESSAGE, _GROUP) else "scalar"


def _oneofs(message: Any) -> dict[str, list[int]]:
    """Numbers of fields by the oneof that they are in."""
    made: dict[str, list[int]] = {}
    for field in message.field:
        if field.HasField("oneof_index") and not field.proto3_optional:
            made.setdefault(message.oneof_decl[field.oneof_index].name, []).append(field.number)
    return made


def _enums(old: Any, new: Any, path: tuple[str, ...]) -> Iterator[Change]:
    before, after = ({value.number: value.name for value in enum.value} for enum in (old, new))
    for number in sorted(before.keys() | after.keys()):
        if before.get(number) == after.get(number):
            continue
        kind = "REMOVED" if number not in after else "ADDED" if number not in before else "CHANGED"
        yield _change(f"ENUM_CONST_{kind}", (*path, str(number)))
