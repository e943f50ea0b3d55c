"""Spark with the real Delta and Iceberg: in processes of their own, as each needs another pyspark than the project."""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import psutil
import pyarrow as pa

from tests.support.packages.maven import resolve
from tests.support.processes import kill, tree_of
from tests.support.spark.pyspark_versions import child_environment, oldest, with_connector

Kind = Literal["delta", "iceberg"]
#: Their jars, without what Spark itself has. Delta's is for Spark 4.1, Iceberg's for 4.0.
_ARTIFACTS: Mapping[Kind, tuple[str, ...]] = {
    "delta": ("io.delta:delta-spark_4.1_2.13:4.1.0", "io.delta:delta-storage:4.1.0"),
    "iceberg": ("org.apache.iceberg:iceberg-spark-runtime-4.0_2.13:1.10.1", "org.xerial:sqlite-jdbc:3.50.3.0"),
}
_ROOT = Path(__file__).parents[3]
_PROGRAM = Path(__file__).with_name("spark_tables_session.py")
_SECONDS = 300.0
_STOP_SECONDS = 30.0
_SETTINGS = {
    "spark.master": "local[2]",
    "spark.ui.enabled": "false",
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.memory": "1g",
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.shuffle.partitions": "2",
}


def table_jars(kind: Kind) -> str:
    """The jars in the syntax of `spark.jars`; `RegistryUnreachable` if Maven does not have them."""
    folder = resolve(f"{kind}-alone", _ARTIFACTS[kind], dependencies=False)
    return ",".join(map(str, sorted(folder.glob("*.jar"))))


def table_python(kind: Kind) -> Path:
    """Python of an environment with the pyspark that the jars are for."""
    return with_connector() if kind == "delta" else oldest()


def table_settings(kind: Kind, catalog: str = "tests", warehouse: Path | None = None) -> dict[str, str]:
    """Spark's settings for tables of this kind.

    For Iceberg, `warehouse` is the folder of the catalog: `warehouse/catalog.db` is its SQLite database, which
    pyiceberg's `SqlCatalog` of the same name shares.
    """
    settings = {"spark.jars": table_jars(kind)}
    if kind == "delta":
        return settings | {
            "spark.sql.extensions": "io.delta.sql.DeltaSparkSessionExtension",
            "spark.sql.catalog.spark_catalog": "org.apache.spark.sql.delta.catalog.DeltaCatalog",
        }
    assert warehouse is not None, "Iceberg needs a catalog"
    name = f"spark.sql.catalog.{catalog}"
    return settings | {
        "spark.sql.extensions": "org.apache.iceberg.spark.extensions.IcebergSparkSessionExtensions",
        name: "org.apache.iceberg.spark.SparkCatalog",
        f"{name}.type": "jdbc",
        f"{name}.cache-enabled": "false",  # others write, too
        f"{name}.uri": f"jdbc:sqlite:{warehouse / 'catalog.db'}",
        f"{name}.jdbc.schema-version": "V1",
        f"{name}.warehouse": str(warehouse),
    }


class SparkTablesFailed(Exception):
    """The session answered with an error, or did not answer; then the text ends with the tail of its log."""


class SparkTables:
    """A session of Spark with the real Delta or Iceberg; its log is `WORK_DIR/spark-KIND.log`.

    Tables are named as in SQL: delta.`/a/path`, or CATALOG.NAMESPACE.TABLE. A query's "klog" is that of the checkout.
    """

    def __init__(self, kind: Kind, work_dir: Path, catalog: str = "tests", warehouse: Path | None = None) -> None:
        work_dir.mkdir(parents=True, exist_ok=True)
        self._folder = work_dir
        self._log = work_dir / f"spark-{kind}.log"
        self._tables = 0
        python = table_python(kind)
        settings = _SETTINGS | table_settings(kind, catalog, warehouse) | {"spark.local.dir": str(work_dir / "local")}
        environment = child_environment(python)
        # the archive of classes in SPARK_SUBMIT_OPTS is that of another Spark
        environment |= {"SPARK_SUBMIT_OPTS": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC", "SPARK_LOCAL_IP": "127.0.0.1"}
        environment |= {"PYTHONPATH": str(_ROOT), "TZ": "UTC"}
        with self._log.open("ab") as errors:
            self._process = subprocess.Popen(
                [str(python), str(_PROGRAM), *("=".join(item) for item in settings.items())],
                cwd=work_dir,
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
            )

    def sql(self, text: str) -> pa.Table:
        """The rows of a statement, in the types that Spark gives them."""
        self._tables += 1
        path = self._folder / f"rows-{self._tables}.arrow"
        self._ask("table", sql=text, path=str(path))
        with pa.OSFile(str(path)) as file, pa.ipc.open_file(file) as reader:
            rows = reader.read_all()
        path.unlink()
        return rows

    def do(self, text: str) -> None:
        """A statement whose rows nobody needs."""
        self._ask("statement", sql=text)

    def delete_by_value(self, table: str, column: str, value: str) -> None:
        """Delete rows of an Iceberg table by an equality delete: those in which a column of strings has the value."""
        self._ask("delete_by_value", name=table, column=column, value=value)

    def stream(
        self,
        options: Mapping[str, str],
        sink: Literal["delta", "iceberg", "batches"],
        target: str,
        checkpoint: Path,
        application: str | None = None,
        *,
        wait: bool = True,
    ) -> None:
        """Run `format("klog")` into a table with the trigger AvailableNow; without `wait` the query goes on."""
        place = {"sink": sink, "target": target, "checkpoint": str(checkpoint), "application": application}
        self._ask("stream", source="klog", options=dict(options), wait=wait, **place)

    def close(self) -> None:
        """SIGKILL to Python's driver, the JVM and its workers."""
        tree = tree_of(self._process)
        kill(tree)
        psutil.wait_procs(tree, timeout=_STOP_SECONDS)
        self._process.wait(_STOP_SECONDS)
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None
            with contextlib.suppress(OSError):
                stream.close()

    def _ask(self, work: str, **request: Any) -> dict[str, Any]:
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(json.dumps({"work": work, **request}).encode() + b"\n")
            process.stdin.flush()
        except OSError as error:
            raise SparkTablesFailed(f"it has ended; {self._log_tail()}") from error
        line = b""
        while not line.endswith(b"\n"):
            if not select.select([process.stdout], [], [], _SECONDS)[0]:
                raise SparkTablesFailed(f"no answer in {_SECONDS:g} s; {self._log_tail()}")
            part = os.read(process.stdout.fileno(), 1 << 16)
            if not part:
                raise SparkTablesFailed(f"it has ended; {self._log_tail()}")
            line += part
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise SparkTablesFailed(answer["error"])
        return answer

    def _log_tail(self) -> str:
        return self._log.read_text(errors="replace")[-3000:].strip() or "no output"

    def __enter__(self) -> SparkTables:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
