"""How records become text and back: -s [key=|value=]FORMAT of `klog consume` and `klog produce`, kcat's letters.

avro, protobuf, json-schema      by a schema, of a registry (-r) or a file (--value-schema)
< > b B h H i I q Q c s $        kcat's pack string, for reading: numbers one after the other (big-endian; after <
                                 little-endian), of 8, 16, 32 and 64 bits, unsigned in upper case; c is a character,
                                 s the rest as text, $ requires that nothing is left; a blank is printed
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from spark_klog.base.extras import require
from spark_klog.base.names import OF_REGISTRY, ROW_FORMATS
from spark_klog.cli.clusters import ChosenCluster
from spark_klog.cli.output import reading_arguments
from spark_klog.cli.schema_registry import check_text
from spark_klog.errors import ConfigError
from spark_klog.security.config import Settings

if TYPE_CHECKING:
    from spark_klog.schemas.column_format import Column, ColumnFormat
    from spark_klog.schemas.registry.client import RegistrySettings

COLUMNS: tuple[Column, ...] = ("key", "value")
_SIZES = {"b": 1, "h": 2, "i": 4, "q": 8}
_PACKED = "<>bBhHiIqQcs$ "


class Unpacked(NamedTuple):
    """What a pack string makes of bytes: text, or why there is none."""

    text: bytes | None
    reason: str = ""


class PackFormat:
    """A pack string; `is_number` if it is one number and no more, so that it is a number in JSON, too."""

    def __init__(self, text: str) -> None:
        self._steps: list[struct.Struct | str] = []
        order = ">"
        for letter in text:
            if letter in "<>":
                order = letter
            elif letter.lower() in _SIZES:
                self._steps.append(struct.Struct(order + letter))
            else:
                self._steps.append(letter)
        self.is_number = [type(step) for step in self._steps if step != "$"] == [struct.Struct]

    def unpack(self, data: bytes) -> Unpacked:
        parts, position = [], 0
        for step in self._steps:
            if isinstance(step, struct.Struct):
                if len(data) - position < step.size:
                    left = len(data) - position
                    return Unpacked(None, f"{left} bytes are left for a number of {step.size} ({step.format[1:]})")
                parts.append(b"%d" % step.unpack_from(data, position)[0])
                position += step.size
            elif step == " ":
                parts.append(b" ")
            elif step == "$":
                if position < len(data):
                    return Unpacked(None, f"{len(data) - position} bytes are left at the end ($)")
            else:
                end = position + 1 if step == "c" else len(data)
                if len(data) < end:
                    return Unpacked(None, "no byte is left for a character (c)")
                parts.append(data[position:end])
                position = end
        return Unpacked(b"".join(parts))


class Serdes(NamedTuple):
    """The chosen formats of keys and values."""

    by_schema: tuple[ColumnFormat, ...] = ()
    packed: tuple[tuple[Column, PackFormat], ...] = ()

    def __bool__(self) -> bool:
        return bool(self.by_schema or self.packed)

    @property
    def columns(self) -> list[Column]:
        return [one.column for one in self.by_schema] + [column for column, _ in self.packed]


class SerdesOptions(NamedTuple):
    """The options of `serdes_options`, as they were given."""

    texts: tuple[str, ...]
    url: str | None
    files: dict[Column, Path | None]
    ids: dict[Column, int | None]
    messages: dict[Column, str | None]

    @reading_arguments()
    def parsed(
        self, cluster: ChosenCluster, own: dict[str, str], topics: Sequence[str], *, is_writing: bool = False
    ) -> Serdes:
        """The formats; `ConfigError` for wrong or contradicting options, `MissingPackage` without pyarrow.

        `own` are the settings of --set, `topics` those that name the subjects. Records are read by the schema that
        wrote them, and written by the subject's latest, unless a file or an id names another one.
        """
        chosen = _chosen(self.texts)
        for column in COLUMNS:
            option = self._given(column)
            if option is not None and chosen.get(column) not in ROW_FORMATS:
                raise click.UsageError(f"{option} needs -s {column}=FORMAT: {', '.join(ROW_FORMATS)}")
            self._check_message(column, chosen.get(column), is_writing)
        if self.url is not None and not set(chosen.values()) & set(ROW_FORMATS):
            raise click.UsageError(f"--schema-registry needs -s FORMAT: {', '.join(ROW_FORMATS)}")
        if not chosen:
            return Serdes()
        require("-s", "pyarrow")
        if is_writing and (other := set(chosen.values()) - set(ROW_FORMATS)):
            raise click.UsageError(f"-s {min(other)}: records are written as {', '.join(ROW_FORMATS)}")
        by_schema, packed = [], []
        registry = None
        if any(text in ROW_FORMATS for text in chosen.values()):
            from spark_klog.schemas.registry.client import RegistrySettings
            from spark_klog.schemas.registry.settings import registry_config

            if settings := cluster.registry_settings(self.url, own):
                client = Settings(cluster.client_settings()) | own
                registry_config(settings, OF_REGISTRY, client)
                registry = RegistrySettings(settings, OF_REGISTRY, client)
        for column, text in sorted(chosen.items()):
            if text in ROW_FORMATS:
                by_schema.append(self._column_format(column, text, registry, topics))
            else:
                packed.append((column, PackFormat(text)))
        return Serdes(tuple(by_schema), tuple(packed))

    def _check_message(self, column: Column, form: str | None, is_writing: bool) -> None:
        if self.messages[column] is None:
            return
        if form != "protobuf":
            raise click.UsageError(f"--{column}-message needs -s {column}=protobuf")
        if not is_writing and self._given(column) is None:
            raise click.UsageError(
                f"--{column}-message needs --{column}-schema or --{column}-schema-id: without one each record is shown "
                "as the message that it names"
            )

    def _given(self, column: Column) -> str | None:
        """The first option about a column's schema."""
        if self.files[column] is not None:
            return f"--{column}-schema"
        return None if self.ids[column] is None else f"--{column}-schema-id"

    def _column_format(
        self, column: Column, name: Any, registry: RegistrySettings | None, topics: Sequence[str]
    ) -> ColumnFormat:
        from spark_klog.schemas.column_format import ColumnFormat

        file, schema_id = self.files[column], self.ids[column]
        if file is not None and schema_id is not None:
            raise click.UsageError(f"give only one of --{column}-schema and --{column}-schema-id")
        if registry is None and (file is None or schema_id is not None):
            needed = "" if schema_id is not None else f", or --{column}-schema FILE for records without a schema's id"
            raise ConfigError(f"-s {column}={name} needs --schema-registry URL{needed}")
        try:
            text = None if file is None else file.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            raise ConfigError(f"--{column}-schema {file} is not UTF-8") from None
        subject = f"{topics[0]}-{column}" if registry is not None and len(topics) == 1 else None
        return check_text(ColumnFormat(column, name, registry, text, schema_id, subject, message=self.messages[column]))


def _chosen(texts: Sequence[str]) -> dict[Column, str]:
    """The format of each column: kcat's rule, a text without a column is for both."""
    chosen: dict[Column, str] = {}
    for text in texts:
        before, equals, after = text.partition("=")
        if equals and before not in COLUMNS:
            raise click.UsageError(f"-s {text}: must be key=FORMAT, value=FORMAT or FORMAT")
        name = after if equals else text
        if name not in ROW_FORMATS and (not name or set(name) - set(_PACKED)):
            raise click.UsageError(
                f"-s {text}: the formats are {', '.join(ROW_FORMATS)}, and kcat's letters {_PACKED.strip()}"
            )
        for column in COLUMNS:
            if not equals or before == column:
                chosen[column] = name
    return chosen


def serdes_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add -s, -r and the options of the schemas; the function gets them as `serdes`."""

    @click.option(
        "--serdes",
        "-s",
        "texts",
        multiple=True,
        metavar="[key=|value=]FORMAT",
        help=f"{', '.join(ROW_FORMATS)}: JSON for people, by a schema. Or kcat's letters for numbers, to read.",
    )
    @click.option(
        "--schema-registry", "-r", "url", metavar="URL", help="Default: schema.registry.url of the client settings."
    )
    @click.option("--key-schema", type=_FILE, help="A file with the schema of keys.")
    @click.option("--value-schema", type=_FILE, help="A file with the schema of values.")
    @click.option("--key-schema-id", type=click.IntRange(0), help="The same, by the registry's id.")
    @click.option("--value-schema-id", type=click.IntRange(0), help="The same, by the registry's id.")
    @click.option("--key-message", metavar="NAME", help="Which message of a Protobuf schema. Default: the first.")
    @click.option("--value-message", metavar="NAME", help="The same of values.")
    @wraps(function)
    def command(
        *args: Any,
        texts: tuple[str, ...],
        url: str | None,
        key_schema: Path | None,
        value_schema: Path | None,
        key_schema_id: int | None,
        value_schema_id: int | None,
        key_message: str | None,
        value_message: str | None,
        **others: Any,
    ) -> Any:
        options = SerdesOptions(
            texts,
            url,
            {"key": key_schema, "value": value_schema},
            {"key": key_schema_id, "value": value_schema_id},
            {"key": key_message, "value": value_message},
        )
        return function(*args, serdes=options, **others)

    return command


_FILE = click.Path(path_type=Path, exists=True, dir_okay=False)
