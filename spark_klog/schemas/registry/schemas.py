"""What a registry holds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple
from uuid import UUID

from spark_klog.base.names import Format

#: Texts of the schemas that one uses, by the names that they have there, each after those that it needs itself.
References = Mapping[str, str]
NO_REFERENCES: Final[References] = {}
#: What formats are called in the REST API; Avro is left out there.
TYPES: Final[dict[Format, str]] = {"avro": "AVRO", "protobuf": "PROTOBUF", "json-schema": "JSON"}
#: Levels of compatibility; those that end in _TRANSITIVE are about all versions before.
LEVELS: Final = (
    *("BACKWARD", "BACKWARD_TRANSITIVE", "FORWARD", "FORWARD_TRANSITIVE", "FULL", "FULL_TRANSITIVE"),
    "NONE",
)
_FORMATS: Final[dict[str, Format]] = {name: kind for kind, name in TYPES.items()}


class Reference(NamedTuple):
    """Another schema that one uses, by the name that it has there: an Avro type's, an imported file's, a URL."""

    name: str
    subject: str
    version: int


@dataclass(frozen=True)
class Schema:
    """A schema's text, and the schemas that it uses."""

    text: str
    format: Format = "avro"
    references: tuple[Reference, ...] = ()

    @classmethod
    def of(cls, answer: dict[str, Any]) -> Schema:
        """Of a registry's JSON; KeyError, TypeError or ValueError if it is not one."""
        references = tuple(
            Reference(str(reference["name"]), str(reference["subject"]), int(reference["version"]))
            for reference in answer.get("references") or ()
        )
        text = answer["schema"]
        if not isinstance(text, str):
            raise TypeError(f"the schema is {type(text).__name__}, not a text")
        return cls(text, _FORMATS[answer.get("schemaType") or "AVRO"], references)

    def request(self) -> dict[str, Any]:
        body: dict[str, Any] = {"schema": self.text}
        if self.format != "avro":
            body["schemaType"] = TYPES[self.format]
        if self.references:
            body["references"] = [reference._asdict() for reference in self.references]
        return body


@dataclass(frozen=True)
class Version:
    """A version of a subject. `guid` is None of a registry that has none."""

    subject: str
    version: int
    id: int
    schema: Schema
    guid: UUID | None = None

    @classmethod
    def of(cls, answer: dict[str, Any]) -> Version:
        """As `Schema.of`."""
        guid = answer.get("guid")
        return cls(
            str(answer["subject"]),
            int(answer["version"]),
            int(answer["id"]),
            Schema.of(answer),
            None if guid is None else UUID(guid),
        )
