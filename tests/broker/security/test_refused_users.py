"""Each API and version answers a user who is no admin with Kafka's error for the resource; the connection stays open.

The codes are those of Kafka's KafkaApis and ControllerApis.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from spark_klog.broker.handlers import HANDLERS
from spark_klog.errors import ErrorCode
from spark_klog.protocol import apis
from spark_klog.protocol.apis import BY_KEY
from spark_klog.protocol.schema import Api
from tests.support.brokers.raw_client import RawClient, error_codes
from tests.support.servers.broker import KlogBroker

TOPIC = ErrorCode.TOPIC_AUTHORIZATION_FAILED
GROUP = ErrorCode.GROUP_AUTHORIZATION_FAILED
CLUSTER = ErrorCode.CLUSTER_AUTHORIZATION_FAILED
TRANSACTIONAL_ID = ErrorCode.TRANSACTIONAL_ID_AUTHORIZATION_FAILED

_PARTITIONS = [{"name": "t", "partitions": [{"partition_index": 0}]}]
_RESOURCE = {"resource_name": "0", "configs": [{"name": "retention.ms", "value": "1"}]}
_ACL = {"resource_name": "t", "principal": "User:x", "host": "*", "operation": 3, "permission_type": 3}
_FILTER = {"resource_type_filter": 1, "pattern_type_filter": 1, "operation": 1, "permission_type": 1}
_USER = {"name": "x", "mechanism": 1, "iterations": 4096, "salt": b"s", "salted_password": b"p"}

_JOINS = {"group_id": "g", "member_id": "m", "rebalance_timeout_ms": 1000, "topic_partitions": []}

Row = tuple[Api, dict[str, Any], ErrorCode]
REFUSED: list[Row] = [
    (apis.CREATE_TOPICS, {"topics": [{"name": "new", "num_partitions": 1, "replication_factor": 1}]}, TOPIC),
    (apis.DELETE_TOPICS, {"topic_names": ["t"], "topics": [{"name": "t"}]}, TOPIC),
    (apis.CREATE_PARTITIONS, {"topics": [{"name": "t", "count": 2}]}, TOPIC),
    (apis.DELETE_RECORDS, {"topics": _PARTITIONS}, TOPIC),
    (apis.DESCRIBE_PRODUCERS, {"topics": [{"name": "t", "partition_indexes": [0]}]}, TOPIC),
    (apis.DESCRIBE_CONFIGS, {"resources": [{"resource_type": 2, "resource_name": "t"}]}, TOPIC),
    (apis.DESCRIBE_CONFIGS, {"resources": [{"resource_type": 4, "resource_name": "0"}]}, CLUSTER),
    (apis.ALTER_CONFIGS, {"resources": [{"resource_type": 2} | _RESOURCE]}, TOPIC),
    (apis.ALTER_CONFIGS, {"resources": [{"resource_type": 4} | _RESOURCE]}, CLUSTER),
    (apis.INCREMENTAL_ALTER_CONFIGS, {"resources": [{"resource_type": 2} | _RESOURCE]}, TOPIC),
    (apis.INCREMENTAL_ALTER_CONFIGS, {"resources": [{"resource_type": 4} | _RESOURCE]}, CLUSTER),
    (apis.INCREMENTAL_ALTER_CONFIGS, {"resources": [{"resource_type": 8} | _RESOURCE]}, CLUSTER),
    (apis.INCREMENTAL_ALTER_CONFIGS, {"resources": [{"resource_type": 32} | _RESOURCE]}, GROUP),
    (apis.LIST_CONFIG_RESOURCES, {}, CLUSTER),
    (apis.CONSUMER_GROUP_HEARTBEAT, _JOINS | {"member_epoch": 0, "subscribed_topic_names": ["t"]}, TOPIC),
    (apis.DELETE_GROUPS, {"groups_names": ["g"]}, GROUP),
    (apis.OFFSET_DELETE, {"group_id": "g", "topics": _PARTITIONS}, GROUP),
    (apis.DESCRIBE_TRANSACTIONS, {"transactional_ids": ["x"]}, TRANSACTIONAL_ID),
    (
        apis.WRITE_TXN_MARKERS,
        {"markers": [{"producer_id": 1, "topics": [{"name": "t", "partition_indexes": [0]}]}]},
        CLUSTER,
    ),
    (apis.DESCRIBE_LOG_DIRS, {"topics": None}, CLUSTER),
    (apis.ALTER_REPLICA_LOG_DIRS, {"dirs": [{"path": "/x", "topics": [{"name": "t", "partitions": [0]}]}]}, CLUSTER),
    (apis.ELECT_LEADERS, {"topic_partitions": [{"topic": "t", "partitions": [0]}]}, CLUSTER),
    (apis.ALTER_PARTITION_REASSIGNMENTS, {"topics": _PARTITIONS}, CLUSTER),
    (apis.LIST_PARTITION_REASSIGNMENTS, {"topics": None}, CLUSTER),
    (apis.DESCRIBE_CLIENT_QUOTAS, {}, CLUSTER),
    (
        apis.ALTER_CLIENT_QUOTAS,
        {"entries": [{"entity": [{"entity_type": "user", "entity_name": "x"}], "ops": []}]},
        CLUSTER,
    ),
    (apis.DESCRIBE_USER_SCRAM_CREDENTIALS, {"users": None}, CLUSTER),
    (apis.ALTER_USER_SCRAM_CREDENTIALS, {"deletions": [], "upsertions": [_USER]}, CLUSTER),
    (apis.DESCRIBE_ACLS, _FILTER, CLUSTER),
    (apis.CREATE_ACLS, {"creations": [{"resource_type": 2} | _ACL]}, CLUSTER),
    (apis.DELETE_ACLS, {"filters": [_FILTER]}, CLUSTER),
]
#: Versions without an error field: they leave out what the user may not see (DescribeLogDirs has the field from 3 on).
LEFT_OUT = {apis.LIST_TRANSACTIONS.key: range(2), apis.DESCRIBE_LOG_DIRS.key: range(3)}
#: APIs that need no admin: rules for topics are tested in test_security_rules.py; groups and producers have no rules.
EVERYBODY = {
    apis.PRODUCE.key,
    apis.FETCH.key,
    apis.LIST_OFFSETS.key,
    apis.METADATA.key,
    apis.OFFSET_COMMIT.key,
    apis.OFFSET_FETCH.key,
    apis.FIND_COORDINATOR.key,
    apis.JOIN_GROUP.key,
    apis.HEARTBEAT.key,
    apis.LEAVE_GROUP.key,
    apis.SYNC_GROUP.key,
    apis.DESCRIBE_GROUPS.key,
    apis.CONSUMER_GROUP_DESCRIBE.key,
    apis.LIST_GROUPS.key,
    apis.SASL_HANDSHAKE.key,
    apis.SASL_AUTHENTICATE.key,
    apis.API_VERSIONS.key,
    apis.INIT_PRODUCER_ID.key,
    apis.OFFSET_FOR_LEADER_EPOCH.key,
    apis.ADD_PARTITIONS_TO_TXN.key,
    apis.ADD_OFFSETS_TO_TXN.key,
    apis.END_TXN.key,
    apis.TXN_OFFSET_COMMIT.key,
    apis.DESCRIBE_CLUSTER.key,
    apis.DESCRIBE_TOPIC_PARTITIONS.key,
}


@pytest.fixture(scope="module")
def broker(module_server_dir: Path) -> Iterator[KlogBroker]:
    """A broker on which ANONYMOUS may do nothing."""
    users = module_server_dir / "users"
    users.write_text("[user alice]\nadmin = true\n")
    users.chmod(0o600)
    with KlogBroker(module_server_dir, "--set", f"klog.users.file={users}") as broker:
        yield broker


@pytest.fixture
def client(broker: KlogBroker) -> Iterator[RawClient]:
    with RawClient(broker.port) as client:
        yield client


@pytest.mark.parametrize(("api", "message", "code"), REFUSED, ids=lambda value: getattr(value, "name", None))
def test_who_is_no_admin_is_answered_as_by_kafka(
    client: RawClient, api: Api, message: dict[str, Any], code: ErrorCode
) -> None:
    for version in range(api.versions.first, api.versions.last + 1):
        answer = client.request(api, version, message)
        if version in LEFT_OUT.get(api.key, ()):
            assert answer["results"] == []
        else:
            assert set(error_codes(answer)) - {ErrorCode.NONE} == {code}, version


@pytest.mark.parametrize("version", LEFT_OUT[apis.LIST_TRANSACTIONS.key])
def test_transactions_are_left_out(client: RawClient, version: int) -> None:
    answer = client.request(apis.LIST_TRANSACTIONS, version, {"duration_filter": -1})
    assert (answer["error_code"], answer["transaction_states"]) == (ErrorCode.NONE, [])


def test_the_table_has_all_apis() -> None:
    assert HANDLERS.keys() == BY_KEY.keys()
    assert {api.key for api, _, _ in REFUSED} | EVERYBODY | LEFT_OUT.keys() == HANDLERS.keys()
