"""Runs of a load into a table, merges and compactions, in processes that tests kill; without Spark.

    python -m tests.load.table_run SERVERS TOPIC ADDRESS [merged|partitioned]

Each request is a line with a MOMENT. A fork of this process, which has the modules already, loads what is new (or, at
the moments "compaction" and "expiry", compacts the table, and expires what it can), and prints "at PID" when the
moment has come:

    any, compaction, expiry    before it begins
    commit                     before the first call of `Table.append`, or of `Table.upsert`
    before, after              it kills itself before or after that call, and prints nothing

When the fork has ended, this process prints "ended CODE". Changes of rows are merged if it is told so, also into
a table that the load partitions.
"""

from __future__ import annotations

import os
import signal
import sys
from importlib import import_module
from typing import Any

from spark_klog.load.settings import WriteSettings
from spark_klog.load.upkeep import expire
from spark_klog.tables.opening import open_table
from spark_klog.tables.table import Table
from spark_klog.tables.upkeep import Kept
from tests.load.change_source import KEYED, PARTITIONED
from tests.load.support import run

_SMALL = 1 << 30
#: What a run imports when it first needs it.
_MODULES = ("pyarrow.dataset", "pyiceberg.io.pyarrow", "pyiceberg.catalog.sql", "spark_klog.spark.read.tasks")


def _tell(text: str) -> None:
    os.write(1, f"{text}\n".encode())


def _at(moment: str, real: Any) -> Any:
    has_told = False

    def commit(*arguments: Any) -> None:
        nonlocal has_told
        if moment == "commit" and not has_told:
            has_told = True
            _tell(f"at {os.getpid()}")
        if moment == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        real(*arguments)
        if moment == "after":
            os.kill(os.getpid(), signal.SIGKILL)

    return commit


def _act(servers: str, topic: str, address: str, moment: str, how: str) -> None:
    table: Table = open_table(address)
    method = "upsert" if how else "append"
    settings = {"": WriteSettings(), "merged": KEYED, "partitioned": PARTITIONED[address.partition(":")[0]]}[how]
    setattr(type(table), method, _at(moment, getattr(type(table), method)))
    if moment in ("any", "compaction", "expiry"):
        _tell(f"at {os.getpid()}")
    if moment in ("compaction", "expiry"):
        table.compact(_SMALL)
        if moment == "expiry":
            expire(address, Kept(0.001))
    else:
        run(servers, address, topic, max_task_records=20, settings=settings)


def main(servers: str, topic: str, address: str, how: str = "") -> None:
    for name in _MODULES:
        import_module(name)
    for line in sys.stdin:
        child = os.fork()
        if not child:
            code = 1
            try:
                _act(servers, topic, address, line.strip(), how)
                code = 0
            except BaseException:
                sys.excepthook(*sys.exc_info())
                sys.stderr.flush()
            finally:
                os._exit(code)
        _, status = os.waitpid(child, 0)
        _tell(f"ended {os.waitstatus_to_exitcode(status)}")


if __name__ == "__main__":
    main(*sys.argv[1:])
