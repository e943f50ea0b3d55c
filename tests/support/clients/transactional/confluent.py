"""confluent-kafka's producers with the commands of java.py, so that tests run with both."""

from __future__ import annotations

from types import TracebackType

from confluent_kafka import Consumer, KafkaError, KafkaException, Message, Producer, TopicPartition

_SECONDS = 30


class ConfluentClient:
    """Named producers; a context manager."""

    def __init__(self, servers: str) -> None:
        self._servers = {"bootstrap.servers": servers, "log_level": 0}
        self._producers: dict[str, Producer] = {}

    def ask(self, *words: str) -> list[str]:
        """Run a command; return the words of the answer, or raise `KafkaException`."""
        what, name, *rest = words
        if what == "open":
            settings = dict(word.split("=", 1) for word in rest)
            self._producers[name] = Producer({**self._servers, "enable.idempotence": True, **settings})
            return []
        producer = self._producers[name]
        if what == "close":
            del self._producers[name]
            return []
        if what == "send":
            return _send(producer, rest[0], int(rest[1]), rest[2:])
        if what == "init":
            producer.init_transactions(_SECONDS)
        elif what == "begin":
            producer.begin_transaction()
        elif what == "commit":
            producer.commit_transaction(_SECONDS)
        elif what == "abort":
            producer.abort_transaction(_SECONDS)
        elif what == "offsets":
            group, topic, partition, offset = rest
            consumer = Consumer({**self._servers, "group.id": group})
            committed = TopicPartition(topic, int(partition), int(offset))
            producer.send_offsets_to_transaction([committed], consumer.consumer_group_metadata(), _SECONDS)
            consumer.close()
        else:
            raise ValueError(what)
        return []

    def __enter__(self) -> ConfluentClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._producers.clear()


def _send(producer: Producer, topic: str, partition: int, values: list[str]) -> list[str]:
    offsets: list[str] = []
    failures: list[KafkaError] = []

    def delivered(error: KafkaError | None, message: Message) -> None:
        if error is None:
            offsets.append(str(message.offset()))
        else:
            failures.append(error)

    for value in values:
        producer.produce(topic, value, partition=partition, on_delivery=delivered)
    assert producer.flush(_SECONDS) == 0
    if failures:
        raise KafkaException(failures[0])
    return offsets
