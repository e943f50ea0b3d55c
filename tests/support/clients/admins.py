"""Fixtures for tests of the admin client: brokers of all kinds, our client and confluent-kafka's."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from confluent_kafka.admin import AdminClient

from spark_klog.client import Admin
from spark_klog.errors import ErrorCode, ProtocolError
from tests.support.clients.consumers import SERVERS, Server, running
from tests.support.clients.on_loop import LoopAdmin
from tests.support.servers.shared_kafka import SharedKafkas


@pytest.fixture(scope="module", params=SERVERS)
def server(request: pytest.FixtureRequest, module_server_dir: Path, shared_kafkas: SharedKafkas) -> Iterator[Server]:
    with running(request.param, module_server_dir / request.param, shared_kafkas) as there:
        yield there


@pytest.fixture(params=["thread", pytest.param("loop", marks=pytest.mark.test_all("client"))])
def admin(server: Server, request: pytest.FixtureRequest) -> Iterator[Admin]:
    """The admin client of each driver: a thread that waits, and asyncio's loop."""
    kind = Admin if request.param == "thread" else LoopAdmin
    with kind({"bootstrap.servers": server.servers}) as there:
        yield there  # type: ignore[misc]  # the same calls


def error_code(result: object) -> ErrorCode:
    """The code of an item's error; fails if the item has another outcome."""
    assert isinstance(result, ProtocolError)
    return result.code


@pytest.fixture
def theirs(server: Server) -> AdminClient:
    return AdminClient({"bootstrap.servers": server.servers, "log_level": 0})
