"""Parse values by the schema, in a task; records that can't be written as columns become dead letters."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from spark_klog.columns.decode import has_microseconds
from spark_klog.columns.schema import FULL
from spark_klog.load.journal.model import Range, letters_name
from spark_klog.load.settings import WriteSettings
from spark_klog.load.values.event_time import field_times, local_times
from spark_klog.load.values.parser import JsonParser
from spark_klog.load.values.schema import parse_schema

#: The columns of records as they are read: with timestamps in ms, as not all of them have microseconds.
READ = FULL.set(FULL.get_field_index("timestamp"), pa.field("timestamp", pa.timestamp("ms", tz="UTC")))


class Kept(NamedTuple):
    """Records that can be written: as they are in the log, and as they are written."""

    raw: pa.RecordBatch
    parsed: pa.RecordBatch


class Values:
    """Parses the values of a range, and converts the timestamps to microseconds.

    The `bad` records, for which that is impossible, are lines of the file `letters`, which exists if there are some.

    A line is {"topic", "partition", "offset", "timestamp" (ms), "reason", "key", "value", "headers"}, bytes in base64.
    """

    def __init__(self, item: Range, settings: WriteSettings, folder: Path, token: str) -> None:
        self._settings = settings
        kind = parse_schema(settings.schema) if settings.schema else None
        self._parser = None if kind is None else JsonParser(kind)
        self.letters = folder / letters_name(item, token)
        self.bad = 0
        self._file: IO[str] | None = None

    def __enter__(self) -> Values:
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()

    def parse(self, batch: pa.RecordBatch) -> Kept:
        """The good records of a batch with the columns `READ`; OSError if the others can't be kept."""
        times = batch["timestamp"].cast(pa.int64()).to_numpy()
        good = has_microseconds(times)
        bad = [(row, f"timestamp {times[row]} ms does not fit into microseconds") for row in _rows(~good)]
        values = None
        if self._parser is not None:
            found = self._parser.parse(batch["value"].filter(pa.array(good)) if bad else batch["value"])
            values = found.column
            if found.bad:
                rows = _rows(good)
                bad = sorted([*bad, *((rows[row], reason) for row, reason in found.bad)])
        if bad:
            good[[row for row, _ in bad]] = False
            self._keep(batch.take(pa.array([row for row, _ in bad])), [reason for _, reason in bad])
            batch = batch.filter(pa.array(good))
        columns = dict(zip(FULL.names, batch.columns, strict=True))
        columns["timestamp"] = columns["timestamp"].cast(FULL.field("timestamp").type)
        raw = pa.RecordBatch.from_arrays(list(columns.values()), schema=FULL)
        if values is None:
            return Kept(raw, raw)
        columns["value"] = values
        return Kept(raw, pa.RecordBatch.from_arrays(list(columns.values()), schema=self._settings.columns))

    def layout_times(self, batch: pa.RecordBatch, times: NDArray[np.int64]) -> NDArray[np.int64]:
        """The times that decide on the records' folders, in microseconds as clocks of the time zone show them."""
        settings = self._settings
        if settings.event_time:
            times = field_times(batch["value"], settings.event_time, times)
        return local_times(times, settings.time_zone)

    def _keep(self, batch: pa.RecordBatch, reasons: list[str]) -> None:
        if self._file is None:
            self._file = self.letters.open("w", encoding="utf-8")
        self.bad += len(reasons)
        times = batch["timestamp"].cast(pa.int64()).to_pylist()
        columns = (batch[name].to_pylist() for name in ("topic", "partition", "offset", "key", "value", "headers"))
        for time, reason, topic, partition, offset, key, value, headers in zip(times, reasons, *columns, strict=True):
            letter = {
                "topic": topic,
                "partition": partition,
                "offset": offset,
                "timestamp": time,
                "reason": reason,
                "key": _text(key),
                "value": _text(value),
                "headers": [[item["key"], _text(item["value"])] for item in headers or ()],
            }
            self._file.write(json.dumps(letter, ensure_ascii=False) + "\n")


def _rows(mask: NDArray[np.bool_]) -> list[int]:
    found: list[int] = np.flatnonzero(mask).tolist()
    return found


def _text(value: Any) -> str | None:
    return None if value is None else base64.b64encode(value).decode()
