"""Fail for corrupt record batches, skip them, or keep their bytes as dead letters: the option badRecords.

The same for single records whose timestamps have no microseconds: of them the value is kept.
"""

from __future__ import annotations

import base64
import json
import logging
import zlib
from collections.abc import Callable
from typing import Any

from spark_klog.clock import system_ms
from spark_klog.directories.trees.addresses import filesystem_at
from spark_klog.records.reading.reader import BadBatch
from spark_klog.spark.options.reads import BadRecordsOptions

_log = logging.getLogger(__name__)


class BadRecords:
    """Handles the corrupt record batches of one partition by mode: "fail" raises; "skip" and "deadletter" log.

    "deadletter" also writes a file TOPIC-PARTITION-OFFSET-CRC.json: topic, partition, the base offset that the batch
    claims, the reason, the time (ms), and the bytes in base64. The CRC-32 of the bytes in the name keeps apart batches
    that claim the same offset. A repeated task writes the same files. `keep` takes (name, letter) in place of the file.
    """

    def __init__(
        self,
        options: BadRecordsOptions,
        topic: str,
        partition: int,
        keep: Callable[[str, dict[str, Any]], None] | None = None,
    ) -> None:
        self._options = options
        self._topic, self._partition = topic, partition
        self._keep = keep
        self._last: tuple[int, int] | None = None

    def take(self, bad: BadBatch) -> None:
        """Handle one record batch. Raises its `DecodeError` with "fail", OSError if a dead letter can't be written."""
        if self._options.mode == "fail":
            raise type(bad.error)(f"{bad.error}; badRecords=skip or deadletter reads on after it")
        letter = bad.offset, zlib.crc32(bad.data)
        if letter == self._last:  # the next fetch starts with the batch that the last one ended with
            return
        self._last = letter
        name = f"{self._topic}-{self._partition}"
        _log.error("%s: skipped %d bytes of bad records: %s", name, len(bad.data), bad.error)
        file = f"{name}-{bad.offset}-{letter[1]:08x}.json"
        if self._keep is not None:
            self._keep(file, self._letter(bad))
        elif self._options.path is not None:
            self._write(self._options.path, file, self._letter(bad))

    def _letter(self, bad: BadBatch) -> dict[str, Any]:
        return {
            "topic": self._topic,
            "partition": self._partition,
            "offset": bad.offset,
            "reason": str(bad.error),
            "time": system_ms(),
            "bytes": base64.b64encode(bad.data).decode(),
        }

    def _write(self, folder: str, name: str, letter: dict[str, Any]) -> None:
        files, path = filesystem_at(folder)
        files.create_dir(path, recursive=True)
        with files.open_output_stream(f"{path.rstrip('/')}/{name}") as stream:
            stream.write(json.dumps(letter).encode())
