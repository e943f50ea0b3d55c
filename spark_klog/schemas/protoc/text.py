"""A .proto text of a FileDescriptorProto, laid out as Confluent's registry stores it.

Types keep the names that the text had, where the descriptor says where it had them; otherwise they have full names with
a leading dot. Options keep their order likewise; otherwise they have that in which Confluent's registry reads a
descriptor, or that of their names. Comments are left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Final

_SCALARS: Final = {
    1: "double",
    2: "float",
    3: "int64",
    4: "uint64",
    5: "int32",
    6: "fixed64",
    7: "fixed32",
    8: "bool",
    9: "string",
    12: "bytes",
    13: "uint32",
    15: "sfixed32",
    16: "sfixed64",
    17: "sint32",
    18: "sint64",
}
_GROUP, _MESSAGE, _ENUM = 10, 11, 14
_REQUIRED, _REPEATED = 2, 3
#: The number after the last that a field may have.
_END_OF_NUMBERS: Final = 536_870_912
_INDENT: Final = "  "
#: Options (by FileOptions' and FieldOptions' numbers) that Confluent's registry takes from a descriptor in this order.
_ORDER_OF_OPTIONS: Final = {
    "google.protobuf.FileOptions": (1, 8, 10, 20, 27, 9),
    "google.protobuf.FieldOptions": (1, 2, 6, 3),
}


def proto_text(file: Any, files: Iterable[Any], text: str, *, is_normal: bool = False) -> str:
    """The text of `file`, a FileDescriptorProto; `files` has it and all that it imports, for custom options.

    `text` is what it was parsed from, or "". Maps are `map<K, V>` where the text has that, or with `is_normal`;
    otherwise repeated messages with the option map_entry: so Confluent's registry writes what clients send serialized.
    protoc refuses that option, see `files`. With `is_normal` options are sorted by name, too.
    """
    printer = _Printer(file, files, text, is_normal)
    return "".join(f"{line}\n" if line else "\n" for line in printer.lines())


def normal(file: Any) -> Any:
    """A copy in which fields, enum values, imports and reserved numbers are in order."""
    made = type(file)()
    made.CopyFrom(file)
    made.ClearField("source_code_info")
    public = {made.dependency[index] for index in made.public_dependency}
    paths = sorted(set(made.dependency))
    del made.dependency[:]
    made.dependency.extend(paths)
    del made.public_dependency[:]
    made.public_dependency.extend(index for index, path in enumerate(paths) if path in public)
    for message in made.message_type:
        _sort_message(message)
    for enum in made.enum_type:
        _sort_enum(enum)
    return made


def _sort_message(message: Any) -> None:
    message.field.sort(key=lambda field: field.number)
    message.reserved_range.sort(key=lambda reserved: reserved.start)
    message.reserved_name.sort()
    for nested in message.nested_type:
        _sort_message(nested)
    for enum in message.enum_type:
        _sort_enum(enum)


def _sort_enum(enum: Any) -> None:
    # an alias stays behind the value that it is one of
    enum.value.sort(key=lambda value: (value.number, value.name))
    enum.reserved_range.sort(key=lambda reserved: reserved.start)
    enum.reserved_name.sort()


class _Printer:
    def __init__(self, file: Any, files: Iterable[Any], text: str, is_normal: bool) -> None:
        self._file = file
        self._is_normal = is_normal
        self._lines = text.split("\n")
        self._spans = {tuple(place.path): list(place.span) for place in file.source_code_info.location} if text else {}
        #: Where what is at a path, or below it, begins.
        self._starts: dict[tuple[int, ...], list[int]] = {}
        for path, span in self._spans.items():
            for length in range(1, len(path) + 1):
                known = self._starts.setdefault(path[:length], span[:2])
                self._starts[path[:length]] = min(known, span[:2])
        self._options = _OptionReader(files)
        self._is_proto3 = file.syntax == "proto3"

    def lines(self) -> Iterator[str]:
        file = self._file
        if file.syntax == "editions":
            yield f'edition = "{_edition(file)}";'
        else:
            yield f'syntax = "{file.syntax or "proto2"}";'
        if file.package:
            yield f"package {file.package};"
        public = set(file.public_dependency)
        if file.dependency:
            yield ""
            yield from (f'import "{path}";' for index, path in enumerate(file.dependency) if index not in public)
            yield from (f'import public "{file.dependency[index]}";' for index in file.public_dependency)
        yield from _after_blank(self._option_lines(file.options, (8,)))
        if file.message_type or file.enum_type:
            yield ""
        for index, message in enumerate(file.message_type):
            yield from self._message(message, (4, index))
        for index, enum in enumerate(file.enum_type):
            yield from self._enum(enum, (5, index))
        if file.extension:
            yield ""
            yield from self._extensions(file.extension, (7,), file.message_type)
        if file.service:
            yield ""
        for index, service in enumerate(file.service):
            yield from self._service(service, (6, index))

    def _written(self, path: tuple[int, ...]) -> str | None:
        """What the text has at a place."""
        span = self._spans.get(path)
        if span is None:
            return None
        first, start, *last, end = span
        lines = self._lines[first : (last[0] if last else first) + 1]
        if not lines:
            return None
        lines[-1] = lines[-1].encode()[:end].decode(errors="ignore")
        lines[0] = lines[0].encode()[start:].decode(errors="ignore")
        text = " ".join(" ".join(lines).split())
        return None if "/*" in text or "//" in text else text.replace(" .", ".").replace(". ", ".")

    def _message(self, message: Any, path: tuple[int, ...], head: str = "") -> Iterator[str]:
        inner: list[str] = [""] if message.reserved_range or message.reserved_name else []
        inner += _reserved(message.reserved_range, message.reserved_name, _END_OF_NUMBERS, is_enum=False)
        inner += _after_blank(self._option_lines(message.options, (*path, 7)))
        oneofs: dict[int, list[int]] = {}
        plain = []
        for index, field in enumerate(message.field):
            if field.HasField("oneof_index") and not field.proto3_optional:
                oneofs.setdefault(field.oneof_index, []).append(index)
            else:
                plain.append(index)
        groups = [index for index in plain if message.field[index].type == _GROUP]
        fields = [index for index in plain if index not in groups]
        inner += _after_blank(self._field(message.field[n], (*path, 2, n), message.nested_type) for n in fields)
        if oneofs:
            inner.append("")
        for number, members in oneofs.items():
            oneof = message.oneof_decl[number]
            inner += [
                f"oneof {oneof.name} {{",
                *(_INDENT + line for line in self._option_lines(oneof.options, (*path, 8, number, 2))),
                *(
                    _INDENT + line
                    for n in members
                    for line in self._field_lines(message.field[n], (*path, 2, n), message.nested_type)
                ),
                "}",
            ]
        if groups:
            inner.append("")
        for index in groups:
            inner += self._field_lines(message.field[index], (*path, 2, index), message.nested_type)
        inner += _after_blank(
            f"extensions {_range(extension.start, extension.end - 1, _END_OF_NUMBERS - 1)};"
            for extension in message.extension_range
        )
        if message.extension:
            inner += ["", *self._extensions(message.extension, (*path, 6), message.nested_type)]
        hidden = {
            entry.name
            for n, field in enumerate(message.field)
            if (entry := _map_entry(field, message.nested_type)) is not None
            and self._type(field, (*path, 2, n), message.nested_type).startswith("map<")
        }
        nested = [
            (index, below)
            for index, below in enumerate(message.nested_type)
            if below.name not in hidden and not _is_group(below, message)
        ]
        if nested or message.enum_type:
            inner.append("")
        for index, below in nested:
            inner += self._message(below, (*path, 3, index))
        for index, enum in enumerate(message.enum_type):
            inner += self._enum(enum, (*path, 4, index))
        yield from _block(head or f"message {message.name}", inner)

    def _field(self, field: Any, path: tuple[int, ...], nested: Any) -> str:
        return "\n".join(self._field_lines(field, path, nested))

    def _field_lines(self, field: Any, path: tuple[int, ...], nested: Any) -> Iterator[str]:
        label = self._label(field)
        if field.type == _GROUP:
            name = field.type_name.rpartition(".")[2]
            below = next(message for message in nested if message.name == name)
            yield from self._message(below, path, f"{label}group {name} = {field.number}")
            return
        kind = self._type(field, path, nested)
        if kind.startswith("map<"):
            label = ""
        text = f"{label}{kind} {field.name} = {field.number}"
        options = self._ordered(field.options, (*path, 8))
        if field.HasField("default_value"):
            is_text = field.type in (9, 12)
            options.append(("default", _quoted(field.default_value) if is_text else field.default_value))
        if field.json_name and field.json_name != _json_name(field.name):
            options.append(("json_name", _quoted(field.json_name)))
        if self._is_normal:
            options.sort(key=_name_of)
        yield from _with_options(text, options)

    def _label(self, field: Any) -> str:
        if field.label == _REPEATED:
            return "repeated "
        if field.label == _REQUIRED:
            return "required "
        if field.proto3_optional:
            return "optional "
        is_bare = self._file.syntax in ("proto3", "editions") or field.HasField("oneof_index")
        return "" if is_bare else "optional "

    def _type(self, field: Any, path: tuple[int, ...], nested: Any) -> str:
        if field.type in _SCALARS:
            return _SCALARS[field.type]
        written = self._written((*path, 6))
        entry = _map_entry(field, nested)
        if entry is not None and written is not None and written.startswith("map<"):
            key, _, value = written[4:-1].partition(",")
            return f"map<{key.strip()}, {value.strip()}>"
        if entry is not None and self._is_normal:
            key, value = (self._type(part, (), ()) for part in entry.field)
            return f"map<{key}, {value}>"
        return written or field.type_name

    def _enum(self, enum: Any, path: tuple[int, ...]) -> Iterator[str]:
        inner = list(_reserved(enum.reserved_range, enum.reserved_name, (1 << 31) - 1, is_enum=True))
        inner += self._option_lines(enum.options, (*path, 3))
        for index, value in enumerate(enum.value):
            options = self._ordered(value.options, (*path, 2, index, 3))
            inner += _with_options(f"{value.name} = {value.number}", options)
        yield from _block(f"enum {enum.name}", [*inner])

    def _extensions(self, extensions: Any, path: tuple[int, ...], nested: Any) -> Iterator[str]:
        """The extend blocks, one for each run of extensions of a message."""
        at = 0
        while at < len(extensions):
            start = at
            while at < len(extensions) and extensions[at].extendee == extensions[start].extendee:
                at += 1
            name = self._written((*path, start, 2)) or extensions[start].extendee
            inner: list[str] = []
            for index in range(start, at):
                inner += self._field_lines(extensions[index], (*path, index), nested)
            yield from _block(f"extend {name}", inner)

    def _service(self, service: Any, path: tuple[int, ...]) -> Iterator[str]:
        inner = list(self._option_lines(service.options, (*path, 3)))
        for index, method in enumerate(service.method):
            place = (*path, 2, index)
            asked = self._written((*place, 2)) or method.input_type
            answered = self._written((*place, 3)) or method.output_type
            streams = ("stream " if method.client_streaming else "", "stream " if method.server_streaming else "")
            head = f"rpc {method.name} ({streams[0]}{asked}) returns ({streams[1]}{answered})"
            options = self._option_lines(method.options, (*place, 4))
            inner += [f"{head} {{", *(_INDENT + line for line in options), "};"] if options else [f"{head};"]
        yield from _block(f"service {service.name}", inner)

    def _option_lines(self, options: Any, path: tuple[int, ...]) -> list[str]:
        return [f"option {name} = {value};" for name, value in self._ordered(options, path)]

    def _ordered(self, options: Any, path: tuple[int, ...]) -> list[tuple[str, str]]:
        """Names and values of options, whose place in the descriptor is `path`."""
        made = list(self._options.read(options))
        if self._is_normal:
            return sorted(((name, value) for _, name, value in made), key=_name_of)
        first = _ORDER_OF_OPTIONS.get(options.DESCRIPTOR.full_name, ())

        def place(option: tuple[tuple[int, ...], str, str]) -> tuple[list[int], int]:
            number = option[0][0]
            start = self._starts.get((*path, *option[0])) or self._starts.get((*path, number), [])
            return start, first.index(number) if number in first else len(first)

        return [(name, value) for _, name, value in sorted(made, key=place)]


class _OptionReader:
    """Options with the names of custom ones, which need the files that declare them."""

    def __init__(self, files: Iterable[Any]) -> None:
        from google.protobuf.descriptor_pool import DescriptorPool

        self._pool = DescriptorPool()
        try:
            for file in files:
                self._pool.Add(file)
            self._pool.FindFileByName("google/protobuf/descriptor.proto")
            self._has_custom = True
        except (KeyError, TypeError):  # no file has custom options, or not all files are here
            self._has_custom = False

    def read(self, options: Any) -> Iterator[tuple[tuple[int, ...], str, str]]:
        """Numbers (with the index of one that is repeated), names and values, as a text has them."""
        if not options.ByteSize():
            return
        if self._has_custom:
            from google.protobuf.message_factory import GetMessageClass

            kind = self._pool.FindMessageTypeByName(options.DESCRIPTOR.full_name)
            options = GetMessageClass(kind).FromString(options.SerializeToString())
        for field, value in options.ListFields():
            if field.name == "uninterpreted_option" and not field.is_extension:
                continue
            name = f"({field.full_name})" if field.is_extension else field.name
            is_list = field.is_repeated and not _is_map(field)
            for index, element in enumerate(value if is_list else [value]):
                yield (field.number, index) if is_list else (field.number,), name, _option_value(field, element)


def _name_of(option: tuple[str, str]) -> str:
    return option[0].strip("()")


def _is_map(field: Any) -> bool:
    return field.message_type is not None and bool(field.message_type.GetOptions().map_entry)


def _option_value(field: Any, value: Any) -> str:
    from google.protobuf.text_format import MessageToString

    if field.message_type is not None:
        return f"{{ {MessageToString(value, as_one_line=True)} }}"
    if field.enum_type is not None:
        return str(field.enum_type.values_by_number[value].name)
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, bytes):
        return _quoted(value.decode("latin-1"))
    return _quoted(value) if isinstance(value, str) else str(value)


def _block(head: str, inner: list[str]) -> list[str]:
    lines = [line for text in inner for line in text.split("\n")]
    while lines and not lines[0]:
        lines.pop(0)
    if not lines:
        return [f"{head} {{}}"]
    return [f"{head} {{", *(_INDENT + line if line else "" for line in lines), "}"]


def _after_blank(lines: Iterable[str]) -> list[str]:
    made = list(lines)
    return ["", *made] if made else []


def _with_options(text: str, options: list[tuple[str, str]]) -> list[str]:
    if not options:
        return [f"{text};"]
    if len(options) == 1:
        return [f"{text} [{options[0][0]} = {options[0][1]}];"]
    last = len(options) - 1
    listed = [f"{_INDENT}{name} = {value}{',' * (index < last)}" for index, (name, value) in enumerate(options)]
    return [f"{text} [", *listed, "];"]


def _reserved(ranges: Any, names: Any, end: int, *, is_enum: bool) -> list[str]:
    made = [f"reserved {_range(span.start, span.end - (not is_enum), end - (not is_enum))};" for span in ranges]
    return made + [f"reserved {_quoted(name)};" for name in names]


def _range(first: int, last: int, most: int) -> str:
    if first == last:
        return str(first)
    return f"{first} to {'max' if last >= most else last}"


def _map_entry(field: Any, nested: Any) -> Any | None:
    """The message of a map's entries, if the field is a map."""
    if field.type != _MESSAGE or field.label != _REPEATED:
        return None
    name = field.type_name.rpartition(".")[2]
    return next((message for message in nested if message.options.map_entry and message.name == name), None)


def _is_group(message: Any, parent: Any) -> bool:
    return any(field.type == _GROUP and field.type_name.rpartition(".")[2] == message.name for field in parent.field)


def _json_name(name: str) -> str:
    first, *rest = name.split("_")
    return first + "".join(part[:1].upper() + part[1:] for part in rest)


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n").replace("\r", "\\r")
    return f'"{escaped}"'


def _edition(file: Any) -> str:
    from google.protobuf.descriptor_pb2 import Edition

    return str(Edition.Name(file.edition)).removeprefix("EDITION_")
