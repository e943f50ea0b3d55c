"""Users' credentials and rules over the wire: compared with Apache Kafka, and their effect on the users file."""

from __future__ import annotations

import hashlib
import re
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import kafka.admin as kafka_python
import pytest
from confluent_kafka import KafkaException
from confluent_kafka.admin import (
    AclBinding,
    AclBindingFilter,
    AclOperation,
    AclPermissionType,
    AdminClient,
    ConfigResource,
    ResourcePatternType,
    ResourceType,
    ScramCredentialInfo,
    ScramMechanism,
    UserScramCredentialAlteration,
    UserScramCredentialDeletion,
    UserScramCredentialUpsertion,
)
from confluent_kafka.cimpl import NewTopic

from spark_klog.broker.security.users import read_users
from spark_klog.errors import ErrorCode
from spark_klog.protocol.apis import (
    DESCRIBE_ACLS,
    DESCRIBE_USER_SCRAM_CREDENTIALS,
    METADATA,
    SASL_AUTHENTICATE,
    SASL_HANDSHAKE,
)
from tests.support.brokers.kafka_python_wire import KafkaPythonWire, Message
from tests.support.brokers.raw_client import RawClient
from tests.support.servers.broker import KlogBroker
from tests.support.servers.certificates import Certificates
from tests.support.servers.java_tools import JavaTools
from tests.support.servers.kafka import NEWEST, Kafka
from tests.support.servers.secure_broker import PASSWORDS, SecureBroker, add_user

_SECONDS = 30
ANY, TOPICS = 1, 2
MATCH, LITERAL, PREFIXED = 2, 3, 4
READ, WRITE = 3, 4
DENY, ALLOW = 2, 3
SHA_256, SHA_512 = 1, 2
INVALID_REQUEST, NONE = 42, 0
UNSUPPORTED_MECHANISM, RESOURCE_NOT_FOUND, DUPLICATE_RESOURCE, UNACCEPTABLE = 33, 91, 92, 93
FILTER = {
    "resource_type_filter": ANY,
    "resource_name_filter": None,
    "pattern_type_filter": ANY,
    "principal_filter": None,
    "host_filter": None,
    "operation": ANY,
    "permission_type": ANY,
}


# against Kafka


@pytest.fixture(scope="module")
def ours(module_server_dir: Path) -> Iterator[KafkaPythonWire]:
    """A connection of ANONYMOUS, an admin of a broker with rules."""
    users = module_server_dir / "users"
    users.write_text("[user ANONYMOUS]\nadmin = true\n")
    users.chmod(0o600)
    with (
        KlogBroker(module_server_dir / "ours", "--set", f"klog.users.file={users}") as broker,
        closing(KafkaPythonWire(broker.bootstrap_servers)) as connection,
    ):
        yield connection


@pytest.fixture(scope="module")
def kafkas(module_server_dir: Path) -> Iterator[KafkaPythonWire]:
    rules = {"authorizer.class.name": "kafka.security.authorizer.AclAuthorizer", "super.users": "User:ANONYMOUS"}
    with (
        Kafka("3.9.1", module_server_dir / "kafka", rules) as broker,
        closing(KafkaPythonWire(broker.bootstrap_servers)) as connection,
    ):
        yield connection


@pytest.fixture(params=["ours", pytest.param("kafkas", marks=[pytest.mark.peer, pytest.mark.test_all("version")])])
def wire(request: pytest.FixtureRequest) -> KafkaPythonWire:
    found: KafkaPythonWire = request.getfixturevalue(request.param)
    return found


def _acl(name: str, user: str, operation: int, pattern: int = LITERAL) -> Message:
    return {
        "resource_type": TOPICS,
        "resource_name": name,
        "resource_pattern_type": pattern,
        "principal": f"User:{user}",
        "host": "*",
        "operation": operation,
        "permission_type": ALLOW,
    }


def _described(wire: KafkaPythonWire, **wanted: Any) -> set[tuple[Any, ...]]:
    answer = wire.ask("DescribeAcls", 2, FILTER | wanted)
    assert answer["error_code"] == NONE, answer
    found = [
        (resource["resource_name"], resource["pattern_type"], acl["principal"], acl["operation"])
        for resource in answer["resources"]
        for acl in resource["acls"]
        if (resource["resource_type"], acl["host"], acl["permission_type"]) == (TOPICS, "*", ALLOW)
    ]
    assert len(set(found)) == len(found)
    return set(found)


def test_acls_are_filtered_as_by_kafka(wire: KafkaPythonWire) -> None:
    made = [
        _acl("clicks", "a", READ),
        _acl("clicks", "a", READ),
        _acl("click", "a", WRITE, PREFIXED),
        _acl("*", "b", READ),
        _acl("clicks-in", "b", WRITE),
        _acl("clicks-in", "CN=x,O=y z", READ),
    ]
    answer = wire.ask("CreateAcls", 3, {"creations": made})
    assert [result["error_code"] for result in answer["results"]] == [NONE] * len(made)
    a_clicks, a_click = ("clicks", LITERAL, "User:a", READ), ("click", PREFIXED, "User:a", WRITE)
    b_star, b_in = ("*", LITERAL, "User:b", READ), ("clicks-in", LITERAL, "User:b", WRITE)
    x_in = ("clicks-in", LITERAL, "User:CN=x,O=y z", READ)
    everything = {a_clicks, a_click, b_star, b_in, x_in}
    for wanted, expected in (
        ({}, everything),
        ({"principal_filter": "User:a"}, {a_clicks, a_click}),
        ({"principal_filter": "a"}, set()),
        ({"operation": READ}, {a_clicks, b_star, x_in}),
        ({"operation": 8}, set()),
        ({"permission_type": ALLOW, "host_filter": "*"}, everything),
        ({"permission_type": DENY}, set()),
        ({"host_filter": "127.0.0.1"}, set()),
        ({"resource_type_filter": 3}, set()),
        ({"resource_type_filter": TOPICS, "pattern_type_filter": PREFIXED}, {a_click}),
        ({"resource_name_filter": "clicks", "pattern_type_filter": LITERAL}, {a_clicks}),
        ({"resource_name_filter": "clicks", "pattern_type_filter": ANY}, {a_clicks}),
        ({"resource_name_filter": "clicks", "pattern_type_filter": MATCH}, {a_clicks, a_click, b_star}),
        ({"resource_name_filter": "click", "pattern_type_filter": MATCH}, {a_click, b_star}),
        ({"resource_name_filter": "other", "pattern_type_filter": MATCH}, {b_star}),
        ({"resource_name_filter": "*", "pattern_type_filter": LITERAL}, {b_star}),
    ):
        assert _described(wire, **wanted) == expected, wanted
    filters = [FILTER | {"principal_filter": "User:a"}, FILTER | {"resource_name_filter": "nowhere"}]
    first, second = wire.ask("DeleteAcls", 2, {"filters": filters})["filter_results"]
    assert (first["error_code"], second["error_code"], second["matching_acls"]) == (NONE, NONE, [])
    gone = {
        (acl["resource_name"], acl["pattern_type"], acl["principal"], acl["operation"])
        for acl in first["matching_acls"]
    }
    assert gone == {a_clicks, a_click}
    assert _described(wire) == {b_star, b_in, x_in}
    wire.ask("DeleteAcls", 2, {"filters": [FILTER]})
    assert _described(wire) == set()


def _salted(mechanism: int, name: str, iterations: int = 4096) -> Message:
    salted = hashlib.pbkdf2_hmac("sha256" if mechanism == SHA_256 else "sha512", b"secret", b"salt", iterations)
    return {"name": name, "mechanism": mechanism, "iterations": iterations, "salt": b"salt", "salted_password": salted}


def _alter(wire: KafkaPythonWire, deleted: list[tuple[str, int]], *upsertions: Message) -> dict[str, int]:
    deletions = [{"name": name, "mechanism": mechanism} for name, mechanism in deleted]
    request = {"deletions": deletions, "upsertions": list(upsertions)}
    results = wire.ask("AlterUserScramCredentials", 0, request)["results"]
    assert len({entry["user"] for entry in results}) == len(results)
    return {entry["user"]: entry["error_code"] for entry in results}


def _credentials(wire: KafkaPythonWire) -> dict[str, list[tuple[int, int]]]:
    answer = wire.ask("DescribeUserScramCredentials", 0, {"users": None})
    return {
        entry["user"]: sorted((info["mechanism"], info["iterations"]) for info in entry["credential_infos"])
        for entry in answer["results"]
    }


def test_credentials_are_altered_as_by_kafka(wire: KafkaPythonWire) -> None:
    assert _alter(wire, [], _salted(SHA_256, "u"), _salted(SHA_512, "u", 8192), _salted(SHA_256, "v")) == {
        "u": 0,
        "v": 0,
    }
    assert _credentials(wire) == {"u": [(SHA_256, 4096), (SHA_512, 8192)], "v": [(SHA_256, 4096)]}
    # a user's changes all succeed or all fail; other users do not matter
    assert _alter(wire, [("v", SHA_256)], _salted(SHA_512, "v"), _salted(SHA_512, "u", 4095)) == {
        "v": 0,
        "u": UNACCEPTABLE,
    }
    assert _alter(wire, [("u", SHA_256)], _salted(SHA_512, "u", 16385)) == {"u": UNACCEPTABLE}
    assert _alter(wire, [("v", SHA_256)], _salted(SHA_256, "w")) == {"v": RESOURCE_NOT_FOUND, "w": 0}
    assert _alter(wire, [("u", SHA_256), ("u", SHA_512)], _salted(SHA_256, "u")) == {"u": DUPLICATE_RESOURCE}
    assert _alter(wire, [("u", 3)], _salted(SHA_256, "u")) == {"u": UNSUPPORTED_MECHANISM}
    assert _alter(wire, [], _salted(SHA_256, "")) == {"": UNACCEPTABLE}
    assert _credentials(wire) == {
        "u": [(SHA_256, 4096), (SHA_512, 8192)],
        "v": [(SHA_512, 4096)],
        "w": [(SHA_256, 4096)],
    }
    assert _alter(wire, [("u", SHA_256), ("u", SHA_512), ("v", SHA_512), ("w", SHA_256)]) == {"u": 0, "v": 0, "w": 0}
    assert _credentials(wire) == {}


# the users file


@pytest.fixture
def broker(server_dir: Path, certificates: Certificates) -> Iterator[SecureBroker]:
    """alice is an admin, bob may read `seen`."""
    broker = SecureBroker(server_dir, certificates, "read = seen\n")
    broker.users.write_text("# ours\n" + broker.users.read_text().replace("[user alice]", "[user alice]\nadmin = true"))
    with broker:
        admin = _admin(broker)
        topics = [NewTopic("seen", 1, 1), NewTopic("hidden", 1, 1)]
        for made in admin.create_topics(topics).values():
            made.result(_SECONDS)
        yield broker


def _admin(broker: SecureBroker, user: str = "alice", mechanism: str = "SCRAM-SHA-512", **who: Any) -> AdminClient:
    return AdminClient(broker.client("SASL_PLAINTEXT", mechanism, user, **who))


def _raw(broker: SecureBroker, user: str, password: str) -> RawClient:
    client = RawClient(broker.ports["SASL_PLAINTEXT"])
    client.request(SASL_HANDSHAKE, 1, {"mechanism": "PLAIN"})
    token = f"\0{user}\0{password}".encode()
    answer = client.request(SASL_AUTHENTICATE, 1, {"auth_bytes": token})
    assert answer["error_code"] == NONE
    return client


def _logs_in(broker: SecureBroker, user: str, password: str) -> bool:
    try:
        with _raw(broker, user, password):
            return True
    except AssertionError:
        return False


def _set(admin: AdminClient, *alterations: UserScramCredentialAlteration) -> None:
    for future in admin.alter_user_scram_credentials(list(alterations)).values():
        future.result(_SECONDS)


def _upsertion(user: str, password: str, mechanism: ScramMechanism = ScramMechanism.SCRAM_SHA_256) -> Any:
    return UserScramCredentialUpsertion(user, ScramCredentialInfo(mechanism, 4096), password.encode(), b"salt of it")


def test_credentials_of_who_is_connected(broker: SecureBroker) -> None:
    admin = _admin(broker)
    _set(admin, _upsertion("dave", "first-secret"), _upsertion("dave", "first-secret", ScramMechanism.SCRAM_SHA_512))
    described = admin.describe_user_scram_credentials(["dave"])["dave"].result(_SECONDS)
    assert [info.iterations for info in described.scram_credential_infos] == [4096, 4096]
    dave = _raw(broker, "dave", "first-secret")
    _set(admin, _upsertion("dave", "second-secret"))
    assert dave.request(METADATA, 4, {"topics": []})["brokers"]  # open connections stay
    assert _logs_in(broker, "dave", "second-secret")
    assert not _logs_in(broker, "dave", "first-secret")  # PLAIN looks at SCRAM-SHA-256 first
    assert _admin(broker, "dave", password="first-secret").list_topics(timeout=_SECONDS).brokers
    broker.stop()
    broker.start()
    assert _logs_in(broker, "dave", "second-secret")
    _set(
        admin,
        UserScramCredentialDeletion("dave", ScramMechanism.SCRAM_SHA_256),
        UserScramCredentialDeletion("dave", ScramMechanism.SCRAM_SHA_512),
    )
    assert not _logs_in(broker, "dave", "second-secret")
    assert "dave" not in read_users(broker.users)
    assert broker.users.stat().st_mode & 0o777 == 0o600
    told = broker.log.read_text() + broker.users.read_text()
    assert "# ours" in told
    assert not re.search("first-secret|second-secret", told)
    credential = read_users(broker.users)["alice"].credentials["SCRAM-SHA-512"]
    assert credential.stored_key.hex() not in told


def test_rules_of_who_is_connected(broker: SecureBroker) -> None:
    admin = _admin(broker)
    rule = ("hidden", ResourcePatternType.LITERAL, "User:bob", "*", AclOperation.READ, AclPermissionType.ALLOW)
    with _raw(broker, "bob", PASSWORDS["bob"]) as bob:
        for operation in (_create, _delete, _create):
            operation(admin, AclBinding(ResourceType.TOPIC, *rule))
            allowed = operation is _create
            assert (bob.fetch("hidden", 0, 11)[0] == NONE) == allowed
            found = admin.describe_acls(AclBindingFilter(ResourceType.TOPIC, *rule)).result(_SECONDS)
            assert len(found) == allowed
        _set(admin, UserScramCredentialDeletion("bob", ScramMechanism.SCRAM_SHA_256))
        _set(admin, UserScramCredentialDeletion("bob", ScramMechanism.SCRAM_SHA_512))
        assert bob.fetch("hidden", 0, 11)[0] == NONE
        _delete(admin, AclBinding(ResourceType.TOPIC, *rule))
        assert bob.fetch("hidden", 0, 11)[0] == ErrorCode.TOPIC_AUTHORIZATION_FAILED
        assert bob.fetch("seen", 0, 11)[0] == NONE  # rules stay without credentials
    assert not _logs_in(broker, "bob", PASSWORDS["bob"])


def _create(admin: AdminClient, acl: AclBinding) -> None:
    admin.create_acls([acl])[acl].result(_SECONDS)


def _delete(admin: AdminClient, acl: AclBinding) -> None:
    parts = (acl.restype, acl.name, acl.resource_pattern_type, acl.principal, acl.host, acl.operation)
    wanted = AclBindingFilter(*parts, acl.permission_type)
    admin.delete_acls([wanted])[wanted].result(_SECONDS)


@pytest.mark.parametrize(
    "change",
    [
        {"resource_type": 3},  # a group
        {"resource_type": 4, "resource_name": "kafka-cluster"},
        {"resource_type": 5},  # a transactional id
        {"resource_name": "a*"},  # it would become a prefix
        {"resource_name": "*", "resource_pattern_type": PREFIXED},
        {"resource_name": "a, *"},  # it would become two rules
        {"resource_name": "a\nadmin = true"},
        {"resource_name": ""},
        {"resource_pattern_type": MATCH},
        {"principal": "User:*"},
        {"principal": "User:a]\n[user eve"},
        {"principal": "Group:a"},
        {"host": "10.0.0.1"},
        {"operation": 2},  # all of them
        {"operation": 8},
        {"permission_type": DENY},
    ],
)
def test_what_rules_can_not_express(ours: KafkaPythonWire, change: Message) -> None:
    good = _acl("good", "a", READ)
    refused, taken = ours.ask("CreateAcls", 3, {"creations": [good | change, good]})["results"]
    assert (refused["error_code"], taken["error_code"]) == (INVALID_REQUEST, NONE)
    assert refused["error_message"]
    assert _described(ours) == {("good", LITERAL, "User:a", READ)}
    ours.ask("DeleteAcls", 2, {"filters": [FILTER]})


def test_who_is_no_admin_changes_nothing(broker: SecureBroker) -> None:
    before = broker.users.read_text()
    bob, denied = _admin(broker, "bob"), "CLUSTER_AUTHORIZATION_FAILED"
    rule = ("hidden", ResourcePatternType.LITERAL, "User:bob", "*", AclOperation.READ, AclPermissionType.ALLOW)
    acl, wanted = AclBinding(ResourceType.TOPIC, *rule), AclBindingFilter(ResourceType.TOPIC, *rule)
    for ask in (
        lambda: bob.create_acls([acl])[acl].result(_SECONDS),
        lambda: bob.delete_acls([wanted])[wanted].result(_SECONDS),
        lambda: _set(bob, _upsertion("alice", "mine")),
    ):
        with pytest.raises(KafkaException, match=denied):
            ask()
    this = ConfigResource(ResourceType.BROKER, "0")
    with pytest.raises(KafkaException, match=denied):
        bob.describe_configs([this])[this].result(_SECONDS)
    admin = _admin(broker)
    settings = admin.describe_configs([this])[this].result(_SECONDS)
    assert settings["klog.users.file"].value == str(broker.users)
    assert (settings["ssl.key.password"].value, settings["ssl.key.password"].is_sensitive) == (None, True)
    cluster = bob.describe_cluster(include_authorized_operations=True).result(_SECONDS)
    assert {operation.name for operation in cluster.authorized_operations} == {"DESCRIBE", "IDEMPOTENT_WRITE"}
    with RawClient(broker.port) as nobody:  # ANONYMOUS
        asked = {"topics": None, "include_topic_authorized_operations": True}
        assert nobody.request(METADATA, 9, asked)["topics"] == []
    with _raw(broker, "bob", PASSWORDS["bob"]) as client:
        # with any broker confluent-kafka takes the first for an empty list, and librdkafka crashes at the second
        assert client.request(DESCRIBE_ACLS, 2, FILTER)["error_code"] == ErrorCode.CLUSTER_AUTHORIZATION_FAILED
        answer = client.request(DESCRIBE_USER_SCRAM_CREDENTIALS, 0, {"users": [{"name": "alice"}]})
        assert answer["error_code"] == ErrorCode.CLUSTER_AUTHORIZATION_FAILED
        assert not answer["results"][0]["credential_infos"]
        (topic,) = client.request(METADATA, 9, asked)["topics"]
        bits = (AclOperation.READ, AclOperation.DESCRIBE, AclOperation.DESCRIBE_CONFIGS)
        assert topic["topic_authorized_operations"] == sum(1 << bit.value for bit in bits)
    assert broker.users.read_text() == before
    # without rules everybody is an admin, but may not change another user's credentials
    broker.users.write_text(before.replace("admin = true\n", "").replace("read = seen\n", ""))
    with pytest.raises(KafkaException, match="SECURITY_DISABLED"):
        _until_denied(lambda: _set(bob, _upsertion("alice", "mine")), denied)
    assert _logs_in(broker, "alice", PASSWORDS["alice"])


def _until_denied(ask: Any, other: str) -> None:
    """Repeat until the error is another one: the broker reads the file again within a second."""
    deadline = time.monotonic() + _SECONDS
    while True:
        try:
            ask()
        except KafkaException as error:
            if other not in str(error) or time.monotonic() > deadline:
                raise


def test_an_edit_by_hand_between_two_changes_is_kept(broker: SecureBroker) -> None:
    admin = _admin(broker)
    _set(admin, _upsertion("dave", "dave's"))
    text = broker.users.read_text()
    broker.users.write_text(text.replace("read = seen\n", "read = seen, hidden\n; bob may see all\n"))
    _set(admin, _upsertion("erin", "erin's"))
    users = read_users(broker.users)
    assert sorted(users) == ["alice", "bob", "dave", "erin"]
    assert users["bob"].read == ("seen", "hidden")
    assert "; bob may see all" in broker.users.read_text()
    good = broker.users.read_text()
    broker.users.write_text(good + "\n[user frank]\nreed = x\n")
    with pytest.raises(KafkaException, match="unknown 'reed'"):
        _set(admin, _upsertion("grace", "grace's"))
    assert broker.users.read_text() == good + "\n[user frank]\nreed = x\n"
    assert _logs_in(broker, "erin", "erin's")  # the users read before stay in force
    broker.users.write_text(good)
    _set(admin, _upsertion("grace", "grace's"))
    assert _logs_in(broker, "grace", "grace's")


def test_admins_at_once(broker: SecureBroker) -> None:
    """Each change starts from the file that the previous one has written, whoever makes it."""
    rounds, errors = 8, []

    def alter(name: str) -> None:
        try:
            admin = _admin(broker)
            for number in range(rounds):
                _set(admin, _upsertion(f"{name}-{number}", "secret"))
                acl = ("t", ResourcePatternType.LITERAL, f"User:{name}-{number}", "*")
                _create(admin, AclBinding(ResourceType.TOPIC, *acl, AclOperation.WRITE, AclPermissionType.ALLOW))
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=alter, args=(name,)) for name in ("one", "two", "three")]
    for thread in threads:
        thread.start()
    for number in range(3):
        add_user(broker.users, f"by-hand-{number}", "secret")
    for thread in threads:
        thread.join(60)
    assert not errors
    users = read_users(broker.users)
    made = {f"{name}-{number}" for name in ("one", "two", "three") for number in range(rounds)}
    assert set(users) == made | {"alice", "bob", "by-hand-0", "by-hand-1", "by-hand-2"}
    assert all(users[name].write == ("t",) and users[name].credentials for name in made)
    assert not [path for path in broker.users.parent.iterdir() if path.name.startswith(".users")]


def test_kafka_python(broker: SecureBroker) -> None:
    settings = broker.kafka_python("SASL_PLAINTEXT", "SCRAM-SHA-256")
    with closing(kafka_python.KafkaAdminClient(**settings)) as admin:
        upsertion = kafka_python.UserScramCredentialUpsertion(
            "dave", kafka_python.ScramMechanism.SCRAM_SHA_256, "daves"
        )
        admin.alter_user_scram_credentials([upsertion])
        assert _logs_in(broker, "dave", "daves")
        pattern = kafka_python.ResourcePattern(
            kafka_python.ResourceType.TOPIC, "hid", kafka_python.ACLResourcePatternType.PREFIXED
        )
        acl = kafka_python.ACL(
            "User:dave", "*", kafka_python.ACLOperation.READ, kafka_python.ACLPermissionType.ALLOW, pattern
        )
        admin.create_acls([acl])
        with _raw(broker, "dave", "daves") as dave:
            assert dave.fetch("hidden", 0, 11)[0] == NONE
    with closing(kafka_python.KafkaAdminClient(**broker.kafka_python("SASL_PLAINTEXT", "SCRAM-SHA-256", "bob"))) as bob:
        assert "ClusterAuthorizationFailed" in repr(bob.create_acls([acl])["failed"])


@pytest.mark.peer
@pytest.mark.test_all("client")  # the requests are those of the other tests
def test_java_tools(broker: SecureBroker, tmp_path: Path) -> None:
    file = tmp_path / "client.properties"
    file.write_text(broker.java("SASL_PLAINTEXT", "SCRAM-SHA-256"))
    way = ("--bootstrap-server", broker.servers("SASL_PLAINTEXT"), "--command-config", str(file))
    with JavaTools(NEWEST) as tools:
        users = ("--entity-type", "users", "--entity-name", "dave")
        secret = "SCRAM-SHA-512=[iterations=8192,password=daves]"
        code, told = tools.run("kafka.admin.ConfigCommand", *way, "--alter", *users, "--add-config", secret)
        assert code == 0, told
        assert _logs_in(broker, "dave", "daves")
        code, told = tools.run("kafka.admin.ConfigCommand", *way, "--describe", *users)
        assert (code, "SCRAM-SHA-512=iterations=8192" in told) == (0, True), told
        acls = ("--allow-principal", "User:dave", "--topic", "hid", "--resource-pattern-type", "prefixed")
        code, told = tools.run("org.apache.kafka.tools.AclCommand", *way, "--add", *acls, "--operation", "Read")
        assert code == 0, told
        code, told = tools.run("org.apache.kafka.tools.AclCommand", *way, "--list")
        assert code == 0
        assert "principal=User:dave, host=*, operation=READ, permissionType=ALLOW" in told
        code, told = tools.run("org.apache.kafka.tools.AclCommand", *way, "--add", *acls, "--operation", "Delete")
        assert "the rules of users can express" in told
        code, told = tools.run(
            "org.apache.kafka.tools.AclCommand", *way, "--remove", *acls, "--operation", "Read", "--force"
        )
        assert code == 0, told
        assert read_users(broker.users)["dave"].read == ()
        delete = ("--delete-config", "SCRAM-SHA-512")
        code, told = tools.run("kafka.admin.ConfigCommand", *way, "--alter", *users, *delete)
        assert code == 0, told
        assert "dave" not in read_users(broker.users)
