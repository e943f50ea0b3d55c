"""`klog doctor`: find what keeps klog from working here, and say what to do."""

from __future__ import annotations

import filecmp
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib.metadata import PackageNotFoundError, version as package_version
from importlib.util import find_spec
from itertools import starmap
from pathlib import Path

import click

import spark_klog
from spark_klog.base.extras import BUILD_KERNELS, NEWEST_TESTED, fault_of, is_installed, is_untested
from spark_klog.base.in_a_thread import addresses_of
from spark_klog.cli.clusters import ChosenCluster, cluster_options
from spark_klog.cli.output import StatusLine, say
from spark_klog.client import Admin
from spark_klog.client.net.connection import Connection
from spark_klog.client.net.dial import Dial
from spark_klog.client.settings import ClientConfig, client_config
from spark_klog.errors import AuthenticationError, ConnectionFailed, HandshakeInterrupted, KlogError, RequestTimedOut
from spark_klog.protocol.apis import METADATA
from spark_klog.security.config import Settings
from spark_klog.trees.paths import host_and_port

#: Of the round trip.
_ROWS = 1000
_OLDEST_JAVA = 17
_OLDEST_SPARK = 4
_COMMAND_SECONDS = 30.0
_ROUND_TRIP_SECONDS = 240.0
#: Of each step on the way to a broker.
_STEP_SECONDS = 10.0
_REQUEST_MS = "10000"
#: Brokers that are checked at a time.
_AT_ONCE = 32
_SLOW = "starting Spark, writing and reading rows: this may take a minute"
_INSTALL_PYSPARK = "pip install 'pyspark[sql]>=4.0'"
#: The first runtime with Spark 4.
_CONNECT_OF_SPARK_4 = "pip install 'databricks-connect>=17'"
_ADVERTISED = "The broker names this address itself (advertised.listeners): it must be one that clients can reach"
#: Settings of Spark, with what the value gives by benchmarks/switches.py and typed.py. klog does not set them itself.
_SWITCHES = (
    (
        "spark.sql.execution.arrow.maxBytesPerBatch",
        str(2**31 - 1),
        "writes rows of many fields up to twice as fast",
    ),
)
#: What Spark's SET says of a setting that it does not know.
_UNDEFINED = "<undefined>"
#: What the Python of Spark's workers runs: the version, or the first module that it lacks, or what keeps one from use.
_OF_WORKERS = """
import sys
from importlib.util import find_spec
for name in ("pyspark", "spark_klog", "pyspark_klog"):
    if find_spec(name) is None:
        sys.exit(f"No module named '{name}'")
from spark_klog.base.extras import fault_of
for name in ("pyarrow", "pandas"):
    fault = fault_of(name)
    if fault is not None:
        sys.exit("%s\t%s\t%s" % (name, *fault))
print("%d.%d" % sys.version_info[:2])
"""
#: What they run in this folder: where they find the package, and its kernel.
_OF_WORKERS_HERE = """
import os, spark_klog
from spark_klog.records import kernels
print(kernels.load().name, os.path.dirname(os.path.abspath(spark_klog.__file__)))
"""


@dataclass(frozen=True)
class Finding:
    """The outcome of a check: what was found, and what to do if that is not well ("" if it is)."""

    check: str
    seconds: float
    found: str
    advice: str = ""


class NotWell(Exception):
    def __init__(self, text: str, advice: str) -> None:
        self.text, self.advice = text, advice
        super().__init__(text)


def run(check: str, action: Callable[[], str]) -> Finding:
    """Run a check; its result is what was found."""
    started = time.monotonic()
    try:
        text, advice = action(), ""
    except NotWell as error:
        text, advice = error.text, error.advice
    except AuthenticationError as error:
        text, advice = str(error), "set what the message names; docs/recipes/security has the settings"
    except HandshakeInterrupted as error:
        text, advice = str(error), "set security.protocol to the one of the broker's listener on this port"
    except (ConnectionFailed, RequestTimedOut) as error:
        text, advice = str(error), "check the broker's log, and that security.protocol is the one of its listener"
    except (KlogError, OSError) as error:
        text, advice = str(error), "change what the message names"
    return Finding(check, time.monotonic() - started, text, advice)


def python() -> str:
    return f"{'.'.join(map(str, sys.version_info[:3]))} at {sys.executable}"


def worker_python() -> str:
    """The Python of Spark's workers: it needs the package, in the same version of Python."""
    named = os.environ.get("PYSPARK_PYTHON")
    command = named or "python3"
    script = Path(sys.prefix, "bin", "activate")
    activate = f", or activate this environment (source {script})," if script.is_file() else ""
    scope = "" if named else "for programs other than klog's own: "
    advice = (
        f"{scope}set PYSPARK_PYTHON={sys.executable}{activate} before Spark starts. Otherwise Spark says 'Failed to "
        "find the data source: klog', 'klog.DefaultSource' or 'No module named spark_klog'"
    )
    where = f"PYSPARK_PYTHON={named}" if named else "python3 of the PATH, as PYSPARK_PYTHON is not set"
    path = shutil.which(command)
    if path is None:
        raise NotWell(f"{where}: there is no such program", advice)
    # Not in the current folder: Python would find a checkout's modules there.
    code, output = _output([os.path.abspath(path), "-c", _OF_WORKERS], cwd=os.path.dirname(sys.executable))
    last = (output.strip().splitlines() or ["it failed"])[-1]  # warnings may come before
    if code:
        if last.count("\t") == 2:
            name, what, remedy = last.split("\t")
            remedy = remedy.replace("pip install", f"{path} -m pip install")
            is_other = os.path.abspath(path) != sys.executable
            raise NotWell(f"{where}: {path}: {name} {what}", f"{remedy}, or {advice}" if is_other else remedy)
        raise NotWell(f"{where}: {path}: {last}", advice)
    ours = ".".join(map(str, sys.version_info[:2]))
    if last != ours:
        raise NotWell(f"{where} is Python {last}, this is {ours}: Spark needs one version", advice)
    return f"{path} has the package{_sources_here(os.path.abspath(path))}"


def _sources_here(python: str) -> str:
    """ "" or that the workers import a checkout in the current folder, as they start there; `NotWell` if it differs."""
    code, output = _output([python, "-c", _OF_WORKERS_HERE])
    kernel, _, folder = (output.strip().splitlines() or [""])[-1].partition(" ")
    installed = Path(spark_klog.__file__).parent
    if code or not folder or installed.samefile(folder):
        return ""
    hides = f"Spark's workers import {folder} if they start in this folder: it hides the installed package {installed}"
    if not _have_same_sources(installed, Path(folder)):
        raise NotWell(
            f"{hides}, and differs from it (kernel: {kernel})",
            "run in another folder, or install that of the sources: pip install -e .",
        )
    return f". {hides}, and equals it"


def _have_same_sources(own: Path, other: Path) -> bool:
    files = {path.relative_to(folder) for folder in (own, other) for path in folder.rglob("*.py")}
    return all(
        (own / path).is_file() and (other / path).is_file() and filecmp.cmp(own / path, other / path, shallow=False)
        for path in files
    )


def java() -> str:
    """The Java that Spark starts: JAVA_HOME's, or else the PATH's."""
    home = os.environ.get("JAVA_HOME")
    path = os.path.join(home, "bin", "java") if home else shutil.which("java")
    advice = f"install Java {_OLDEST_JAVA} or 21 (apt-get install openjdk-17-jre-headless), or set JAVA_HOME to it"
    if path is None or not os.access(path, os.X_OK):
        where = f"JAVA_HOME={home} has no bin/java" if home else "there is no java on the PATH"
        raise NotWell(f"{where}. Spark says JAVA_GATEWAY_EXITED", advice)
    code, output = _output([path, "-version"])
    version = re.search(r'version "(?:1\.)?(\d+)', output)
    if code or version is None:
        raise NotWell(f"{path} -version failed: {output.strip()[:200]}", advice)
    if int(version[1]) < _OLDEST_JAVA:
        raise NotWell(f"{path} is Java {version[1]}. Spark says UnsupportedClassVersionError", advice)
    return f"Java {version[1]} at {path}"


def spark_version() -> str:
    try:
        import pyspark
    except Exception as error:  # of a broken environment: any
        raise NotWell(f"it can't be imported: {type(error).__name__}: {error}", _other_pyspark()) from None
    version: str = pyspark.__version__
    if int(version.partition(".")[0]) < _OLDEST_SPARK:
        raise NotWell(f"{version} is older than {_OLDEST_SPARK}.0, the first that klog can use", _other_pyspark())
    home = os.environ.get("SPARK_HOME")
    if home and not (Path(home) / "jars").is_dir():
        raise NotWell(f"{version}, but SPARK_HOME={home} has no jars", "unset SPARK_HOME")
    if is_untested("pyspark", version):
        version += f", newer than {NEWEST_TESTED['pyspark']}, the last that klog is tested with"
    return version + (f", with SPARK_HOME={home}" if home else "")


def is_client_only() -> bool:
    """Whether this pyspark is a client of Spark Connect, without a JVM (pyspark-client, databricks-connect)."""
    spec = find_spec("pyspark")
    folders = [] if spec is None else list(map(Path, spec.submodule_search_locations or ()))
    return "SPARK_HOME" not in os.environ and not any((folder / "jars").is_dir() for folder in folders)


def elsewhere() -> str:
    return (
        "this pyspark is a client without a JVM: the server and its workers need spark-klog[spark], and klog doctor "
        "there checks them"
    )


def _other_pyspark() -> str:
    """How to get a pyspark that can be used; one that a platform brings must not be installed over."""
    if _has_metadata("pyspark"):
        return _INSTALL_PYSPARK
    if _has_metadata("databricks-connect"):
        return f"{_CONNECT_OF_SPARK_4}, for a runtime of that version. A pyspark beside it would replace its files"
    return (
        f"use a runtime with Spark {_OLDEST_SPARK}.0 or later: this pyspark is the platform's, and one that pip "
        "installs would hide it or replace its files"
    )


def _has_metadata(name: str) -> bool:
    try:
        package_version(name)
    except PackageNotFoundError:
        return False
    return True


def arrow(has_spark: bool) -> str:
    """The version of pyarrow; with pyspark, which needs pandas for it, also that pandas can be imported."""
    if not has_spark and not is_installed("pyarrow"):
        return "not installed, which loads and all that is Arrow need: pip install 'spark-klog[spark]' brings it"
    for name in ("pyarrow", "pandas") if has_spark else ("pyarrow",):
        if fault := fault_of(name):
            raise NotWell(f"{name} {fault.what}", fault.remedy)
    import pyarrow as pa

    return str(pa.__version__)


def no_spark_here() -> str:
    home = os.environ.get("SPARK_HOME")
    if home and Path(home, "python", "pyspark").is_dir():
        raise NotWell(
            f"SPARK_HOME={home} has one that this Python does not import",
            f"add {home}/python and the py4j-*.zip of {home}/python/lib to PYTHONPATH",
        )
    return "not installed, which only the connector and its jobs need: pip install 'spark-klog[pyspark]' brings one"


def kernel() -> str:
    """Whether the native kernel was built."""
    from spark_klog.records import kernels

    name, trouble = kernels.load().name, kernels.native_trouble()
    if trouble is not None and "pip install -e" in trouble:
        raise NotWell(f"the native kernel {trouble}", "pip install -e . in the folder of the sources")
    if name != "native":
        raise NotWell(
            f"{name}: records are decoded and encoded in Python, some hundred times slower",
            f"install a wheel, or {BUILD_KERNELS}",
        )
    return name


def round_trip() -> str:
    """Rows through Spark and a broker of its own."""
    command = [sys.executable, "-m", "spark_klog.cli.doctor"]
    code, output = _output(command, _ROUND_TRIP_SECONDS)
    lines = output.strip().splitlines() or [""]
    if code:
        ours = [line for line in lines if re.match(r"(spark_klog\.errors\.|\w+Error|\w+Exception|\[[A-Z_.]+\])", line)]
        raise NotWell(
            (ours or lines)[-1][:400], f"solve the findings above first; for all output of Spark: {' '.join(command)}"
        )
    return lines[-1]


def switches(value_of: Callable[[str], str | None]) -> str:
    """What switches of Spark would give that are not set, or ""; `value_of` gives None for what this Spark lacks."""
    missing = [
        f"; {name}={value} {what} (docs/explanation/speed.md, Spark's switches)"
        for name, value, what in _SWITCHES
        if value_of(name) not in (None, value)
    ]
    return "".join(missing)


def _output(command: list[str], seconds: float | None = None, cwd: str | None = None) -> tuple[int, str]:
    """(exit code, standard output and error); -1 if the command does not end in time."""
    seconds = _COMMAND_SECONDS if seconds is None else seconds
    try:
        ran = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=seconds,
            cwd=cwd,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return -1, f"{command[0]} did not end in {seconds:g} s"
    except OSError as error:
        return -1, f"{command[0]}: {error.strerror}"
    return ran.returncode, ran.stdout.decode(errors="replace")


def way_to(settings: Mapping[str, str]) -> Iterator[Finding]:
    """DNS, TCP, TLS and Kafka of each bootstrap server, then metadata, and the same of the brokers that it names.

    `ConfigError` for wrong settings.
    """
    config = client_config(settings)
    reached: list[str] = []
    for host, port in config.bootstrap_servers:
        findings = list(_way_to_broker(host, port, config))
        yield from findings
        if not findings[-1].advice:
            reached.append(host_and_port(host, port))
    if not reached:
        return
    brokers: list[tuple[str, int]] = []

    def metadata() -> str:
        limits = {"request.timeout.ms": _REQUEST_MS, "default.api.timeout.ms": _REQUEST_MS}
        with Admin(Settings(settings) | {"bootstrap.servers": reached[0]} | limits) as admin:
            brokers.extend((broker.host, broker.port) for broker in admin.describe_cluster().brokers)
            return f"{len(brokers)} brokers, {len(admin.list_topics())} topics"

    yield run("metadata", metadata)
    others = [address for address in brokers if address not in config.bootstrap_servers]
    with ThreadPoolExecutor(_AT_ONCE) as threads:  # a firewall that drops packets takes the whole time of each broker
        for findings in threads.map(lambda address: list(_way_to_broker(address[0], address[1], config)), others):
            for finding in findings:
                if finding.advice:
                    finding = replace(finding, advice=f"{finding.advice}. {_ADVERTISED}")
                yield finding


def _way_to_broker(host: str, port: int, config: ClientConfig) -> Iterator[Finding]:
    """The steps of a connection, each with the ones before it, up to the first that fails."""
    where, security = host_and_port(host, port), config.security

    def look_up() -> str:
        try:
            entries = addresses_of(host, port, _deadline())
        except (OSError, UnicodeError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise NotWell(f"{host}: {reason}", "check the name, and this machine's DNS and /etc/hosts") from None
        return ", ".join(dict.fromkeys(str(entry[4][0]) for entry in entries))

    def connect() -> str:
        try:
            Dial(host, port, _deadline()).finish().close()
        except ConnectionFailed as error:
            raise NotWell(str(error), "check the port, that the broker runs, and the firewalls between") from None
        return "connected"

    def shake_hands() -> str:
        with closing(Dial(host, port, _deadline(), security.tls).finish()) as connected:
            return str(getattr(connected, "version", lambda: "connected")())

    def negotiate() -> str:
        deadline = _deadline()
        with closing(Connection(host, port, config, deadline)) as connection:
            # a listener that requires SASL answers ApiVersions to everybody
            connection.request(METADATA, {"topics": []}, deadline=deadline)
        return f"{security.protocol}, ApiVersions and Metadata answered"

    steps = [(f"DNS {host}", look_up), (f"TCP {where}", connect)]
    if security.tls is not None:
        steps.append((f"TLS {where}", shake_hands))
    for name, step in [*steps, (f"Kafka {where}", negotiate)]:
        finding = run(name, step)
        yield finding
        if finding.advice:
            return


def _deadline() -> float:
    return time.monotonic() + _STEP_SECONDS


@click.command(
    epilog="""\b
Examples:
  klog doctor                                        this machine
  klog doctor -b broker:9093 --command-config client.properties --no-spark
"""
)
@cluster_options
@click.option("--no-spark", is_flag=True, help="Leave out the round trip through Spark, which starts a JVM.")
def doctor(cluster: ChosenCluster, as_json: bool, no_spark: bool) -> None:
    """Check this machine and, with --bootstrap-server or --cluster, the way to a cluster. Exits with 1 on a finding.

    Checks Python, the Python of Spark's workers, Java, pyspark, pyarrow and the kernel; then DNS, TCP, TLS and Kafka
    (SASL, ApiVersions) of each server, metadata, and the brokers that it names; at last, as it takes up to a minute,
    rows through Spark and a broker of its own.
    """
    settings = cluster.settings()
    is_well, status = True, StatusLine(is_quiet=as_json)
    for stage, findings in _stages(settings, no_spark):
        if stage == _SLOW and not (status.is_shown or as_json):
            click.echo(stage, err=True)
        while True:
            status.show(stage)
            with status:
                finding = next(findings, None)
            if finding is None:
                break
            is_well = is_well and not finding.advice
            mark = "NOT WELL" if finding.advice else "ok"
            text = f"{mark:8}  {finding.check:24} {finding.seconds * 1000:7,.0f} ms  {finding.found}"
            say(as_json, asdict(finding), f"{text}\n{'':10}-> {finding.advice}" if finding.advice else text)
    if not is_well:
        sys.exit(1)


def _stages(settings: dict[str, str], no_spark: bool) -> Iterator[tuple[str, Iterator[Finding]]]:
    """What is checked, for the terminal, and the findings: the cheap ones first."""
    has_spark = is_installed("pyspark")
    is_client = has_spark and is_client_only()
    checks = {"Python": python, "pyspark": no_spark_here}
    if is_client:
        checks |= {"pyspark": spark_version, "Spark Connect": elsewhere}
    elif has_spark:
        checks |= {"Spark's Python": worker_python, "Java": java, "pyspark": spark_version}
    checks |= {"pyarrow": partial(arrow, has_spark), "kernel": kernel}
    yield "checking this machine", starmap(run, checks.items())
    if "bootstrap.servers" in settings:
        yield "checking the way to the cluster", way_to(settings)
    if has_spark and not is_client and not no_spark:
        yield _SLOW, starmap(run, [("Spark", round_trip)])


def main() -> int:
    """The program of `round_trip`: write and read rows by Spark and a broker of its own."""
    from pyspark.sql import SparkSession

    from spark_klog.embedded import EmbeddedCluster

    started = time.monotonic()
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)  # what Spark takes by itself is a finding of its own
    with EmbeddedCluster() as cluster:
        builder = SparkSession.builder.master("local[2]").appName("klog doctor").config("spark.ui.enabled", "false")
        spark = builder.getOrCreate()
        began = time.monotonic()
        options = {"kafka.bootstrap.servers": cluster.bootstrap_servers}
        rows = spark.range(_ROWS).selectExpr("CAST(id AS STRING) AS value")
        rows.write.format("klog").options(**options, topic="doctor", createTopics="2").mode("append").save()
        read = spark.read.format("klog").options(**options, subscribe="doctor").load().select("value").distinct()
        count = read.count()
        # SET also has the default of what is not set; conf.get with a default returns that one then
        settings = {name: spark.sql(f"SET {name}").first()["value"] for name, _, _ in _SWITCHES}
        advice = switches({name: value for name, value in settings.items() if value != _UNDEFINED}.get)
        spark.stop()
    times = f"Spark started in {began - started:.1f} s, the rows took {time.monotonic() - began:.1f} s"
    sys.stdout.write(f"{count} of {_ROWS} rows written and read; {times}{advice}\n")
    return 0 if count == _ROWS else 1


if __name__ == "__main__":
    sys.exit(main())
