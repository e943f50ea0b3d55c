"""Load a topic into a table, or compact the table, in a process that tests kill.

    python -m tests.load.table_run SERVERS TOPIC ADDRESS MOMENT

It prints "ready" and waits for a line. MOMENT is "any" (nothing special), "before" or "after" (it kills itself
before or after the table's commit), or "compaction" (it compacts the table in place of a load).
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

from spark_klog.tables.opening import open_table
from tests.load.support import run

_SMALL = 1 << 30


def _killing(real: Any, moment: str) -> Any:
    def append(*arguments: Any) -> None:
        if moment == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        real(*arguments)
        os.kill(os.getpid(), signal.SIGKILL)

    return append


def main(servers: str, topic: str, address: str, moment: str) -> None:
    table = open_table(address)
    if moment in ("before", "after"):
        kind = type(table)
        kind.append = _killing(kind.append, moment)  # type: ignore[method-assign]
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    sys.stdin.readline()
    if moment == "compaction":
        table.compact(_SMALL)
    else:
        run(servers, address, topic, max_task_records=20)


if __name__ == "__main__":
    main(*sys.argv[1:])
