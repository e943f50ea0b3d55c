"""Load topics into files: a run loads all available records and stops; the next run continues there.

    spark-submit jobs/batch_load.py --bootstrap-servers HOST:PORT --topics clicks,views --output /data/clicks
        [--group G [--zookeeper HOST:PORT | --offsets-path URI]] [--command-config client.properties]

That is `python -m spark_klog.cli.jobs.batch_load ...`, started by Spark.

Tasks write Parquet, Arrow or JSON lines themselves: no record goes through the JVM. Each record is written once,
however often the job is killed; the runs are in OUTPUT/_klog (`spark_klog.load` says how), `klog load status OUTPUT`
shows them.

With --table the files are those of a Delta or Iceberg table. With another --format (delta, iceberg, orc, or any that
Spark's streams can write) Spark's own sink writes, and --checkpoint has the progress.

With --follow it goes on until SIGTERM, a run every --every seconds.

Exit codes: 0 done, 1 failed (also of single partitions; the others are loaded), 2 wrong arguments, 3 nothing new,
4 done, with bad records as dead letters.
"""

from __future__ import annotations

import json
import logging
import re
import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, fields
from functools import partial
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any
from zoneinfo import ZoneInfo

import click

from spark_klog.base.addresses import without_user
from spark_klog.base.extras import require
from spark_klog.base.names import ROW_FORMATS, TopicPartition, topic_pattern
from spark_klog.base.settings import any_of, some_of
from spark_klog.cli.clusters import ChosenCluster
from spark_klog.cli.jobs.following import EVERY, EXPIRE, MAX_FAILURES, Stop, follow_topics, loads_json
from spark_klog.cli.jobs.running import (
    CONTEXT,
    DONE,
    DONE_WITH_BAD,
    FAILED,
    NOTHING_NEW,
    cluster_options,
    complain,
    exit_code,
    log_to_stderr,
    needed_packages,
    option,
    options_of,
    packages_of,
    progress_bar,
    spark_session,
)
from spark_klog.cli.output import duration, print_table, reading_arguments, say
from spark_klog.cli.schema_registry import ChosenRegistry, check_text, registry_options
from spark_klog.client.settings import client_config
from spark_klog.errors import ConfigError
from spark_klog.groups.stores import open_store, tree_addresses
from spark_klog.security.config import Settings
from spark_klog.wire.http import LOOPBACK
from spark_klog.wire.listening import parse_listen

if TYPE_CHECKING:
    import pyarrow as pa

    from spark_klog.load.by_topic import Outcome
    from spark_klog.load.driving import Steps
    from spark_klog.load.lineage import LoadEvents
    from spark_klog.load.rows import Evolution
    from spark_klog.schemas.column_format import ColumnFormat

_JOB = "batch_load"
_APPLICATION = "klog batch load"

with needed_packages(_JOB) if __name__ == "__main__" else nullcontext():
    from spark_klog.load.audit import COLUMNS, loaded_json, table_rows
    from spark_klog.load.by_topic import Loads, example_of, is_by_topic
    from spark_klog.load.places import Place, parse_run, parse_time, read_offsets
    from spark_klog.load.planning import Limits
    from spark_klog.load.run import Loaded, LoadOptions, MaxBad
    from spark_klog.load.settings import CODECS, PARQUET, SORTED, TABLE_COLUMNS, WriteSettings
    from spark_klog.load.tasks.task import SparkRunner, cause_of
    from spark_klog.load.upkeep import Upkeep
    from spark_klog.load.values import UTC, read_schema
    from spark_klog.schemas.json_schema.ddl import INFER, parse_schema, schema_text
    from spark_klog.spark.options import PROTECTED
    from spark_klog.tables.changes import ENVELOPES, RECORD_KEY, UNAVAILABLES, Envelope, Unavailable, debezium_type
    from spark_klog.tables.opening import check_address, is_table
    from spark_klog.tables.partitions import BY_TIME, layout_text, parse_terms
    from spark_klog.tables.upkeep import Kept

_log = logging.getLogger(__name__)
_LIKE_A_TIME = re.compile(r"-?[0-9]+($|[-a-z:T])")


def _bad(text: str) -> MaxBad:
    number = text.removesuffix("%")
    try:
        count = float(number) if number != text else int(number)
    except ValueError:
        count = -1
    if not 0 <= count <= (100 if number != text else float("inf")):
        raise click.BadParameter(f"{text!r} is neither a number from 0 on nor a percentage")
    return MaxBad(count, number != text)


def _name(text: str) -> str:
    if not text.strip():  # as a variable that is not set: the job would publish nothing
        raise click.BadParameter("it is empty: give a value, or leave the option out")
    return text


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < inf:
        raise click.BadParameter(f"{text!r} is not a positive number of seconds")
    return seconds


def _topics(text: str) -> list[str]:
    topics = list(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    if not topics:
        raise click.BadParameter(f"{text!r} names no topic")
    return topics


_DEFAULTS = WriteSettings()
_AT_LEAST_1 = click.IntRange(1)
#: Options of a column that say which schema it has.
_NAMES = ("schema", "schema_id", "subject")
_ID = click.IntRange(0, 2**31 - 1)
#: Options of the job that a load by Spark's own sink takes, beside those of the cluster.
_OF_SPARK = {
    "--topics",
    "--topics-pattern",
    "--output",
    "--format",
    "--checkpoint",
    "--max-records",
    "--fail-on-data-loss",
    "--group",
    "--zookeeper",
    "--offsets-path",
    "--lineage",
    "--json",
}
#: Options of files that stay as a task has written them.
_OF_FILES = (
    "--sort-by",
    "--compression",
    "--compression-level",
    "--dictionary",
    "--row-group-rows",
    "--row-group-bytes",
    "--file-bytes",
)


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
        help="The column's schema; of json as DDL, 'user_id bigint, at timestamp', `infer` or `variant`.",
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
                "--value-format json needs --schema: fields as DDL, 'user_id bigint, at timestamp', a file, or infer"
            )
        for column in ("key", "value"):
            kind = self.of(column, "format")
            given = [f"--{column}-{name.replace('_', '-')}" for name in _NAMES if self.of(column, name) is not None]
            if kind not in ROW_FORMATS and given and not (kind == "json" and given == ["--value-schema"]):
                if given == ["--value-schema"]:  # it has a second name, which the user may have given
                    kinds = any_of(["json", *ROW_FORMATS])
                    raise click.UsageError(f"--value-schema, or --schema, needs --value-format {kinds}")
                raise click.UsageError(f"{given[-1]} needs --{column}-format {any_of(ROW_FORMATS)}")
            if len(given) > 1:
                raise click.UsageError(f"give only one of {' and '.join(given)}")
            if self.of(column, "message") is not None and kind != "protobuf":
                raise click.UsageError(f"--{column}-message needs --{column}-format protobuf")
        if not self.has_rows:
            try:
                self.registry.own()
            except ConfigError as error:
                raise click.UsageError(str(error)) from None
            if self.registry.is_given:
                raise click.UsageError(
                    f"--schema-registry needs --value-format or --key-format {any_of(ROW_FORMATS)}: the schema of "
                    "json is in no registry"
                )
            if self.schema_evolution != "keep" and self.value_format != "json":
                raise click.UsageError("--schema-evolution needs --value-format or --key-format, such as avro or json")

    @reading_arguments()
    def formats(self, cluster: ChosenCluster, client: Mapping[str, str]) -> tuple[ColumnFormat, ...]:
        """The formats of columns that become rows; `client` are the settings of the Kafka client.

        `ConfigError` if a schema is not given, or can't be read, and for wrong settings of the registry.
        """
        if not self.has_rows:
            return ()
        registry = self.registry.settings(cluster, client)
        from spark_klog.schemas.column_format import Column, ColumnFormat
        from spark_klog.schemas.json_schema.ddl import INFER

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
            if text is not None and text.strip().lower() == INFER:
                raise ConfigError(
                    f"--{column}-schema {text} is for --value-format json: give {kind} the text of its schema, or "
                    "leave it out if --schema-registry has it"
                )
            text = None if text is None else _text_of(f"--{column}-schema", text)
            message = self.of(column, "message")
            formats.append(check_text(ColumnFormat(column, kind, registry, text, schema_id, subject, message=message)))
        return tuple(formats)


@dataclass(frozen=True)
class JobOptions:
    """The arguments of the job. `given` are the names of the options that its user has given, in the order of the help.

    `check` has the rules that options are given or left out by; those about their values are `LoadOptions`' own.
    """

    cluster: ChosenCluster
    as_json: bool
    row_formats: RowFormatOptions
    given: list[str]
    topics: list[str] | None = option(type=_topics, metavar="TOPIC[,...]", help="Topics to load.")
    topics_pattern: str | None = option(type=_name, metavar="REGEX", help="Or those whose whole names match.")
    output: str | None = option(
        help="Folder or URI of this load: its files, and its runs in _klog. With {topic} in it each topic has its own."
    )
    table: str | None = option(
        metavar="ADDRESS",
        help="Load into a table instead: delta:URI, delta:uc://C.S.T, iceberg:C.N.T. Its runs are in its _klog. With "
        "{topic}, or parts of its name {topic[0]}, {topic[1]}, each topic has its own.",
    )
    table_columns: str = option(
        type=click.Choice(TABLE_COLUMNS),
        default=_DEFAULTS.table_columns,
        help="values: a column for each field of the values. Default: records.",
    )
    format: str = option(
        default="parquet", help="parquet, arrow, json; others, with --checkpoint, are written by Spark."
    )
    checkpoint: str | None = option(help="Folder or URI of the progress of a --format that Spark writes.")
    from_run: str | None = option(metavar="RUN", help="Load again what this run and later ones have loaded.")
    from_time: str | None = option(metavar="TIME", help="Load from this time on: 2026-11-21T10:00:00Z, -1h.")
    from_offsets: Path | None = option(
        type=click.Path(path_type=Path), metavar="FILE", help="Load from offsets of `klog load offsets`."
    )
    until: str | None = option(metavar="TIME|FILE", help="Load until this time, or offsets as of --from-offsets.")
    group: str | None = option(
        type=_name, metavar="NAME", help="Publish the progress as offsets of this group, by default at Kafka."
    )
    zookeeper: str | None = option(
        type=_name, metavar="HOST:PORT[/CHROOT]", help="Publish to /consumers/GROUP/offsets there."
    )
    offsets_path: str | None = option(type=_name, metavar="URI", help="Publish to the same tree in plain files.")
    max_records: int | None = option(type=_AT_LEAST_1, metavar="N", help="Load at most about N records.")
    max_bytes: int | None = option(type=_AT_LEAST_1, metavar="N", help="Load at most about N bytes of the log.")
    max_time: float | None = option(type=_seconds, metavar="SECONDS", help="Stop reading after this time.")
    max_bad: MaxBad = option(type=_bad, default="0", metavar="N|P%", help="Fail if more batches and values are bad.")
    dead_letters: str | None = option(
        metavar="ADDRESS",
        help="Also put dead letters into this table or topic: delta:URI, iceberg:CATALOG.NAMESPACE.TABLE, topic:NAME.",
    )
    fail_on_data_loss: str = option(type=click.Choice(["true", "false"]), default="true", help="Default: true.")
    layout: str = option(
        "--partition-by",
        type=_name,
        metavar="LAYOUT",
        default=_DEFAULTS.layout,
        help="day or hour: by the records' time. Of a --table also columns, of Iceberg transforms: 'day(ts), "
        "bucket(16, id), city'.",
    )
    event_time: str | None = option(type=_name, metavar="FIELD", help="Of values: the time for --partition-by.")
    time_zone: str = option(default=UTC, metavar="ZONE", help="For --partition-by and times without a zone.")
    sort_by: str | None = option(type=click.Choice(SORTED), default=None, help="Sort each row group of Parquet files.")
    upsert_key: str | None = option(
        type=_name,
        metavar="FIELDS",
        help="Of a --table: records are changes of rows with this key, fields of the value or `key`, the record's key.",
    )
    envelope: Envelope = option(type=click.Choice(ENVELOPES), default="none", help="What the values with changes are.")
    order_by: str | None = option(
        type=_name,
        metavar="FIELD[,...]",
        help="Order changes by these (source.lsn), not by offsets. In JSON with their types, if not bigint: "
        "'source.file string, source.pos'.",
    )
    unavailable: Unavailable = option(
        type=click.Choice(UNAVAILABLES),
        default="keep",
        help="Of an envelope: a value that it does not have. Default: the row keeps its own.",
    )
    keep_deletes: float | None = option(
        type=duration,
        metavar="DURATION",
        help="Remember deleted keys for this long (7d), so that older changes do not bring their rows back.",
    )
    compression: str | None = option(help="zstd (default), snappy, lz4, gzip, none.")
    compression_level: int | None = option(type=int, help="Of the codec.")
    dictionary: str = option(default=",".join(_DEFAULTS.dictionary), help="Parquet columns with a dictionary.")
    row_group_rows: int = option(type=_AT_LEAST_1, default=_DEFAULTS.row_group_rows, metavar="N", help="The largest.")
    row_group_bytes: int = option(type=_AT_LEAST_1, default=_DEFAULTS.row_group_bytes, metavar="N", help="The largest.")
    file_bytes: int = option(type=_AT_LEAST_1, default=_DEFAULTS.file_bytes, metavar="N", help="Size to end files at.")
    max_file_records: int | None = option(
        type=_AT_LEAST_1, metavar="N", help="Offsets of a file and of a task's range."
    )
    lineage: bool = option(is_flag=True, help="Send OpenLineage events, as OPENLINEAGE_URL and others say.")
    follow: bool = option(is_flag=True, help="Run again and again in one Spark application, until SIGTERM.")
    every: float | None = option(type=duration, metavar="DURATION", help="With --follow: from run to run; default 30s.")
    max_failures: int | None = option(
        type=_AT_LEAST_1, metavar="N", help="With --follow: failed runs in a row; default 10."
    )
    compact_every: float | None = option(
        type=duration,
        metavar="DURATION",
        help="With --follow: merge small files this often (1h); of a table, also remove what is older than --expire.",
    )
    expire: float | None = option(
        type=duration, metavar="DURATION", help="With --compact-every: what readers of a table need; default 1d."
    )
    metrics: str | None = option(metavar="HOST:PORT", help="With --follow: serve metrics for Prometheus at /metrics.")

    def check(self) -> None:
        """Refuse options that exclude or need each other."""
        if bool(self.topics) == bool(self.topics_pattern):
            raise click.UsageError("give either --topics or --topics-pattern")
        for names in (("from_run", "from_time", "from_offsets"), ("zookeeper", "offsets_path")):
            given = [f"--{name.replace('_', '-')}" for name in names if getattr(self, name) is not None]
            if len(given) > 1:
                raise click.UsageError(f"give only one of {' and '.join(given)}")
        if (self.zookeeper or self.offsets_path) and not self.group:
            raise click.UsageError("--zookeeper and --offsets-path need --group")
        if bool(self.output) == bool(self.table):
            raise click.UsageError("give either --output or --table")
        if self.table and self.format not in CODECS:
            raise click.UsageError(f"--table has files of --format parquet, not {self.format}")
        self._check_by_topic()
        self._check_follow()
        self.row_formats.check()
        if self.output and is_table(self.output):
            raise click.UsageError(f"--output {without_user(self.output)} is a table: write it as --table")
        if self.key and (given := [name for name in _OF_FILES if name in self.given]):
            raise click.UsageError(
                f"{given[0]} is for the files of records: with an upsert key the table writes its own"
            )
        if "--unavailable" in self.given and self.envelope == "none":
            raise click.UsageError("--unavailable is for --envelope debezium")
        if self.dead_letters is not None:
            if not is_table(self.dead_letters) and not self.dead_letters.startswith("topic:"):
                raise click.UsageError(
                    "--dead-letters is the address of a table, or topic:NAME: a load has them in its _klog anyway"
                )
            if is_by_topic(self.destination) != is_by_topic(self.dead_letters):
                raise click.UsageError("--dead-letters has {topic} in it if --output or --table has, and else not")
        if self.is_of_spark:
            self._check_spark()
        elif self.checkpoint:
            raise click.UsageError(
                "--checkpoint is for a --format that Spark writes: the runs of the others are in OUTPUT/_klog"
            )

    def _check_by_topic(self) -> None:
        if is_by_topic(self.destination):
            if self.is_of_spark:
                raise click.UsageError(f"an output by topic is for {', '.join(sorted(CODECS))} and --table")
            if self.from_run is not None:
                raise click.UsageError("--from-run is a run of one load: with {topic} each topic has runs of its own")
        elif self.topics_pattern is not None and self.key:
            raise click.UsageError(
                "changes of several topics have no order: write {topic} into --table, so that each topic has its own"
            )

    def _check_follow(self) -> None:
        if not self.follow:
            names = ("--every", "--max-failures", "--compact-every", "--expire", "--metrics")
            if given := [name for name in names if name in self.given]:
                raise click.UsageError(f"{given[0]} is for --follow")
        elif self.from_run or self.from_time or self.from_offsets or self.until:
            raise click.UsageError(
                "--from-run, --from-time, --from-offsets, --until exclude --follow: load once from there, then follow"
            )
        elif self.is_of_spark:
            raise click.UsageError(
                f"--follow is for {', '.join(sorted(CODECS))}: a query of Spark has a trigger of its own"
            )
        elif self.expire is not None and not self.table:
            raise click.UsageError("--expire is for --table: a folder has no old states")
        elif self.expire is not None and self.compact_every is None:
            raise click.UsageError("--expire needs --compact-every, which says how often")
        elif self.compact_every is not None and not self.table and self.format != PARQUET:
            raise click.UsageError(f"--compact-every is for --format parquet and --table, not {self.format}")

    def _check_spark(self) -> None:
        if not self.checkpoint:
            raise click.UsageError(
                f"--format {self.format} needs --checkpoint if Spark is to write it; the job itself writes "
                f"{', '.join(sorted(CODECS))}"
            )
        if given := [name for name in self.given if name not in _OF_SPARK]:
            advice = ""
            if self.row_formats.value_format != "bytes" or self.row_formats.key_format != "bytes":
                advice = (
                    ". A stream of format klog into Spark's sink takes the options valueFormat and keyFormat: "
                    "docs/recipes/tables-streaming.md"
                )
            raise click.UsageError(
                f"Spark writes --format {self.format}, and these options are for parquet, arrow, json and --table: "
                f"{', '.join(given)}{advice}"
            )

    @property
    def is_of_spark(self) -> bool:
        """Whether Spark writes, and not the job."""
        return self.format not in CODECS and not self.table

    @property
    def destination(self) -> str:
        """The table's address, or the folder's."""
        return self.table or self.output or ""

    @property
    def key(self) -> str:
        """The fields of an upsert's key; "" to append."""
        return self.upsert_key or (RECORD_KEY if self.envelope != "none" else "")

    @reading_arguments()
    def load_options(self, client: dict[str, str]) -> LoadOptions:
        """What to load; `WrongArguments` if values exclude each other or can't be read.

        Of loads by topic it is what they have in common, as the load of some topic.
        """
        client_config(client)
        topics, output, letters = self.topics or [], self.destination, self.dead_letters or ""
        if is_by_topic(output):
            topics, output, letters = topics[:1], example_of(output), letters and example_of(letters)
        if self.metrics is not None:
            parse_listen(self.metrics, "--metrics", LOOPBACK)
        formats = self.row_formats.formats(self.cluster, client)
        written = {each.name: getattr(self, each.name) for each in fields(WriteSettings) if hasattr(self, each.name)}
        written |= {"sort_by": self.sort_by or "", "upsert_key": self.key, "event_time": self.event_time or ""}
        order = self._order()
        written["order_by"] = ",".join(order)
        if self.layout not in BY_TIME:  # later calls are compared with it, however they write it
            written["layout"] = layout_text(parse_terms(self.layout))
        written["dictionary"] = tuple(name for name in self.dictionary.split(",") if name)
        if self.row_formats.value_format == "json" and str(self.row_formats.value_schema).strip().lower() == INFER:
            written["infers"] = True
        elif self.row_formats.value_format == "json":
            kind = read_schema(str(self.row_formats.value_schema))
            written["schema"] = schema_text(debezium_type(kind, order) if self.envelope == "debezium" else kind)
        if self.table:
            check_address(output)
        if self.topics_pattern is not None:
            topic_pattern("--topics-pattern", self.topics_pattern)
        written["compression"] = self.compression or CODECS.get(self.format, ("",))[0]
        return LoadOptions(
            client,
            topics,
            output,
            WriteSettings(**written),
            Limits(self.max_records, self.max_bytes),
            self.max_time,
            self.max_file_records,
            self.max_bad,
            self.fail_on_data_loss == "true",
            self._start(),
            _until(self.until, self.time_zone),
            formats,
            self.row_formats.schema_evolution,
            letters,
            self.keep_deletes,
        )

    def _order(self) -> dict[str, pa.DataType]:
        """The fields of --order-by, with their types in JSON; `ConfigError`."""
        order: dict[str, pa.DataType] = {}
        for item in (self.order_by or "").split(",") if self.order_by else ():
            name, _, kind = item.strip().partition(" ")
            if not name or name in order:
                raise ConfigError(f"--order-by {self.order_by!r}: name each field once, with commas between them")
            if kind and self.row_formats.value_format != "json":
                raise ConfigError(f"--order-by {item.strip()!r}: only JSON needs a field's type; give {name}")
            try:
                order[name] = parse_schema(f"value {kind or 'bigint'}").field(0).type
            except ConfigError as error:
                raise ConfigError(f"--order-by {item.strip()!r}: {error}") from None
        return order

    def _start(self) -> Place | None:
        if self.from_run is not None:
            return parse_run("--from-run", self.from_run)
        if self.from_time is not None:
            return parse_time("--from-time", self.from_time, ZoneInfo(self.time_zone))
        return None if self.from_offsets is None else read_offsets("--from-offsets", self.from_offsets)


def _text_of(name: str, given: str) -> str:
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


def _until(text: str | None, zone: str) -> Place | None:
    if text is None:
        return None
    if Path(text).is_file():
        return read_offsets("--until", Path(text))
    if not _LIKE_A_TIME.match(text):
        raise ConfigError(
            f"--until {text} is neither a file nor a time: give a file of offsets, an ISO time "
            "(2026-11-21T10:00:00Z) or a time before now (-1h)"
        )
    return parse_time("--until", text, ZoneInfo(zone))


def _load_files(options: JobOptions, client: dict[str, str]) -> int:
    stop = Stop()
    make_session = partial(spark_session, _APPLICATION)
    runner = SparkRunner(stop.surviving(make_session) if options.follow else make_session)
    asked = options.load_options(client)
    publish = partial(_set_group, options, client) if options.group else None
    follow = partial(progress_bar, options.as_json)
    every = options.every or EVERY

    events: LoadEvents | None = None

    def around(of_load: LoadOptions, steps: Steps[Loaded]) -> Steps[Loaded]:
        nonlocal events
        if not options.lineage:
            return steps
        if events is None:
            from spark_klog.load.lineage import LoadEvents
            from spark_klog.spark.lineage import lineage_settings

            # the session is begun before: its settings say where the events go and who the parent is
            events = LoadEvents(lineage_settings(runner.spark))
        return events.around(of_load, steps)

    pattern, output = options.topics_pattern, options.destination
    topics, letters = options.topics or (), options.dead_letters or ""
    loads = Loads(
        *(asked, topics, pattern, output, runner, follow, publish, every, around, stop.is_asked, letters),
        follows=options.follow,
    )
    try:
        if options.follow:
            most, upkeep = options.max_failures or MAX_FAILURES, None
            if options.compact_every is not None:
                upkeep = Upkeep(options.compact_every, Kept(options.expire or EXPIRE))
            return follow_topics(loads, runner, stop, every, most, options.metrics, output, options.as_json, upkeep)
        outcomes = loads.round()
    finally:
        if events is not None:
            events.close()
        runner.stop()
    if not loads.is_by_topic and (error := outcomes[0].error):
        raise error
    _print_loaded(outcomes, options.as_json, by_topic=loads.is_by_topic)
    if any(outcome.has_failed or (outcome.loaded and outcome.loaded.left_out) for outcome in outcomes):
        return FAILED
    done = [outcome.loaded for outcome in outcomes if outcome.loaded is not None]
    if not any(loaded.runs for loaded in done):
        return NOTHING_NEW
    return DONE_WITH_BAD if any(loaded.bad for loaded in done) else DONE


def _print_loaded(outcomes: Sequence[Outcome], as_json: bool, *, by_topic: bool) -> None:
    """Print what has been loaded on stdout, and on stderr what has failed."""
    done = [outcome.loaded for outcome in outcomes if outcome.loaded is not None]
    if as_json:
        shown = loads_json(outcomes) if by_topic else loaded_json(done[0], outcomes[0].output)
        click.echo(json.dumps(shown))
    elif not done:
        click.echo(f"0 of {len(outcomes):,} topics are loaded")
    else:
        click.echo("loaded")
        parts = [part for outcome in outcomes if outcome.loaded for part in outcome.loaded.partitions]
        if by_topic:  # without those of which nothing was new
            changed = {outcome.topic for outcome in outcomes if outcome.has_news}
            parts = [part for part in parts if part.topic in changed]
        print_table(COLUMNS, table_rows(parts), right=set(COLUMNS) - {"topic", "gaps"})
        if by_topic:
            idle = sum(not outcome.has_news for outcome in outcomes)
            click.echo(f"{idle:,} of {len(outcomes):,} topics have nothing new")
    for part in (part for loaded in done for part in loaded.failed):
        complain(_JOB, f"{part.topic}-{part.partition} is loaded until {part.until} only: {part.error}")
    for left_out in (loaded.left_out for loaded in done if loaded.left_out):
        names = some_of([f"{name} ({error})" for name, error in left_out.items()])
        complain(_JOB, f"not loaded, as no broker answers for them: {names}")
    for outcome in outcomes:
        if outcome.error is not None:
            complain(_JOB, f"{outcome.topic}: {cause_of(outcome.error)}")


def _set_group(options: JobOptions, client: dict[str, str], offsets: Mapping[TopicPartition, int]) -> None:
    assert options.group is not None
    trees = tree_addresses(options.zookeeper, options.offsets_path)
    address = trees[0] if trees else f"kafka://{client['bootstrap.servers']}"
    with open_store(address, options.group, client, writing=True) as store:
        store.commit(offsets)


def _subscribed(options: JobOptions) -> tuple[str, str]:
    """The option of the source that has the topics."""
    pattern = options.topics_pattern
    return (
        ("subscribe", ",".join(options.topics or ())) if pattern is None else ("subscribePattern", f"^(?:{pattern})$")
    )


def _load_table(options: JobOptions, client: dict[str, str]) -> int:
    """Append to a table by Spark's own streaming sink, which is exactly once by its own means."""
    from spark_klog.lineage.datasets import folder_use
    from spark_klog.spark.tracing import TracingListener
    from spark_klog.spark.versions import HAS_ADMISSION_CONTROL
    from spark_klog.tracing import is_on

    spark = spark_session(_APPLICATION)
    reader = (
        spark.readStream.format("klog")
        .options(**{f"kafka.{name}": value for name, value in client.items()})
        .option(*_subscribed(options))
        .option("startingOffsets", "earliest")
        .option("failOnDataLoss", options.fail_on_data_loss)
        .option("includeHeaders", "true")
    )
    if options.max_records and HAS_ADMISSION_CONTROL:  # otherwise Spark ends after one micro-batch
        reader = reader.option("maxOffsetsPerTrigger", options.max_records)
    if options.group:
        reader = reader.option("kafka.group.id", options.group).option("commitOffsets", "true")
    if options.zookeeper:
        reader = reader.option("kafka.zookeeper.connect", options.zookeeper)
    if options.offsets_path:
        reader = reader.option("offsetsPath", options.offsets_path)
    lineage = None
    if options.lineage:
        from spark_klog.spark.lineage import LineageListener

        lineage = LineageListener(spark)
        spark.streams.addListener(lineage)
    tracing = TracingListener(client) if is_on() else None
    if tracing is not None:
        spark.streams.addListener(tracing)
    try:
        writer = (
            reader.load()
            .writeStream.format(options.format)
            .outputMode("append")
            .option("checkpointLocation", options.checkpoint)
            .option("path", options.destination)
            .trigger(availableNow=True)
        )
        if options.lineage:  # the query's job is that of a load of files into the same output
            writer = writer.queryName(folder_use(options.destination).name.strip("/") or "_")
        query = writer.start()
        while not query.awaitTermination(1):
            pass  # Python handles signals between two calls
        records = sum(item["numInputRows"] for item in query.recentProgress)
    finally:
        if lineage is not None:
            lineage.close()
        spark.stop()
        if tracing is not None:
            tracing.close()
    output = without_user(options.destination)
    say(options.as_json, {"records": records, "output": output}, f"loaded {records:,} records into {output}")
    return DONE if records else NOTHING_NEW


def _reading(settings: dict[str, str]) -> dict[str, str]:
    """The settings without those of a program that shares their file, which Spark's sources refuse."""
    if unused := sorted(settings.keys() & PROTECTED.keys()):
        _log.warning("settings without effect on a load: %s", ", ".join(unused))
    return Settings({name: value for name, value in settings.items() if name not in PROTECTED})


def _given() -> list[str]:
    """The options of `JobOptions` that are among the arguments, in the order of the help."""
    context = click.get_current_context()
    names = {each.name for kind in (JobOptions, RowFormatOptions) for each in fields(kind)}
    return [
        each.opts[0]
        for each in context.command.params
        if each.name in names and context.get_parameter_source(str(each.name)) is click.core.ParameterSource.COMMANDLINE
    ]


@click.command(context_settings=CONTEXT)
@options_of(JobOptions)
@options_of(RowFormatOptions)
@registry_options
@cluster_options
def main(cluster: ChosenCluster, as_json: bool, registry: ChosenRegistry, **values: Any) -> None:
    """Load topics into files, each record once."""
    of_rows = {each.name: values.pop(each.name) for each in fields(RowFormatOptions) if each.metadata}
    options = JobOptions(cluster, as_json, RowFormatOptions(registry, **of_rows), _given(), **values)
    options.check()
    log_to_stderr(_JOB)
    sys.exit(exit_code(_JOB, lambda: _load(options, _reading(cluster.settings()))))


def _load(options: JobOptions, client: dict[str, str]) -> int:
    registry = ["--schema-registry"] if options.row_formats.registry.is_given else []
    words = [options.destination, f"--dead-letters={options.dead_letters or ''}", *options.given, *registry]
    require("A load", *packages_of(words))
    return (_load_table if options.is_of_spark else _load_files)(options, client)


if __name__ == "__main__":
    main()
