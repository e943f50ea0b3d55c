"""Options of jobs that make rows of keys and values: their formats and schemas."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from spark_klog.base.names import ROW_FORMATS
from spark_klog.base.settings import any_of
from spark_klog.cli.clusters import ChosenCluster
from spark_klog.cli.jobs.running import option
from spark_klog.cli.schema_registry import ChosenRegistry
from spark_klog.errors import ConfigError

if TYPE_CHECKING:
    from spark_klog.load.rows import Evolution
    from spark_klog.schemas.column_format import ColumnFormat

_NAMES = ("schema", "schema_id", "subject")
_ID = click.IntRange(0, 2**31 - 1)


@dataclass(frozen=True)
class RowFormatOptions:
    """What a job is told of the formats of keys and values; --value-format json, which has no registry, is its own."""

    registry: ChosenRegistry
    value_format: str = option(
        type=click.Choice(["bytes", "json", *ROW_FORMATS]),
        default="bytes",
        help="json needs --schema; avro and others --schema-registry or --value-schema.",
    )
    value_schema: str | None = option(
        *("--value-schema", "--schema"),
        metavar="FILE|TEXT",
        help="The column's schema; of json as DDL: 'user_id bigint, at timestamp'.",
    )
    value_schema_id: int | None = option(type=_ID, metavar="ID", help="The column's schema, of the registry.")
    value_subject: str | None = option(metavar="NAME", help="Of the schema: its latest version. Default: TOPIC-value.")
    value_message: str | None = option(
        metavar="NAME", help="Which message of a Protobuf schema values are. Default: the first."
    )
    key_format: str = option(type=click.Choice(["bytes", *ROW_FORMATS]), default="bytes", help="As of values.")
    key_schema: str | None = option(metavar="FILE|TEXT", help="As of values.")
    key_schema_id: int | None = option(type=_ID, metavar="ID", help="As of values.")
    key_subject: str | None = option(metavar="NAME", help="As of values.")
    key_message: str | None = option(metavar="NAME", help="As of values.")
    schema_evolution: Evolution = option(
        type=click.Choice(["keep", "latest"]),
        default="keep",
        help="Whether a run keeps the schema of the one before. Default: keep.",
    )

    @property
    def has_rows(self) -> bool:
        return self.value_format in ROW_FORMATS or self.key_format in ROW_FORMATS

    def of(self, column: str, name: str) -> Any:
        """An option of one column."""
        return getattr(self, f"{column}_{name}")

    def check(self) -> None:
        """Refuse options that exclude or need each other."""
        if self.value_format == "json" and not self.value_schema:
            raise click.UsageError(
                "--value-format json needs --schema: fields as DDL, 'user_id bigint, at timestamp', or a file"
            )
        for column in ("key", "value"):
            kind = self.of(column, "format")
            given = [f"--{column}-{name.replace('_', '-')}" for name in _NAMES if self.of(column, name) is not None]
            if kind not in ROW_FORMATS and given and not (kind == "json" and given == ["--value-schema"]):
                kinds = any_of(ROW_FORMATS)
                if given == ["--value-schema"]:  # it has a second name, which the user may have given
                    raise click.UsageError(f"--schema needs --value-format json, --value-schema {kinds}")
                raise click.UsageError(f"{given[-1]} needs --{column}-format {kinds}")
            if len(given) > 1:
                raise click.UsageError(f"give only one of {' and '.join(given)}")
            if self.of(column, "message") is not None and kind != "protobuf":
                raise click.UsageError(f"--{column}-message needs --{column}-format protobuf")
        if not self.has_rows:
            if self.registry.is_given:
                raise click.UsageError("--schema-registry needs --value-format or --key-format, such as avro")
            if self.schema_evolution != "keep" and self.value_format != "json":
                raise click.UsageError("--schema-evolution needs --value-format or --key-format, such as avro or json")

    def formats(self, cluster: ChosenCluster, client: Mapping[str, str]) -> tuple[ColumnFormat, ...]:
        """The formats of columns that become rows; `client` are the settings of the Kafka client.

        `ConfigError` if a schema is not given, or can't be read, and for wrong settings of the registry.
        """
        if not self.has_rows:
            return ()
        registry = self.registry.settings(cluster, client)
        from spark_klog.schemas.column_format import Column, ColumnFormat

        formats = []
        column: Column
        for column in ("key", "value"):
            kind = self.of(column, "format")
            if kind not in ROW_FORMATS:
                continue
            text, schema_id, subject = (self.of(column, name) for name in _NAMES)
            if registry is None and text is None:
                raise ConfigError(
                    f"--{column}-format {kind} needs --schema-registry, or --{column}-schema: the schema that all "
                    "records have, without a registry's ids before them"
                )
            if registry is None and (schema_id is not None or subject is not None):
                raise ConfigError(f"--{column}-schema-id and --{column}-subject need --schema-registry")
            text = None if text is None else _text(f"--{column}-schema", text)
            message = self.of(column, "message")
            formats.append(ColumnFormat(column, kind, registry, text, schema_id, subject, message=message))
        return tuple(formats)


def _text(name: str, given: str) -> str:
    """The text of a schema, or of the file that has it; `ConfigError`."""
    path = Path(given)
    try:
        is_file = path.is_file()
    except (OSError, ValueError):  # a schema may be longer than a file's name
        is_file = False
    if not is_file:
        from spark_klog.schemas.codec import names_file

        if names_file(given):
            raise ConfigError(f"{name} {given} does not exist: name a file, or give the text of a schema")
        return given
    try:
        return path.read_text("utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(f"{name} {given} can't be read: {error}") from None
