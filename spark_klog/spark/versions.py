"""What the Python data source API of each pyspark lacks, and what stands in for it. No other module asks for versions.

                                                  4.0    4.1    4.2, 4.3
    a class for stream writers of Arrow batches   no     yes    yes
    arrow_udf: functions of Arrow arrays          no     yes    yes
    filter classes, pushFilters                   no     yes    yes
    latestOffset(start, limit), read limits,
    SupportsTriggerAvailableNow, the latest
    offset of progress records                    no     no     yes
    to_arrow_schema(timezone=...)                 no     no     yes

The API is asked for what it has, not for its number.

Without admission control `LatestOffsetReader` gives each `latestOffset()` the start that Spark does not pass: the end
of the micro-batch before, which Spark tells a restarted query by `partitions(END, END)`. Trigger.AvailableNow then asks
for the latest offset once, and reads up to it in one micro-batch; nothing tells it from other triggers before that.
So limits cut it short: `available_now.run_available_now` and the option availableNow=all read the rest. With
spark.sql.streaming.triggerAvailableNowWrapper.enabled (off by default) Spark asks before it tells a restarted query's
end, so that a limit would count from the query's start: `LatestOffsetReader` refuses that.
"""

from __future__ import annotations

import inspect
import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version as package_version
from typing import Any

import numpy as np
import pyarrow as pa
import pyspark
from pyspark.sql import datasource, functions
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import ArrayType, DataType, StructType

from spark_klog.base.extras import NEWEST_TESTED, is_untested
from spark_klog.errors import ConfigError

_log = logging.getLogger(__name__)

JsonOffsets = dict[str, dict[str, int]]

try:
    from pyspark.sql.streaming.datasource import (
        ReadAllAvailable as ReadAllAvailable,
        ReadLimit as ReadLimit,
        ReadMaxRows as ReadMaxRows,
        SupportsTriggerAvailableNow as SupportsTriggerAvailableNow,
    )

    HAS_ADMISSION_CONTROL = True
except ImportError:
    HAS_ADMISSION_CONTROL = False

    class ReadLimit:  # type: ignore[no-redef]
        """How much a micro-batch may read."""

    @dataclass
    class ReadAllAvailable(ReadLimit):  # type: ignore[no-redef]
        """No limit."""

    @dataclass
    class ReadMaxRows(ReadLimit):  # type: ignore[no-redef]
        """At most so many rows."""

        max_rows: int

    class SupportsTriggerAvailableNow:  # type: ignore[no-redef]
        """Spark does not ask for it."""


HAS_ARROW_FUNCTIONS = hasattr(functions, "arrow_udf")

# 4.0 gives Arrow batches to writers of this class only, and does not check the class of a stream's writer.
StreamArrowWriter = getattr(datasource, "DataSourceStreamArrowWriter", datasource.DataSourceArrowWriter)

if hasattr(datasource, "Filter"):
    from pyspark.sql.datasource import (
        EqualNullSafe as EqualNullSafe,
        EqualTo as EqualTo,
        Filter as Filter,
        GreaterThan as GreaterThan,
        GreaterThanOrEqual as GreaterThanOrEqual,
        In as In,
        IsNotNull as IsNotNull,
        LessThan as LessThan,
        LessThanOrEqual as LessThanOrEqual,
    )
else:
    # Spark pushes no filters: none of these is ever made.
    class Filter:  # type: ignore[no-redef]
        """A filter of a query."""

    EqualNullSafe = EqualTo = GreaterThan = GreaterThanOrEqual = type("NoFilter", (Filter,), {})
    In = IsNotNull = LessThan = LessThanOrEqual = EqualTo


def warn_of_untested() -> None:
    """Log a warning if pyspark or pandas is newer than what the tests have run with."""
    versions = {"pyspark": pyspark.__version__}
    with suppress(PackageNotFoundError):
        versions["pandas"] = package_version("pandas")  # its import takes long
    for name, version in versions.items():
        if is_untested(name, version):
            _log.warning(
                "spark_klog is not tested with %s %s: the newest that it is tested with is %s",
                *(name, version, NEWEST_TESTED[name]),
            )


def arrow_schema(schema: StructType) -> pa.Schema:
    if "timezone" in inspect.signature(to_arrow_schema).parameters:
        return to_arrow_schema(schema, timezone="UTC")
    return to_arrow_schema(schema)


def arrow_function(
    function: Callable[..., pa.Array], kind: DataType, inputs: Sequence[pa.DataType]
) -> Callable[..., Any]:
    """A function for columns, of one that takes Arrow arrays and returns one, of the Arrow type of Spark's `kind`.

    `inputs` are the types of the arrays for a pyspark that makes objects of Python of them, and this makes them again.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*prefer.*type hints", UserWarning)  # they can't say that it is an object
        made: Callable[..., Any]
        if HAS_ARROW_FUNCTIONS:
            from pyspark.sql.functions import ArrowUDFType, arrow_udf

            made = arrow_udf(function, kind, ArrowUDFType.SCALAR)
            return made
        from pyspark.sql.functions import PandasUDFType, pandas_udf

        made = pandas_udf(_OnPandas(function, tuple(inputs)), ArrayType(kind), PandasUDFType.SCALAR)
    return lambda *columns: made(*columns).getItem(0)


class _OnPandas:
    """A function of Arrow arrays as one of pandas' series, whose result is an array of one value a row.

    For a struct Spark wants a pandas DataFrame, which has no nulls and no types inside; an array it takes from what
    looks like a series and knows its Arrow array.
    """

    def __init__(self, function: Callable[..., pa.Array], inputs: tuple[pa.DataType, ...]) -> None:
        self.__name__: str = function.__name__
        self._function, self._inputs = function, inputs

    def __call__(self, *columns: Any) -> _Result:
        arrays = [pa.array(column, kind, from_pandas=True) for column, kind in zip(columns, self._inputs, strict=True)]
        return _Result(self._function(*arrays))


class _Result:
    """As much of a series as Spark uses of one."""

    dtype = None

    def __init__(self, values: pa.Array) -> None:
        self._values = values

    @property
    def array(self) -> _Result:
        return self

    def __len__(self) -> int:
        return len(self._values)

    def apply(self, convert: object) -> _Result:
        """Nothing has to be converted."""
        return self

    def __arrow_array__(self, type: pa.DataType) -> pa.Array:
        values = self._values if self._values.type == type.value_type else self._values.cast(type.value_type)
        return pa.ListArray.from_arrays(np.arange(len(values) + 1, dtype=np.int32), values, type)


def adapted(
    reader: DataSourceStreamReader, *, is_limited: bool, ignores_limits: bool = False
) -> DataSourceStreamReader:
    """The reader in the form that this pyspark asks for; `is_limited` if its micro-batches have limits.

    With `ignores_limits` (availableNow=all) they have none where Spark does not tell the trigger.
    """
    return reader if HAS_ADMISSION_CONTROL else LatestOffsetReader(reader, is_limited, ignores_limits)


class LatestOffsetReader(DataSourceStreamReader):
    """A stream reader for a pyspark whose `latestOffset` has no parameters."""

    def __init__(self, reader: DataSourceStreamReader, is_limited: bool, ignores_limits: bool = False) -> None:
        self._reader = reader
        self._is_limited = is_limited and not ignores_limits
        #: The end of the last micro-batch; {} before the first one.
        self._end: JsonOffsets = {}
        #: Whether Spark has asked for a latest offset, and whether it has told where the query goes on.
        self._is_asked = self._has_start = False

    def initialOffset(self) -> JsonOffsets:
        return {}

    def latestOffset(self) -> JsonOffsets:
        if self._is_limited and not self._is_asked:
            _log.warning(
                "this pyspark ends Trigger.AvailableNow after one micro-batch, which the options of limits "
                "(maxOffsetsPerTrigger and others) cut short: the rest is left to the next run, unlike with "
                'format("kafka"). To read all, start the query by spark_klog.run_available_now, which starts it again '
                "until nothing is left and keeps the limits; or set the option availableNow=all, which ignores them "
                "and reads all in one micro-batch; or use pyspark 4.2 (docs/recipes/switch.md). With other triggers "
                "limits work as ever"
            )
        self._is_asked = True
        limit = self._reader.getDefaultReadLimit() if self._is_limited else ReadAllAvailable()
        self._end = self._reader.latestOffset(self._end, limit)
        return self._end

    def partitions(self, start: JsonOffsets, end: JsonOffsets) -> list[InputPartition]:
        if self._is_limited and self._is_asked and not self._has_start and (start or end != self._end):
            raise ConfigError(
                "spark.sql.streaming.triggerAvailableNowWrapper.enabled is on, with which Spark asks for the end of "
                "Trigger.AvailableNow before it says where the query goes on: a limit (maxOffsetsPerTrigger and "
                "others) can't be counted from there. Turn the setting off and start the query by "
                "spark_klog.run_available_now, or set the option availableNow=all, which ignores the limits"
            )
        self._has_start = True
        self._end = end
        return self._reader.partitions(start, end) if start != end else []

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        batches: Iterator[pa.RecordBatch] = self._reader.read(partition)
        return batches

    def commit(self, end: JsonOffsets) -> None:
        self._reader.commit(end)

    def stop(self) -> None:
        self._reader.stop()
