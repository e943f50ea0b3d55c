"""confluent-kafka producers and consumers in threads, which record what they send and receive.

They continue whatever happens to the broker. A seed determines what they do, but not when.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections import Counter
from random import Random

from confluent_kafka import Consumer, KafkaError, KafkaException, Message, Producer, TopicPartition

from tests.support.checker.history import History, Outcome, Read, Seen, Sent, Write
from tests.support.clients.transactional.readers import places_by_confluent, places_by_kafka_python

PARTITIONS = 3
_QUICK = {
    "reconnect.backoff.ms": 10,
    "reconnect.backoff.max.ms": 100,
    "retry.backoff.ms": 20,
    "retry.backoff.max.ms": 100,
    "log_level": 0,
}
#: Delivery timeout of a record, much longer than the time between kills of the broker.
_PATIENCE_MS = 300_000
_SECONDS = 60.0
#: The most records that an idempotent producer has queued when more are sent.
_MAX_QUEUED = 500


class Client(ABC):
    """A thread with a seed; `finish` ends it and raises its error, if any."""

    def __init__(self, name: str, servers: str, topic: str, history: History, seed: int) -> None:
        self.name = name
        self.history = history
        #: Errors that the client library reported, by name.
        self.errors: Counter[str] = Counter()
        self._servers = servers
        self._topic = topic
        self._rng = Random(f"{seed} {name}")
        self._is_over = threading.Event()
        self._trouble: BaseException | None = None
        self._lives = 0
        self._thread = threading.Thread(target=self._guarded, name=name, daemon=True)
        self._thread.start()

    def _guarded(self) -> None:
        try:
            self._run()
        except BaseException as error:
            self._trouble = error

    @abstractmethod
    def _run(self) -> None: ...

    def stop(self) -> None:
        """Tell the thread to stop."""
        self._is_over.set()

    def finish(self) -> None:
        self.stop()
        self._thread.join(2 * _SECONDS)
        if self._trouble is not None:
            raise self._trouble
        assert not self._thread.is_alive(), self.name

    def _new_process(self) -> str:
        self._lives += 1
        return f"{self.name}.{self._lives}"

    def _on_error(self, error: KafkaError) -> None:
        self.errors[error.name()] += 1


class IdempotentClient(Client):
    """A producer that is replaced after some seconds, mostly without waiting for its records in flight."""

    def _run(self) -> None:
        number = 0
        while not self._is_over.is_set():
            process = self._new_process()
            producer = Producer(
                {
                    "bootstrap.servers": self._servers,
                    "enable.idempotence": True,
                    "linger.ms": self._rng.choice([0, 2, 10]),
                    "message.timeout.ms": _PATIENCE_MS,
                    "error_cb": self._on_error,
                    **_QUICK,
                }
            )
            end = time.monotonic() + self._rng.uniform(1, 6)
            while not self._is_over.is_set() and time.monotonic() < end:
                if len(producer) < _MAX_QUEUED:
                    for _ in range(self._rng.randint(1, 12)):
                        self._send(producer, process, f"{process}-{number}")
                        number += 1
                producer.poll(0)
                time.sleep(0.025)
            if self._is_over.is_set() or self._rng.random() < 0.3:
                assert producer.flush(_SECONDS) == 0
            else:
                producer.purge()
                assert producer.flush(_SECONDS) == 0

    def _send(self, producer: Producer, process: str, value: str) -> None:
        began, partition = self.history.tick(), self._rng.randrange(PARTITIONS)

        def delivered(error: KafkaError | None, message: Message) -> None:
            outcome, offset = Outcome.OK, message.offset()
            if error is not None:
                # a purged record may have been sent before and requeued for a retry
                self.errors[error.name()] += 1
                outcome, offset = Outcome.UNKNOWN, None
            sent = Sent(partition, value, offset if offset is not None and offset >= 0 else None)
            self.history.writes.append(Write(process, outcome, (sent,), False, began, began, ended=self.history.tick()))

        producer.produce(self._topic, value, partition=partition, on_delivery=delivered)


class TransactionalClient(Client):
    """Transactions over several partitions, most committed; after errors a new producer with the same id takes over.

    Some are aborted; some are left open by a producer that is dropped. Before some commits the next producer has
    already initialized its transactions, and some commits are not waited for.
    """

    def _run(self) -> None:
        while not self._is_over.is_set():
            process = self._new_process()
            producer = self._make()
            number = 0
            while not self._is_over.is_set():
                number += 1
                if not self._transaction(producer, process, number):
                    break
                time.sleep(self._rng.choice([0, 0, 0.02]))
        self._make()  # ends the open transaction

    def _make(self) -> Producer:
        """Make the next producer, and retry until the broker accepts it."""
        producer = Producer(
            {
                "bootstrap.servers": self._servers,
                "transactional.id": f"{self._topic}-{self.name}",
                "linger.ms": self._rng.choice([0, 2, 10]),
                "message.timeout.ms": 10_000,
                "transaction.timeout.ms": 20_000,
                "error_cb": self._on_error,
                **_QUICK,
            }
        )
        deadline = time.monotonic() + _SECONDS
        while True:
            try:
                producer.init_transactions(_SECONDS)
                return producer
            except KafkaException as error:
                self.errors[error.args[0].name()] += 1
                if not error.args[0].retriable() or time.monotonic() > deadline:
                    raise

    def _transaction(self, producer: Producer, process: str, number: int) -> bool:
        """Run one transaction; return False if the producer can't be used any more."""
        offsets: dict[str, int] = {}

        def delivered(error: KafkaError | None, message: Message) -> None:
            if error is None and (message.offset() or 0) >= 0:
                offsets[(message.value() or b"").decode()] = message.offset() or 0

        began = self.history.tick()
        values = [
            (self._rng.randrange(PARTITIONS), f"{process}-{number}-{index}") for index in range(self._rng.randint(1, 6))
        ]
        end = self._rng.choices(["commit", "abort", "leave", "overtake", "hurry"], [70, 15, 4, 4, 7])[0]
        # short: after a kill, a new producer is ready before the old one has found the coordinator again
        patience = self._rng.choice([0.002, 0.01]) if end == "hurry" else self._rng.choice([0.5, 1, _SECONDS])
        outcome, is_usable, commit_began = Outcome.FAILED, False, began
        try:
            producer.begin_transaction()
            for partition, value in values:
                producer.produce(self._topic, value, partition=partition, on_delivery=delivered)
                if self._rng.random() < 0.2:
                    producer.poll(self._rng.choice([0, 0.01]))
            if end != "hurry" and self._rng.random() < 0.5:
                producer.flush(patience)
            if end == "abort":
                producer.abort_transaction(patience)
                is_usable = True
            elif end != "leave":
                if end == "overtake":
                    self._make()
                commit_began = self.history.tick()
                outcome = Outcome.UNKNOWN
                producer.commit_transaction(patience)
                outcome, is_usable = Outcome.OK, True
        except KafkaException as error:
            self.errors[error.args[0].name()] += 1
            if end == "overtake" and error.args[0].fatal():
                outcome = Outcome.FAILED  # the next producer has aborted it
            elif error.args[0].txn_requires_abort():
                is_usable = self._abort(producer)
                outcome = Outcome.FAILED if is_usable else outcome
        sent = tuple(Sent(partition, value, offsets.get(value)) for partition, value in values)
        self.history.writes.append(Write(process, outcome, sent, True, began, commit_began, ended=self.history.tick()))
        return is_usable

    def _abort(self, producer: Producer) -> bool:
        try:
            producer.abort_transaction(_SECONDS)
            return True
        except KafkaException as error:
            self.errors[error.args[0].name()] += 1
            return False


class RecordingConsumer(Client):
    """A consumer that reads all partitions from the beginning, and starts over every `lives_for` seconds."""

    def __init__(
        self, name: str, servers: str, topic: str, history: History, seed: int, *, is_committed: bool, lives_for: float
    ) -> None:
        self._is_committed = is_committed
        self._lives_for = lives_for
        self._ends: dict[int, int] = {}
        super().__init__(name, servers, topic, history, seed)

    def read_up_to(self, ends: dict[int, int]) -> None:
        """Stop at these end offsets, by partition."""
        self._ends = ends
        self.stop()

    def _run(self) -> None:
        while not self._is_over.is_set():
            self._live(self._new_process())

    def _live(self, process: str) -> None:
        consumer = Consumer(
            {
                "bootstrap.servers": self._servers,
                "group.id": "none",
                "isolation.level": "read_committed" if self._is_committed else "read_uncommitted",
                "enable.auto.commit": False,
                "auto.offset.reset": "error",
                "enable.partition.eof": True,
                "fetch.wait.max.ms": self._rng.choice([10, 100, 500]),
                "fetch.error.backoff.ms": 20,
                "max.partition.fetch.bytes": self._rng.choice([2_000, 100_000]),
                "error_cb": self._on_error,
                **_QUICK,
            }
        )
        consumer.assign([TopicPartition(self._topic, partition, 0) for partition in range(PARTITIONS)])
        reached: dict[int, int] = {}
        end = time.monotonic() + self._lives_for
        deadline: float | None = None
        try:
            while deadline is None or reached != self._ends:
                if self._is_over.is_set():
                    if not self._ends:
                        return
                    deadline = deadline or time.monotonic() + _SECONDS
                    if time.monotonic() > deadline:
                        raise TimeoutError(f"{process} has come to {reached}, and not to {self._ends}")
                elif time.monotonic() > end:
                    return
                began = self.history.tick()
                seen = []
                for message in consumer.consume(500, 0.1):
                    partition, offset, error = message.partition() or 0, message.offset() or 0, message.error()
                    if error is None:
                        seen.append(Seen(partition, offset, (message.value() or b"").decode()))
                        reached.pop(partition, None)
                    elif error.code() == KafkaError._PARTITION_EOF:
                        reached[partition] = offset
                    elif error.code() == KafkaError._AUTO_OFFSET_RESET:
                        raise KafkaException(error)
                    else:
                        self.errors[error.name()] += 1
                if seen:
                    ended = self.history.tick()
                    self.history.reads.append(Read(process, self._is_committed, False, tuple(seen), began, ended))
        finally:
            consumer.close()


def read_finally(servers: str, topic: str, history: History) -> None:
    """Read all records with two client libraries and both isolation levels."""
    readers = {
        ("by confluent-kafka", True): places_by_confluent,
        ("by kafka-python", True): places_by_kafka_python,
        ("all by confluent-kafka", False): places_by_confluent,
    }
    for (process, is_committed), read in readers.items():
        began = history.tick()
        seen = tuple(
            Seen(partition, offset, value)
            for partition in range(PARTITIONS)
            for offset, value in read(servers, topic, partition, committed=is_committed)
        )
        history.reads.append(Read(process, is_committed, True, seen, began, history.tick()))
