"""`klog doctor` names each problem of the first hour, and what to do about it."""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import redirect_stdout
from importlib.metadata import PackageNotFoundError
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner

from spark_klog.cli import doctor
from spark_klog.cli.main import main
from spark_klog.embedded import EmbeddedCluster
from tests.jobs.support import ROOT
from tests.support.brokers.simulated_cluster import SimulatedCluster
from tests.support.clients.klog import klog
from tests.support.packages.wheel import copied_checkout
from tests.support.servers.broker import KlogBroker
from tests.support.servers.certificates import make_certificates
from tests.support.servers.kafka import HOST, free_port
from tests.support.servers.secure_broker import PASSWORDS, SecureBroker

pytestmark = pytest.mark.usefixtures("logging_kept")


@pytest.fixture(scope="module")
def secure(module_server_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecureBroker]:
    certificates = make_certificates(tmp_path_factory.mktemp("certificates"))
    with SecureBroker(module_server_dir / "secure", certificates) as running:
        yield running


_output = doctor._output
_answers: dict[tuple[object, ...], tuple[int, str]] = {}


def _remembered_output(command: list[str], seconds: float | None = None, cwd: str | None = None) -> tuple[int, str]:
    """This Python is asked once: its answer takes half a second of CPU, and is the same for nearly all tests."""
    if command[0] != sys.executable:
        return _output(command, seconds, cwd)
    settings = [item for item in sorted(os.environ.items()) if item[0].startswith(("SPARK_", "PYTHON"))]
    question = (*command, cwd or os.getcwd(), *settings)
    if question not in _answers:
        _answers[question] = _output(command, seconds, cwd)
    return _answers[question]


@pytest.fixture(autouse=True)
def _healthy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYSPARK_PYTHON", sys.executable)
    monkeypatch.setattr(doctor, "_output", _remembered_output)


def _doctor(*arguments: str) -> tuple[int, dict[str, dict[str, Any]]]:
    """Run `klog doctor`; return its exit code and the findings by check."""
    done = CliRunner().invoke(main, ["doctor", "--no-spark", "--json", *arguments])
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    return done.exit_code, {line["check"]: line for line in lines}


def _program(folder: Path, name: str, script: str) -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


def test_all_is_well(cluster: EmbeddedCluster) -> None:
    code, found = _doctor("--bootstrap-server", cluster.bootstrap_servers)
    assert [line["check"] for line in found.values() if line["advice"] and line["check"] != "kernel"] == []
    assert code == (1 if found["kernel"]["advice"] else 0)
    assert sys.executable in found["Python"]["found"]
    assert found["metadata"]["found"].startswith("1 brokers, ")
    server = cluster.bootstrap_servers
    assert {"DNS 127.0.0.1", f"TCP {server}", f"Kafka {server}", "metadata", "Java", "pyspark"} <= found.keys()


def test_text(cluster: EmbeddedCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYSPARK_PYTHON", "no-such-python")
    done = CliRunner().invoke(main, ["doctor", "--no-spark"])
    assert done.exit_code == 1
    lines = done.stdout.splitlines()
    (number,) = (number for number, line in enumerate(lines) if line.startswith("NOT WELL  Spark's Python"))
    assert "PYSPARK_PYTHON=no-such-python: there is no such program" in lines[number]
    assert f"-> set PYSPARK_PYTHON={sys.executable}" in lines[number + 1]


def test_a_python_without_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python = _program(tmp_path, "python3", f'exec "{sys.executable}" -S -I "$@"')
    monkeypatch.delenv("PYSPARK_PYTHON")
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    code, found = _doctor()
    line = found["Spark's Python"]
    assert (code, str(python) in line["found"], "No module named" in line["found"]) == (1, True, True)
    assert "as PYSPARK_PYTHON is not set" in line["found"]
    assert "Failed to find the data source: klog" in line["advice"]
    assert line["advice"].startswith(f"for programs other than klog's own: set PYSPARK_PYTHON={sys.executable}")


def test_a_relative_path_and_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A relative path works, as Spark's workers start in the driver's folder."""
    _program(tmp_path, "bin/python", f'echo "a warning" >&2; exec "{sys.executable}" "$@"')
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYSPARK_PYTHON", "bin/python")
    _, found = _doctor()
    assert (found["Spark's Python"]["advice"], found["Spark's Python"]["found"]) == ("", "bin/python has the package")


def test_another_version_of_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYSPARK_PYTHON", str(_program(tmp_path, "python3", "echo 3.9")))
    _, found = _doctor()
    assert "is Python 3.9, this is 3." in found["Spark's Python"]["found"]


def test_a_checkout_that_hides_the_installed_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Spark's workers start in this folder, and Python imports a checkout's sources there."""
    checkout = copied_checkout(tmp_path)
    (checkout / "spark_klog/cli/main.py").write_text("")
    monkeypatch.chdir(checkout)
    line = _doctor()[1]["Spark's Python"]
    hides = f"import {checkout / 'spark_klog'} if they start in this folder: it hides the installed package"
    assert hides in line["found"]
    assert "differs" in line["found"]
    assert "another folder" in line["advice"]


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("""echo 'openjdk version "11.0.2" 2019-01-15' >&2""", "is Java 11. Spark says UnsupportedClassVersionError"),
        ("""echo 'java version "1.8.0_202"' >&2""", "is Java 8."),
        ("exit 3", "-version failed"),
        ("""echo 'openjdk version "21" 2023-09-19' >&2""", "Java 21 at"),
        (None, "has no bin/java. Spark says JAVA_GATEWAY_EXITED"),
    ],
)
def test_java(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str | None, message: str) -> None:
    if script is not None:
        _program(tmp_path, "bin/java", script)
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    _, found = _doctor()
    assert message in found["Java"]["found"]
    assert bool(found["Java"]["advice"]) != ("21" in message)


def test_no_java_on_the_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    _, found = _doctor()
    assert "there is no java on the PATH" in found["Java"]["found"]


def test_a_spark_home_of_something_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARK_HOME", str(tmp_path))
    _, found = _doctor()
    assert "has no jars" in found["pyspark"]["found"]


def test_the_reference_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    from spark_klog.records import kernels
    from spark_klog.records.kernels import reference

    monkeypatch.setattr(kernels, "load", lambda: reference)
    code, found = _doctor()
    assert (code, "C compiler" in found["kernel"]["advice"]) == (1, True)


def test_a_name_that_does_not_exist(cluster: EmbeddedCluster) -> None:
    code, found = _doctor("--bootstrap-server", f"nowhere.invalid:9092,{cluster.bootstrap_servers}")
    assert code == 1
    assert "DNS" in found["DNS nowhere.invalid"]["advice"]
    assert "TCP nowhere.invalid:9092" not in found
    assert found["metadata"]["advice"] == ""  # from the other address


def test_nobody_listens() -> None:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        server = f"127.0.0.1:{bound.getsockname()[1]}"
        _, found = _doctor("--bootstrap-server", server)
    assert found[f"TCP {server}"]["found"].endswith("Connection refused")
    assert "firewalls" in found[f"TCP {server}"]["advice"]
    assert "metadata" not in found


def test_security(secure: SecureBroker, tmp_path: Path) -> None:
    server = secure.servers("SASL_SSL")
    plain = _doctor("--bootstrap-server", server)[1][f"Kafka {server}"]
    assert "set security.protocol to SSL" in plain["found"]
    file = tmp_path / "client.properties"
    file.write_text(secure.java("SASL_SSL", "SCRAM-SHA-512"))
    way = ("--bootstrap-server", server, "--command-config", str(file))
    found = _doctor(*way)[1]
    assert found[f"TLS {server}"]["found"] == "TLSv1.3"
    assert found[f"Kafka {server}"]["found"].startswith("SASL_SSL, ")
    assert found["metadata"]["advice"] == ""
    file.write_text(secure.java("SASL_SSL", "SCRAM-SHA-512").replace(PASSWORDS["alice"], "wrong-secret"))
    refused = _doctor(*way)[1]
    assert refused[f"TLS {server}"]["advice"] == ""
    assert "refuses SCRAM-SHA-512" in refused[f"Kafka {server}"]["found"]
    assert "wrong-secret" not in json.dumps(refused)


def test_a_certificate_of_somebody_else(secure: SecureBroker, tmp_path: Path) -> None:
    server = secure.servers("SSL")
    other = make_certificates(tmp_path / "other")
    file = tmp_path / "client.properties"
    file.write_text(secure.java("SSL").replace(str(secure.certificates.ca), str(other.ca)))
    _, found = _doctor("--bootstrap-server", server, "--command-config", str(file))
    assert "certificate" in found[f"TLS {server}"]["found"]
    assert f"Kafka {server}" not in found


def test_a_listener_that_requires_sasl(secure: SecureBroker) -> None:
    """Such a listener answers ApiVersions, and closes the connection at the next request."""
    server = secure.servers("SASL_PLAINTEXT")
    _, found = _doctor("--bootstrap-server", server)
    assert "set security.protocol to SASL_PLAINTEXT" in found[f"Kafka {server}"]["found"]
    assert "metadata" not in found


def test_a_silent_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_STEP_SECONDS", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        server = f"127.0.0.1:{listening.getsockname()[1]}"
        _, found = _doctor("--bootstrap-server", server)
    assert found[f"TCP {server}"]["advice"] == ""
    assert "security.protocol" in found[f"Kafka {server}"]["advice"]
    assert "metadata" not in found


def test_a_name_server_that_never_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    never = threading.Event()
    monkeypatch.setattr(doctor, "_STEP_SECONDS", 0.5)
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: never.wait(60) and [])
    try:
        _, found = _doctor("--bootstrap-server", "broker.invalid:9092")
    finally:
        never.set()
    assert "no name server has answered in time" in found["DNS broker.invalid"]["found"]


def test_wrong_settings(tmp_path: Path) -> None:
    """The error is a line on stderr, without a traceback or the secret."""
    file = tmp_path / "client.properties"
    file.write_text("security.protocol=SASL_PLAINTEXT\nsasl.mechanism=NONSENSE\nsasl.password=top-secret\n")
    done = CliRunner().invoke(
        main, ["doctor", "--no-spark", "--bootstrap-server", "127.0.0.1:1", "--command-config", str(file)]
    )
    assert (done.exit_code, type(done.exception)) == (1, SystemExit)
    assert done.stderr.startswith("klog: ")
    assert "top-secret" not in done.output


def test_an_address_that_only_the_broker_knows(server_dir: Path) -> None:
    server = f"{HOST}:{free_port()}"
    listeners = ("listeners", f"PLAINTEXT://{server}"), ("advertised.listeners", "PLAINTEXT://inside.invalid:9092")
    with KlogBroker(server_dir, *(word for name, value in listeners for word in ("--set", f"{name}={value}"))):
        code, found = _doctor("--bootstrap-server", server)
    assert (code, found["metadata"]["advice"]) == (1, "")
    assert "advertised.listeners" in found["DNS inside.invalid"]["advice"]


def test_many_brokers_that_are_silent_are_checked_beside_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """As behind a firewall: a hundred of them, one after the other, would take a quarter of an hour."""
    monkeypatch.setattr(doctor, "_STEP_SECONDS", 0.5)
    with SimulatedCluster(topics=1, partitions=1, brokers=20) as cluster:
        for node in range(3, 20):
            cluster.tell("slow", node=node, seconds=100)
        begin = time.monotonic()
        findings = list(doctor.way_to({"bootstrap.servers": cluster.bootstrap_servers}))
        assert time.monotonic() - begin < 17 * 0.5
    silent = [finding.check for finding in findings if "advertised.listeners" in finding.advice]
    assert silent == [f"Kafka 127.0.0.1:{port}" for port in cluster.ports[3:]]


def test_the_cheap_checks_come_first(cluster: EmbeddedCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a terminal the command says what it is at; Spark, which takes longest, comes last."""
    main_side, terminal = os.openpty()
    seen: list[bytes] = []

    def round_trip() -> str:
        while b"starting Spark" not in b"".join(seen):
            seen.append(os.read(main_side, 4096))
        return "rows"

    monkeypatch.setattr("spark_klog.cli.doctor.round_trip", round_trip)
    monkeypatch.setenv("TERM", "xterm")
    with open(terminal, "w") as stderr:
        monkeypatch.setattr("sys.stderr", stderr)
        with redirect_stdout(StringIO()) as stdout, pytest.raises(SystemExit) as ended:
            main(["doctor", "--bootstrap-server", cluster.bootstrap_servers])
    os.close(main_side)
    assert ended.value.code in (0, 1)
    checks = [line[10:34].strip() for line in stdout.getvalue().splitlines() if "-> " not in line]
    assert checks[-2:] == ["metadata", "Spark"]
    assert b"checking this machine" in b"".join(seen)


def test_without_a_terminal_a_line_says_that_spark_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "round_trip", lambda: "rows")
    assert CliRunner().invoke(main, ["doctor"]).stderr == f"{doctor._SLOW}\n"
    assert CliRunner().invoke(main, ["doctor", "--json"]).stderr == ""


def test_a_round_trip_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    output = "WARN a line\nspark_klog.errors.ConfigError: this is wrong\n at java.lang.Thread"
    monkeypatch.setattr(doctor, "_output", lambda *_: (1, output))
    finding = doctor.run("Spark", doctor.round_trip)
    assert finding.found == "spark_klog.errors.ConfigError: this is wrong"
    assert "spark_klog.cli.doctor" in finding.advice


def test_a_command_that_does_not_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_COMMAND_SECONDS", 0.5)
    monkeypatch.setenv("PYSPARK_PYTHON", str(_program(tmp_path, "python3", "exec sleep 60")))
    _, found = _doctor()
    assert "did not end in 0.5 s" in found["Spark's Python"]["found"]


def test_a_kernel_that_does_not_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command still prints its other findings."""
    monkeypatch.setenv("SPARK_KLOG_KERNEL", "nonsense")
    done = klog("doctor", "--no-spark", "--json")
    found = {line["check"]: line for line in map(json.loads, done.stdout.splitlines())}
    assert (done.returncode, done.stderr) == (1, "")
    assert "SPARK_KLOG_KERNEL=nonsense is unknown" in found["kernel"]["found"]
    assert {"Python", "Spark's Python", "Java", "pyspark"} < found.keys()


def test_the_versions_are_those_of_the_package() -> None:
    required = doctor._INSTALL_PYSPARK.removeprefix("pip install ").strip("'")
    assert f'"{required}"' in (ROOT / "pyproject.toml").read_text()


def test_switches_that_are_worth_it() -> None:
    """Those that are set, or that this Spark does not have, are left out."""
    [(name, value, _)] = doctor._SWITCHES
    assert doctor.switches({name: "64MB"}.get).startswith(f"; {name}={value} writes rows")
    assert doctor.switches({name: value}.get) == ""
    assert doctor.switches({}.get) == ""


@pytest.mark.test_all("long")  # of Spark's source and sink
def test_a_round_trip_through_spark() -> None:
    finding = doctor.run("Spark", doctor.round_trip)
    assert (finding.advice, finding.found[:34]) == ("", "1000 of 1000 rows written and read")
    assert "maxBytesPerBatch=2147483647" in finding.found  # Spark's default is another


def test_a_spark_home_whose_pyspark_is_not_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second pyspark is not what it needs."""
    monkeypatch.setattr(doctor, "is_installed", lambda name: name != "pyspark")
    assert _doctor()[1]["pyspark"]["found"].startswith("not installed")
    (tmp_path / "python" / "pyspark").mkdir(parents=True)
    monkeypatch.setenv("SPARK_HOME", str(tmp_path))
    found = _doctor()[1]["pyspark"]
    assert f"SPARK_HOME={tmp_path} has one" in found["found"]
    assert found["advice"].startswith(f"add {tmp_path}/python and the py4j")


@pytest.mark.parametrize(
    ("packages", "advice"),
    [
        (("pyspark",), "pip install 'pyspark[sql]>=4.0'"),
        (("databricks-connect",), "pip install 'databricks-connect>=17'"),
        ((), "use a runtime with Spark 4.0 or later"),
    ],
)
def test_an_old_pyspark(monkeypatch: pytest.MonkeyPatch, packages: tuple[str, ...], advice: str) -> None:
    """One that a platform brings, of which pip does not know under this name, is not to be installed over."""
    import pyspark

    def version(name: str) -> str:
        if name in packages:
            return "3.5.2"
        raise PackageNotFoundError(name)

    monkeypatch.setattr(pyspark, "__version__", "3.5.2")
    monkeypatch.setattr(doctor, "package_version", version)
    found = _doctor()[1]["pyspark"]
    assert found["found"].startswith("3.5.2 is older than 4.0")
    assert found["advice"].startswith(advice)
    assert ("pyspark[sql]" in found["advice"]) == ("pyspark" in packages)


def test_a_client_of_spark_connect(monkeypatch: pytest.MonkeyPatch) -> None:
    """pyspark-client and databricks-connect have no JVM: neither Java nor workers are here."""
    monkeypatch.delenv("SPARK_HOME", raising=False)
    monkeypatch.setenv("PYSPARK_PYTHON", "no-such-python")
    monkeypatch.setattr(doctor, "is_client_only", lambda: True)
    monkeypatch.setattr(doctor, "round_trip", lambda: pytest.fail("there is no Spark to start"))
    done = CliRunner().invoke(main, ["doctor", "--json"])
    found = {line["check"]: line for line in map(json.loads, done.stdout.splitlines())}
    assert not {"Java", "Spark", "Spark's Python"} & found.keys()
    assert found["Spark Connect"]["found"].startswith("this pyspark is a client without a JVM: the server and its")
    assert not found["Spark Connect"]["advice"]


@pytest.mark.parametrize(
    ("folder", "home", "expected"), [("jars", None, False), ("sql", None, True), ("sql", "/x", False)]
)
def test_which_pyspark_has_no_jvm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: str, home: str | None, expected: bool
) -> None:
    (tmp_path / "pyspark" / folder).mkdir(parents=True)
    monkeypatch.setattr(doctor, "find_spec", lambda name: SimpleNamespace(submodule_search_locations=[tmp_path / name]))
    monkeypatch.delenv("SPARK_HOME", raising=False)
    if home is not None:
        monkeypatch.setenv("SPARK_HOME", home)
    assert doctor.is_client_only() is expected
