"""Protobuf schemas for a registry: a .proto text, or a serialized FileDescriptorProto in base64."""

from __future__ import annotations

import base64
from functools import cached_property
from typing import Any

from spark_klog.errors import SchemaError
from spark_klog.registry.formats.contract import (
    PROTOBUF,
    InvalidSchema,
    ParsedSchema,
    limited,
)
from spark_klog.registry.formats.protobuf_differences import differences
from spark_klog.schemas.protoc.files import parse_proto
from spark_klog.schemas.registry.schemas import References


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
        found = differences(writer.files, self.files)
        return limited(change.text() for change in found if not change.is_compatible)
