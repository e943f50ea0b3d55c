"""The look-up of a topic that a producer's call needs first, while other threads use the producer."""

from __future__ import annotations

import time
from collections.abc import Callable

from spark_klog.client.any_broker import MetadataRequest
from spark_klog.client.cluster import Cluster
from spark_klog.client.delivery.background import Turns
from spark_klog.client.delivery.partitions.topics import PartitionCounts
from spark_klog.client.network.connection import Connection
from spark_klog.client.network.readiness import wait_until_ready
from spark_klog.errors import ConnectionFailed, ProtocolError, RequestTimedOut, is_retriable


class TopicLookUp:
    """Have `counts` know a topic within request.timeout.ms; the broker may create it if `counts` says so.

    The producer's turn is taken for each step only, and `check` is called in each.
    """

    def __init__(self, turns: Turns, cluster: Cluster, counts: PartitionCounts, check: Callable[[], None]) -> None:
        self._turns, self._cluster, self._counts, self._check = turns, cluster, counts, check

    def run(self, topic: str) -> None:
        """Retry retriable errors until the deadline, and raise others."""
        with self._turns, self._turns.section:
            self._check()
            deadline, backoff = self._cluster.deadline(), self._cluster.backoff()
        while True:
            try:
                return self._ask(topic, deadline)
            except (ConnectionFailed, RequestTimedOut, ProtocolError) as error:
                if not is_retriable(error):
                    raise
                failure = error
            backoff.pause(failure)

    def _ask(self, topic: str, deadline: float) -> None:
        request: MetadataRequest | None = None
        while True:
            with self._turns, self._turns.section:
                self._check()
                if self._counts.knows(topic):  # by another thread's call
                    if request is not None:
                        request.cancel()
                    return
                if request is None:
                    with self._cluster.within(1000 * max(0.0, deadline - time.monotonic())):
                        request = MetadataRequest(self._cluster, [topic], create=self._counts.creates_topics)
                found = request.step()
                if found is not None:
                    self._counts.learn(topic, found)
                    return
                connections, look_at = request.connections, request.look_at
            _wait(connections, look_at - time.monotonic())


def _wait(connections: list[Connection], seconds: float) -> None:
    try:
        wait_until_ready(connections, seconds)
    except (OSError, ValueError):  # another thread has closed the connection: the next step says so
        time.sleep(max(0.0, seconds))
