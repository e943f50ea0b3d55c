"""A plugin of pytest that runs aiokafka's own tests with the clients of `spark_klog.aio`, see `aiokafka_names.py`.

It has the fixtures of aiokafka's conftest, which starts brokers with docker, for the broker at
`SPARK_KLOG_SUITE_SERVERS`.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator

import aiokafka
import aiokafka.consumer
import aiokafka.producer
import pytest

from tests.support.clients.aiokafka_names import AIOKafkaConsumer, AIOKafkaProducer

_INSIDE = "it replaces, or looks at, what is inside aiokafka's client"
_BETWEEN = "aiokafka rebalances, and looks for topics, between the calls of a program; our client within them"
_NO_CALL = "our consumer has no such call: highwater, last_stable_offset, partitions_for_topic"
_NO_BATCH = "our producer makes the batches, a program does not (create_batch)"
_OWN_WORDS = "it is about the words of aiokafka's errors, or a setting that is an object (ssl_context)"
_ERRORS = (
    "other errors: of a partition that is not there at once, aiokafka's is a timeout; of partitions without a position "
    "by each call, as in Java, aiokafka's of those that the call names"
)
_OTHER = "unsubscribe is awaited here; loop= is no argument; who drops a consumer without close is not warned"
#: Tests of aiokafka that are not run, and why.
LEFT_OUT = {
    _INSIDE: """
        test_consumer_cleanup_unassigned_data_getmany test_consumer_cleanup_unassigned_data_getone
        test_consumer_compacted_topic test_consumer_compressed_returns_older_msgs test_consumer_context_manager
        test_consumer_invalid_crc_in_records test_consumer_position test_consumer_propagates_commit_refresh_errors
        test_consumer_propagates_coordinator_errors test_consumer_propagates_heartbeat_errors
        test_consumer_seek_backward test_consumer_seek_forward_getmany test_consumer_seek_forward_getone
        test_consumer_subscribe_pattern_autocreate_no_group_id test_consumer_subscribe_pattern_with_autocreate
        test_exclude_internal_topics test_kafka_consumer_sets_coordinator_values
        test_producer_context_manager test_producer_correct_time_returned test_producer_idempotence_configuration
        test_producer_indempotence_no_duplicates test_producer_invalid_leader_retry_metadata
        test_producer_leader_change_preserves_order test_producer_notopic test_producer_send_empty_batch
        test_producer_send_error test_producer_send_leader_notfound test_producer_send_reenque_resets_waiters
        test_producer_send_timeout test_producer_sender_errors_propagate_to_producer
        test_producer_transactional_aborting_previous_failure test_producer_transactional_cancel_txn_methods
        test_producer_transactional_raise_out_of_sequence test_producer_transactional_restart_reaquire_pid
        test_rebalance_listener_with_coroutines
    """,
    _BETWEEN: """
        test_consumer_rebalance_on_new_topic test_kip_345_disabled test_kip_345_enabled test_max_poll_interval_ms
        test_offset_behavior__resuming_behavior test_rebalance_listener_no_deadlock_callbacks
    """,
    _NO_CALL: "test_consumer_transactional_abort test_consumer_transactional_commit test_simple_consumer",
    _NO_BATCH: """
        test_producer_send_batch test_producer_send_batch_with_serializer
        test_producer_transactional_flush_2_batches_before_commit test_producer_transactional_send_batch_outside_txn
    """,
    _OWN_WORDS: """
        test_consumer_arguments test_consumer_commit_validation test_producer_arguments test_producer_ssl
        test_ssl_consume
    """,
    _ERRORS: "test_kafka_consumer_offsets_errors test_offset_reset_manual",
    _OTHER: """
        test_consumer_fast_unsubscribe test_consumer_warn_unclosed test_create_consumer_no_running_loop
        test_create_producer_no_running_loop test_producer_warn_unclosed test_subscribe_manual
    """,
}

for module in (aiokafka, aiokafka.consumer):
    module.AIOKafkaConsumer = AIOKafkaConsumer  # type: ignore[assignment,misc]
for module in (aiokafka, aiokafka.producer):
    module.AIOKafkaProducer = AIOKafkaProducer  # type: ignore[assignment,misc,attr-defined]


@pytest.fixture(scope="class")
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    yield loop
    loop.run_until_complete(loop.shutdown_default_executor())
    loop.close()
    asyncio.set_event_loop(None)


@pytest.fixture(scope="class")
def setup_test_class(request: pytest.FixtureRequest, loop: asyncio.AbstractEventLoop) -> None:
    servers = os.environ["SPARK_KLOG_SUITE_SERVERS"]
    request.cls.loop, request.cls.hosts, request.cls.kafka_version = loop, [servers], "4.0.0"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    names = {name for text in LEFT_OUT.values() for name in text.split()}
    config.hook.pytest_deselected(items=[item for item in items if item.name in names])
    items[:] = [item for item in items if item.name not in names]
