"""Every setting that Kafka's own clients have is taken with effect, taken without, or refused with a reason."""

from __future__ import annotations

import re
import subprocess

import pytest

from spark_klog.client.config import _LIBRDKAFKAS, client_config, without_effect
from spark_klog.errors import ConfigError
from tests.support.kafka import Version, kafka_libs

CLIENTS = ["consumer.ConsumerConfig", "producer.ProducerConfig"]
#: Refused: TLS and SASL, and what would do something else than was asked for.
REFUSED = {"transactional.id", "partitioner.class", "config.providers", "partitioner.ignore.keys"}
SERVERS = {"bootstrap.servers": "h:1"}


def _settings(version: Version, client: str) -> set[str]:
    """As Kafka's client lists them itself."""
    command = ["java", "-cp", f"{kafka_libs(version)}/*", f"org.apache.kafka.clients.{client}"]
    page = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    return {name for name in re.findall(r'id="([a-z0-9.]+)"', page) if "_" not in name}


@pytest.mark.peer
@pytest.mark.parametrize("version", ["3.9.1", "4.1.0"])
@pytest.mark.parametrize("client", CLIENTS)
def test_all_are_known(version: Version, client: str) -> None:
    names = _settings(version, client)
    assert len(names) > 50
    unknown, refused = [], set()
    for name in sorted(names - SERVERS.keys()):
        try:
            client_config(SERVERS | {name: "x"})
        except ConfigError as error:
            if "unknown client setting" in str(error):
                unknown.append(name)
            elif "not supported" in str(error):
                refused.add(name)
    assert unknown == []
    assert {name for name in refused if not name.startswith(("ssl.", "sasl.", "security."))} <= REFUSED


def test_names_of_librdkafka_are_told_by_kafkas() -> None:
    """All that kcat lists: none is called a misspelt name of Kafka's if it is librdkafka's for another."""
    page = subprocess.run(["kcat", "-X", "list"], capture_output=True, text=True, timeout=60, check=False).stdout
    names = set(re.findall(r"^([a-z][a-z0-9.]+) +\| ", page, re.MULTILINE))
    told = {}
    for name in names - SERVERS.keys():
        try:
            client_config(SERVERS | {name: "x"})
        except ConfigError as error:
            if found := re.search(r"it is librdkafka's, Kafka's name for it is ([a-z.]+)$", str(error)):
                told[name] = found[1]
    assert told["fetch.wait.max.ms"] == "fetch.max.wait.ms"
    assert told["message.timeout.ms"] == "delivery.timeout.ms"
    assert set(told) == _LIBRDKAFKAS.keys()
    with pytest.raises(ConfigError, match="remove it: only settings of Kafka's Java clients are known"):
        client_config(SERVERS | {"statistics.interval.ms": "1"})
    with pytest.raises(ConfigError, match=re.escape("did you mean bootstrap.servers?")):
        client_config(SERVERS | {"bootstrap.server": "h:1"})


@pytest.mark.parametrize(("text", "wanted"), [("True", True), (" FALSE", False)])
def test_truth_is_taken_in_any_case(text: str, wanted: bool) -> None:
    """As Kafka's ConfigDef does."""
    assert client_config(SERVERS | {"enable.idempotence": text}).enable_idempotence is wanted


def test_what_has_no_effect_is_listed() -> None:
    given = SERVERS | {"linger.ms": "5", "max.block.ms": "9", "request.timeout.ms": "7", "group.id": "g"}
    assert client_config(given).request_timeout_ms == 7
    assert without_effect(given) == ["linger.ms", "max.block.ms"]


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_what_would_do_something_else_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"setting {re.escape(name)}.* is not supported: "):
        client_config(SERVERS | {name: "true"})
    client_config(SERVERS | {"partitioner.ignore.keys": "false"})
