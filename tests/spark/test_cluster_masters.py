"""Executors in processes of their own: a standalone master with the package shipped to it, and local-cluster.

Part of make soak, with SPARK_KLOG_MASTERS=all. `exactly_once/test_speculation.py` uses a standalone master, too.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from spark_klog.embedded import EmbeddedCluster
from spark_klog.load.audit import status
from tests.jobs.support import DONE, NOTHING_NEW, ROOT, Load, rows_of, spark_submit
from tests.jobs.truth import Truth
from tests.support.spark.standalone import bare_environment, environment, packed_environment, standalone

from .support import consume, create_topic, produce, values

pytestmark = [
    pytest.mark.skipif(os.environ.get("SPARK_KLOG_MASTERS") != "all", reason="part of make soak"),
    pytest.mark.test_all("long"),
]

RECORDS, PARTITIONS = 1000, 4
_PROGRAM = Path(__file__).with_name("cluster_program.py")
_SECONDS = 480


@pytest.fixture(scope="module")
def bare_python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return bare_environment(tmp_path_factory.mktemp("bare") / "environment")


@pytest.fixture(scope="module")
def master(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a standalone master with one worker of two cores."""
    with standalone(tmp_path_factory.mktemp("standalone")) as running:
        yield running.url


def _submit(
    folder: Path, cluster: EmbeddedCluster, topic: str, python: Path | str, arguments: list[str], path: str = ""
) -> dict[str, Any]:
    """Submit the program, check the records that it wrote, and return its report."""
    servers, output = cluster.bootstrap_servers, f"{topic}-out"
    create_topic(servers, topic, PARTITIONS)
    create_topic(servers, output, 1)
    records = values(RECORDS, partitions=PARTITIONS)
    produce(servers, topic, records)
    settings = ["spark.ui.enabled=false", "spark.driver.bindAddress=127.0.0.1", "spark.driver.host=127.0.0.1"]
    command = [spark_submit(), *(word for setting in settings for word in ("--conf", setting)), *arguments]
    ran = subprocess.run(
        [*command, str(_PROGRAM), servers, topic, output, str(folder)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        timeout=_SECONDS,
        cwd=folder,
        env=environment(python) | ({"PYTHONPATH": path} if path else {}),
        check=False,
    )
    assert ran.returncode == 0, ran.stdout[-6000:]
    assert sorted(seen.value or b"" for seen in consume(servers, output)) == sorted(
        record.value or b"" for record in records
    )
    found: dict[str, Any] = json.loads((folder / "found.json").read_text())
    assert found["rows"] == found["streamed"] == RECORDS
    assert found["bytes"] == sum(len(record.value or b"") for record in records)
    return found


def test_local_cluster(cluster: EmbeddedCluster, topic: str, tmp_path: Path) -> None:
    found = _submit(tmp_path, cluster, topic, sys.executable, ["--master", "local-cluster[2,1,1024]"], str(ROOT))
    assert found["executors"] == 2


def test_standalone_with_a_wheel_by_py_files(
    cluster: EmbeddedCluster, topic: str, tmp_path: Path, master: str, wheel: Path, bare_python: Path
) -> None:
    # --py-files takes only .zip, .egg and .py; a wheel is a zip file
    archive = shutil.copy(wheel, tmp_path / "spark_klog.zip")
    arguments = ["--master", master, "--py-files", str(archive), "--executor-memory", "1g"]
    arguments += ["--executor-cores", "1", "--total-executor-cores", "2"]
    arguments += ["--conf", "spark.scheduler.minRegisteredResourcesRatio=1"]
    arguments += ["--conf", "spark.scheduler.maxRegisteredResourcesWaitingTime=120s"]
    # the driver's JVM starts Python processes for data sources with PYTHONPATH, but without --py-files
    found = _submit(tmp_path, cluster, topic, bare_python, arguments, str(archive))
    assert found["executors"] == 2
    # Python can't import native code from an archive
    [(file, kernel)] = found["packages"]
    assert (Path(file).parent.parent.name, kernel) == ("spark_klog.zip", "reference")


def test_standalone_with_a_packed_environment(
    cluster: EmbeddedCluster, topic: str, tmp_path: Path, master: str, wheel: Path, bare_python: Path
) -> None:
    archive, driver_python = packed_environment(bare_python, wheel, tmp_path)
    arguments = ["--master", master, "--archives", f"{archive}#environment", "--executor-memory", "1g"]
    arguments += ["--conf", "spark.pyspark.python=./environment/bin/python"]
    arguments += ["--conf", f"spark.pyspark.driver.python={driver_python}"]
    found = _submit(tmp_path, cluster, topic, driver_python, arguments)
    assert {kernel for _, kernel in found["packages"]} == {"native"} or not _has_native()
    assert all("/environment/lib/" in file for file, _ in found["packages"])


@pytest.mark.parametrize("kind", ["local-cluster", "standalone"])
def test_a_load(cluster: EmbeddedCluster, topic: str, tmp_path: Path, master: str, kind: str) -> None:
    """jobs/batch_load.py loads twice on executors in processes of their own; pyarrow reads all records back."""
    truth = Truth(cluster.bootstrap_servers)
    truth.create(topic, PARTITIONS)
    url = master if kind == "standalone" else "local-cluster[2,1,1024]"
    load = Load(cluster.bootstrap_servers, topic, tmp_path, settings=["spark.executor.memory=1g"], master=url)
    try:
        for _ in range(2):
            truth.send(topic, RECORDS, PARTITIONS)
            ran = load.submit("--json", "--max-file-records", "50")
            assert ran.code == DONE, ran.stdout + ran.stderr
            assert rows_of(load.output) == truth.rows()
        assert load.submit("--json").code == NOTHING_NEW
    finally:
        load.stop()
    assert status(str(load.output)).findings == []


def _has_native() -> bool:
    return bool(list((ROOT / "spark_klog" / "records").glob("_kernel*.so")))
