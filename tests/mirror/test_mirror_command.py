"""`klog mirror` as a user runs it: what it follows, how it stops, what it rejects."""

from __future__ import annotations

import json
import re
import signal
import uuid
from pathlib import Path

import pytest
from confluent_kafka import Producer

from spark_klog.client import Admin
from spark_klog.embedded import EmbeddedCluster
from spark_klog.mirror.mirror import Mirror, Session
from spark_klog.mirror.settings import MirrorSettings
from tests.support.clients.klog import klog, klog_refusal
from tests.support.clients.mirrors import SECONDS, mirror_once, read_topic, start_mirror, wait_for
from tests.support.clients.topics import make_topic
from tests.support.servers.certificates import make_certificates
from tests.support.servers.secure_broker import PASSWORDS, SecureBroker


def _send(servers: str, topic: str, values: list[bytes], partition: int = 0) -> None:
    producer = Producer({"bootstrap.servers": servers, "log_level": 0})
    for value in values:
        producer.produce(topic, value, None, partition)
    assert producer.flush(SECONDS) == 0


def _name() -> str:
    return f"t-{uuid.uuid4().hex[:8]}"


def test_new_topics_and_partitions_until_it_is_stopped(
    cluster: EmbeddedCluster, target: EmbeddedCluster, server_dir: Path
) -> None:
    base = _name()
    sides = cluster.bootstrap_servers, target.bootstrap_servers
    make_topic(sides[0], f"{base}-a", 1)
    _send(sides[0], f"{base}-a", [b"1", b"2"])
    chosen = (
        "--topics",
        f"{base}-.*",
        "--exclude",
        ".*-x",
        "--name",
        base,
        "--refresh-interval",
        "0.2",
        "--commit-interval",
        "0.2",
    )
    mirror = start_mirror(server_dir / "mirror.log", *sides, *chosen)
    try:
        wait_for(mirror, 2)
        for suffix in ("b", "x"):
            make_topic(sides[0], f"{base}-{suffix}", 2)
            _send(sides[0], f"{base}-{suffix}", [b"3"], 1)
        with Admin({"bootstrap.servers": sides[0]}) as admin:
            admin.create_partitions({f"{base}-a": 3}).check()
        _send(sides[0], f"{base}-a", [b"4"], 2)
        wait_for(mirror, 4)
        mirror.send_signal(signal.SIGTERM)
        rest, _ = mirror.communicate(timeout=SECONDS)
    finally:
        mirror.kill()
    assert mirror.returncode == 0, (server_dir / "mirror.log").read_text()
    assert json.loads(rest.splitlines()[-1])["records"] == 4
    for name, partitions in ((f"{base}-a", 3), (f"{base}-b", 2)):
        assert read_topic(sides[1], name, partitions) == read_topic(sides[0], name, partitions)
    with Admin({"bootstrap.servers": sides[1]}) as admin:
        assert not [one for one in admin.list_topics() if one.name == f"{base}-x"]
    assert mirror_once(*sides, *chosen)["records"] == 0  # everything was committed


def test_what_the_source_has_deleted_is_lost_and_named(cluster: EmbeddedCluster, target: EmbeddedCluster) -> None:
    name = _name()
    sides = cluster.bootstrap_servers, target.bootstrap_servers
    make_topic(sides[0], name, 1)
    _send(sides[0], name, [b"1"])
    assert mirror_once(*sides, "--topics", name, "--name", name)["records"] == 1
    _send(sides[0], name, [b"2", b"3", b"4"])
    with Admin({"bootstrap.servers": sides[0]}) as admin:
        admin.delete_records({(name, 0): 3}).check()
    told = mirror_once(*sides, "--topics", name, "--name", name)
    assert (told["records"], told["lost"]) == (1, 2)
    assert [seen.value for seen in read_topic(sides[1], name, 1)[0]] == [b"1", b"4"]


def test_a_topic_that_was_created_again_is_refused(cluster: EmbeddedCluster, target: EmbeddedCluster) -> None:
    name = _name()
    sides = cluster.bootstrap_servers, target.bootstrap_servers
    make_topic(sides[0], name, 1)
    _send(sides[0], name, [b"1", b"2"])
    mirror_once(*sides, "--topics", name, "--name", name)
    with Admin({"bootstrap.servers": sides[0]}) as admin:
        admin.delete_topic(name)
    make_topic(sides[0], name, 1)
    _send(sides[0], name, [b"3", b"4", b"5"])  # the new log is longer than the mirrored part of the old one
    chosen = ("--topics", name, "--name", name)
    arguments = ("mirror", "--from", sides[0], "--to", sides[1], *chosen, "--until-end")
    assert f"topic {name} was deleted and created again" in klog_refusal(*arguments)
    assert mirror_once(*sides, *chosen, "--recreated", "begin")["records"] == 3
    assert mirror_once(*sides, *chosen)["records"] == 0
    assert [seen.value for seen in read_topic(sides[1], name, 1)[0]] == [b"1", b"2", b"3", b"4", b"5"]
    with Admin({"bootstrap.servers": sides[1]}) as admin:
        admin.delete_topic(name)
    refusal = klog_refusal(*arguments)
    assert f"the copy of topic {name} was deleted at the target" in refusal
    assert f"--copy-again {name}" in refusal
    assert mirror_once(*sides, *chosen, "--copy-again", name)["records"] == 3


def test_another_prefix_needs_another_name(cluster: EmbeddedCluster, target: EmbeddedCluster) -> None:
    name = _name()
    sides = cluster.bootstrap_servers, target.bootstrap_servers
    make_topic(sides[0], name, 1)
    chosen = ("--topics", name, "--name", name)
    mirror_once(*sides, *chosen, "--prefix", "a.")
    arguments = ("mirror", "--from", sides[0], "--to", sides[1], *chosen, "--until-end")
    assert "with the prefix 'a.', not 'b.'" in klog_refusal(*arguments, "--prefix", "b.")
    assert "with the prefix 'a.', not ''" in klog_refusal(*arguments)


def test_from_the_latest_records_on(cluster: EmbeddedCluster, target: EmbeddedCluster) -> None:
    name = _name()
    sides = cluster.bootstrap_servers, target.bootstrap_servers
    make_topic(sides[0], name, 1)
    _send(sides[0], name, [b"1", b"2"])
    chosen = ("--topics", name, "--name", name, "--start", "latest")
    assert mirror_once(*sides, *chosen)["records"] == 0
    _send(sides[0], name, [b"3"])
    assert mirror_once(*sides, *chosen)["records"] == 1
    assert [seen.value for seen in read_topic(sides[1], name, 1)[0]] == [b"3"]


def test_the_latest_records_are_those_of_the_first_start(
    cluster: EmbeddedCluster, target: EmbeddedCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mirror that dies before its first commit goes on where it began, not at the log's end by then."""
    name = _name()
    sides = cluster.bootstrap_servers, target.bootstrap_servers
    make_topic(sides[0], name, 1)
    _send(sides[0], name, [b"1", b"2"])
    first, second = ({"bootstrap.servers": side} for side in sides)
    settings = MirrorSettings(first, second, name=name, topics=re.compile(name), start="latest", exactly_once=True)

    class Died(Exception):
        pass

    def die(_: Session) -> None:
        raise Died

    with monkeypatch.context() as patch:
        patch.setattr(Session, "_step", die)
        with pytest.raises(Died):
            Mirror(settings).run()
    _send(sides[0], name, [b"3"])
    assert Mirror(settings).run(until_end=True).records == 1
    assert [seen.value for seen in read_topic(sides[1], name, 1)[0]] == [b"3"]


def test_named_clusters(
    cluster: EmbeddedCluster, target: EmbeddedCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = _name()
    make_topic(cluster.bootstrap_servers, topic, 1)
    _send(cluster.bootstrap_servers, topic, [b"1"])
    file = tmp_path / "clusters.toml"
    file.write_text(
        "".join(
            f'[{name}]\nbootstrap.servers = "{side.bootstrap_servers}"\n'
            for name, side in (("here", cluster), ("there", target))
        )
    )
    monkeypatch.setenv("KLOG_CONFIG", str(file))
    done = klog("mirror", "--from", "here", "--to", "there", "--topics", topic, "--name", topic, "--until-end")
    assert done.returncode == 0, done.stderr
    assert [seen.value for seen in read_topic(target.bootstrap_servers, topic, 1)[0]] == [b"1"]
    assert "did you mean there?" in klog_refusal("mirror", "--from", "here", "--to", "ther", code=2)


def test_refusals(cluster: EmbeddedCluster, target: EmbeddedCluster, tmp_path: Path) -> None:
    sides = ("--from", cluster.bootstrap_servers, "--to", target.bootstrap_servers, "--until-end")
    same = ("--from", cluster.bootstrap_servers, "--to", cluster.bootstrap_servers, "--until-end")
    assert "same cluster" in klog_refusal("mirror", *same)
    assert "not a regular expression" in klog_refusal("mirror", *sides, "--topics", "(", code=2)
    assert "of a mirror" in klog_refusal("mirror", *sides, "--name", "a/b", code=2)
    assert "neither a file nor HOST:PORT" in klog_refusal("mirror", "--from", "nowhere", "--to", "127.0.0.1:1", code=2)
    file = tmp_path / "no.properties"
    file.write_text("acks=all\n")
    assert "does not set bootstrap.servers" in klog_refusal(
        "mirror", "--from", str(file), "--to", "127.0.0.1:1", code=2
    )
    file.write_text(f"bootstrap.servers={target.bootstrap_servers}\nacks=0\n")
    assert "acks=0" in klog_refusal(
        "mirror", "--from", cluster.bootstrap_servers, "--to", str(file), "--until-end", code=2
    )
    file.write_text(f"bootstrap.servers={target.bootstrap_servers}\ntransaction.timeout.ms=2000\n")
    late = ("--from", cluster.bootstrap_servers, "--to", str(file), "--exactly-once", "--commit-interval", "2")
    assert "--commit-interval 2 needs a transaction.timeout.ms" in klog_refusal("mirror", *late, "--name", "late")


@pytest.mark.test_all("mechanism")
def test_secure_sides(
    target: EmbeddedCluster, server_dir: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    certificates = make_certificates(tmp_path_factory.mktemp("certificates"))
    name = _name()
    with SecureBroker(server_dir, certificates) as secure:
        make_topic(secure.bootstrap_servers, name, 2)
        _send(secure.bootstrap_servers, name, [b"1", b"2"], 1)
        source = tmp_path / "source.properties"
        servers = f"bootstrap.servers={secure.servers('SASL_SSL')}\n"
        source.write_text(servers + secure.java("SASL_SSL", "SCRAM-SHA-512"))
        arguments = ("--from", str(source), "--to", target.bootstrap_servers, "--topics", name, "--until-end")
        done = klog("mirror", *arguments)
        assert (done.returncode, done.stdout.startswith("2 records of 2 partitions")) == (0, True), done
        back = ("--from", target.bootstrap_servers, "--to", str(source), "--topics", name, "--prefix", "back.")
        assert "idempotence" in klog_refusal("mirror", *back, "--until-end", "--exactly-once")
        source.write_text(source.read_text().replace("enable.idempotence=false\n", ""))
        done = klog("mirror", *back, "--until-end", "--exactly-once")
        assert done.returncode == 0, done.stderr
        assert read_topic(secure.bootstrap_servers, f"back.{name}", 2) == read_topic(target.bootstrap_servers, name, 2)
        source.write_text(
            servers + secure.java("SASL_SSL", "SCRAM-SHA-512").replace(PASSWORDS["alice"], "wrong-secret")
        )
        done = klog("--log-level", "DEBUG", "mirror", *arguments)
        assert done.returncode == 1
        assert "wrong-secret" not in done.stderr
