"""Settings of groups of KIP-848 (resource type GROUP): by raw requests, after restarts, at all brokers, by Java."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from spark_klog.embedded import EmbeddedCluster
from spark_klog.errors import ErrorCode
from spark_klog.protocol import apis
from tests.support.brokers.raw_client import RawClient
from tests.support.servers.broker import KlogBroker
from tests.support.servers.java_tools import JavaTools
from tests.support.servers.kafka import NEWEST
from tests.support.waiting import wait_until

HEARTBEAT, SESSION = "consumer.heartbeat.interval.ms", "consumer.session.timeout.ms"
SET, DELETE, APPEND = 0, 1, 2


@pytest.fixture
def broker(server_dir: Path) -> Iterator[KlogBroker]:
    with KlogBroker(server_dir, "--set", "group.consumer.session.timeout.ms=30000") as running:
        yield running


def _alter(raw: RawClient, group: str, *changes: tuple[str, int, str | None], validate_only: bool = False) -> int:
    configs = [{"name": name, "config_operation": kind, "value": value} for name, kind, value in changes]
    resource = {"resource_type": 32, "resource_name": group, "configs": configs}
    answer = raw.request(apis.INCREMENTAL_ALTER_CONFIGS, 1, {"resources": [resource], "validate_only": validate_only})
    code: int = answer["responses"][0]["error_code"]
    return code


def _described(raw: RawClient, group: str) -> dict[str, tuple[str, int, list[str]]]:
    """Value, source and the names of synonyms by setting."""
    resource = {"resource_type": 32, "resource_name": group, "configuration_keys": None}
    answer = raw.request(apis.DESCRIBE_CONFIGS, 4, {"resources": [resource], "include_synonyms": True})
    (result,) = answer["results"]
    assert result["error_code"] == 0, result
    return {
        entry["name"]: (entry["value"], entry["config_source"], [each["name"] for each in entry["synonyms"]])
        for entry in result["configs"]
    }


def _beat(raw: RawClient, group: str, epoch: int = 0) -> dict[str, Any]:
    join = {"rebalance_timeout_ms": 1000, "subscribed_topic_names": ["t"], "topic_partitions": []}
    request = {"group_id": group, "member_id": "m", "member_epoch": epoch} | (join if epoch == 0 else {})
    answer = raw.request(apis.CONSUMER_GROUP_HEARTBEAT, 1, request)
    assert answer["error_code"] == 0, answer
    return answer


def _members(raw: RawClient, group: str) -> int:
    (described,) = raw.request(apis.CONSUMER_GROUP_DESCRIBE, 1, {"group_ids": [group]})["groups"]
    return len(described["members"])


def test_a_group_has_times_of_its_own(broker: KlogBroker) -> None:
    default = {
        HEARTBEAT: ("5000", 5, [f"group.{HEARTBEAT}"]),
        SESSION: ("30000", 4, [f"group.{SESSION}", f"group.{SESSION}"]),
    }
    with RawClient(broker.port) as raw:
        assert _described(raw, "g") == default
        assert _alter(raw, "g", (HEARTBEAT, SET, "200"), (SESSION, SET, "600")) == ErrorCode.NONE
        own = {
            HEARTBEAT: ("200", 8, [HEARTBEAT, f"group.{HEARTBEAT}"]),
            SESSION: ("600", 8, [SESSION, f"group.{SESSION}", f"group.{SESSION}"]),
        }
        assert _described(raw, "g") == own
        assert _described(raw, "other") == default
        joined = _beat(raw, "g")
        assert joined["heartbeat_interval_ms"] == 200
        wait_until(lambda: _members(raw, "g") == 0, "the member's end", seconds=30)  # the default is 45 s
    broker.kill()
    broker.start()
    with RawClient(broker.port) as raw:
        assert _described(raw, "g") == own
        listed = raw.request(apis.LIST_CONFIG_RESOURCES, 1, {"resource_types": [32]})["config_resources"]
        assert [entry["resource_name"] for entry in listed] == ["g"]
        assert _alter(raw, "g", (HEARTBEAT, DELETE, None), (SESSION, DELETE, None)) == ErrorCode.NONE
        assert _described(raw, "g") == default
        assert raw.request(apis.LIST_CONFIG_RESOURCES, 1, {"resource_types": [32]})["config_resources"] == []


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ([("consumer.max.size", SET, "1")], ErrorCode.INVALID_CONFIG),
        ([(SESSION, SET, "soon")], ErrorCode.INVALID_CONFIG),
        ([(SESSION, SET, "0")], ErrorCode.INVALID_CONFIG),
        ([(SESSION, SET, str(2**31))], ErrorCode.INVALID_CONFIG),
        ([(HEARTBEAT, SET, "5000"), (SESSION, SET, "5000")], ErrorCode.INVALID_CONFIG),
        ([(SESSION, APPEND, "6000")], ErrorCode.INVALID_CONFIG),
        ([(SESSION, SET, None)], ErrorCode.INVALID_REQUEST),
        ([(SESSION, SET, "6000"), (SESSION, SET, "7000")], ErrorCode.INVALID_REQUEST),
    ],
)
def test_settings_that_are_refused(raw: RawClient, changes: list[tuple[str, int, str | None]], code: ErrorCode) -> None:
    before = _described(raw, "refused")
    assert _alter(raw, "refused", *changes) == code
    assert _alter(raw, "refused", (SESSION, SET, "9000"), validate_only=True) == ErrorCode.NONE
    assert _described(raw, "refused") == before
    assert _alter(raw, "", (SESSION, SET, "9000")) == ErrorCode.INVALID_REQUEST


@pytest.fixture(scope="module")
def cluster(module_server_dir: Path) -> Iterator[EmbeddedCluster]:
    with EmbeddedCluster(2, data_dir=module_server_dir / "cluster") as running:
        yield running


@pytest.fixture
def raw(cluster: EmbeddedCluster) -> Iterator[RawClient]:
    with RawClient(int(cluster.bootstrap_servers.split(",")[0].rpartition(":")[2])) as connected:
        yield connected


def test_all_brokers_know(cluster: EmbeddedCluster, raw: RawClient) -> None:
    assert _alter(raw, "g/ü", (SESSION, SET, "9000")) == ErrorCode.NONE
    with RawClient(int(cluster.bootstrap_servers.split(",")[1].rpartition(":")[2])) as other:
        wait_until(lambda: _described(other, "g/ü")[SESSION][0] == "9000", "the setting at the other broker")
        assert _alter(other, "h", (SESSION, SET, "8000")) == ErrorCode.NONE
        wait_until(lambda: _described(raw, "h")[SESSION][0] == "8000", "the setting of the other broker")
        assert _described(raw, "g/ü")[SESSION][0] == "9000"


@pytest.mark.test_all("client")
@pytest.mark.peer
def test_kafkas_tool_sets_and_shows_them(cluster: EmbeddedCluster) -> None:
    with JavaTools(NEWEST) as tools:

        def tool(*arguments: str) -> str:
            way = ("--bootstrap-server", cluster.bootstrap_servers, "--entity-type", "groups")
            return tools.run("kafka.admin.ConfigCommand", *way, *arguments)[1]

        tool("--entity-name", "by-tool", "--alter", "--add-config", f"{SESSION}=50000,{HEARTBEAT}=4000")
        told = ("--entity-name", "by-tool", "--describe")
        wait_until(lambda: f"{SESSION}=50000" in tool(*told), "the settings", 60)
        assert f"{HEARTBEAT}=4000" in tool(*told)
        assert "by-tool" in tool("--describe")
        refused = tool("--entity-name", "by-tool", "--alter", "--add-config", f"{SESSION}=1")
        assert "InvalidConfigurationException" in refused
        tool("--entity-name", "by-tool", "--alter", "--delete-config", f"{SESSION},{HEARTBEAT}")
        wait_until(lambda: f"{SESSION}=50000" not in tool(*told), "their end", 60)
