"""The admin client's calls for quotas, at our broker and Kafka's; kafka-configs reads those of Kafka, too."""

from __future__ import annotations

import re
import subprocess

import pytest

from spark_klog.client import Admin, QuotaEntity
from spark_klog.client.admin.users import ANY, DEFAULT
from spark_klog.errors import ConfigError, ErrorCode, ProtocolError, UnsupportedVersionError
from tests.support.clients.consumers import Server
from tests.support.servers.kafka import kafka_libs
from tests.support.waiting import wait_until

ALICE, PAIR, ALL_USERS = (
    QuotaEntity(user="alice"),
    QuotaEntity(user="alice", client_id="c 1"),
    QuotaEntity(user=DEFAULT),
)
ADDRESS = QuotaEntity(ip="127.0.0.9")


def _by_tool(servers: str, *arguments: str) -> str:
    """Quotas as kafka-configs describes them."""
    command = ["java", "-cp", f"{kafka_libs('3.9.1')}/*", "kafka.admin.ConfigCommand", "--bootstrap-server", servers]
    done = subprocess.run([*command, "--describe", *arguments], capture_output=True, text=True, timeout=120, check=True)
    return done.stdout


def test_quotas(server: Server, admin: Admin) -> None:
    if server.is_old:
        with pytest.raises(UnsupportedVersionError, match=r"DescribeClientQuotas.*Kafka 2\.6"):
            admin.describe_client_quotas()
        with pytest.raises(UnsupportedVersionError, match=r"AlterClientQuotas.*Kafka 2\.6"):
            admin.alter_client_quotas({ALICE: {"producer_byte_rate": 1}})
        return
    if server.version is None:
        assert admin.describe_client_quotas() == {}
        refused = admin.alter_client_quotas({ALICE: {"producer_byte_rate": 1}, PAIR: {"consumer_byte_rate": None}})
        assert isinstance(refused[ALICE], ProtocolError)
        assert "this broker has no quotas" in str(refused[ALICE])
        assert refused[PAIR] is None
        return
    wanted = {
        ALICE: {"producer_byte_rate": 1e6, "request_percentage": 12.5},
        PAIR: {"consumer_byte_rate": 2e6},
        ALL_USERS: {"producer_byte_rate": 3e6},
        ADDRESS: {"connection_creation_rate": 7.0},
    }
    admin.alter_client_quotas(wanted, validate_only=True).check()
    assert admin.describe_client_quotas() == {}
    admin.alter_client_quotas(wanted).check()
    wait_until(lambda: admin.describe_client_quotas() == wanted, seconds=30)
    said = _by_tool(server.servers, "--entity-type", "users", "--entity-type", "clients", "--entity-name", "alice",
                    "--entity-name", "c 1")  # fmt: skip
    assert re.search(r"user-principal 'alice', client-id 'c 1' are consumer_byte_rate=2000000\.0", said), said

    def found(match: QuotaEntity, strict: bool = False) -> set[QuotaEntity]:
        return set(admin.describe_client_quotas(match, strict=strict))

    assert found(QuotaEntity(user="alice")) == {ALICE, PAIR}
    assert found(QuotaEntity(user="alice"), strict=True) == {ALICE}
    assert found(QuotaEntity(user=ANY), strict=True) == {ALICE, ALL_USERS}
    assert found(QuotaEntity(user=DEFAULT)) == {ALL_USERS}
    assert found(QuotaEntity(client_id=ANY)) == {PAIR}
    outcomes = admin.alter_client_quotas({ALICE: {"request_percentage": None}, PAIR: {"no_such_rate": 1.0}})
    assert outcomes[ALICE] is None
    assert isinstance(outcomes[PAIR], ProtocolError)
    assert outcomes[PAIR].code == ErrorCode.INVALID_REQUEST
    wait_until(
        lambda: admin.describe_client_quotas(ALICE, strict=True) == {ALICE: {"producer_byte_rate": 1e6}}, seconds=30
    )
    admin.alter_client_quotas({entity: dict.fromkeys(quotas) for entity, quotas in wanted.items()}).check()
    wait_until(lambda: admin.describe_client_quotas() == {}, seconds=30)


def test_arguments(admin: Admin) -> None:
    with pytest.raises(ConfigError, match="can't be for a user or client id, too"):
        QuotaEntity(user="alice", ip="127.0.0.1")
    with pytest.raises(ConfigError, match="the client-id of a quota is empty"):
        QuotaEntity(client_id="")
    for entity in (QuotaEntity(), QuotaEntity(user=ANY)):
        with pytest.raises(ConfigError, match="name a user, client_id or ip"):
            admin.alter_client_quotas({entity: {"producer_byte_rate": 1.0}})
    with pytest.raises(TypeError, match="producer_byte_rate must be a number or None, not str"):
        admin.alter_client_quotas({ALICE: {"producer_byte_rate": "1"}})  # type: ignore[dict-item]
    with pytest.raises(ConfigError, match="producer_byte_rate=nan: set a finite number"):
        admin.alter_client_quotas({ALICE: {"producer_byte_rate": float("nan")}})
    with pytest.raises(TypeError, match="match must be a QuotaEntity, not str"):
        admin.describe_client_quotas("alice")  # type: ignore[arg-type]
