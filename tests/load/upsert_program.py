"""Merge a topic's changes into a table, as a job does, without Spark. Tests kill it.

python -m tests.load.upsert_program '{"servers": ..., "topic": ..., "table": ..., "settings": {...}, "records": ...}'
"""

from __future__ import annotations

import json
import sys

from spark_klog.load.planning import Limits
from spark_klog.load.settings import WriteSettings
from tests.load.support import run

if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    limits = Limits(max_records=given["records"])
    run(given["servers"], given["table"], given["topic"], settings=WriteSettings(**given["settings"]), limits=limits)
