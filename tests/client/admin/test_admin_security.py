"""The admin client's calls for users and ACLs, at our broker by SASL_SSL and at Kafka's, checked by confluent-kafka."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from confluent_kafka.admin import (
    AclBindingFilter,
    AclOperation,
    AclPermissionType,
    AdminClient,
    ResourcePatternType,
    ResourceType,
)

from spark_klog.client import Admin
from spark_klog.client.admin.users import Acl, AclFilter, ScramCredential, ScramDeletion
from spark_klog.errors import ConfigError, ErrorCode, ProtocolError, SaslError, UnsupportedVersionError
from tests.support.clients.admins import error_code
from tests.support.clients.consumers import SECONDS, Server, running
from tests.support.servers.certificates import make_certificates
from tests.support.servers.kafka import NEWEST, versions
from tests.support.servers.secure_broker import SecureBroker
from tests.support.servers.shared_kafka import SharedKafkas
from tests.support.waiting import wait_until

#: Clients without authentication may do everything.
_SUPER_USERS = {"super.users": "User:ANONYMOUS"}
_AUTHORIZERS = {
    "3.9.1": "kafka.security.authorizer.AclAuthorizer",
    NEWEST: "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
}
#: They need a Kafka of their own.
_KAFKAS = [
    pytest.param(name, marks=[pytest.mark.peer, pytest.mark.test_all("version")])
    for name in versions(NEWEST, "0.10.2.2", "3.9.1")
]


@pytest.fixture(scope="module", params=["klog", *_KAFKAS])
def server(request: pytest.FixtureRequest, module_server_dir: Path, shared_kafkas: SharedKafkas) -> Iterator[Server]:
    name = request.param
    if name in _AUTHORIZERS:
        settings = _SUPER_USERS | {"authorizer.class.name": _AUTHORIZERS[name]}
        yield Server(shared_kafkas.get(name, settings).bootstrap_servers, name)
        return
    with running(name, module_server_dir / name, shared_kafkas) as there:
        yield there


@pytest.fixture(scope="module")
def secure(module_server_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecureBroker]:
    certificates = make_certificates(tmp_path_factory.mktemp("certificates"))
    broker = SecureBroker(module_server_dir / "secure", certificates)
    broker.users.write_text(broker.users.read_text().replace("[user alice]", "[user alice]\nadmin = true"))
    with broker:
        yield broker


def test_a_secure_broker(secure: SecureBroker) -> None:
    settings = secure.client("SASL_SSL", "SCRAM-SHA-256")
    with Admin(settings) as admin:
        assert admin.create_topic("secured", 2).partitions == 2
        admin.alter_scram_credentials([ScramCredential("carol", "SCRAM-SHA-512", "carol's secret")]).check()
        assert admin.describe_scram_credentials().check()["carol"] == {"SCRAM-SHA-512": 4096}
        acl = Acl("topic", "secured", "User:carol", "read")
        admin.create_acls([acl]).check()
        assert admin.describe_acls(AclFilter(principal="User:carol")) == [acl]
        carol = settings | {"sasl.mechanism": "SCRAM-SHA-512", "sasl.username": "carol"}
        with Admin(carol | {"sasl.password": "carol's secret"}) as hers:
            assert [topic.name for topic in hers.list_topics()] == ["secured"]
            refused = hers.delete_topics(["secured"])
            assert error_code(refused["secured"]) == ErrorCode.TOPIC_AUTHORIZATION_FAILED
        with pytest.raises(SaslError):
            Admin(carol | {"sasl.password": "wrong"})
        assert admin.delete_acls([AclFilter("topic", "secured")]).check() == {AclFilter("topic", "secured"): [acl]}
        admin.alter_scram_credentials([ScramDeletion("carol", "SCRAM-SHA-512")]).check()
        gone = admin.describe_scram_credentials(["carol", "alice"])
        assert error_code(gone["carol"]) == ErrorCode.RESOURCE_NOT_FOUND
        assert set(gone.successes["alice"]) == {"SCRAM-SHA-256", "SCRAM-SHA-512"}


def test_credentials(server: Server, admin: Admin, theirs: AdminClient) -> None:
    if server.version is None:
        return  # covered by test_a_secure_broker
    if server.is_old:
        with pytest.raises(UnsupportedVersionError, match=r"DescribeUserScramCredentials.*Kafka 2\.7"):
            admin.describe_scram_credentials()
        return
    changes = [ScramCredential("dora", "SCRAM-SHA-256", "secret-1"), ScramCredential("eve", "SCRAM-SHA-512", "s", 5000)]
    missing = ScramDeletion("nobody", "SCRAM-SHA-256")
    outcomes = admin.alter_scram_credentials([*changes, missing])
    assert (outcomes["dora"], outcomes["eve"]) == (None, None)
    assert error_code(outcomes["nobody"]) == ErrorCode.RESOURCE_NOT_FOUND
    wait_until(lambda: set(admin.describe_scram_credentials()) == {"dora", "eve"}, seconds=30)
    assert admin.describe_scram_credentials().check() == {
        "dora": {"SCRAM-SHA-256": 4096},
        "eve": {"SCRAM-SHA-512": 5000},
    }
    (future,) = theirs.describe_user_scram_credentials(["eve"]).values()
    (seen,) = future.result(SECONDS).scram_credential_infos
    assert (seen.iterations, seen.mechanism.name) == (5000, "SCRAM_SHA_512")


def test_acls(server: Server, admin: Admin, theirs: AdminClient) -> None:
    if server.is_old:
        with pytest.raises(UnsupportedVersionError, match=r"DescribeAcls.*Kafka 0\.11"):
            admin.describe_acls()
        return
    if server.version is None:
        with pytest.raises(ProtocolError, match="SECURITY_DISABLED"):
            admin.describe_acls()
        return
    read = Acl("topic", "a", "User:bob", "read")
    deny = Acl("group", "g-", "User:bob", "all", "prefixed", "deny", "127.0.0.1")
    assert admin.create_acls([read, deny]).check() == {read: None, deny: None}
    mine = AclFilter(principal="User:bob")
    wait_until(lambda: set(admin.describe_acls(mine)) == {read, deny}, seconds=30)
    their_filter = AclBindingFilter(
        *(ResourceType.ANY, None, ResourcePatternType.ANY, "User:bob", None, AclOperation.ANY, AclPermissionType.ANY)
    )
    seen = theirs.describe_acls(their_filter).result(SECONDS)
    assert {(one.name, one.operation, one.permission_type) for one in seen} == {
        ("a", AclOperation.READ, AclPermissionType.ALLOW),
        ("g-", AclOperation.ALL, AclPermissionType.DENY),
    }
    assert admin.describe_acls(AclFilter("group", "g-7", pattern="match")) == [deny]
    nothing, topics = AclFilter("user"), AclFilter("topic", principal="User:bob")
    assert admin.delete_acls([nothing, topics]).check() == {nothing: [], topics: [read]}
    wait_until(lambda: admin.describe_acls(mine) == [deny], seconds=30)


def test_arguments_that_are_refused(admin: Admin) -> None:
    assert "secret" not in repr(ScramCredential("u", "SCRAM-SHA-256", "secret"))
    with pytest.raises(ConfigError, match="iterations of u is 1: set 4096 to 16384"):
        ScramCredential("u", "SCRAM-SHA-256", "secret", 1)
    with pytest.raises(ConfigError, match="mechanism 'PLAIN' of u: set SCRAM-SHA-256 or SCRAM-SHA-512"):
        ScramDeletion("u", "PLAIN")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="operation 'any' of an ACL: set one of all, read"):
        admin.create_acls([Acl("topic", "t", "User:u", "any")])
    with pytest.raises(TypeError, match="each of acls must be an Acl, not str"):
        admin.create_acls(["t"])  # type: ignore[list-item]
    with pytest.raises(ConfigError, match="resource 'topics' of an ACL: set one of any, topic"):
        admin.describe_acls(AclFilter("topics"))
