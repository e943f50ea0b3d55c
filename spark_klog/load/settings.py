"""How a load writes its files: format, compression, sizes, layout."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import pyarrow as pa

from spark_klog.base.settings import any_of
from spark_klog.columns.schema import FULL
from spark_klog.errors import ConfigError
from spark_klog.load.rows import RowSchema
from spark_klog.load.values import UTC, check_field, check_zone, name_now
from spark_klog.schemas.json_schema.columns import VARIANT, stored_type
from spark_klog.schemas.json_schema.ddl import parse_schema
from spark_klog.tables.change_order import OWN
from spark_klog.tables.changes import RECORD_KEY, ChangeFormat, Envelope, Unavailable
from spark_klog.tables.partitions import BY_TIME, parse_terms

PARQUET, ARROW, JSON_LINES = "parquet", "arrow", "json"
#: Formats that tasks write themselves, with their codecs. The first is the default.
CODECS = {
    PARQUET: ("zstd", "snappy", "lz4", "gzip", "none"),
    ARROW: ("zstd", "lz4", "none"),
    JSON_LINES: ("none", "gzip", "zstd"),
}
EXTENSIONS = {PARQUET: "parquet", ARROW: "arrow", JSON_LINES: "jsonl"}
_SUFFIXES = {"gzip": ".gz", "zstd": ".zst"}
#: For users of the job, which has no option failOnDataLoss.
LOSS_ADVICE = "--fail-on-data-loss false goes on without them"
#: Columns by which row groups can be sorted.
SORTED = ("key",)
RECORDS, VALUES = "records", "values"
#: The columns of a table: those of the connector, or a column for each field of the values.
TABLE_COLUMNS = (RECORDS, VALUES)
#: Columns in which values repeat.
_DICTIONARY = ("topic", "partition", "timestampType")


@dataclass(frozen=True)
class WriteSettings:
    """How tasks write. Sizes are bytes; a file may exceed `file_bytes` by a row group.

    A row group ends at `row_group_rows` records or `row_group_bytes` of Arrow data, which a task holds in memory.
    With a `schema` (as `schema_text` has it) values are parsed from JSON; if it `infers`, runs find it themselves, and
    `known` is what they had before (`load/inference.py`). `rows` are keys and values of other formats,
    once their schemas are known. `sort_by` is a column of `SORTED`, by which each row group of a Parquet file is sorted
    (then by offset), or "": by offset. A layout of day or hour is by the field `event_time` of values, or by the
    records' timestamps if it is "", in `time_zone`; one of a table's columns is as of `parse_terms`.
    With an `upsert_key` (fields of the value, or "key") records are changes of rows, in an `envelope` or plain, ordered
    by the fields `order_by`, with commas between them, or by offsets if it is "".
    """

    format: str = PARQUET
    compression: str = "zstd"
    compression_level: int | None = None
    dictionary: tuple[str, ...] = _DICTIONARY
    row_group_rows: int = 1_000_000
    row_group_bytes: int = 32 * 1024 * 1024
    file_bytes: int = 256 * 1024 * 1024
    layout: str = "none"
    schema: str = ""
    event_time: str = ""
    time_zone: str = UTC
    rows: tuple[RowSchema, ...] = ()
    sort_by: str = ""
    upsert_key: str = ""
    envelope: Envelope = "none"
    order_by: str = ""
    unavailable: Unavailable = "keep"
    table_columns: str = RECORDS
    infers: bool = False
    known: str = ""

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> WriteSettings:
        """Of the JSON in a plan; TypeError or ValueError if it is not what a run has written."""
        values = _known(cls, values)
        if "dictionary" in values:
            values["dictionary"] = tuple(values["dictionary"])
        values["rows"] = tuple(RowSchema(**_known(RowSchema, row)) for row in values.get("rows", ()))
        return cls(**values)

    def to_json(self) -> dict[str, Any]:
        """For a plan."""
        return asdict(self)

    @property
    def ordering(self) -> list[tuple[str, str]]:
        """The columns and directions by which row groups are sorted, if not by offset."""
        prefix = OWN if self.table_columns == VALUES else ""
        return [(f"{prefix}{name}", "ascending") for name in (self.sort_by, "offset")] if self.sort_by else []

    def __post_init__(self) -> None:
        if self.format not in CODECS:
            raise ConfigError(f"format {self.format!r} must be {any_of(tuple(CODECS))}")
        if self.compression not in CODECS[self.format]:
            raise ConfigError(
                f"compression {self.compression!r} of format {self.format} must be {any_of(CODECS[self.format])}"
            )
        self._check_level()
        if self.layout not in BY_TIME:
            parse_terms(self.layout)
        if self.dictionary != _DICTIONARY and self.format != PARQUET:
            raise ConfigError(f"dictionary is for format parquet, not {self.format}: leave it out")
        unknown = [name for name in self.dictionary if name not in FULL.names]
        if unknown:
            raise ConfigError(f"dictionary: no column {', '.join(unknown)}; the columns are {', '.join(FULL.names)}")
        if self.rows and self.format == PARQUET:
            self._check_parquet()
        self._check_order()
        if self.upsert_key and self.layout in ("day", "hour"):
            raise ConfigError(
                f"partition-by {self.layout} is by the time of records, and with an upsert key rows change: name a "
                f"column of the rows, as '{self.layout}(FIELD)'"
            )
        if self.envelope != "none" and not self.upsert_key:
            raise ConfigError(f"envelope {self.envelope} needs an upsert key")
        if self.order_by and not self.upsert_key:
            raise ConfigError(f"order by {self.order_by!r} needs an upsert key")
        if self.is_variant and (self.upsert_key or self.event_time or self.table_columns == VALUES):
            raise ConfigError(
                "--schema variant is one column without fields, and an upsert key, --event-time and --table-columns "
                "values need some: give a DDL, or infer"
            )
        if self.schema or self.rows:  # `LoadOptions` knows whether there will be some
            for topic in {row.topic for row in self.rows} or {""}:
                self.change_format(topic)
        check_zone(self.time_zone)
        if self.event_time:
            # `LoadOptions` knows whether there will be one
            if self.schema:
                check_field(parse_schema(self.schema), self.event_time)
            for row in self.rows:
                if row.column == "value":
                    check_field(row.type, self.event_time)
            if self.layout not in ("day", "hour"):
                raise ConfigError(f"event time {self.event_time!r} is for --partition-by hour or day")

    def with_rows(self, rows: tuple[RowSchema, ...]) -> WriteSettings:
        """These settings with other schemas: the event time by the name that its field has in them, by its aliases.

        `ConfigError` if topics have the field by different names.
        """
        names = {row.topic: name_now(row.type, self.event_time) for row in rows if row.column == "value"}
        if self.event_time and len(set(names.values())) > 1:
            texts = [f"{name!r} in topic {topic}" for topic, name in sorted(names.items())]
            raise ConfigError(
                f"event time {self.event_time!r} is {', '.join(texts)} by the new schemas, and partitions go by one "
                "name: rename the field in all topics, or in none"
            )
        event_time = next(iter(names.values())) if self.event_time and names else self.event_time
        return replace(self, rows=rows, event_time=event_time)

    def change_format(self, topic: str) -> ChangeFormat | None:
        """What the topic's records say about rows; None if each of them is a row. `ConfigError` if they can't."""
        if not self.upsert_key:
            return None
        columns = self.columns(topic)
        kinds = columns.field("key").type, columns.field("value").type
        names = () if self.upsert_key == RECORD_KEY else self.upsert_key.split(",")
        fields = tuple(name.strip().removeprefix("value.") for name in names)
        order = tuple(self.order_by.split(",")) if self.order_by else ()
        return ChangeFormat(*kinds, fields, self.envelope, order, self.unavailable)

    @property
    def is_variant(self) -> bool:
        """Whether values are VARIANTs."""
        return bool(self.schema) and parse_schema(self.schema) == VARIANT

    def columns(self, topic: str) -> pa.Schema:
        """The columns of a topic's files."""
        columns = FULL
        types = {row.column: row.type for row in self.rows if row.topic == topic}
        if self.schema:
            types["value"] = stored_type(parse_schema(self.schema))
        for name, kind in types.items():
            columns = columns.set(columns.get_field_index(name), pa.field(name, kind))
        return columns

    def _check_level(self) -> None:
        """`ConfigError` unless the codec takes the level: a plan would keep it, and no run would get past it."""
        if self.compression_level is None:
            return
        try:
            first = pa.Codec.minimum_compression_level(self.compression)
            last = pa.Codec.maximum_compression_level(self.compression)
        except ValueError:  # snappy, none
            raise ConfigError(f"compression {self.compression} has no compression-level: leave it out") from None
        if not first <= self.compression_level <= last:
            raise ConfigError(
                f"compression-level {self.compression_level} of {self.compression} must be {first} to {last}"
            )

    def _check_order(self) -> None:
        if not self.sort_by:
            return
        if self.sort_by not in SORTED:
            raise ConfigError(f"sort-by {self.sort_by!r} must be {any_of(SORTED)}")
        if self.format != PARQUET:
            raise ConfigError(f"sort-by {self.sort_by} is for format parquet, whose row groups tell their order")
        for row in self.rows:
            if row.column == self.sort_by and pa.types.is_nested(row.type):
                raise ConfigError(
                    f"sort-by {self.sort_by}: the keys of topic {row.topic} are records, without an order"
                )

    def _check_parquet(self) -> None:
        """`ConfigError` if Parquet can't hold the columns, such as records without fields, or Spark can't read them."""
        import pyarrow.parquet as pq

        for topic in {row.topic for row in self.rows}:
            if alike := _alike(pa.struct(list(self.columns(topic)))):
                raise ConfigError(
                    f"the rows of topic {topic} have fields that differ by case only, {' and '.join(alike)}: Spark "
                    "can't read such Parquet; rename one of them, or write files of --format arrow or json"
                )
            try:
                pq.ParquetWriter(pa.BufferOutputStream(), self.columns(topic)).close()
            except pa.ArrowException as error:
                raise ConfigError(
                    f"format parquet can't hold the rows of topic {topic} ({error}); --format arrow and json can"
                ) from None

    @property
    def extension(self) -> str:
        suffix = _SUFFIXES.get(self.compression, "") if self.format == JSON_LINES else ""
        return EXTENSIONS[self.format] + suffix


def _known(kind: type[Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """The values of fields that a dataclass has: those of a later version are passed over."""
    names = {field.name for field in fields(kind)}
    return {name: value for name, value in values.items() if name in names}


def _alike(kind: pa.DataType) -> tuple[str, ...]:
    """The first two fields of a level whose names differ by case only."""
    fields = [kind.field(number) for number in range(kind.num_fields)]
    names: dict[str, str] = {}
    for field in fields:
        if (other := names.setdefault(field.name.lower(), field.name)) != field.name:
            return other, field.name
    return next(filter(None, (_alike(field.type) for field in fields)), ())
