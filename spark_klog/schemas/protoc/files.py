"""protoc, of grpcio-tools: .proto texts, or serialized FileDescriptorProtos in base64, to descriptors.

It runs in a process of its own with a deadline: texts come from anywhere. `stay_in_this_process` is for such processes.
"""

from __future__ import annotations

import base64
import binascii
import errno
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from spark_klog.base.extras import require
from spark_klog.errors import SchemaError, SchemaTimedOut

_PARSE_SECONDS: Final = 20.0
#: What the paths of imports can be the fault of.
_OF_PATHS: Final = (errno.ENAMETOOLONG, errno.ENOTDIR, errno.EEXIST, errno.EISDIR)
#: What protoc says of the file that it parses.
_ERROR: Final = re.compile(r"^(?P<file>[^: \n]+\.proto):(?P<place>\d+:\d+: )?(?P<reason>.*)$", re.MULTILINE)
_STDERR: Final = 2
_ROOT: Final = "schema.proto"
#: protoc refuses this option, which only it may set, but texts in Confluent's registry have it.
_MAP_ENTRY: Final = re.compile(r"option\s+map_entry\s*=\s*true\s*;")
#: A reserved name of a message instead.
_MARKER: Final = "_map_"
#: Files that Confluent's clients take for known, beside google/protobuf/ and google/type/.
_KNOWN: Final = {
    "confluent/meta.proto": """syntax = "proto3";
package confluent;
import "google/protobuf/descriptor.proto";
message Meta {
  string doc = 1;
  map<string, string> params = 2;
  repeated string tags = 3;
}
extend google.protobuf.FileOptions { Meta file_meta = 1088; }
extend google.protobuf.MessageOptions { Meta message_meta = 1088; }
extend google.protobuf.FieldOptions { Meta field_meta = 1088; }
extend google.protobuf.EnumOptions { Meta enum_meta = 1088; }
extend google.protobuf.EnumValueOptions { Meta enum_value_meta = 1088; }
""",
    "confluent/type/decimal.proto": """syntax = "proto3";
package confluent.type;
message Decimal {
  bytes value = 1;
  uint32 precision = 2;
  int32 scale = 3;
}
""",
}


def parse_proto(text: str, references: Mapping[str, str]) -> tuple[str, list[Any]]:
    """The .proto text of a schema, and the FileDescriptorProtos of it and of all that it imports, its own last.

    `text` is that, or its FileDescriptorProto in base64, as are those of `references`. `SchemaError` says what does not
    compile; `SchemaTimedOut`; `MissingPackage` without grpcio-tools.
    """
    require("a Protobuf schema", "grpc_tools")
    texts: dict[str, str] = {}
    for path, content in references.items():
        descriptor = _from_base64(content)
        texts[path] = content if descriptor is None else _text_of(descriptor, texts)
    if (descriptor := _from_base64(text)) is not None:
        text = _text_of(descriptor, texts)
    return text, list(_compiled(text, texts).file)


def has_map_entries(text: str) -> bool:
    """Whether a .proto text has messages for the entries of maps, as that of a descriptor, and not `map<K, V>`."""
    return _MAP_ENTRY.search(text) is not None


def _from_base64(text: str) -> Any | None:
    """The FileDescriptorProto that a text is in base64; None if it is none."""
    from google.protobuf.descriptor_pb2 import FileDescriptorProto
    from google.protobuf.message import DecodeError

    try:
        return FileDescriptorProto.FromString(base64.b64decode(text.strip(), validate=True))
    except (binascii.Error, DecodeError, ValueError):
        return None


def _text_of(descriptor: Any, references: Mapping[str, str]) -> str:
    """The text of a FileDescriptorProto. Its custom options have names in the files that it imports only."""
    from spark_klog.schemas.protoc.text import proto_text

    files = []
    if any(not path.startswith("google/protobuf/") for path in descriptor.dependency):
        imports = "".join(f"import {json.dumps(path)};\n" for path in descriptor.dependency)
        files = list(_compiled(f'syntax = "proto3";\n{imports}', references).file)[:-1]
    return proto_text(descriptor, [*files, descriptor], "")


def _compiled(text: str, references: Mapping[str, str]) -> Any:
    """The FileDescriptorSet of a text and of what it imports, the text's own file last."""
    from google.protobuf.descriptor_pb2 import FileDescriptorSet

    with tempfile.TemporaryDirectory(prefix="klog-proto-") as folder:
        root = Path(folder, "in")
        name = _ROOT
        while name in references:
            name = f"_{name}"
        for path, content in [*_KNOWN.items(), *references.items(), (name, text)]:
            if not _is_inside(path):
                raise SchemaError(f"{path!r} is not a path that can be imported")
            file = root / path
            try:
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_text(_MAP_ENTRY.sub(_marked, content), encoding="utf-8")
            except OSError as error:
                if error.errno not in _OF_PATHS:
                    raise
                # too long, or one is a folder of the other
                raise SchemaError(f"{path[:300]!r} can't be imported: {error.strerror}") from None
        made = Path(folder, "out")
        arguments = [f"-I{root}", *_shared_types(text, references), "--include_imports", "--include_source_info"]
        said = _protoc([*arguments, f"--descriptor_set_out={made}", name])
        if said is not None:
            raise SchemaError("; ".join(_reasons(said.decode(errors="replace").replace(f"{root}/", ""), name)))
        files = FileDescriptorSet.FromString(made.read_bytes())
        for file_made in files.file:
            for message in file_made.message_type:
                _set_map_entries(message)
        return files


def _in_a_process(arguments: list[str]) -> bytes | None:
    """Run protoc in a process of its own; what it says if it fails."""
    command = [sys.executable, "-m", "grpc_tools.protoc", *arguments]
    try:
        done = subprocess.run(command, capture_output=True, timeout=_PARSE_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        raise SchemaTimedOut(f"protoc did not parse the schema within {_PARSE_SECONDS:g} s") from None
    return done.stderr if done.returncode else None


def _in_this_process(arguments: list[str]) -> bytes | None:
    from grpc_tools import protoc  # type: ignore[import-untyped]

    own = os.dup(_STDERR)
    try:
        with tempfile.TemporaryFile() as said:
            os.dup2(said.fileno(), _STDERR)
            code = protoc.main(["protoc", *arguments, f"-I{Path(protoc.__file__).parent / '_proto'}"])
            said.seek(0)
            return said.read() if code else None
    finally:
        os.dup2(own, _STDERR)
        os.close(own)


_protoc = _in_a_process


def stay_in_this_process() -> None:
    """Run protoc within this process from now on, which takes a hundredth of the time.

    For a process with one thread that another one ends if it takes too much time or memory.
    """
    global _protoc
    _protoc = _in_this_process


def _marked(match: re.Match[str]) -> str:
    """The marker, as long as what it replaces, and over as many lines: places in the text stay."""
    marker = f'reserved "{_MARKER}";'
    lines = match[0].count("\n")
    return marker + "\n" * lines if lines else marker.ljust(len(match[0]))


def _set_map_entries(message: Any) -> None:
    """Give messages with the marker the option that it stands for."""
    if _MARKER in message.reserved_name:
        message.reserved_name.remove(_MARKER)
        message.options.map_entry = True
    for nested in message.nested_type:
        _set_map_entries(nested)


def _is_inside(path: str) -> bool:
    parts = path.split("/")
    return all(part not in ("", ".", "..") and "\0" not in part and "\\" not in part for part in parts)


def _shared_types(text: str, references: Mapping[str, str]) -> list[str]:
    """Where google/type/ is, of googleapis-common-protos, if it is imported and installed."""
    if not any("google/type/" in content for content in (text, *references.values())):
        return []
    from importlib.util import find_spec

    spec = find_spec("google.type")
    places = [] if spec is None else list(spec.submodule_search_locations or ())
    return [f"-I{Path(place).parent.parent}" for place in places]


def _reasons(errors: str, name: str) -> Iterator[str]:
    """What protoc said; all of it if it has another form."""
    matches = [match for match in _ERROR.finditer(errors) if "warning:" not in match["reason"]]
    for match in matches:
        file = "" if match["file"] == name else f"{match['file']}: "
        yield f"{file}{match['place'] or ''}{match['reason'].strip()}"
    if not matches:
        yield errors.strip()[-2000:] or "protoc failed"
