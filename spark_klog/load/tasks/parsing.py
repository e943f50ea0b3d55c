"""Parse values by the schema, in a task; values that do not parse become dead letters."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from spark_klog.load.journal.model import Range
from spark_klog.load.settings import WriteSettings
from spark_klog.load.values.event_time import field_times, local_times
from spark_klog.load.values.parser import JsonParser
from spark_klog.load.values.schema import parse_schema


class Kept(NamedTuple):
    """Records whose values parse: as they are in the log, and as they are written."""

    raw: pa.RecordBatch
    parsed: pa.RecordBatch


class Values:
    """Parses the values of a range. The others are lines of the file `letters`, which exists if there are `bad` ones.

    A line is {"topic", "partition", "offset", "timestamp" (ms), "reason", "key", "value", "headers"}, bytes in base64.
    """

    def __init__(self, item: Range, settings: WriteSettings, folder: Path) -> None:
        self._settings = settings
        kind = parse_schema(settings.schema) if settings.schema else None
        self._parser = None if kind is None else JsonParser(kind)
        again = f"+{item.incarnation}" if item.incarnation else ""
        self.letters = folder / f"values+{item.topic}+{item.partition}+{item.start:020d}{again}.jsonl"
        self.bad = 0
        self._file: IO[str] | None = None

    def __enter__(self) -> Values:
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()

    def parse(self, batch: pa.RecordBatch) -> Kept:
        """The records whose values parse; OSError if the others can't be kept."""
        if self._parser is None:
            return Kept(batch, batch)
        found = self._parser.parse(batch["value"])
        if found.bad:
            good = np.ones(len(batch), bool)
            good[[row for row, _ in found.bad]] = False
            self._keep(batch.take(pa.array([row for row, _ in found.bad])), [reason for _, reason in found.bad])
            batch = batch.filter(pa.array(good))
        index = batch.schema.get_field_index("value")
        columns = [found.column if at == index else column for at, column in enumerate(batch.columns)]
        return Kept(batch, pa.RecordBatch.from_arrays(columns, schema=self._settings.columns))

    def layout_times(self, batch: pa.RecordBatch, times: NDArray[np.int64]) -> NDArray[np.int64]:
        """The times that decide on the records' folders, in microseconds as clocks of the time zone show them."""
        settings = self._settings
        if settings.event_time:
            times = field_times(batch["value"], settings.event_time, times)
        return local_times(times, settings.time_zone)

    def _keep(self, batch: pa.RecordBatch, reasons: list[str]) -> None:
        if self._file is None:
            self._file = self.letters.open("w")
        self.bad += len(reasons)
        times = batch["timestamp"].cast(pa.int64()).to_pylist()
        columns = (batch[name].to_pylist() for name in ("topic", "partition", "offset", "key", "value", "headers"))
        for time, reason, topic, partition, offset, key, value, headers in zip(times, reasons, *columns, strict=True):
            letter = {
                "topic": topic,
                "partition": partition,
                "offset": offset,
                "timestamp": time // 1000,
                "reason": reason,
                "key": _text(key),
                "value": _text(value),
                "headers": [[item["key"], _text(item["value"])] for item in headers or ()],
            }
            self._file.write(json.dumps(letter, ensure_ascii=False) + "\n")


def _text(value: Any) -> str | None:
    return None if value is None else base64.b64encode(value).decode()
