"""`--command-config` with a file as of Kafka's own tools: commands by TLS and SASL."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from spark_klog.cli.clusters import ChosenCluster
from tests.support.clients.klog import klog
from tests.support.servers.certificates import make_certificates
from tests.support.servers.secure_broker import PASSWORDS, SecureBroker


@pytest.fixture(scope="module")
def broker(module_server_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecureBroker]:
    with SecureBroker(module_server_dir, make_certificates(tmp_path_factory.mktemp("certificates"))) as running:
        yield running


@pytest.mark.parametrize(("protocol", "mechanism"), [("SSL", None), ("SASL_SSL", "SCRAM-SHA-512")])
def test_commands(broker: SecureBroker, tmp_path: Path, protocol: str, mechanism: str | None) -> None:
    file = tmp_path / "client.properties"
    file.write_text(broker.java(protocol, mechanism))
    way = ("--bootstrap-server", broker.servers(protocol), "--command-config", str(file))
    topic = f"by-{protocol.lower()}"
    for command in (
        ("topics", "create", topic),
        ("topics", "describe", topic),
        ("topics", "alter", topic, "--partitions", "3"),
        ("groups", "list"),
    ):
        done = klog(*command, *way)
        assert (done.returncode, done.stderr) == (0, ""), command
    listed = klog("topics", "list", *way, "--json")
    assert topic in {json.loads(line)["name"] for line in listed.stdout.splitlines()}
    store = f"kafka://{broker.servers(protocol)}"
    changed = ("offsets", "set", "--group", "g", "--to", store, "--topic", f"{topic}:0", "--to-offset", "0")
    done = klog(*changed, "--command-config", str(file))
    assert (done.returncode, done.stderr) == (0, "")
    done = klog("offsets", "show", "--group", "g", "--from", store, "--command-config", str(file), "--json")
    assert (done.returncode, topic in done.stdout) == (0, True), done.stderr


def test_a_named_cluster(broker: SecureBroker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    servers = broker.servers("SASL_SSL")
    file = tmp_path / "clusters.toml"
    settings = [f'bootstrap.servers = "{servers}"', f'ssl.ca.location = "{broker.certificates.ca}"']
    settings += ['security.protocol = "SASL_SSL"', 'sasl.mechanism = "PLAIN"', 'sasl.username = "alice"']
    file.write_text("\n".join(["[prod]", *settings, 'sasl.password = "env:KLOG_TEST_PASSWORD"']))
    monkeypatch.setenv("KLOG_CONFIG", str(file))
    done = klog("topics", "list", "--cluster", "prod")
    assert (done.returncode, "KLOG_TEST_PASSWORD is not set" in done.stderr) == (2, True), done.stderr
    monkeypatch.setenv("KLOG_TEST_PASSWORD", PASSWORDS["alice"])
    for command in (("topics", "create", "by-name"), ("groups", "list")):
        done = klog(*command, "--cluster", "prod")
        assert (done.returncode, done.stderr) == (0, ""), command
    set_offsets = ("offsets", "set", "--group", "g", "--to", f"kafka://{servers}", "--topic", "by-name:0")
    done = klog(*set_offsets, "--to-offset", "0", "--cluster", "prod")
    assert (done.returncode, done.stderr) == (0, "")
    other = klog("topics", "list", "--cluster", "prod", "--bootstrap-server", "127.0.0.1:1")
    assert other.stderr == (
        f"klog: --bootstrap-server 127.0.0.1:1 and bootstrap.servers of the cluster differ ({servers}): remove one of "
        "them\n"
    )
    for command in (("consume", "by-name"), ("produce", "by-name"), ("bench",)):
        other = klog(*command, "--cluster", "prod", "-X", "bootstrap.servers=127.0.0.1:1")
        assert (other.returncode, other.stderr) == (
            2,
            f"klog: bootstrap.servers of the cluster ({servers}) and --set bootstrap.servers=127.0.0.1:1 differ: "
            "remove one of them\n",
        )
    same = klog("consume", "by-name", "--cluster", "prod", "-b", servers, "-X", f"bootstrap.servers={servers}")
    assert (same.returncode, same.stderr) == (0, "")
    nowhere = klog("topics", "list", "-b", "nowhere")
    assert nowhere.stderr == "klog: --bootstrap-server: 'nowhere' is not HOST:PORT\n"
    file.write_text(file.read_text() + '\n[empty]\nclient.id = "x"\n')
    nowhere = klog("topics", "list", "--cluster", "empty")
    assert nowhere.stderr == "klog: cluster empty has no bootstrap.servers: set them in its table\n"
    file.write_text(file.read_text().replace("client.id", "bootstrap.server"))
    nowhere = klog("topics", "list", "--cluster", "empty")
    assert nowhere.stderr == "klog: unknown client setting 'bootstrap.server'; did you mean bootstrap.servers?\n"
    both = klog("topics", "list", "--cluster", "prod", "--command-config", str(file))
    assert both.stderr == "klog: give only one of --cluster and --command-config\n"
    assert ChosenCluster(name="prod").settings()["bootstrap.servers"] == servers


def test_a_wrong_password(broker: SecureBroker, tmp_path: Path) -> None:
    file = tmp_path / "client.properties"
    file.write_text(broker.java("SASL_SSL", "SCRAM-SHA-512").replace(PASSWORDS["alice"], "wrong-secret"))
    way = ("--bootstrap-server", broker.servers("SASL_SSL"), "--command-config", str(file))
    done = klog("--log-level", "DEBUG", "topics", "list", *way)
    assert done.returncode == 1
    assert f"broker {broker.servers('SASL_SSL')} refuses SCRAM-SHA-512" in done.stderr
    assert "wrong-secret" not in done.stdout + done.stderr
    assert "Traceback" not in done.stderr


def test_the_servers_of_the_file(broker: SecureBroker, tmp_path: Path) -> None:
    file = tmp_path / "client.properties"
    file.write_text(broker.java("SSL", None) + f"bootstrap.servers={broker.servers('SSL')}\n")
    way = ("--command-config", str(file))
    for command in (("topics", "create", "by-file"), ("groups", "list")):
        done = klog(*command, *way)
        assert (done.returncode, done.stderr) == (0, ""), command
    to_files = ("offsets", "set", "--group", "by-file", "--to", str(tmp_path / "offsets"))
    done = klog(*to_files, "--topic", "by-file:0", "--to-earliest", *way)
    assert (done.returncode, done.stderr) == (0, "")
    assert ChosenCluster(command_config=file).settings()["bootstrap.servers"] == broker.servers("SSL")


@pytest.mark.parametrize(
    "command",
    [
        ("topics", "delete", "t", "--yes"),
        ("topics", "list"),
        ("groups", "list"),
        ("groups", "describe", "g"),
        ("offsets", "set", "--group=g", "--to=folder", "--topic=t", "--to-latest"),
    ],
)
def test_two_clusters_are_refused(tmp_path: Path, command: tuple[str, ...]) -> None:
    file = tmp_path / "client.properties"
    file.write_text("bootstrap.servers=other:9092\n")
    done = klog(*command, "--bootstrap-server", "127.0.0.1:1", "--command-config", str(file))
    assert done.returncode == 2
    assert f"--bootstrap-server 127.0.0.1:1 and bootstrap.servers in {file} differ (other:9092)" in done.stderr


def test_a_password_in_an_address_is_not_shown(tmp_path: Path) -> None:
    file = tmp_path / "client.properties"
    for address in ("SASL_SSL://alice:s3kr1t@h:9093", "alice:s3kr1t@h:9093"):
        file.write_text(f"bootstrap.servers={address}\n")
        for arguments in (
            ("topics", "list", "--bootstrap-server", address),
            ("topics", "list", "--command-config", str(file)),
            ("topics", "list", "--command-config", str(file), "--bootstrap-server", "h:1"),
            ("offsets", "show", "--group", "g", "--from", f"kafka://{address}"),
            ("offsets", "show", "--group", "g", "--from", address),
        ):
            done = klog(*arguments)
            assert done.returncode != 0
            assert "has a character @, and is not shown" in done.stderr
            assert "s3kr1t" not in done.stdout + done.stderr
