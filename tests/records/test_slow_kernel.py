"""A driver or worker without the native kernel logs one warning."""

from __future__ import annotations

import os
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest

import spark_klog
from spark_klog.errors import ConfigError
from spark_klog.records import kernels
from tests.support.packages.wheel import copied_checkout

_PROGRAM = """
import os
import sys
import traceback
sys.modules["spark_klog.records.kernels._kernel"] = None  # as if it had not been built
import pyarrow as pa
from pyspark.sql.types import BinaryType, StructField, StructType
from spark_klog.errors import KlogError
from spark_klog.spark.options import source_options
from spark_klog.spark.write.sink_options import sink_options
from spark_klog.spark.read.tasks import read_ranges
from spark_klog.spark.write.sink import BatchQueryWriter
from spark_klog.spark.read.source import KlogDataSource
from spark_klog.columns.schema import WITHOUT_HEADERS

options = {"kafka.bootstrap.servers": "127.0.0.1:1", "kafka.socket.connection.setup.timeout.ms": "1"}

def driver():
    source = KlogDataSource({**options, "subscribe": "t"})
    source.reader(source.schema())
    source.streamReader(source.schema())

def reading():
    list(read_ranges(source_options({**options, "subscribe": "t"}, streaming=False), [], WITHOUT_HEADERS))

def writing():
    try:
        schema = StructType([StructField("value", BinaryType())])
        writer = BatchQueryWriter(sink_options(options | {"topic": "t"}), schema)
        writer.write(iter([]))
    except KlogError:
        pass

# as in a process of Spark each: what is said once is said once in a process
for choice in ("", "reference"):
    for process in (driver, reading, writing):
        sys.stderr.write(f"{process.__name__} {choice}\\n")
        sys.stderr.flush()
        child = os.fork()
        if child == 0:
            if choice:
                os.environ["SPARK_KLOG_KERNEL"] = choice
            code = 1
            try:
                for _ in range(3):
                    process()
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(code)
        status = os.waitpid(child, 0)[1]
        assert status == 0, (process, status)
"""


def test_it_is_said_once_unless_it_was_chosen() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "SPARK_KLOG_KERNEL"}
    run = subprocess.run([sys.executable, "-c", _PROGRAM], env=environment, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    told: dict[str, list[str]] = {}
    for line in run.stderr.splitlines():
        if line.partition(" ")[0] in ("driver", "reading", "writing"):
            told[line] = found = []
        elif "the native kernel is missing" in line:
            found.append(line)
    wanted = {"driver ": 1, "reading ": 1, "writing ": 1}
    wanted |= {f"{process}reference": 0 for process in wanted}
    assert {process: len(lines) for process, lines in told.items()} == wanted, run.stderr
    for line in (line for lines in told.values() for line in lines):
        assert "get a C compiler (apt-get install gcc python3-dev), then repeat the pip install with --force" in line
        assert "hundred times slower" in line


def _like(reference: Any) -> Any:
    """A module in place of the native kernel, with the attributes of the reference."""
    made: Any = types.ModuleType("spark_klog.records.kernels._kernel")
    vars(made).update({name: value for name, value in vars(reference).items() if not name.startswith("__")})
    made.name, made.VERSION = "native", kernels.VERSION
    return made


@pytest.mark.parametrize("how", ["version", "function"])
def test_a_native_kernel_of_older_sources(monkeypatch: pytest.MonkeyPatch, how: str, caplog: Any) -> None:
    """Such a kernel is not used; both the error and the warning tell how to build it again."""
    reference = kernels.load("reference")
    monkeypatch.delenv("SPARK_KLOG_KERNEL", raising=False)
    same, older = _like(reference), _like(reference)
    monkeypatch.setitem(sys.modules, same.__name__, same)
    assert kernels.load("native") is same
    monkeypatch.setitem(sys.modules, older.__name__, older)
    if how == "version":
        older.VERSION = kernels.VERSION - 1
    else:
        del older.ordered_batches
    with pytest.raises(ConfigError, match=r"built from other sources.*pip install -e \."):
        kernels.load("native")
    assert kernels.load() is reference
    kernels.warn_if_slow.cache_clear()
    kernels.warn_if_slow()
    assert "pip install -e ." in caplog.text
    kernels.warn_if_slow.cache_clear()


_WHICH = """
import spark_klog
from spark_klog.records import kernels
print(kernels.load().name, spark_klog.__file__)
print(kernels.native_trouble())
"""


@pytest.mark.parametrize("is_changed", [False, True])
def test_a_checkout_that_hides_the_installed_package(tmp_path: Path, is_changed: bool) -> None:
    """Spark's workers start in the driver's folder, and Python imports a checkout's sources there: without a kernel."""
    checkout, package = copied_checkout(tmp_path), Path(spark_klog.__file__).parent
    if is_changed:
        with (checkout / "spark_klog/records/contract.py").open("a") as contract:
            contract.write("# changed\n")
    run = subprocess.run(
        [sys.executable, "-c", _WHICH],
        cwd=checkout,
        env=os.environ | {"PYTHONPATH": str(package.parent)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert run.returncode == 0, run.stderr
    which, trouble = run.stdout.splitlines()
    kernel = "reference" if is_changed else "native"
    assert which == f"{kernel} {checkout / 'spark_klog' / '__init__.py'}"
    hides = f"is not in {checkout / 'spark_klog'}, whose sources hide the installed package {package}"
    assert trouble.startswith(hides) if is_changed else trouble == "None"
