"""Deleted keys, remembered for a time: an older change of one that a later run reads does not bring its row back.

They are in a Parquet file below the table's folder, with the places of their deletions and the times at which they were
remembered. Each run writes a file before its commit, whose name has the run's number and token: the commit has both, so
that the file of an attempt that is not committed is never read. Truncations are among them, without a key.
"""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from spark_klog.base.durable import check_version
from spark_klog.errors import LoadError
from spark_klog.files.arrow import ArrowFolder
from spark_klog.files.folder import LocalFolder
from spark_klog.tables.change_files import ChangeFiles
from spark_klog.tables.change_order import DELETED, last_rows, matching, outlived, place_of
from spark_klog.tables.table import Run

_FOLDER, _END = "_klog/deleted", ".parquet"
#: The last column: when a key was remembered, in seconds since the epoch.
_SINCE = pa.field("since", pa.int64())
#: The version of the file, in its footer.
_VERSION, _VERSION_KEY = 1, b"klog.version"
_Store = LocalFolder | ArrowFolder


def with_memory(files: ChangeFiles, store: _Store, last: Run | None) -> ChangeFiles:
    """Changes that are compared with what the table's last run has remembered, if it has.

    `LoadError` if that is of a key of other columns.
    """
    name = _file_of(store, last)
    content = store.read(f"{_FOLDER}/{name}") if name else None
    if content is None:
        return files
    columns = [*files.key, *place_of(files.schema)]
    wanted = pa.schema([*(files.schema.field(column) for column in columns), _SINCE])
    try:
        known = pq.read_table(pa.BufferReader(content))
        text = (known.schema.metadata or {}).get(_VERSION_KEY, b"").decode()
        version, where = int(text) if text.isdecimal() else None, f"{store.address}/{_FOLDER}/{name}"
        check_version(version, _VERSION, where, "remove it to forget them", LoadError)
        memory = pa.table(known.columns, names=wanted.names).cast(wanted)  # a key's column may have another name now
    except (pa.ArrowException, ValueError) as error:
        raise LoadError(
            f"{store.address}/{_FOLDER}/{name} has deleted keys by other columns than the changes ({error}): remove it "
            "to forget them"
        ) from None
    return replace(files, memory=memory)


def remember(files: ChangeFiles | None, store: _Store, last: Run | None, run: Run, seconds: float) -> None:
    """Write what a run, which is about to be committed, remembers: deletions of its own, and those of `last` which are
    younger than some seconds, of keys that it has not written. None: it has no changes."""
    path = f"{_FOLDER}/{_prefix(run)}{_END}"
    if files is None:
        name = _file_of(store, last)
        if name and (content := store.read(f"{_FOLDER}/{name}")) is not None:
            store.write(path, content)
        return
    now = int(time.time())
    stream = pa.BufferOutputStream()
    table = _remembered(files, now - int(min(seconds, now)), now).replace_schema_metadata({_VERSION_KEY: str(_VERSION)})
    pq.write_table(table, stream, compression="zstd")
    store.write(path, stream.getvalue().to_pybytes())


def forget(store: _Store, run: int) -> None:
    """Remove what runs before this one have remembered."""
    for name in store.names(_FOLDER):
        number = name.partition("-")[0]
        if number.isdecimal() and int(number) < run:
            store.remove(f"{_FOLDER}/{name}")


def _remembered(files: ChangeFiles, since: int, now: int) -> pa.Table:
    columns = [*files.key, *place_of(files.schema)]
    truncations = files.all_truncations
    kinds = pa.schema([*(files.schema.field(column) for column in columns), _SINCE])
    memory = kinds.empty_table() if files.memory is None else files.memory
    is_left, parts = np.ones(len(memory), np.bool_), []
    for changes in map(files.without_letters, files.slices()):
        is_left[matching(memory, changes, files.key)[0]] = False
        last = changes.take(pa.array(last_rows(changes, files.key)))
        parts.append(last.filter(last[DELETED]).select(columns))
    own = files.truncations
    is_left &= ~(memory[files.key[0]].is_null().to_numpy() & outlived(memory, own))
    own = own.filter(pa.array(~outlived(own, truncations)))
    keyless = [pa.nulls(len(own), kinds.field(name).type) for name in files.key]
    parts.append(pa.table([*keyless, *own.columns], names=columns))
    new = pa.concat_tables(parts)
    new = new.append_column(_SINCE, pa.array(np.full(len(new), now, np.int64)))
    new = pa.concat_tables([memory.filter(pa.array(is_left)), new])
    is_young = new[_SINCE.name].to_numpy() >= since
    is_within = outlived(new, truncations) & new[files.key[0]].is_valid().to_numpy()
    return new.filter(pa.array(is_young & ~is_within))


def _prefix(run: Run) -> str:
    return f"{run.number:08d}-{run.token}"


def _file_of(store: _Store, run: Run | None) -> str | None:
    """The file of a run; if its table has forgotten the token, the only one of its number."""
    if run is None:
        return None
    names = [name for name in store.names(_FOLDER) if name.startswith(_prefix(run))]
    return names[0] if len(names) == 1 else None
