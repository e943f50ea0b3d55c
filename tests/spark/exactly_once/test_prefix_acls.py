"""The ACLs of docs/recipes/exactly-once.md suffice at Kafka, and only for their prefix of transactional ids."""

from __future__ import annotations

from pathlib import Path

import pytest

from spark_klog.client.admin.admin import Admin
from spark_klog.client.admin.users import Acl, AclFilter
from spark_klog.client.producer.producer import Producer
from spark_klog.errors import ProtocolError
from spark_klog.spark.write.decisions.decision_place import decision_place
from spark_klog.spark.write.exactly_once import Transaction
from spark_klog.spark.write.exactly_once_driver import Claimed, claim, decide
from tests.support.clients.transactional.readers import by_confluent
from tests.support.servers.kafka import HOST, NEWEST, Kafka
from tests.support.waiting import wait_until

TOPIC = "t"
PROPERTIES = {
    "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
    "super.users": "User:ANONYMOUS",
    "sasl.enabled.mechanisms": "PLAIN",
    "listener.name.sasl_plaintext.plain.sasl.jaas.config": (
        'org.apache.kafka.common.security.plain.PlainLoginModule required user_writer="secret";'
    ),
}


@pytest.mark.peer
@pytest.mark.test_all("mechanism")
def test_rules_by_prefix(module_server_dir: Path) -> None:
    listeners = {"SASL_PLAINTEXT": "SASL_PLAINTEXT"}
    with Kafka(NEWEST, module_server_dir / "acls", PROPERTIES, listeners=listeners) as kafka:
        settings = {
            "bootstrap.servers": f"{HOST}:{kafka.ports['SASL_PLAINTEXT']}",
            "security.protocol": "SASL_PLAINTEXT",
            "sasl.mechanism": "PLAIN",
            "sasl.username": "writer",
            "sasl.password": "secret",
        }

        def task(claimed: Claimed, value: bytes) -> Transaction:
            with Producer({**settings, "transactional.id": f"{claimed.identity.id_prefix}{value.decode()}"}) as made:
                made.init_transactions()
                made.begin_transaction()
                made.send(TOPIC, value)
                found = made.prepare_transaction()
            assert found is not None
            return Transaction(found.transactional_id, found.producer_id, found.epoch, 0)

        with Admin({"bootstrap.servers": kafka.bootstrap_servers}) as admin:
            admin.create_topic(TOPIC, 1)
            rules = [("topic", TOPIC, "write", "literal")]
            rules += [("transactional-id", "team-a.", operation, "prefixed") for operation in ("write", "describe")]
            acls = {Acl(what, name, "User:writer", may, how) for what, name, may, how in rules}
            admin.create_acls(acls).check()
            wait_until(lambda: set(admin.describe_acls(AclFilter(principal="User:writer"))) == acls, seconds=30)
            place = decision_place("s3a://bucket/a", None)
            with pytest.raises(
                ProtocolError, match=r"TOPIC_AUTHORIZATION_FAILED.*allow Read, Write and Describe on"
            ) as at:
                claim(settings, place, "team-a.")
            assert "klog topics create __klog_decisions --partitions 1 --replication-factor 3 --config" in str(at.value)
            may = ("create", "read", "write", "describe")
            acls |= {Acl("topic", place.topic, "User:writer", operation, "literal") for operation in may}
            admin.create_acls(acls).check()
            wait_until(lambda: set(admin.describe_acls(AclFilter(principal="User:writer"))) == acls, seconds=30)
            lost = task(claim(settings, place, "team-a."), b"lost")
            claimed = claim(settings, place, "team-a.")
            state = admin.describe_transactions([lost.transactional_id]).check()[lost.transactional_id].state
            assert state in ("PrepareAbort", "CompleteAbort")
            decide(settings, claimed, 0, [task(claimed, b"a"), task(claimed, b"b")])
            other = decision_place("s3a://bucket/other", None)
            with pytest.raises(ProtocolError, match=r"id team-b\..*: TRANSACTIONAL_ID_AUTHORIZATION_FAILED"):
                task(claim(settings, other, "team-b."), b"c")
        claimed = claim(settings, place, "team-a.")
        decide(settings, claimed, 1, [task(claimed, b"end")])
        wait_until(lambda: "end" in by_confluent(kafka.bootstrap_servers, TOPIC, 0), seconds=30)
        assert sorted(by_confluent(kafka.bootstrap_servers, TOPIC, 0)) == ["a", "b", "end"]
