"""The page and commands with Apache Kafka over TLS and SCRAM: a user with all rights, and one who may read a topic."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from confluent_kafka import Consumer, Producer, TopicPartition
from selenium import webdriver
from selenium.webdriver.common.keys import Keys

from spark_klog.client import Admin
from spark_klog.client.admin.users import Acl
from tests.support.clients.klog import klog, klog_lines, klog_refusal
from tests.support.servers.certificates import Certificates, make_certificates
from tests.support.servers.kafka import HOST, NEWEST, Kafka, versions
from tests.support.servers.secure_kafka import JAAS, add_scram_users, tls_properties
from tests.ui.browser import Browser
from tests.ui.support import Page, serving

#: `make test` has commands by TLS and SASL with our broker (tests/cli/test_command_config.py), clients with Kafka.
pytestmark = [pytest.mark.peer, pytest.mark.test_all("again")]
PASSWORDS = {"alice": "alice's, secret=1", "reader": "reader-secret-2"}
AUTHORIZERS = {
    "3.9.1": "kafka.security.authorizer.AclAuthorizer",
    NEWEST: "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
}
CLICKS, OTHER, GROUP = "clicks", "other", "readers"
UNKNOWN = "\N{EN DASH}"


class SecureKafka(NamedTuple):
    """A broker of Apache Kafka with a SASL_SSL listener, and client settings for it."""

    kafka: Kafka
    certificates: Certificates
    folder: Path

    @property
    def servers(self) -> str:
        return f"{HOST}:{self.kafka.ports['SASL_SSL']}"

    def librdkafka(self) -> dict[str, str]:
        return {
            "bootstrap.servers": self.servers,
            "security.protocol": "SASL_SSL",
            "ssl.ca.location": str(self.certificates.ca),
            "sasl.mechanism": "SCRAM-SHA-512",
            "sasl.username": "alice",
            "sasl.password": PASSWORDS["alice"],
        }

    def options(self, user: str = "alice", password: str | None = None) -> tuple[str, ...]:
        """Options for a command, with a settings file as Kafka's own tools take it."""
        file = self.folder / f"{user}.properties"
        file.write_text(
            "security.protocol=SASL_SSL\nsasl.mechanism=SCRAM-SHA-512\nssl.truststore.type=PEM\n"
            f"ssl.truststore.location={self.certificates.ca}\n"
            f'sasl.jaas.config={JAAS}.scram.ScramLoginModule required username="{user}" '
            f'password="{password or PASSWORDS[user]}";\n'
        )
        return ("-b", self.servers, "--command-config", str(file))


def fill(secure: SecureKafka) -> None:
    with Admin({"bootstrap.servers": secure.kafka.bootstrap_servers}) as admin:
        for name in (CLICKS, OTHER):
            admin.create_topic(name, 3, replication_factor=1)
        rights = [Acl("topic", CLICKS, "User:reader", "read"), Acl("group", GROUP, "User:reader", "read")]
        admin.create_acls(rights).check()
    producer = Producer(secure.librdkafka())
    for number in range(100):
        value = json.dumps({"user": number % 7, "page": f"/products/{number}"})
        producer.produce(CLICKS, value, f"user-{number % 7}", number % 3, headers=[("trace", b"%d" % number)])
    assert producer.flush(30) == 0
    consumer = Consumer({**secure.librdkafka(), "group.id": GROUP})
    consumer.commit(offsets=[TopicPartition(CLICKS, part, 10 + part) for part in range(3)], asynchronous=False)
    consumer.close()


@pytest.fixture(scope="module", params=versions(NEWEST, "3.9.1"))
def secure(request: pytest.FixtureRequest, module_server_dir: Path) -> Iterator[SecureKafka]:
    folder = module_server_dir / request.param
    certificates = make_certificates(folder / "certificates")
    settings = {
        **tls_properties(certificates, folder),
        "sasl.enabled.mechanisms": "SCRAM-SHA-512",
        "listener.name.sasl_ssl.scram-sha-512.sasl.jaas.config": f"{JAAS}.scram.ScramLoginModule required;",
        "authorizer.class.name": AUTHORIZERS[request.param],
        "super.users": "User:ANONYMOUS;User:alice",  # ANONYMOUS is the user of connections without TLS
    }
    with Kafka(request.param, folder, settings, listeners={"SASL_SSL": "SASL_SSL"}) as kafka:
        add_scram_users(kafka, PASSWORDS)
        made = SecureKafka(kafka, certificates, folder)
        fill(made)
        yield made


@pytest.fixture(scope="module")
def page(secure: SecureKafka) -> Iterator[Page]:
    with serving(*secure.options()) as running:
        yield running


@pytest.fixture
def browser(chromium: webdriver.Chrome, page: Page) -> Iterator[Browser]:
    chromium.get_log("browser")
    made = Browser(chromium, page)
    yield made
    assert made.problems() == []
    chromium.get("about:blank")


def open_first(browser: Browser) -> str:
    """Open the first message; return the `klog consume` line that the page offers to copy."""
    browser.js("document.querySelector('#messages details').open = true")
    browser.wait(lambda: browser.text("#messages pre[aria-label='klog consume']"))
    return browser.text("#messages pre[aria-label='klog consume']")


def test_the_page(browser: Browser, secure: SecureKafka) -> None:
    browser.open("overview")
    assert secure.servers in browser.text("#main")  # the page shows the address of the listener that it uses
    rows = {row.split("\t")[0]: row.split("\t") for row in browser.text("#main table:has(a)").splitlines()}
    assert rows[CLICKS][1:3] == ["3", "100"]
    assert rows[CLICKS][4].endswith("B")
    browser.open("topic", CLICKS)
    assert "100 records" in browser.text("#rate")
    assert "retention.ms" in browser.text("#main")
    browser.open("messages", CLICKS)
    assert 20 <= browser.rows() <= 50
    browser.type("#search", "/products/42", Keys.ENTER)
    browser.wait(lambda: browser.text("#result").startswith("1 found in 100 records"))
    line = open_first(browser)
    spark = browser.text("#messages pre[aria-label=Spark]")
    assert secure.options()[3] in spark
    browser.open("groups")
    assert GROUP in browser.text("#main").replace("\t", "\n").splitlines()
    browser.open("group", GROUP)
    assert "67 records behind" in browser.text("#lag")

    command, *arguments = shlex.split(line)
    assert command == "klog"
    (record,) = klog_lines(*arguments)
    assert record["value"] == json.dumps({"user": 0, "page": "/products/42"})
    for view in ("session", "overview"):
        assert PASSWORDS["alice"] not in json.dumps(browser.page.get(view))


def test_the_page_of_a_user_who_may_read_one_topic(
    chromium: webdriver.Chrome, secure: SecureKafka, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {**secure.librdkafka(), "sasl.username": "reader", "sasl.password": "env:KLOG_TEST_PASSWORD"}
    file = tmp_path / "clusters.toml"
    file.write_text("[secure]\n" + "".join(f'{name} = "{text}"\n' for name, text in settings.items()))
    monkeypatch.setenv("KLOG_CONFIG", str(file))
    monkeypatch.setenv("KLOG_TEST_PASSWORD", PASSWORDS["reader"])
    with serving("--cluster", "secure") as page:
        browser = Browser(chromium, page)
        browser.open("overview")
        (row,) = [line.split("\t") for line in browser.text("#main table:has(a)").splitlines()[2:]]
        assert (row[0], row[2], row[4]) == (CLICKS, "100", UNKNOWN), "sizes are for those who may describe the cluster"
        assert f"1 topics, 3 partitions, {UNKNOWN}," in browser.text("#total")
        browser.open("topic", CLICKS)
        assert browser.text("#rate").startswith(f"100 records, {UNKNOWN},")
        assert "does not tell the settings" in browser.text("#main")
        assert "TOPIC_AUTHORIZATION_FAILED" in browser.text("#main")
        browser.open("messages", CLICKS)
        assert browser.rows() >= 20
        (record,) = klog_lines(*shlex.split(open_first(browser))[1:])
        assert record["topic"] == CLICKS
        assert '.option("cluster", "secure")' in browser.text("#messages pre[aria-label=Spark]")
        browser.open("group", GROUP)
        assert "67 records behind" in browser.text("#lag")
        assert browser.problems() == []
        browser.js("location.hash = arguments[0]", f"#/messages/{OTHER}")
        browser.wait(lambda: "TOPIC_AUTHORIZATION_FAILED" in browser.text("body"))
        chromium.get("about:blank")
        chromium.get_log("browser")  # drop the log of the rejected request
    refused = klog_refusal("ui", "--listen", "0", *secure.options("reader", "wrong-secret"))
    assert "refuses SCRAM-SHA-512" in refused
    assert "wrong-secret" not in refused


def test_commands(secure: SecureKafka) -> None:
    way = secure.options()
    assert {CLICKS, OTHER} <= {line["name"] for line in klog_lines("topics", "list", *way)}
    done = klog("topics", "create", "made", "--partitions", "2", *way)
    assert (done.returncode, done.stderr) == (0, "")
    (described,) = klog_lines("topics", "describe", "made", *way)
    assert [one["partition"] for one in described["partitions"]] == [0, 1]
    done = klog("produce", "made", "-p", "1", *way, stdin="one\ntwo\n")
    assert done.returncode == 0, done.stderr
    assert [line["value"] for line in klog_lines("consume", "made", "-p", "1", "--from", "earliest", "-e", *way)] == [
        "one",
        "two",
    ]
    assert GROUP in {line["group"] for line in klog_lines("groups", "list", *way)}
    (lag,) = klog_lines("groups", "lag", GROUP, *way)
    assert lag["stores"]["kafka"]["lag"] == 67
    store = f"kafka://{secure.servers}"
    shown = klog_lines("offsets", "show", "--group", GROUP, "--from", store, *way[2:])
    assert {(line["topic"], line["partition"]): line["offset"] for line in shown} == {
        (CLICKS, part): 10 + part for part in range(3)
    }
    (bench,) = klog_lines("bench", "-n", "1000", "--probes", "2", *way)
    assert bench["consume"]["recordsPerSecond"] > 0
    assert bench["latencyMs"]["delivered"]["probes"] == 2
    assert not [line for line in klog_lines("topics", "list", *way) if line["name"].startswith("klog-bench-")]
    checks = [json.loads(line) for line in klog("doctor", "--no-spark", "--json", *way).stdout.splitlines()]
    assert [(one["check"].split()[0], one["advice"]) for one in checks[-4:]] == [
        (name, "") for name in ("TCP", "TLS", "Kafka", "metadata")
    ]
    side = secure.folder / "side.properties"
    side.write_text(f"bootstrap.servers={secure.servers}\n" + Path(way[3]).read_text())
    done = klog(
        "mirror", "--from", str(side), "--to", str(side), "--topics", CLICKS, "--prefix", "copy.", "--until-end"
    )
    assert done.returncode == 0, done.stderr
    copied = klog_lines("consume", f"copy.{CLICKS}", "--from", "earliest", "-e", *way)
    found = klog_lines("consume", CLICKS, "--from", "earliest", "-e", *way)
    assert sorted((one["partition"], one["offset"], one["value"]) for one in copied) == sorted(
        (one["partition"], one["offset"], one["value"]) for one in found
    )


def test_commands_of_a_user_who_may_read_one_topic(secure: SecureKafka) -> None:
    way = secure.options("reader")
    assert {line["name"] for line in klog_lines("topics", "list", *way)} == {CLICKS}
    assert len(klog_lines("consume", CLICKS, "--from", "earliest", "-e", *way)) == 100
    (lag,) = klog_lines("groups", "lag", GROUP, *way)
    assert lag["stores"]["kafka"]["lag"] == 67
    for command in (("consume", OTHER, "-e"), ("topics", "describe", OTHER), ("topics", "create", "more")):
        assert "AUTHORIZATION_FAILED" in klog_refusal(*command, *way), command
    done = klog("produce", CLICKS, *way, stdin="x\n")
    assert done.returncode == 1
    assert "the user needs WRITE on a topic" in done.stderr
