"""Fetching for the streams of a ConsumerConnector: one `client.Consumer` for all partitions that the member holds."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Collection, Mapping

from spark_klog.classic.group.membership import broker_addresses
from spark_klog.classic.group.streams import Held, KafkaStream
from spark_klog.classic.settings import ConnectorConfig
from spark_klog.client import Consumer
from spark_klog.client.cluster import Cluster, TopicPartition
from spark_klog.client.offsets import offsets_of_led
from spark_klog.client.settings import client_config
from spark_klog.errors import ConnectionFailed, DirectoryError, KlogError, WokenUp, is_retriable
from spark_klog.trees.tree import Tree

_log = logging.getLogger(__name__)
#: Messages decoded at once.
_CHUNK = 10_000
#: Seconds that fetching waits for a full stream before it pauses the stream's partitions: what was fetched of them is
#: then dropped, and fetched again.
_GRACE = 0.05
_PLACES = {-1: "latest", -2: "earliest", None: "none"}


class Reading:
    """Brokers found in ZooKeeper, their cluster and consumer, and the way of messages into the streams.

    All but `wake` and `has_room` is called by the member's thread, or by the one that has its lock.
    """

    def __init__(self, config: ConnectorConfig, tree: Tree) -> None:
        self._config, self._tree = config, tree
        self._protocol = str(config.client.get("security.protocol", "PLAINTEXT")).upper()
        self._addresses: list[str] = []
        self._cluster: Cluster | None = None
        self._consumer: Consumer | None = None
        self._held: dict[TopicPartition, Held] = {}
        self._streams: dict[int, KafkaStream] = {}
        self._paused: set[TopicPartition] = set()
        self._woken = threading.Event()

    @property
    def cluster(self) -> Cluster:
        """The cluster, for offsets; `ConnectionFailed` while no broker is registered."""
        if self._cluster is None:
            raise ConnectionFailed("no broker is registered in ZooKeeper")
        return self._cluster

    def find_brokers(self) -> bool:
        """Look for brokers in ZooKeeper; False if there is none. The clients are made again if all have moved."""
        found = broker_addresses(self._tree, self._protocol)
        if not found:
            return self._cluster is not None
        if not set(found) & set(self._addresses):
            self._close_clients()
            settings = self._config.client_settings(found)
            self._cluster = Cluster(client_config(settings))
            self._consumer = Consumer(
                {
                    **settings,
                    "auto.offset.reset": _PLACES[self._config.reset.place],
                    "fetch.max.wait.ms": self._config.fetch_wait_max_ms,
                    "fetch.min.bytes": self._config.fetch_min_bytes,
                    "max.partition.fetch.bytes": self._config.fetch_message_max_bytes,
                    "max.poll.records": _CHUNK,
                }
            )
            self._assign(self._held, self._held)
        self._addresses = found
        return True

    def first_offsets(self, keys: Collection[TopicPartition]) -> dict[TopicPartition, int]:
        """Where to begin without a committed offset, as auto.offset.reset says; without those not found yet."""
        place = self._config.reset.place
        if place is None or not keys:
            return {}
        self.cluster.metadata(sorted({topic for topic, _ in keys}))
        found, failed = offsets_of_led(self.cluster, dict.fromkeys(keys, place))
        for key, error in failed.items():
            _log.info("the first offset of %s-%d is looked up later: %s", *key, error)
        return found

    def read(self, held: Mapping[TopicPartition, Held]) -> None:
        """Read exactly these partitions from now on; those read before go on."""
        self._assign(held, [key for key, one in held.items() if self._held.get(key) is not one])

    def _assign(self, held: Mapping[TopicPartition, Held], new: Collection[TopicPartition]) -> None:
        self._held = dict(held)
        self._streams = {id(one.stream): one.stream for one in held.values()}
        self._paused &= held.keys()
        if self._consumer is not None:
            starts = [
                (*key, one.fetched) if key in new and one.fetched is not None else key for key, one in held.items()
            ]
            self._consumer.assign(starts)

    def step(self, until: float) -> None:
        """Fetch for the streams until messages have come, something wakes this thread, or the time is over."""
        self._woken.clear()
        full = [stream for stream in self._streams.values() if stream.is_full]
        if self._consumer is None or not self._held or (full and len(full) == len(self._streams)):
            self._woken.wait(max(0.0, until - time.monotonic()))
            return
        if full and not self._paused:
            self._woken.wait(_GRACE)
        self._pause()
        try:
            records = self._consumer.poll(max(0.0, until - time.monotonic()))
        except WokenUp:
            return
        if not records:
            return
        held = self._held.get((records[0].topic, records[0].partition))
        if held is not None:
            held.fetched = self._consumer.position(*held.key)
            held.stream.put(held, records, held.fetched)

    def _pause(self) -> None:
        """Pause the partitions of full streams, so that they hold up no other, and go on with the rest."""
        assert self._consumer is not None
        full = {key for key, held in self._held.items() if held.stream.is_full}
        if full != self._paused:
            self._consumer.pause(full - self._paused)
            self._consumer.resume(self._paused - full)
            self._paused = full

    def wake(self) -> None:
        """End `step` or `wait`. Any thread may call it."""
        self._woken.set()
        consumer = self._consumer
        if consumer is not None:
            consumer.wakeup()

    def has_room(self) -> None:
        """A stream has room again. Any thread may call it."""
        self._woken.set()
        if self._paused:
            self.wake()

    def wait(self, seconds: float) -> None:
        self._woken.clear()
        self._woken.wait(seconds)

    def may_pass(self, error: KlogError) -> bool:
        """Whether an error may pass by itself, so that the thread goes on."""
        return is_retriable(error) or isinstance(error, DirectoryError)

    def _close_clients(self) -> None:
        if self._consumer is not None:
            self._consumer.close()
        if self._cluster is not None:
            self._cluster.close()
        self._consumer = self._cluster = None
        self._paused.clear()

    def close(self) -> None:
        self._close_clients()
