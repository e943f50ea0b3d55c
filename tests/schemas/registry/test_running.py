"""How a registry is started: by a command, beside a broker, in a cluster, by pytest's fixtures."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import pytest

from spark_klog.cli.main import _OwnRegistry
from spark_klog.embedded import EmbeddedCluster
from spark_klog.errors import KlogError
from spark_klog.schema_registry import SchemaRegistry
from tests.schemas.registry.asking import ask, register
from tests.support.clients.klog import klog_command, klog_refusal
from tests.support.servers.certificates import Certificates
from tests.support.servers.secure_broker import SecureBroker
from tests.test_pytest_plugin import run, users

__all__ = ["users"]
pytest_plugins = ["pytester"]


@contextmanager
def _running(*arguments: str, lines: int, stderr: IO[str] | None = None) -> Iterator[list[str]]:
    """The last words of a command's first lines; it is stopped by SIGTERM, and ends with 0."""
    with subprocess.Popen(klog_command(*arguments), stdout=subprocess.PIPE, stderr=stderr, text=True) as process:
        assert process.stdout is not None
        try:
            yield [process.stdout.readline().strip().rpartition(" ")[2] for _ in range(lines)]
        finally:
            process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0


def test_the_command(cluster: EmbeddedCluster) -> None:
    arguments = ["schema-registry", "-b", cluster.bootstrap_servers, "--listen", "0", "--topic", "own"]
    for expected in ([], ["s"]):
        with _running(*arguments, lines=1) as (url,):
            assert url.startswith("http://127.0.0.1:")
            assert ask(url, "GET", "/subjects") == (200, expected)
            register(url, "s", '"int"')
    with _running(*arguments, lines=1) as (url,):
        taken = url.removeprefix("http://")
        refusal = klog_refusal("schema-registry", "-b", cluster.bootstrap_servers, "--listen", taken)
        assert f"can't listen on {taken}: Address already in use" in refusal


@pytest.mark.test_all("mechanism")
def test_over_a_secure_broker(tmp_path: Path, certificates: Certificates) -> None:
    with SecureBroker(tmp_path / "broker", certificates) as broker:
        config = tmp_path / "client.properties"
        config.write_text(f"{broker.java('SASL_SSL', 'SCRAM-SHA-256')}group.id=mine\ntransactional.id=mine\n")
        servers = broker.servers("SASL_SSL")
        arguments = ["schema-registry", "-b", servers, "--command-config", str(config), "--listen", "0"]
        with _running(*arguments, lines=1) as (url,):
            assert register(url, "s", '"int"') == 1


def test_beside_a_broker(tmp_path: Path) -> None:
    arguments = ["broker", "--data-dir", str(tmp_path / "data"), "--listen", "127.0.0.1:0", "--schema-registry", "0"]
    for expected in ([], ["s"]):
        with _running(*arguments, lines=2) as (_, url):
            assert ask(url, "GET", "/subjects") == (200, expected)
            register(url, "s", '"int"')
    refusal = klog_refusal(*arguments[:-1], "192.0.2.1:1")
    assert "can't listen on 192.0.2.1:1" in refusal
    secure = ["--set", "listeners=SASL_PLAINTEXT://127.0.0.1:0", "--set", "klog.users.file=/dev/null"]
    assert "--schema-registry" in klog_refusal(*arguments[:3], "--schema-registry", "0", *secure, code=2)


def test_beside_a_broker_that_does_not_know_its_own_name(tmp_path: Path) -> None:
    """As in a container. What the clean stop of both logs is nothing to worry about."""
    arguments = ["broker", "--data-dir", str(tmp_path / "data"), "--listen", "127.0.0.1:0", "--schema-registry", "0"]
    arguments += ["--set", "advertised.listeners=PLAINTEXT://broker.invalid:0"]
    log = tmp_path / "log"
    with log.open("w") as stderr, _running(*arguments, lines=2, stderr=stderr) as (_, url):
        assert register(url, "s", '"int"') == 1
    assert "stopped" in log.read_text()
    assert "WARNING" not in log.read_text()


def test_a_start_that_hangs_does_not_hold_up_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    has_begun, is_over = threading.Event(), threading.Event()

    def hang(*_: object) -> None:
        has_begun.set()
        is_over.wait(60)
        raise KlogError("too late")

    monkeypatch.setattr("spark_klog.schema_registry.SchemaRegistry", hang)
    own = _OwnRegistry("0")
    own.start("127.0.0.1:1")
    assert has_begun.wait(10)
    started = time.monotonic()
    own.close()
    is_over.set()
    assert time.monotonic() - started < 30
    assert own.error is None


def test_a_port_alone(cluster: EmbeddedCluster) -> None:
    with SchemaRegistry({"bootstrap.servers": cluster.bootstrap_servers}, 0, "port") as registry:
        assert ask(registry.url, "GET", "/subjects") == (200, [])


def test_a_cluster_of_the_command(tmp_path: Path) -> None:
    data = str(tmp_path / "data")
    with _running("cluster", "--data-dir", data, "--schema-registry", "0", lines=2) as (_, url):
        assert ask(url, "GET", "/subjects") == (200, [])
    assert os.path.exists(f"{data}/schema-registry.log")


def test_fixtures(users: pytest.Pytester) -> None:
    users.makepyfile(
        """
    import urllib.request

    def subjects(url):
        with urllib.request.urlopen(f"{url}/subjects", timeout=20) as answer:
            return answer.read()

    def test_shared(klog_schema_registry):
        assert subjects(klog_schema_registry) == b"[]"

    def test_own(klog_cluster_factory):
        assert subjects(klog_cluster_factory(schema_registry=True).schema_registry_url) == b"[]"
    """
    )
    run(users).assert_outcomes(passed=2)
