"""Offsets in a transaction at a broker before Kafka 2.5, whose TxnOffsetCommit has no member (KIP-447)."""

from __future__ import annotations

import pytest

from spark_klog.client.offsets import GroupMetadata
from spark_klog.client.producer.producer import Producer
from spark_klog.errors import UnsupportedVersionError
from tests.support.brokers.kafka_python_wire import Message
from tests.support.brokers.scripted_broker import ScriptedCluster

pytestmark = pytest.mark.usefixtures("driver")


class _Transactional(ScriptedCluster):
    """Accepts each offset and each end of a transaction."""

    def _on_AddOffsetsToTxn(self, node: int, asked: Message, is_applied: bool) -> Message:
        return {"error_code": 0}

    def _on_TxnOffsetCommit(self, node: int, asked: Message, is_applied: bool) -> Message:
        topics = [
            {
                "name": topic["name"],
                "partitions": [
                    {"partition_index": item["partition_index"], "error_code": 0} for item in topic["partitions"]
                ],
            }
            for topic in asked["topics"]
        ]
        return {"topics": topics}

    def _on_EndTxn(self, node: int, asked: Message, is_applied: bool) -> Message:
        return {"error_code": 0}


@pytest.mark.parametrize(
    "member", [GroupMetadata("g", 3, "m-1"), GroupMetadata("g", instance="i")], ids=["dynamic", "static"]
)
def test_a_member_needs_kafka_2_5(member: GroupMetadata) -> None:
    with (
        _Transactional({"t": 1}, versions={"TxnOffsetCommit": (0, 2)}) as brokers,
        Producer({"bootstrap.servers": brokers.bootstrap_servers, "transactional.id": "x"}) as producer,
    ):
        producer.init_transactions()
        producer.begin_transaction()
        with pytest.raises(UnsupportedVersionError, match=r"coordinator of group g is older than Kafka 2\.5"):
            producer.send_offsets_to_transaction({("t", 0): 5}, member)
        assert brokers.count("AddOffsetsToTxn") == brokers.count("TxnOffsetCommit") == 0
        # the transaction is still open
        producer.send_offsets_to_transaction({("t", 0): 5}, "g")
        producer.commit_transaction()
        assert [asked.version for asked in brokers.asked if asked.name == "TxnOffsetCommit"] == [2]
        assert brokers.count("EndTxn") == 1


def test_a_member_at_kafka_2_5() -> None:
    with (
        _Transactional({"t": 1}, versions={"TxnOffsetCommit": (0, 3)}) as brokers,
        Producer({"bootstrap.servers": brokers.bootstrap_servers, "transactional.id": "x"}) as producer,
    ):
        producer.init_transactions()
        producer.begin_transaction()
        producer.send_offsets_to_transaction({("t", 0): 5}, GroupMetadata("g", 3, "m-1", "i"))
        producer.commit_transaction()
        (asked,) = (asked.message for asked in brokers.asked if asked.name == "TxnOffsetCommit")
        assert (asked["generation_id"], asked["member_id"], asked["group_instance_id"]) == (3, "m-1", "i")
