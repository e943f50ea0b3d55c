"""Executors in processes of their own: a standalone master with the package shipped to it, and local-cluster.

SPARK_KLOG_MASTERS=all adds local-cluster, and the wheel by --py-files, which reads by the reference kernel.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import sysconfig
import tarfile
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from spark_klog.embedded import EmbeddedCluster
from tests.jobs.support import ROOT, spark_submit

from .support import consume, create_topic, produce, values, wait_for

pytestmark = pytest.mark.slow

RECORDS, PARTITIONS = 1000, 4
_PROGRAM = Path(__file__).with_name("cluster_program.py")
_HOST = "127.0.0.1"
_SECONDS = 480
_WORKER = ("--host", _HOST, "--cores", "2", "--memory", "2g", "--webui-port", "0")


@pytest.fixture(scope="module")
def bare_python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Python with all that the package needs, but without the package."""
    folder = tmp_path_factory.mktemp("bare") / "environment"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True, timeout=_SECONDS)
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "dependencies.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    python = folder / "bin" / "python"
    command = [python, "-c", "import importlib.util, pyspark; assert importlib.util.find_spec('spark_klog') is None"]
    subprocess.run(command, check=True, cwd=folder, env=_environment(python), timeout=_SECONDS)
    return python


def _environment(python: Path | str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "SPARK_HOME")}
    return kept | {"PYSPARK_PYTHON": str(python), "PYSPARK_DRIVER_PYTHON": str(python), "SPARK_LOCAL_IP": _HOST}


@pytest.fixture(scope="module")
def master(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A standalone master with one worker of two cores: its URL."""
    folder = tmp_path_factory.mktemp("standalone")
    port, web_port = _free_port(), _free_port()
    url = f"spark://{_HOST}:{port}"
    deploy = "org.apache.spark.deploy"
    commands = [
        [f"{deploy}.master.Master", "--host", _HOST, "--port", str(port), "--webui-port", str(web_port)],
        [f"{deploy}.worker.Worker", url, *_WORKER, "--work-dir", str(folder / "work")],
    ]
    spark_class = Path(spark_submit()).with_name("spark-class")
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for command in commands:
            with (folder / f"{command[0].rsplit('.')[-1]}.log").open("wb") as log:
                processes.append(
                    subprocess.Popen(
                        [spark_class, *command], stdout=log, stderr=log, env=_environment(sys.executable), cwd=folder
                    )
                )
        wait_for(lambda: _alive_workers(web_port) == 1, "the worker at its master", 120)
        yield url
    finally:
        for process in reversed(processes):
            process.terminate()
        for process in processes:
            process.wait(60)


def _alive_workers(port: int) -> int:
    with suppress(OSError, ValueError), urllib.request.urlopen(f"http://{_HOST}:{port}/json/", timeout=5) as answer:
        found: int = json.load(answer)["aliveworkers"]
        return found
    return 0


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((_HOST, 0))
        port: int = probe.getsockname()[1]
        return port


def _submit(
    folder: Path, cluster: EmbeddedCluster, topic: str, python: Path | str, arguments: list[str], path: str = ""
) -> dict[str, Any]:
    """Run the program; what it found, when what it wrote is in the topic, too."""
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
        env=_environment(python) | ({"PYTHONPATH": path} if path else {}),
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


if os.environ.get("SPARK_KLOG_MASTERS") == "all":

    def test_local_cluster(cluster: EmbeddedCluster, topic: str, tmp_path: Path) -> None:
        found = _submit(tmp_path, cluster, topic, sys.executable, ["--master", "local-cluster[2,1,1024]"], str(ROOT))
        assert found["executors"] == 2


@pytest.mark.skipif(os.environ.get("SPARK_KLOG_MASTERS") != "all", reason="part of make soak")
def test_standalone_with_a_wheel_by_py_files(
    cluster: EmbeddedCluster, topic: str, tmp_path: Path, master: str, wheel: Path, bare_python: Path
) -> None:
    # Spark takes .zip, .egg and .py only; a wheel is a zip
    archive = shutil.copy(wheel, tmp_path / "spark_klog.zip")
    arguments = ["--master", master, "--py-files", str(archive), "--executor-memory", "1g"]
    arguments += ["--executor-cores", "1", "--total-executor-cores", "2"]
    arguments += ["--conf", "spark.scheduler.minRegisteredResourcesRatio=1"]
    arguments += ["--conf", "spark.scheduler.maxRegisteredResourcesWaitingTime=120s"]
    # the driver's JVM starts Python to find and to run sources, and gives it PYTHONPATH, but not --py-files
    found = _submit(tmp_path, cluster, topic, bare_python, arguments, str(archive))
    assert found["executors"] == 2
    # Python does not import native code from an archive
    [(file, kernel)] = found["packages"]
    assert (Path(file).parent.parent.name, kernel) == ("spark_klog.zip", "reference")


def test_standalone_with_a_packed_environment(
    cluster: EmbeddedCluster, topic: str, tmp_path: Path, master: str, wheel: Path, bare_python: Path
) -> None:
    (site,) = bare_python.parent.parent.glob("lib/python*/site-packages")
    command = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-compile", "--disable-pip-version-check"]
    installed = tmp_path / "installed"
    subprocess.run([*command, "--target", installed, wheel], check=True, timeout=_SECONDS)
    archive = tmp_path / "environment.tar.gz"
    root = bare_python.parent.parent
    with tarfile.open(archive, "w:gz") as packed:
        packed.add(root, ".")
        packed.add(installed, str(site.relative_to(root)))
    arguments = ["--master", master, "--archives", f"{archive}#environment", "--executor-memory", "1g"]
    arguments += ["--conf", "spark.pyspark.python=./environment/bin/python"]
    driver = tmp_path / "driver"
    with tarfile.open(archive) as packed:
        packed.extractall(driver, filter="fully_trusted")
    arguments += ["--conf", f"spark.pyspark.driver.python={driver}/bin/python"]
    found = _submit(tmp_path, cluster, topic, driver / "bin" / "python", arguments)
    assert {kernel for _, kernel in found["packages"]} == {"native"} or not _has_native()
    assert all("/environment/lib/" in file for file, _ in found["packages"])


def _has_native() -> bool:
    return bool(list((ROOT / "spark_klog" / "records").glob("_kernel*.so")))
