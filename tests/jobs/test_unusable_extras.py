"""Without pyarrow, or beside one that can't be imported (pyarrow 26 beside numpy 1): each way in says what to do."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.jobs.support import ROOT

_SECONDS = 120
_REFUSAL = "pyarrow requires NumPy 2.0 or newer, found 1.26.4"
_REMEDY = "pip install 'numpy>=2', or pip install 'pyarrow<26', which runs with numpy 1, too"
_REFUSED = f"needs pyarrow, which can't be imported ({_REFUSAL}): {_REMEDY}"
_MISSING = "needs pyarrow, which is not installed: pip install 'spark-klog[spark]'"

#: The message, by a file that causes it in a folder of PYTHONPATH.
_CAUSES = [
    pytest.param("pyarrow.py", f"raise ImportError({_REFUSAL!r})\n", _REFUSED, id="refused"),
    pytest.param("sitecustomize.py", "import sys\nsys.modules['pyarrow'] = None\n", _MISSING, id="missing"),
]

_COMMANDS = """
import json, sys
from click.testing import CliRunner
from spark_klog.cli.main import main
from spark_klog.embedded import EmbeddedCluster

with EmbeddedCluster() as cluster:
    def klog(*words):
        done = CliRunner().invoke(main, [*words, "-b", cluster.bootstrap_servers])
        assert done.exit_code == 0, (words, done.output, done.exception)
        return done.output

    klog("topics", "create", "clicks")
    with open("lines.txt", "w") as file:
        file.write("line\\n" * 300)
    klog("produce", "clicks", "-l", "lines.txt")
    assert klog("consume", "clicks", "--from", "-2") == "line\\nline\\n"
    assert klog("consume", "clicks", "--where", "offset=7", "--json").count('"value": "line"') == 1
    done = CliRunner().invoke(main, ["bench", "-b", cluster.bootstrap_servers])
    print(json.dumps([done.exit_code, done.stderr]))
"""

_SOURCE = """
import pyspark_klog
from spark_klog.errors import MissingPackage

assert pyspark_klog.DefaultSource.name() == "klog"
try:
    pyspark_klog.DefaultSource({})
except MissingPackage as error:
    print(error)
"""


def _run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    paths = f"{folder}{os.pathsep}{ROOT}"
    return subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": paths, "PYSPARK_PYTHON": sys.executable},
        timeout=_SECONDS,
        check=False,
    )


def _python(program: str, folder: Path) -> str:
    ran = _run(folder, "-c", program)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


@pytest.mark.parametrize(("file", "content", "needed"), _CAUSES)
def test_commands(tmp_path: Path, file: str, content: str, needed: str) -> None:
    """What works without pyarrow does so beside one that can't be imported, too."""
    (tmp_path / file).write_text(content)
    code, told = json.loads(_python(_COMMANDS, tmp_path))
    assert (code, told) == (1, f"klog: klog bench {needed}\n")


@pytest.mark.parametrize(("file", "content", "needed"), _CAUSES)
def test_the_source_says_what_it_lacks(tmp_path: Path, file: str, content: str, needed: str) -> None:
    """Spark shows an error of the source's `__init__`; of one that it does not find, only that there is none."""
    (tmp_path / file).write_text(content)
    assert _python(_SOURCE, tmp_path) == f"The Spark connector {needed}\n"


def test_the_source_without_pyspark(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.modules |= {'pyarrow': None, 'pyspark': None}\n")
    program = "try: import pyspark_klog\nexcept ImportError as error: print(error)"
    needed = "The Spark connector needs pyspark, which is not installed: pip install 'spark-klog[pyspark]'\n"
    assert _python(program, tmp_path) == needed


@pytest.mark.parametrize(("file", "content", "needed"), _CAUSES)
@pytest.mark.parametrize("job", ["batch_load", "restore"])
@pytest.mark.parametrize("is_module", [True, False])
def test_jobs(tmp_path: Path, job: str, is_module: bool, file: str, content: str, needed: str) -> None:
    """A line, no traceback."""
    (tmp_path / file).write_text(content)
    way = ("-m", f"spark_klog.cli.jobs.{job}") if is_module else (str(ROOT / "jobs" / f"{job}.py"),)
    ran = _run(tmp_path, *way, "--help")
    what = "A load" if job == "batch_load" else "A restore"
    assert (ran.returncode, ran.stdout, ran.stderr) == (1, "", f"{job}: {what} {needed}\n")


@pytest.mark.parametrize(("file", "content"), [pytest.param(*one.values[:2], id=one.id) for one in _CAUSES])
def test_names_of_the_package(tmp_path: Path, file: str, content: str) -> None:
    """What looks at the package's names does not fail; the call does."""
    (tmp_path / file).write_text(content)
    program = (
        "import spark_klog\nassert hasattr(spark_klog, 'read') and not hasattr(spark_klog, 'reed')\n"
        "from spark_klog import *\nfrom spark_klog.client import *\n"
        "try: read('clicks')\nexcept ImportError as error: print(error)"
    )
    assert "pyarrow" in _python(program, tmp_path)


def test_without_numpy(tmp_path: Path) -> None:
    """pyarrow declares no numpy, and can be imported without it."""
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.modules |= {'numpy': None, 'pyspark': None}\n")
    program = (
        "from click.testing import CliRunner\nfrom spark_klog.cli.main import main\nimport json, spark_klog\n"
        "told = [json.loads(CliRunner().invoke(main, ['doctor', '--no-spark', '--json']).stdout.split('\\n')[n])"
        " for n in range(4)]\n"
        "lines = [one['found'] + ': ' + one['advice'] for one in told if one['check'] == 'pyarrow']\n"
        "for command in ('consume', 'produce'): "
        "lines.append(CliRunner().invoke(main, [command, 'clicks', '-s', 'avro']).stderr.strip())\n"
        "try: spark_klog.read('clicks')\nexcept ImportError as error: lines.append(str(error))\n"
        "print(json.dumps(lines))"
    )
    fault = "can't be used without numpy: pip install 'spark-klog[spark]'"
    needs = f"needs pyarrow, which {fault}"
    commands = [f"klog: -s {needs}"] * 2
    assert json.loads(_python(program, tmp_path)) == [f"pyarrow {fault}", *commands, f"spark_klog.read {needs}"]


@pytest.mark.parametrize("has_spark", [True, False])
def test_the_doctor(tmp_path: Path, has_spark: bool) -> None:
    """It imports pyarrow here and in the Python of Spark's workers; the notebooks' and jobs' may be others."""
    (tmp_path / "pyarrow.py").write_text(f"raise ImportError({_REFUSAL!r})\n")
    if not has_spark:
        (tmp_path / "sitecustomize.py").write_text("import sys\nsys.modules['pyspark'] = None\n")
    program = (
        "from click.testing import CliRunner\nfrom spark_klog.cli.main import main\n"
        "print(CliRunner().invoke(main, ['doctor', '--no-spark', '--json']).stdout)"
    )
    found = {line["check"]: line for line in map(json.loads, _python(program, tmp_path).split("\n")[:-2])}
    assert found["pyarrow"]["found"] == f"pyarrow can't be imported ({_REFUSAL})"
    assert found["pyarrow"]["advice"] == _REMEDY
    if has_spark:
        workers = found["Spark's Python"]
        assert workers["found"].endswith(f"pyarrow can't be imported ({_REFUSAL})")
        assert workers["advice"] == _REMEDY.replace("pip", f"{sys.executable} -m pip")
