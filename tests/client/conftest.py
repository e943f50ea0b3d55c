"""Fixtures of the admin client's tests for all tests of clients; what kfake answers otherwise than Kafka."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.clients.admins import admin, server, theirs
from tests.support.clients.on_loop import LoopRequests

__all__ = ["admin", "server", "theirs"]

#: By the name of the test that shows it.
_AT_KFAKE = {
    "test_a_message_larger_than_the_fetch": "kfake leaves partitions out of a Fetch response; Kafka answers for each",
    "test_commits": "kfake answers GROUP_ID_NOT_FOUND to OffsetFetch of a group without offsets; Kafka answers -1",
    "test_auto_commit_of_a_topic_that_was_deleted": "kfake answers a Fetch with a topic id that was not asked for",
    "test_offsets_of_a_group": "kfake answers GROUP_ID_NOT_FOUND to OffsetFetch of a group without offsets",
    "test_a_broker_alone": "kfake says that it elected leaders where they lead already; Kafka: ELECTION_NOT_NEEDED",
    "test_letters_and_retries_go_with_the_offsets": "kfake answers GROUP_ID_NOT_FOUND to OffsetFetch, likewise",
    "test_quotas": "kfake leaves out the default where any user is asked for; Kafka has it",
    "test_transactions": "kfake still names a start of a transaction that was aborted",
    "test_each_topic_has_an_outcome_of_its_own": "kfake creates a topic by a name that Kafka refuses",
    "test_settings_of_topics": "kfake's cleanup.policy is not delete,compact after compact was appended; Kafka's is",
    "test_settings_of_brokers": "kfake lists settings without a value as null; Kafka as empty",
}


@pytest.fixture(params=["thread", pytest.param("loop", marks=pytest.mark.test_all("client"))])
def driver(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The name of the driver that makes requests: a thread that waits, and asyncio's loop."""
    if request.param == "thread":
        yield "thread"
        return
    on_loop = LoopRequests()
    on_loop.patch(monkeypatch)
    yield "loop"
    on_loop.close()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "[kfake" in item.name and (reason := _AT_KFAKE.get(item.name.partition("[")[0])):
            item.add_marker(pytest.mark.xfail(reason=reason, strict=True))
