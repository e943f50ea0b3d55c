"""The high-level consumer of the documents: a member of a group that lives in ZooKeeper.

Source: 0.7 design and 0.10 implementation chapters, "High-level API"; 0.10 documentation, "Distribution".
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

from spark_klog.classic.member import ConsumerRebalanceListener, Member, TopicFilter, new_consumer_id
from spark_klog.classic.settings import connector_config
from spark_klog.classic.streams import Decoder, KafkaStream
from spark_klog.client.forks import Maker
from spark_klog.errors import ConfigError, ConsumerClosed, KlogError
from spark_klog.trees.consumers import STATIC, Registration
from spark_klog.trees.opening import open_tree


class ConsumerConnector:
    """Read topics as a member of a group in ZooKeeper, beside consumers of Kafka 0.8 to 2.x with `zookeeper.connect`.

        with ConsumerConnector({"zookeeper.connect": "127.0.0.1:2181", "group.id": "g"}) as connector:
            for message in connector.create_message_streams({"clicks": 1})["clicks"][0]:
                print(message.offset, message.value)

    Settings are those of Kafka 0.8 to 0.10, or of 0.7: zookeeper.connect and group.id (required), consumer.id,
    zookeeper.session.timeout.ms, auto.commit.enable and auto.commit.interval.ms, auto.offset.reset (smallest, largest
    or fail), rebalance.max.retries and rebalance.backoff.ms, queued.max.message.chunks (fetches that wait in a stream),
    consumer.timeout.ms, offsets.storage, dual.commit.enabled, exclude.internal.topics, fetch.message.max.bytes,
    fetch.wait.max.ms, fetch.min.bytes, socket.timeout.ms; others are client settings, for example of TLS and SASL.

    At least once: offsets of messages that were not yet consumed are never committed; see `KafkaStream` for what counts
    as consumed. With `at_most_once`, offsets are committed before the messages of a fetch are given out.

    The broker's listener is chosen by security.protocol. A thread fetches, commits and rebalances. If an exception ends
    the `with` block, the message in hand is not committed. In a process forked since calls and streams raise
    `ConsumerClosed`, and `shutdown` does nothing: make a new connector there. `ConfigError` for wrong settings,
    `DirectoryError` if no ZooKeeper answers.
    """

    def __init__(self, settings: Mapping[str, Any], *, at_most_once: bool = False) -> None:
        self._config = config = connector_config(settings)
        self._maker = Maker("connector", ConsumerClosed)
        self._at_most_once = at_most_once
        self._consumer_id = new_consumer_id(config.group_id, config.consumer_id)
        self._listener: ConsumerRebalanceListener | None = None
        self._member: Member | None = None
        self._streams: list[KafkaStream] = []
        self._lock = threading.Lock()
        self._is_shut_down = False
        self._tree = open_tree(f"zookeeper://{config.zookeeper_connect}", config.session_timeout_ms / 1000)

    @property
    def consumer_id(self) -> str:
        """The member's id, the name of its node in /consumers/GROUP/ids."""
        return self._consumer_id

    def create_message_streams(
        self,
        topic_count_map: Mapping[str, int],
        key_decoder: Decoder | None = None,
        value_decoder: Decoder | None = None,
    ) -> dict[str, list[KafkaStream]]:
        """Join the group, and return so many streams for each topic. Decoders take bytes; null stays None.

        A stream without partitions waits until the group gives it some. Call this or `create_message_streams_by_filter`
        once. `RebalanceFailed` if other members do not release their partitions in time.
        """
        for topic, count in topic_count_map.items():
            if type(count) is not int or count < 1:
                raise ConfigError(f"create_message_streams: {count!r} streams for topic {topic!r}, set at least 1")
        if not topic_count_map:
            raise ConfigError("create_message_streams: no topics are given")
        streams = {
            topic: [self._stream(key_decoder, value_decoder) for _ in range(count)]
            for topic, count in topic_count_map.items()
        }
        self._join(Registration(STATIC, dict(topic_count_map)), lambda topic, number: streams[topic][number])
        return streams

    def create_message_streams_by_filter(
        self,
        topic_filter: TopicFilter,
        num_streams: int = 1,
        key_decoder: Decoder | None = None,
        value_decoder: Decoder | None = None,
    ) -> list[KafkaStream]:
        """Like `create_message_streams`, for all topics that a filter allows, also later ones, in the same streams."""
        if num_streams < 1:
            raise ConfigError(f"create_message_streams_by_filter: {num_streams} streams, set at least 1")
        streams = [self._stream(key_decoder, value_decoder) for _ in range(num_streams)]
        registration = Registration(topic_filter.pattern, {topic_filter.regex: num_streams})
        self._join(registration, lambda _, number: streams[number])
        return streams

    def _stream(self, key_decoder: Decoder | None, value_decoder: Decoder | None) -> KafkaStream:
        timeout = self._config.consumer_timeout_ms
        stream = KafkaStream(
            self._config.queued_max_chunks,
            None if timeout < 0 else timeout / 1000,
            (key_decoder, value_decoder),
            self._maker.check,
        )
        self._streams.append(stream)
        return stream

    def _failed(self, error: KlogError) -> None:
        for stream in self._streams:
            stream.fail(error)

    def _join(self, registration: Registration, stream_of: Callable[[str, int], KafkaStream]) -> None:
        self._maker.check()
        with self._lock:
            if self._is_shut_down:
                raise ConsumerClosed("the connector is shut down")
            if self._member is not None:
                raise ConfigError("this connector has its streams: make another connector for more")
            member = Member(
                *(self._config, self._tree, self._consumer_id, registration),
                *(stream_of, self._failed, self._at_most_once),
            )
            member.listener = self._listener
            self._member = member
            try:
                member.join()
            except BaseException:
                self._member = None
                self._is_shut_down = True
                member.leave(commits=False, counts_own=False)
                self._tree.close()
                raise

    def commit_offsets(self) -> None:
        """Commit the offsets of all messages consumed so far, with the one that this thread has in hand."""
        self._maker.check()
        if self._member is not None:
            self._member.commit(counts_own=True)

    def set_consumer_rebalance_listener(self, listener: ConsumerRebalanceListener) -> None:
        """Call `listener` in each rebalance from now on; set it before the streams are created to see the first."""
        self._listener = listener
        if self._member is not None:
            self._member.listener = listener

    def shutdown(self) -> None:
        """Commit what was consumed if auto.commit.enable is set, leave the group, end the streams."""
        self._shutdown(counts_own=True)

    def _shutdown(self, *, counts_own: bool) -> None:
        if self._maker.is_forked:
            return  # the member, its thread and the session with ZooKeeper are the parent's
        with self._lock:
            if self._is_shut_down:
                return
            self._is_shut_down = True
            try:
                if self._member is not None:
                    self._member.leave(commits=True, counts_own=counts_own)
            finally:
                for stream in self._streams:
                    stream.close()
                self._tree.close()

    def __enter__(self) -> ConsumerConnector:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: Any) -> None:
        self._shutdown(counts_own=kind is None)
