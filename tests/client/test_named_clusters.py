"""Named clusters: the location of the file, values of TOML, references to secrets, error messages."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from spark_klog.client import Admin, named_cluster
from spark_klog.client.settings import client_config
from spark_klog.embedded import EmbeddedCluster
from spark_klog.errors import ConfigError

FILE = """
[dev]
bootstrap.servers = "127.0.0.1:9092"

[prod]
"bootstrap.servers" = ["kafka-1:9093", "kafka-2:9093"]
security.protocol = "SASL_SSL"
request.timeout.ms = 5000
enable.idempotence = true
sasl.mechanism = "SCRAM-SHA-512"
sasl.username = "loader"
sasl.password = "env:KLOG_TEST_PASSWORD"
"""


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "clusters.toml"
    path.write_text(FILE)
    monkeypatch.setenv("KLOG_CONFIG", str(path))
    return path


def test_settings(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KLOG_TEST_PASSWORD", "hunter-2")
    settings = named_cluster("prod")
    assert settings == {
        "bootstrap.servers": "kafka-1:9093,kafka-2:9093",
        "security.protocol": "SASL_SSL",
        "request.timeout.ms": "5000",
        "enable.idempotence": "true",
        "sasl.mechanism": "SCRAM-SHA-512",
        "sasl.username": "loader",
        "sasl.password": "env:KLOG_TEST_PASSWORD",
    }
    assert b"hunter-2" not in pickle.dumps(settings)  # Spark ships the settings to executors
    found = client_config(settings)
    assert (found.bootstrap_servers, found.request_timeout_ms) == ((("kafka-1", 9093), ("kafka-2", 9093)), 5000)
    assert found.security.sasl is not None
    assert "hunter-2" in pickle.dumps(found.security.sasl).decode("latin-1")
    assert "hunter-2" not in repr(found)


def test_a_byte_order_mark(config: Path) -> None:
    config.write_text(FILE, "utf-8-sig")
    assert named_cluster("dev") == {"bootstrap.servers": "127.0.0.1:9092"}


def test_a_connection(config: Path, cluster: EmbeddedCluster) -> None:
    config.write_text(f'[here]\nbootstrap.servers = "{cluster.bootstrap_servers}"\n')
    with Admin(named_cluster("here") | {"client.id": "by-name"}) as admin:
        admin.list_topics()


def test_settings_of_a_schema_registry(config: Path, cluster: EmbeddedCluster) -> None:
    registry = 'schema.registry.url = "https://h:8081"\nschema.registry.basic.auth.user.info = "env:NOT_HERE"\n'
    config.write_text(f'[here]\nbootstrap.servers = "{cluster.bootstrap_servers}"\n{registry}')
    assert named_cluster("here")["schema.registry.url"] == "https://h:8081"
    with Admin(named_cluster("here")) as admin:
        admin.list_topics()
    with pytest.raises(ConfigError, match=r"unknown client setting 'kafka\.schema\.registry\.url'"):
        client_config(named_cluster("here"), "kafka.")


def test_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KLOG_CONFIG", raising=False)
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    folder = tmp_path / ".config" / "klog"
    with pytest.raises(ConfigError, match=r"there is no .*clusters\.toml.* KLOG_CONFIG"):
        named_cluster("dev")
    folder.mkdir(parents=True)
    (folder / "clusters.toml").write_text('[dev]\nbootstrap.servers = "a:1"\n')
    assert named_cluster("dev") == {"bootstrap.servers": "a:1"}
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "other"))
    with pytest.raises(ConfigError, match="other/klog"):
        named_cluster("dev")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[prd]\n[dev]", r"no cluster 'prod' in .*: it has dev, prd; did you mean prd\?"),
        ("", "it has none"),
        ("[prod", "is not TOML"),
        ("prod = 1", r"prod must be a table of settings: \[prod\]"),
        ("[prod]\nacks = 1.5", "cluster prod: acks must be a text, a whole number"),
        ("[prod]\nbootstrap.servers = []", "bootstrap.servers must be a text"),
        ("[prod]\nbootstrap.servers = [1]", "bootstrap.servers must be a text"),
        ("[prod]\nssl = { a = { b = 2020-01-01 } }", "cluster prod: ssl.a.b must be"),
    ],
)
def test_a_bad_file(config: Path, content: str, message: str) -> None:
    config.write_text(content)
    with pytest.raises(ConfigError, match=message):
        named_cluster("prod")


def test_bytes_and_a_folder(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config.write_bytes(b"\xff")
    with pytest.raises(ConfigError, match="not UTF-8"):
        named_cluster("prod")
    monkeypatch.setenv("KLOG_CONFIG", str(config.parent))
    with pytest.raises(ConfigError, match="can't be read: Is a directory"):
        named_cluster("prod")


def _secure(password: str) -> dict[str, str]:
    return {
        "bootstrap.servers": "a:1",
        "security.protocol": "SASL_PLAINTEXT",
        "sasl.mechanism": "PLAIN",
        "sasl.username": "u",
        "sasl.password": password,
    }


def test_a_file_with_a_secret(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("hunter-3\n")
    found = client_config(_secure(f"file:{secret}"))
    assert "hunter-3" in pickle.dumps(found.security.sasl).decode("latin-1")


def test_a_reference_in_a_jaas_string(monkeypatch: pytest.MonkeyPatch) -> None:
    """The password of a login module may be a reference, like `sasl.password`."""
    jaas = 'org.apache.kafka.common.security.plain.PlainLoginModule required username="env:U" password="env:KLOG_TEST";'
    settings = {name: value for name, value in _secure("").items() if not name.startswith(("sasl.user", "sasl.pass"))}
    settings["sasl.jaas.config"] = jaas
    monkeypatch.setenv("KLOG_TEST", "hunter-4")
    sasl = client_config(settings).security.sasl
    assert sasl is not None
    assert (sasl.username, sasl.password) == ("env:U", "hunter-4")
    monkeypatch.delenv("KLOG_TEST")
    with pytest.raises(ConfigError, match=r"kafka.sasl.jaas.config: password: the environment variable KLOG_TEST is"):
        client_config(settings, "kafka.")


def test_references_to_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KLOG_TEST_PASSWORD", raising=False)
    with pytest.raises(ConfigError, match=r"kafka.sasl.password: the environment variable KLOG_TEST_PASSWORD is not"):
        client_config(_secure("env:KLOG_TEST_PASSWORD"), "kafka.")
    with pytest.raises(ConfigError, match=r"sasl.password: .*gone can't be read: No such file"):
        client_config(_secure(f"file:{tmp_path / 'gone'}"))


def test_only_secrets_are_references(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KLOG_TEST_PASSWORD", "x")
    assert client_config({"bootstrap.servers": "a:1", "client.id": "env:KLOG_TEST_PASSWORD"}).client_id == (
        "env:KLOG_TEST_PASSWORD"
    )
