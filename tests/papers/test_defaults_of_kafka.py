"""The client knows every setting of Kafka's clients; defaults are those of Kafka 3.9.1, except those in `OTHERS`.

`tests/support/servers/kafka_defaults.py` makes the file with Kafka's defaults.
"""

from __future__ import annotations

import json
import re
import subprocess
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from spark_klog.client.admin.calls import admin_config
from spark_klog.client.consumer.settings import RESET, ConsumerConfig, consumer_config
from spark_klog.client.settings import LIBRDKAFKAS, ClientConfig, client_config
from spark_klog.errors import ConfigError
from tests.support.clients.tools import kcat_path
from tests.support.servers import kafka_defaults
from tests.support.servers.kafka import NEWEST, Version

SERVERS = {"bootstrap.servers": "h:1"}
THEIRS: dict[str, dict[str, list[str]]] = json.loads(
    (Path(__file__).parents[1] / "data" / "kafka-3.9.1" / "client-settings.json").read_text()
)
#: Rejected, as the client would do something else than the setting asks for.
REFUSED = {"config.providers"}
#: Settings whose default differs from Kafka's, by client, with our default and the reason.
OTHERS = {
    "consumer": {
        "client.id": ("spark_klog", "brokers' logs and quotas name the client"),
        "allow.auto.create.topics": ("False", "a misspelt topic is an error, as in librdkafka"),
    },
    "producer": {
        "client.id": ("spark_klog", "brokers' logs and quotas name the client"),
        "batch.size": ("262144", "batches come from columns, and compress better"),
        "linger.ms": ("5", "Kafka's own default since 4.0"),
    },
    "admin": {"client.id": ("spark_klog", "brokers' logs and quotas name the client")},
}
_ASSIGNORS = {"RangeAssignor": "range", "CooperativeStickyAssignor": "cooperative-sticky"}


def _ours(client: str) -> dict[str, Any]:
    """Our defaults of the settings that this client parses."""
    if client == "consumer":
        config = consumer_config(SERVERS)
        own = {item.metadata["name"]: getattr(config, item.name) for item in fields(ConsumerConfig) if item.metadata}
        return _shared(config.client) | own
    if client == "producer":
        return _shared(client_config(SERVERS))
    config, timeout = admin_config(SERVERS)
    return _shared(config) | {"default.api.timeout.ms": timeout}


def _shared(config: ClientConfig) -> dict[str, Any]:
    return {item.metadata["name"]: getattr(config, item.name) for item in fields(ClientConfig) if item.metadata}


def _plain(name: str, text: str) -> Any:
    """Kafka's default as the type that our settings have."""
    if name == "partition.assignment.strategy":
        return tuple(_ASSIGNORS[part.rpartition(".")[2]] for part in text.replace("class ", "").split(","))
    if name == "auto.offset.reset":
        return RESET.parse(text)
    if name == "acks":
        return -1 if text == "all" else int(text)
    if name == "isolation.level":
        return int(text == "read_committed")
    if text in ("true", "false"):
        return text == "true"
    return int(text) if text.lstrip("-").isdecimal() else text


#: Kafka's defaults for which our default is None, with the same meaning.
SAME = {
    ("producer", "enable.idempotence"): True,  # None: acks and retries decide
    ("producer", "compression.gzip.level"): -1,
    ("producer", "compression.lz4.level"): 9,  # of Java's LZ4, which has other levels
    ("producer", "compression.zstd.level"): 3,
}


@pytest.mark.parametrize("client", ["consumer", "producer", "admin"])
def test_defaults(client: str) -> None:
    theirs, ours = THEIRS[client], _ours(client)
    compared, different = [], {}
    for name, (_, text) in theirs.items():
        if name not in ours or name in SERVERS:
            continue
        compared.append(name)
        mine, wanted = ours[name], _plain(name, text)
        if mine is None and wanted in ("", SAME.get((client, name), "")):
            continue
        if mine != wanted:
            different[name] = str(mine)
    assert different == {name: mine for name, (mine, _) in OTHERS[client].items()}
    assert len(compared) > {"consumer": 20, "producer": 20, "admin": 7}[client], compared


def _refusal(name: str) -> str:
    try:
        client_config(SERVERS | {name: "x"})
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("client", ["consumer", "producer", "admin"])
def test_every_setting_is_known_or_refused_by_name(client: str) -> None:
    said = [_refusal(name) for name in THEIRS[client].keys() - SERVERS.keys()]
    assert [text for text in said if "unknown client setting" in text] == []


@pytest.mark.peer
@pytest.mark.parametrize("version", ["3.9.1", NEWEST])
@pytest.mark.parametrize("client", ["consumer", "producer"])
def test_all_are_known(version: Version, client: str) -> None:
    names = kafka_defaults.settings(version, client).keys()
    assert len(names) > 50
    unknown, refused = [], set()
    for name in sorted(names - SERVERS.keys()):
        said = _refusal(name)
        if "unknown client setting" in said:
            unknown.append(name)
        elif "not supported" in said:
            refused.add(name)
    assert unknown == []
    assert {name for name in refused if not name.startswith(("ssl.", "sasl.", "security."))} <= REFUSED


def test_names_of_librdkafka_are_told_by_kafkas() -> None:
    """Of all names that kcat lists, those with another name in Kafka are reported as such, not as misspelt."""
    page = subprocess.run([kcat_path(), "-X", "list"], capture_output=True, text=True, timeout=60, check=False).stdout
    names = set(re.findall(r"^([a-z][a-z0-9.]+) +\| ", page, re.MULTILINE))
    told = {}
    for name in names - SERVERS.keys():
        if found := re.search(r"it is librdkafka's, Kafka's name for it is ([a-z.]+)$", _refusal(name)):
            told[name] = found[1]
    assert set(told) == LIBRDKAFKAS.keys()


@pytest.mark.peer
def test_the_file_is_kafkas() -> None:
    made = {client: kafka_defaults.settings("3.9.1", client) for client in kafka_defaults.CLIENTS}
    assert json.loads(json.dumps(made)) == THEIRS
