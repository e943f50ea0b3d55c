"""The checks of `klog doctor`: of this machine, of Spark's round trip, and of the way to a cluster, each timed."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from spark_klog.client import Admin
from spark_klog.client.config import client_config
from spark_klog.errors import KlogError

_OLDEST_JAVA = 17
_PYSPARKS = ((4, 0), (4, 4))
_COMMAND_SECONDS = 30.0
_ROUND_TRIP_SECONDS = 240.0
_CONNECT_SECONDS = 10.0
_REQUEST_MS = "10000"
#: What the Python of Spark's workers runs: the version, or the first module that it lacks.
_OF_WORKERS = """
import sys
from importlib.util import find_spec
for name in ("pyspark", "spark_klog", "pyspark_klog", "pyarrow", "pandas"):
    if find_spec(name) is None:
        sys.exit(f"No module named '{name}'")
print("%d.%d" % sys.version_info[:2])
"""


@dataclass(frozen=True)
class Finding:
    """The outcome of a check: what was found, and what to do if that is not well ("" if it is)."""

    check: str
    seconds: float
    found: str
    advice: str = ""


class NotWell(Exception):
    """A check failed."""

    def __init__(self, found: str, advice: str) -> None:
        self.found, self.advice = found, advice
        super().__init__(found)


def run(check: str, action: Callable[[], str]) -> Finding:
    """Run a check; its result is what was found."""
    started = time.monotonic()
    try:
        found, advice = action(), ""
    except NotWell as error:
        found, advice = error.found, error.advice
    except KlogError as error:
        found, advice = (
            str(error),
            "check the settings that the message is about (security.protocol and what belongs to it)",
        )
    return Finding(check, time.monotonic() - started, found, advice)


def python() -> str:
    """This Python, and whether its environment is the active one."""
    return f"{'.'.join(map(str, sys.version_info[:3]))} at {sys.executable}"


def worker_python() -> str:
    """The Python of Spark's workers: it needs the package, in the same version of Python."""
    named = os.environ.get("PYSPARK_PYTHON")
    command = named or "python3"
    advice = (
        f"set PYSPARK_PYTHON={sys.executable}, or activate this environment (source {sys.prefix}/bin/activate), before "
        "Spark starts. Otherwise Spark says 'Failed to find the data source: klog', 'klog.DefaultSource' or 'No module "
        "named spark_klog'"
    )
    where = f"PYSPARK_PYTHON={named}" if named else "python3 of the PATH, as PYSPARK_PYTHON is not set"
    path = shutil.which(command)
    if path is None:
        raise NotWell(f"{where}: there is no such program", advice)
    # Not in the current folder: Python would find a checkout's modules there.
    code, output = _output([path, "-c", _OF_WORKERS], cwd=os.path.dirname(sys.executable))
    if code:
        last = output.strip().splitlines()[-1:] or ["it failed"]
        raise NotWell(f"{where}: {path}: {last[0]}", advice)
    ours = ".".join(map(str, sys.version_info[:2]))
    if output.strip() != ours:
        raise NotWell(f"{where} is Python {output.strip()}, this is {ours}: Spark needs one version", advice)
    return f"{path} has the package"


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
    """The pyspark that is installed here."""
    try:
        import pyspark
    except ImportError as error:
        raise NotWell(f"it can't be imported: {error}", "pip install 'pyspark[sql]>=4.0,<4.4'") from None
    version: str = pyspark.__version__
    lowest, end = _PYSPARKS
    if not lowest <= tuple(map(int, version.split(".")[:2])) < end:
        raise NotWell(f"{version} is not one that klog knows", "pip install 'pyspark[sql]>=4.0,<4.4'")
    home = os.environ.get("SPARK_HOME")
    if home and not (Path(home) / "jars").is_dir():
        raise NotWell(f"{version}, but SPARK_HOME={home} has no jars", "unset SPARK_HOME")
    return version + (f", with SPARK_HOME={home}" if home else "")


def kernel() -> str:
    """Whether the native kernel was built."""
    from spark_klog.records import kernels

    name = kernels.load().name
    if name != "native":
        raise NotWell(
            f"{name}: reading and writing is some thirty times slower",
            "install a wheel, or a C compiler (apt-get install gcc python3-dev) and then the package again",
        )
    return name


def round_trip() -> str:
    """Rows through Spark and a broker of its own."""
    command = [sys.executable, "-m", "spark_klog.cli.round_trip"]
    code, output = _output(command, _ROUND_TRIP_SECONDS)
    lines = output.strip().splitlines() or [""]
    if code:
        ours = [line for line in lines if re.match(r"(spark_klog\.errors\.|\w+Error|\w+Exception|\[[A-Z_.]+\])", line)]
        raise NotWell(
            (ours or lines)[-1][:400], f"mend what is above this line first; all that Spark says: {' '.join(command)}"
        )
    return lines[-1]


def _output(command: list[str], seconds: float = _COMMAND_SECONDS, cwd: str | None = None) -> tuple[int, str]:
    """(exit code, standard output and error); -1 if the command does not end in time."""
    try:
        ran = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=seconds,
            cwd=cwd,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return -1, f"{command[0]} did not end in {seconds:g} s"
    except OSError as error:
        return -1, f"{command[0]}: {error.strerror}"
    return ran.returncode, ran.stdout


def machine() -> Iterator[Finding]:
    """The checks that need no cluster, but for the round trip."""
    for name, check in (
        ("Python", python),
        ("Spark's Python", worker_python),
        ("Java", java),
        ("pyspark", spark_version),
        ("kernel", kernel),
    ):
        yield run(name, check)


def way_to(settings: Mapping[str, str]) -> Iterator[Finding]:
    """DNS, TCP and Kafka of each bootstrap server, then of the brokers that the metadata names."""
    config = client_config(settings)
    reached = None
    for host, port in config.bootstrap_servers:
        found = list(_address(host, port))
        yield from found
        if not found[-1].advice:
            shake = _handshake({**settings, "bootstrap.servers": _text(host, port)}, str(config.security.protocol))
            finding = run(f"Kafka {_text(host, port)}", shake)
            yield finding
            reached = reached or (None if finding.advice else _text(host, port))
    if reached is None:
        return
    brokers: list[tuple[str, int]] = []

    def metadata() -> str:
        with Admin({"request.timeout.ms": _REQUEST_MS, **settings, "bootstrap.servers": reached}) as admin:
            described = admin.describe_cluster()
            brokers.extend((broker.host, broker.port) for broker in described.brokers)
            return f"{len(brokers)} brokers, {len(admin.list_topics())} topics"

    yield run("metadata", metadata)
    for host, port in brokers:
        if (host, port) not in config.bootstrap_servers:
            for finding in _address(host, port):
                why = ": the broker names this address itself (advertised.listeners), and clients have to reach it"
                yield (
                    finding
                    if not finding.advice
                    else Finding(finding.check, finding.seconds, finding.found, finding.advice + why)
                )


def _text(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _address(host: str, port: int) -> Iterator[Finding]:
    def look_up() -> str:
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except OSError as error:
            raise NotWell(f"{host}: {error.strerror}", "check the name, and this machine's DNS or /etc/hosts") from None
        return ", ".join(dict.fromkeys(str(entry[4][0]) for entry in found))

    def connect() -> str:
        try:
            socket.create_connection((host, port), _CONNECT_SECONDS).close()
        except OSError as error:
            reason = error.strerror or str(error)
            raise NotWell(reason, "check the port, that the broker runs, and the firewalls between") from None
        return "connected"

    name = run(f"DNS {host}", look_up)
    yield name
    if not name.advice:
        yield run(f"TCP {_text(host, port)}", connect)


def _handshake(settings: Mapping[str, str], protocol: str) -> Callable[[], str]:
    def shake() -> str:
        with Admin({"request.timeout.ms": _REQUEST_MS, **settings}):
            return f"{protocol}, ApiVersions and metadata answered"

    return shake
