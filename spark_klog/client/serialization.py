"""Settings that make keys and values of records Python values, and back: key.deserializer, value.serializer and so on.

    avro, protobuf, json-schema     rows by a schema, of `schema.registry.url` or `value.schema`
    string, bytes, short, integer, long, float, double, boolean, uuid       as Kafka's Java classes write them
    a Java class                    by the end of its name: ...KafkaAvroDeserializer, ...StringSerializer
    an object of confluent-kafka    called with (value, context), see `Context`; so is a function with two parameters
    an object of kafka-python       its method serialize(topic, value) or deserialize(topic, value) is called
    any other function              called with the value

Null stays null, without a call.
"""

from __future__ import annotations

import inspect
import logging
import struct
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, cast
from uuid import UUID

from spark_klog.base.extras import require
from spark_klog.base.names import OF_REGISTRY, ROW_FORMATS, SUBJECT_STRATEGIES, Format
from spark_klog.base.settings import BOOLEAN, INT, INT32_MAX, choice, value_of
from spark_klog.client.settings import (
    OF_ROWS,
    OF_WRITTEN_ROWS,
    REGISTRY_LOGINS,
    SERIALIZERS,
    setting_texts,
)
from spark_klog.errors import ConfigError
from spark_klog.security.config import Settings

if TYPE_CHECKING:
    from spark_klog.schemas.column_format import ColumnFormat
    from spark_klog.schemas.column_writing import Strategy, WriteFormat
    from spark_klog.schemas.registry.client import RegistrySettings

_log = logging.getLogger(__name__)
Column = Literal["key", "value"]
#: What the setting's name ends with: of a consumer, of a producer.
Direction = Literal["deserializer", "serializer"]
COLUMNS: tuple[Column, ...] = ("key", "value")
#: Kafka's default of the settings by which calls of consumers and producers end.
_LIMIT_MS = 60_000
#: What Java classes are called before "Serializer" and "Deserializer".
_JAVA = {
    "KafkaAvro": "avro",
    "GenericAvro": "avro",
    "KafkaProtobuf": "protobuf",
    "KafkaJsonSchema": "json-schema",
    "ByteArray": "bytes",
    "ByteBuffer": "bytes",
    "Bytes": "bytes",
}


class Context(NamedTuple):
    """What a function of two parameters learns of a record, by the names of confluent-kafka's SerializationContext.

    `field` is "key" or "value". A serializer may append to `headers`.
    """

    topic: str
    field: Column
    headers: list[tuple[str, bytes | None]]


class RowNames(NamedTuple):
    """What users call the settings of a column that is rows; `kind` is the word before the names, or empty."""

    kind: str
    registry: str
    format: str
    schema: str
    schema_id: str
    subject: str
    message: str

    def check(self, form: str | None, given: Collection[str], *, has_registry: bool) -> None:
        """Raise `ConfigError` if some of the `given` names contradict the format, None for bytes, or each other."""
        of_registry = [name for name in (self.schema_id, self.subject) if name in given]
        if self.message in given and form != "protobuf":
            raise self._needs(self.message, f"{self.format}=protobuf: it names one of a schema's messages")
        if form is None:
            if first := [name for name in (self.schema, *of_registry) if name in given]:
                raise self._needs(first[0], f"{self.format}: one of {', '.join(ROW_FORMATS)}")
        elif self.schema in given and self.schema_id in given:
            kind = self.kind and f"{self.kind}s "
            raise ConfigError(f"{kind}{self.schema} and {self.schema_id} exclude each other: remove one of them")
        elif of_registry and not has_registry:
            raise self._needs(of_registry[0], self.registry)

    def no_schema(self, form: str) -> ConfigError:
        """The error of a column without a schema and a registry that has one."""
        return self._needs(
            f"{self.format}={form}",
            f"{self.registry}, or {self.schema}: the text of the schema that all records have, without a registry's "
            "ids before them",
        )

    def no_one_schema(self, form: str) -> ConfigError:
        """The error of a column that would have a schema for each topic."""
        return self._needs(
            f"{self.format}={form} of several topics",
            f"{self.subject}, {self.schema_id} or {self.schema}: the column has one schema, to which all records are "
            "converted",
        )

    def _needs(self, what: str, needed: str) -> ConfigError:
        return ConfigError(f"{self.kind and f'{self.kind} '}{what} needs {needed}")


class PlainType(NamedTuple):
    """A type without a schema: its name in Arrow, and how a value is read and written. Errors are any exceptions."""

    arrow: str
    read: Callable[[bytes], Any]
    write: Callable[[Any], bytes]


Function = Callable[[Any, Context], Any]


def _number(code: str, arrow: str) -> PlainType:
    form = struct.Struct(f">{code}")

    def read(data: bytes) -> Any:
        if len(data) != form.size:
            raise ValueError(f"it has {len(data)} bytes, not {form.size}")
        return form.unpack(data)[0]

    return PlainType(arrow, read, form.pack)


def _written_text(value: str) -> bytes:
    if not isinstance(value, str):
        raise TypeError(f"it must be a str, not {type(value).__name__}")
    return value.encode()


def _read_boolean(data: bytes) -> bool:
    if data not in (b"\0", b"\1"):
        raise ValueError("it must be a byte 0 or 1")
    return data == b"\1"


def _written_boolean(value: bool) -> bytes:
    if not isinstance(value, bool):
        raise TypeError(f"it must be a bool, not {type(value).__name__}")
    return b"\1" if value else b"\0"


def _read_uuid(data: bytes) -> UUID:
    return UUID(data.decode())


def _written_uuid(value: UUID | str) -> bytes:
    return str(value if isinstance(value, UUID) else UUID(value)).encode()


PLAIN: Mapping[str, PlainType | None] = {
    "bytes": None,
    "string": PlainType("string", bytes.decode, _written_text),
    "short": _number("h", "int16"),
    "integer": _number("i", "int32"),
    "long": _number("q", "int64"),
    "float": _number("f", "float32"),
    "double": _number("d", "float64"),
    "boolean": PlainType("bool", _read_boolean, _written_boolean),
    "uuid": PlainType("string", _read_uuid, _written_uuid),
}


class Serialization:
    """What the settings say of keys and values. Formats with a schema need the `schemas` room, which is imported then.

    `by_column` has a column's format by name, its plain type, or its function; a column of bytes is not in it.
    """

    def __init__(self, direction: Direction, settings: Mapping[str, Any]) -> None:
        """`settings` are those of a client, with those for `direction`; `ConfigError` for a wrong one."""
        self._direction = direction
        self.by_column: dict[Column, str | PlainType | Function] = {}
        for column in COLUMNS:
            name = f"{column}.{direction}"
            chosen = None if settings.get(name) is None else _chosen(name, settings[name])
            if chosen is not None:
                self.by_column[column] = chosen
        names = OF_ROWS | (OF_WRITTEN_ROWS if direction == "serializer" else frozenset())
        self._texts = setting_texts({name: value for name, value in settings.items() if name in names})
        self._registry = _registry_texts(settings)
        self._client = Settings(setting_texts(_of_client(settings, direction)))
        self._check(settings)
        if self._registry:  # a call waits for it as long as for brokers
            limit = self._client.get("default.api.timeout.ms" if direction == "deserializer" else "max.block.ms", "")
            milliseconds = min(int(limit), INT32_MAX) if limit.isdecimal() else _LIMIT_MS
            self._registry.setdefault("retries.deadline.ms", str(milliseconds))

    @property
    def has_schemas(self) -> bool:
        return any(isinstance(chosen, str) for chosen in self.by_column.values())

    def _check(self, settings: Mapping[str, Any]) -> None:
        if self._direction == "deserializer" and (idle := sorted(OF_WRITTEN_ROWS & settings.keys())):
            _log.warning("settings without effect on a consumer: %s", ", ".join(idle))
        if self._registry and "url" not in self._registry:
            first = f"{OF_REGISTRY}{min(self._registry)}"
            raise ConfigError(f"{first} needs {OF_REGISTRY}url: http://HOST:PORT of the registry")
        for column in COLUMNS:
            chosen, names = self.by_column.get(column), self._names(column)
            form = chosen if isinstance(chosen, str) else None
            names.check(form, self._texts, has_registry=bool(self._registry))
            if form is None:
                continue
            if not self._registry and names.schema not in self._texts:
                raise names.no_schema(form)
            if self._direction == "serializer":
                self._strategy(column)
            self._schema_id(column)
        if self.has_schemas:
            require(f"{'reading' if self._direction == 'deserializer' else 'writing'} records by a schema", "pyarrow")
            if self._registry:
                require(f"{OF_REGISTRY}url", "httpx")
                from spark_klog.schemas.registry.settings import check_names

                check_names(self._registry, OF_REGISTRY)
        elif self._registry:
            raise ConfigError(f"{OF_REGISTRY}url needs value.{self._direction} or key.{self._direction}, such as avro")
        if self._flag("use.latest.version", False) and self._texts.get("auto.register.schemas", "").lower() == "true":
            raise ConfigError("auto.register.schemas=true and use.latest.version=true exclude each other")

    def _names(self, column: Column) -> RowNames:
        names = (f"{column}.{name}" for name in (self._direction, "schema", "schema.id", "subject", "message"))
        return RowNames("", f"{OF_REGISTRY}url", *names)

    def column_format(self, column: Column, topic: str) -> ColumnFormat:
        """The format of a column that has a schema, in a topic, whose name its subject has unless another is set."""
        from spark_klog.schemas.column_format import ColumnFormat
        from spark_klog.schemas.registry.client import RegistrySettings

        registry: RegistrySettings | None = None
        if self._registry:
            registry = RegistrySettings.beside(self._client, self._registry)
        subject = self._texts.get(f"{column}.subject")
        if subject is None and registry is not None and self._has_topic_subject(column):
            subject = f"{topic}-{column}"
        return ColumnFormat(
            column,
            cast("Format", self.by_column[column]),
            registry,
            self._texts.get(f"{column}.schema"),
            self._schema_id(column),
            subject,
            message=self._texts.get(f"{column}.message"),
        )

    def write_format(self, column: Column, topic: str) -> WriteFormat:
        """As `column_format`, for writing."""
        from spark_klog.schemas.column_writing import WriteAdvice, WriteFormat

        advice = WriteAdvice(
            "leave use.latest.version out and set {column}.schema to register one",
            "set auto.register.schemas=true, use.latest.version=true, or a {column}.schema that is there",
            "set use.latest.version=true to write by the subject's schema",
            "set {column}.subject, or {column}.subject.name.strategy=RecordNameStrategy",
            "set {column}.schema, or {column}.subject",
        )
        registers = self._flag("auto.register.schemas", True)
        uses_latest = self._flag("use.latest.version", False)
        source, strategy = self.column_format(column, topic), self._strategy(column)
        return WriteFormat(source, topic, strategy, registers, uses_latest, advice)

    def check_one_schema(self) -> None:
        """Raise `ConfigError` for a column whose schema is not the same for all topics."""
        for column, chosen in self.by_column.items():
            if isinstance(chosen, str) and not self.has_one_schema(column):
                raise self._names(column).no_one_schema(chosen)

    def has_one_schema(self, column: Column) -> bool:
        """Whether the column's schema is the same for all topics."""
        return any(f"{column}.{name}" in self._texts for name in ("schema", "schema.id", "subject"))

    def _has_topic_subject(self, column: Column) -> bool:
        return self._direction == "deserializer" or self._strategy(column) == "topic"

    def _strategy(self, column: Column) -> Strategy:
        name = f"{column}.subject.name.strategy"
        text = self._texts.get(name, "TopicNameStrategy").rpartition(".")[2]
        kind = choice(name, SUBJECT_STRATEGIES, f"one of {', '.join(SUBJECT_STRATEGIES)}")
        return cast("Strategy", value_of(kind, name, text))

    def _schema_id(self, column: Column) -> int | None:
        name = f"{column}.schema.id"
        text = self._texts.get(name)
        return None if text is None else cast(int, value_of(INT, name, text))

    def _flag(self, name: str, default: bool) -> bool:
        text = self._texts.get(name)
        return default if text is None else cast(bool, value_of(BOOLEAN, name, text))


def split_settings(settings: Mapping[str, Any], direction: Direction) -> tuple[dict[str, Any], Serialization | None]:
    """The client's other settings, and what there is for keys and values; None if they are bytes."""
    rest = _of_client(settings, direction)
    if len(rest) == len(settings):
        return rest, None
    made = Serialization(direction, settings)
    return rest, made if made.by_column else None


def _of_client(settings: Mapping[str, Any], direction: Direction) -> dict[str, Any]:
    """The settings that are not about keys and values; the names of the other direction have no effect, as text."""
    mine = {f"{column}.{direction}" for column in COLUMNS}
    return {
        name: value
        for name, value in settings.items()
        if not (
            name in mine
            or (name in SERIALIZERS and not isinstance(value, str))
            or name in OF_ROWS | OF_WRITTEN_ROWS
            or name.startswith((OF_REGISTRY, *REGISTRY_LOGINS))
        )
    }


def _registry_texts(settings: Mapping[str, Any]) -> Settings:
    texts = Settings()
    for name, text in setting_texts({k: v for k, v in settings.items() if k.startswith(REGISTRY_LOGINS)}).items():
        texts[name] = text
    for name, text in setting_texts({k: v for k, v in settings.items() if k.startswith(OF_REGISTRY)}).items():
        own = name.removeprefix(OF_REGISTRY)
        if own in texts:
            raise ConfigError(f"{own} and {name} are both set: remove one of them")
        texts[own] = text
    return texts


def _chosen(name: str, given: Any) -> str | PlainType | Function | None:
    """What a setting `name` says; None for bytes. `ConfigError`."""
    if isinstance(given, str):
        return _named(name, given.strip())
    direction = name.rpartition(".")[2]
    method = getattr(given, "serialize" if direction == "serializer" else "deserialize", None)
    if not isinstance(given, type) and callable(method):
        return _synchronous(lambda value, context: method(context.topic, value))
    if not callable(given):
        raise ConfigError(
            f"{name} is of type {type(given).__name__}: set one of {', '.join((*ROW_FORMATS, *PLAIN))}, or a function"
        )
    if inspect.iscoroutinefunction(given) or inspect.iscoroutinefunction(type(given).__call__):
        raise ConfigError(f"{name} is asynchronous: set a function that returns the value")
    return _synchronous(given if _takes_context(given) else lambda value, context: given(value))


def _synchronous(function: Function) -> Function:
    """The function; what returns a coroutine, as asynchronous objects of confluent-kafka do, raises `TypeError`."""

    def call(value: Any, context: Context) -> Any:
        result = function(value, context)
        if inspect.iscoroutine(result):
            result.close()
            raise TypeError("it is asynchronous: set a function that returns the value")
        return result

    return call


def _named(name: str, text: str) -> str | PlainType | None:
    direction = name.rpartition(".")[2]
    known = text.lower()
    if "." in text or text.endswith(("Serializer", "Deserializer")):
        java = text.rpartition(".")[2]
        before = java.removesuffix("Deserializer").removesuffix("Serializer")
        wanted = direction.capitalize()
        if java != before + wanted and before != java:
            raise ConfigError(f"{name}={text}: set a class whose name ends with {wanted}")
        known = _JAVA.get(before, before).lower()
    if known in ROW_FORMATS:
        return known
    if known not in PLAIN:
        raise ConfigError(
            f"{name}={text} is unknown: set one of {', '.join((*ROW_FORMATS, *PLAIN))}, the name of Kafka's or "
            "Confluent's Java class for it, or a function"
        )
    return PLAIN[known]


def _takes_context(function: Callable[..., Any]) -> bool:
    """Whether a function wants the context: its second parameter has no default, or is called ctx."""
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # of C
        return False
    places = [each for each in parameters if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)]
    return len(places) > 1 and (places[1].default is inspect.Parameter.empty or places[1].name == "ctx")
