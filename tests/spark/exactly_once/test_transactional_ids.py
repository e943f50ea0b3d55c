"""A worker reuses its transactional ids, but not within the same micro-batch, nor one that was fenced."""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa
import pytest

from spark_klog.client.admin.admin import Admin
from spark_klog.client.producer.transactions import PreparedTransaction
from spark_klog.embedded import EmbeddedCluster
from spark_klog.spark.write import producers
from spark_klog.spark.write.producers import ProducerCache
from tests.support.clients.transactional.readers import by_confluent

PREFIX = "klog-test-"
TASKS = producers._MOST_IDLE + 3


@pytest.fixture
def cache() -> Iterator[ProducerCache]:
    made = ProducerCache()
    yield made
    made.forget()


def task(cache: ProducerCache, servers: str, topic: str, claim: int, value: str) -> PreparedTransaction:
    settings = {"bootstrap.servers": servers}
    with cache.borrow_transactional(settings, PREFIX, claim) as producer:
        producer.send_arrow(pa.record_batch({"value": [value.encode()]}), topic, None, 0)
        producer.flush()
        if value == "failed":
            raise EOFError
        found = producer.prepare_transaction()
    assert found is not None
    return found


def test_ids_of_claims(cluster: EmbeddedCluster, topic: str, cache: ProducerCache) -> None:
    servers = cluster.bootstrap_servers
    with Admin({"bootstrap.servers": servers}) as admin:
        admin.create_topic(topic, 1)
        names = []
        for claim in (3, 6, 9):
            found = [task(cache, servers, topic, claim, f"{claim} {n}") for n in range(TASKS)]
            names.append({one.transactional_id for one in found})
            admin.end_transactions(found, commits=True).check()  # also those of closed producers
        assert names == [names[0]] * 3
        assert len(names[0]) == TASKS
        with pytest.raises(EOFError):
            task(cache, servers, topic, 12, "failed")
        assert admin.list_transactions(states=["Ongoing"]) == []
        epochs = [one.producer_epoch for one in admin.describe_transactions(names[0]).check().values()]
        # what the failed task has in flight is of an epoch that has passed: 3 was its own
        assert sorted(epochs) == [2] * (TASKS - 1) + [4]
        other = task(cache, servers, topic, 12, "12")
        admin.fence_transactions([other]).check()
        again = [task(cache, servers, topic, 15, f"15 {n}") for n in range(TASKS)]
        kept = {one.transactional_id for one in again} & names[0]
        assert len(kept) == TASKS - 2  # not the one that has failed, nor the one that a driver has fenced
        assert other.transactional_id not in kept
        admin.end_transactions(again, commits=True).check()
    wanted = [f"{claim} {n}" for claim in (3, 6, 9, 15) for n in range(TASKS)]
    assert sorted(by_confluent(servers, topic, 0)) == sorted(wanted)


def test_a_task_without_rows_leaves_its_producer_usable(
    cluster: EmbeddedCluster, topic: str, cache: ProducerCache
) -> None:
    servers = cluster.bootstrap_servers
    with Admin({"bootstrap.servers": servers}) as admin:
        admin.create_topic(topic, 1)
        for claim in (3, 6):
            with cache.borrow_transactional({"bootstrap.servers": servers}, PREFIX, claim) as producer:
                assert producer.prepare_transaction() is None
        names = set()
        for claim in (9, 12):
            found = task(cache, servers, topic, claim, f"{claim}")
            names.add(found.transactional_id)
            admin.end_transactions([found], commits=True).check()
    assert len(names) == 1
    assert by_confluent(servers, topic, 0) == ["9", "12"]
