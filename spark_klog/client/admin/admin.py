"""The public admin client."""

from __future__ import annotations

from typing import Any

from spark_klog.client.admin.configs import ConfigCalls
from spark_klog.client.admin.groups import GroupCalls
from spark_klog.client.admin.leaders import LeaderCalls
from spark_klog.client.admin.quotas import QuotaCalls
from spark_klog.client.admin.records import RecordCalls
from spark_klog.client.admin.topics import TopicCalls
from spark_klog.client.admin.transactions import TransactionCalls
from spark_klog.client.admin.users import UserCalls


class Admin(TopicCalls, ConfigCalls, GroupCalls, RecordCalls, TransactionCalls, UserCalls, QuotaCalls, LeaderCalls):
    """Administer a cluster of any version of Kafka from 0.10.1 on.

        with Admin({"bootstrap.servers": "127.0.0.1:9092"}) as admin:
            admin.create_topic("clicks", 6, replication_factor=3, configs={"retention.ms": "86400000"})
            for name, found in admin.describe_topics(["clicks", "orders"]).items():
                print(name, found)  # a TopicDescription or a KlogError

    `settings` have Kafka's names and defaults: bootstrap.servers, client.id, those of TLS and SASL, request.timeout.ms
    (one request), default.api.timeout.ms (a call with all its attempts), retry.backoff.ms, retry.backoff.max.ms,
    socket.connection.setup.timeout.ms, isolation.level (of `list_offsets`). `ConfigError` names an unknown or wrong
    one. A `Cluster` may stand for them; `close` closes it, and its request.timeout.ms bounds each call.

    A method with a singular name takes one item, and returns its result or raises its error. A method with a plural
    name takes several and returns `Outcomes`: a dict with the result or the `KlogError` of each item, whose `check`
    raises if one failed. Requests go to the controller, the coordinators or the leaders; errors that pass
    (NOT_CONTROLLER, COORDINATOR_LOAD_IN_PROGRESS, lost connections) are retried with back-off until the time is over.

    Thread-safe: calls of several threads are made one after the other, and the time of a call includes the wait.
    In a process forked since every call raises `AdminClosed`: make a new one there.

    Every call may raise

    * `TypeError` or `ConfigError` for wrong arguments, before anything is sent,
    * `UnsupportedVersionError` if the broker is too old; it names the API and the version of Kafka that has it,
    * `ConnectionFailed` or `RequestTimedOut` if no broker answered in time,
    * `AuthenticationError`, `DecodeError`, `AdminClosed`.
    """

    def __enter__(self) -> Admin:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()
