"""Dead letters in a table, beside the folder that a load has of them.

    topic, partition, offset, timestamp    the record's place; of a corrupt batch the offset that it claims
    reason                                 why it is not among the others
    key, value, headers                    the record's
    batch                                  the bytes of a corrupt record batch, which has no records to read
    run                                    the run of the load that has left it out

A commit of the table has the letters of one run, and its number. They come after the run's own commit; what a killed
call has left to do, the next one does, so that each letter is in the table once. The folder stays: `klog load replay`
sends what is in it.
"""

from __future__ import annotations

import logging
import os
from itertools import chain
from operator import itemgetter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from spark_klog.base.addresses import local_path, without_user
from spark_klog.columns.schema import FULL
from spark_klog.errors import ConfigError, LoadError
from spark_klog.load.journal import paths
from spark_klog.load.journal.checkpoint import read_summary
from spark_klog.load.journal.history import read_manifest
from spark_klog.load.journal.letters import StoredLetter, dead_letters, in_parts, is_there
from spark_klog.load.journal.store import Store, open_store
from spark_klog.load.table_columns import as_columns
from spark_klog.tables.opening import kind_and_folder, open_table, takes_plain_names
from spark_klog.tables.table import LETTERS, DataFile, Run, RunConflict

_log = logging.getLogger(__name__)
COLUMNS = pa.schema(
    [
        *(FULL.field(name) for name in ("topic", "partition", "offset", "timestamp")),
        pa.field("reason", pa.string()),
        *(FULL.field(name) for name in ("key", "value", "headers")),
        pa.field("batch", pa.binary()),
        pa.field("run", pa.int64()),
    ]
)
_COLUMNS = pa.schema([field.with_nullable(True) for field in COLUMNS])
#: How many times another call may be quicker.
_MOST_CONFLICTS = 10
_MOST_MS = (1 << 63) // 1000 - 1


def check_letters(address: str, output: str) -> None:
    """`ConfigError` if the table at an address is a load's output, or one of them is in the folder of the other:
    readers and vacuums of the one would take the files of both for its own. Errors also as of `open_table`."""
    if address == output:
        raise ConfigError("--dead-letters is the table of the records: name another one")
    open_table(address)
    letters, folder = _folder(address), _folder(output)
    if letters and folder and (letters.startswith(folder) or folder.startswith(letters)):
        where = "are in one folder" if letters == folder else "are one within the other"
        texts = [without_user(each) for each in (address, output)]
        raise ConfigError(f"--dead-letters {texts[0]} and {texts[1]} {where}: name another table for dead letters")


def _folder(address: str) -> str:
    """The folder of a load, or of a table that is named by it; "" of the tables of catalogs, which keep them apart."""
    if takes_plain_names(address):
        return ""
    folder = kind_and_folder(address)[1]
    local = local_path(folder)
    path = folder.partition("?")[0] if local is None else os.path.realpath(local)
    return f"{path.rstrip('/')}/"


class LetterTable:
    """The table at an address, for the dead letters of a load.

    It belongs to `load` and `LETTERS`, so that it is not taken for the table of the load's records.
    """

    def __init__(self, address: str, load: str) -> None:
        self._table, self._load = open_table(address), f"{load}{LETTERS}"

    def check(self) -> None:
        """`LoadError` if the table belongs to something else, or can't be written: a first letter may come months
        later."""
        self._table.check("append")
        owner = self._table.load_id()
        if owner not in (None, self._load):
            raise LoadError(
                f"--dead-letters {self._table.address} belongs to another load ({owner}): each load has a table of "
                "dead letters of its own, so name another one"
            )

    def catch_up(self, store: Store) -> None:
        """Add the letters of the load's committed runs that the table lacks; `store` has the load's journal.

        `LoadError` if the table is of another load or has other columns, or can't be written.
        """
        conflicts = 0
        letters = read_summary(store).letters
        runs = sorted({run for run, _ in letters.values()})
        while True:
            last = self._table.last_run(self._load) if runs else None
            at = 0 if last is None else last.number
            run = next((run for run in runs if run > at), None)
            if run is None:
                return
            names = [name for name, place in sorted(letters.items(), key=itemgetter(1)) if place[0] == run]
            try:
                self._add(store, run, at, names)
            except RunConflict:  # another call of the load has added them
                conflicts += 1
                if conflicts == _MOST_CONFLICTS:
                    raise

    def _add(self, store: Store, run: int, last: int, names: list[str]) -> None:
        schema = self._table.prepare(_COLUMNS, "none", "timestamp", self._load, "tasks")
        token = paths.new_token()
        target = open_store(self._table.location, of_table=True)
        with TemporaryDirectory() as folder:
            path = Path(folder, f"letters-{paths.run_name(run)}-{token}.parquet")
            with pq.ParquetWriter(path, schema, compression="zstd") as writer:
                letters = (dead_letters(store, name) for name in names if is_there(store, name))
                for part in in_parts(chain.from_iterable(letters)):
                    rows = pa.RecordBatch.from_pylist([_row(letter, run) for letter in part], _COLUMNS)
                    writer.write_batch(as_columns(rows, schema, False))
            footer, size = pq.read_metadata(path), path.stat().st_size
            files = [DataFile(path.name, size, footer)] if footer.num_rows else []
            if files:
                target.put(path, path.name)
                target.settle()
        manifest = read_manifest(store, run)
        offsets = {} if manifest is None else manifest.offsets
        ends = {topic: {number: at.offset for number, at in each.items()} for topic, each in offsets.items()}
        try:
            self._table.append(files, Run(self._load, run, token, ends, before=last))
        except RunConflict:
            there = {file.path for file in self._table.files()} if files else set()
            for file in files:
                if file.path not in there:  # it is, if the answer was lost and the other call has come after it
                    target.remove(file.path)
            raise
        _log.info("%s: added %d dead letters of run %s", self._table.address, footer.num_rows, paths.run_name(run))


def _row(letter: StoredLetter, run: int) -> dict[str, Any]:
    time = letter.timestamp
    return {
        **vars(letter),
        "timestamp": time * 1000 if time is not None and abs(time) <= _MOST_MS else None,
        "headers": [{"key": key, "value": value} for key, value in letter.headers],
        "run": run,
    }
