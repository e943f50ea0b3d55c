"""Program with a write, a batch read and a stream for each of several ways of authentication.

test_kerberos.py runs it, as Kerberos's settings apply to a whole process, and test_security_kafka.py, to use
`local-cluster`.

python -m tests.spark.security_program MASTER FOLDER OPTIONS_BY_WAY(JSON)

The topics WAY-written and WAY-streamed must exist. It writes FOLDER/found.json: the number of executors, and for each
way the values read from both topics.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from pyspark.sql import SparkSession

from .support import create_topic

ROOT = Path(__file__).parents[2]
#: The values written to each topic.
VALUES = [str(number) for number in range(20)]
_SECONDS = 480


def topics(way: str) -> tuple[str, str]:
    return f"{way}-written", f"{way}-streamed"


def write_read_and_stream(spark: SparkSession, way: str, options: dict[str, str], folder: Path) -> list[list[str]]:
    """Write VALUES to the first topic, copy them to the second one by a stream, and return the values of both."""
    written, streamed = topics(way)
    rows = spark.range(0, len(VALUES), 1, 1).selectExpr("cast(id as string) as value")
    rows.write.format("klog").options(**options).option("topic", written).mode("append").save()
    start = {"startingOffsets": "earliest"}
    stream = spark.readStream.format("klog").options(**options, subscribe=written, **start).load()
    writer = stream.select("value").writeStream.format("klog").options(**options, topic=streamed)
    query = writer.option("checkpointLocation", str(folder / f"checkpoint-{way}")).trigger(availableNow=True).start()
    query.awaitTermination()
    found = []
    for topic in (written, streamed):
        read = spark.read.format("klog").options(**options, subscribe=topic, **start).load()
        found.append([row.value.decode() for row in read.orderBy("offset").collect()])
    return found


def run(
    servers: str,
    folder: Path,
    master: str,
    ways: Mapping[str, Mapping[str, str]],
    libraries: Sequence[Path] = (),
    environment: Mapping[str, str] | None = None,
) -> tuple[int, dict[str, list[list[str]]]]:
    """Create the topics at `servers` (plain text), run this program, and return the contents of found.json.

    `libraries` are folders with further packages for the program's processes.
    """
    folder.mkdir()
    for way in ways:
        for topic in topics(way):
            create_topic(servers, topic)
    path = os.pathsep.join(map(str, [*libraries, ROOT]))
    done = subprocess.run(
        [sys.executable, "-m", "tests.spark.security_program", master, str(folder), json.dumps(ways)],
        env={**os.environ, **(environment or {}), "PYTHONPATH": path},
        cwd=folder,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=_SECONDS,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    executors, found = json.loads((folder / "found.json").read_text())
    return executors, found


def main() -> None:
    master, folder, given = sys.argv[1], Path(sys.argv[2]), json.loads(sys.argv[3])
    builder = SparkSession.builder.master(master).config("spark.ui.enabled", "false")
    builder = builder.config("spark.executor.memory", "1g").config("spark.sql.warehouse.dir", str(folder))
    spark = builder.getOrCreate()
    found = {way: write_read_and_stream(spark, way, options, folder) for way, options in given.items()}
    executors = len(spark.sparkContext._jsc.sc().statusTracker().getExecutorInfos()) - 1
    (folder / "found.json").write_text(json.dumps([executors, found]))
    spark.stop()


if __name__ == "__main__":
    main()
