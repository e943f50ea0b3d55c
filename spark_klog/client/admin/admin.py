"""The public admin client, with the calls about transactions and the producers of partitions (KIP-664)."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from spark_klog.base.names import TopicPartition
from spark_klog.base.settings import INT32_MAX
from spark_klog.client.admin.calls import (
    AdminCalls,
    Outcomes,
    Routes,
    by_field,
    by_partition,
    checked,
    known,
    mapped,
    whole,
)
from spark_klog.client.admin.groups import GroupCalls
from spark_klog.client.admin.topics import TopicCalls
from spark_klog.client.admin.users import UserCalls
from spark_klog.client.answers import answer_error
from spark_klog.client.arguments import items_of, name_of, names_of, number_of, one_of, partition_of, partitions_of
from spark_klog.client.calls import call, steps_of
from spark_klog.client.offsets import partition_entries, topic_numbers
from spark_klog.client.producer.transactions import PreparedTransaction
from spark_klog.client.requests import Steps
from spark_klog.errors import (
    ConfigError,
    DecodeError,
    ErrorCode,
    KlogError,
    ProtocolError,
    UnsupportedVersionError,
    is_retriable,
)
from spark_klog.protocol.apis import (
    DESCRIBE_PRODUCERS,
    DESCRIBE_TRANSACTIONS,
    END_TXN,
    INIT_PRODUCER_ID,
    LIST_TRANSACTIONS,
    WRITE_TXN_MARKERS,
)
from spark_klog.protocol.codec import Message
from spark_klog.protocol.schema import Api
from spark_klog.protocol.tables.groups import TRANSACTION

_MAX_INT16 = 0x7FFF
_MOST_REPLICAS = 3
_STATES = (
    "Empty",
    "Ongoing",
    "PrepareCommit",
    "PrepareAbort",
    "CompleteCommit",
    "CompleteAbort",
    "Dead",
    "PrepareEpochFence",
)
#: The first version of ListTransactions with a filter by duration (KIP-994).
_FIRST_WITH_DURATION = 1
#: The first InitProducerId with the producer id and epoch that are to be fenced (KIP-360).
_FIRST_WITH_EPOCH = 3
#: InitProducerId's answers if the producer has another epoch than the given one.
_FENCED = frozenset({ErrorCode.PRODUCER_FENCED, ErrorCode.INVALID_PRODUCER_EPOCH})
#: Its answer while the coordinator ends a transaction.
_BUSY = ErrorCode.CONCURRENT_TRANSACTIONS
#: Requests that are sent before the first is answered, and that have one deadline.
_MOST_IN_FLIGHT = 100
#: Partitions in one DescribeProducers: brokers answer it with every producer of each.
_MOST_DESCRIBED = 500


@dataclass(frozen=True)
class TransactionListing:
    """A transactional id; `state` is the coordinator's: Empty, Ongoing, PrepareCommit, CompleteCommit and so on."""

    transactional_id: str
    producer_id: int
    state: str
    coordinator: int


@dataclass(frozen=True)
class TransactionDescription:
    """A transactional id with its transaction; `started` is in ms since 1970, None without an open transaction.

    `partitions` are those that have no marker yet, `coordinator` is a node id.
    """

    transactional_id: str
    state: str
    timeout_ms: int
    started: int | None
    producer_id: int
    producer_epoch: int
    partitions: tuple[TopicPartition, ...]
    coordinator: int = -1


@dataclass(frozen=True)
class ProducerState:
    """A producer of a partition as its leader knows it.

    `last_sequence` and `last_timestamp` (ms) are None if unknown, `transaction_start` is the first offset of its open
    transaction, None if it has none.
    """

    producer_id: int
    producer_epoch: int
    last_sequence: int | None
    last_timestamp: int | None
    coordinator_epoch: int
    transaction_start: int | None


class TransactionCalls(AdminCalls):
    """Calls about transactions and the producers of partitions."""

    @call
    def list_transactions(
        self, *, states: Iterable[str] = (), producer_ids: Iterable[int] = (), longer_than_ms: int | None = None
    ) -> Steps[list[TransactionListing]]:
        """The transactional ids of all brokers, sorted, of these states and producers if any are given.

        `states` are those of `TransactionListing`, in any case; `ConfigError` for others. With `longer_than_ms` (Kafka
        3.8) only transactions that are open for longer. ListTransactions (Kafka 3.0).
        """
        request: Message = {
            "state_filters": [one_of("state", name, _STATES) for name in names_of("states", states)],
            "producer_id_filters": [number_of("a producer id", pid) for pid in items_of("producer_ids", producer_ids)],
        }
        if longer_than_ms is not None:
            request["duration_filter"] = number_of("longer_than_ms", longer_than_ms)

        def listed(node: int) -> Steps[list[TransactionListing]]:
            version = yield from self.cluster.asking_version(node, LIST_TRANSACTIONS)
            if longer_than_ms is not None and version < _FIRST_WITH_DURATION:
                raise UnsupportedVersionError("ListTransactions with longer_than_ms needs Kafka 3.8 or later")
            what = f"ListTransactions of broker {node}"
            answer = checked(
                LIST_TRANSACTIONS, (yield from self.cluster.asking(node, LIST_TRANSACTIONS, request)), what
            )
            return [
                TransactionListing(entry["transactional_id"], entry["producer_id"], entry["transaction_state"], node)
                for entry in answer["transaction_states"]
            ]

        return sorted((yield from self._of_all_brokers(listed)), key=lambda listing: listing.transactional_id)

    @call
    def describe_transactions(self, transactional_ids: Iterable[str]) -> Steps[Outcomes[str, TransactionDescription]]:
        """Describe transactional ids; an unknown one has the error TRANSACTIONAL_ID_NOT_FOUND.

        DescribeTransactions (Kafka 3.0), at the coordinators.
        """
        return self._each_at(
            DESCRIBE_TRANSACTIONS,
            names_of("transactional_ids", transactional_ids),
            lambda keys: {"transactional_ids": keys},
            by_field("transaction_states", "transactional_id"),
            "transaction of",
            places=partial(self._at_coordinators, kind=TRANSACTION),
            result=_described,
        )

    @call
    def end_transactions(
        self, transactions: Iterable[PreparedTransaction], *, commits: bool
    ) -> Steps[Outcomes[PreparedTransaction, None]]:
        """Commit or abort transactions of `Producer.prepare_transaction`; a repeated call succeeds again.

        INVALID_TXN_STATE if a transaction has ended the other way, PRODUCER_FENCED or INVALID_PRODUCER_EPOCH if its
        producer has another epoch by now, after a timeout for example. The timeout of a call bounds each hundred of
        them; after a hundred of which one has no final answer the rest is not asked for. EndTxn (Kafka 0.11), at the
        coordinators.
        """
        doing = f"{'commit' if commits else 'abort'} of a transaction of"

        def ask(rest: list[PreparedTransaction]) -> Steps[dict[PreparedTransaction, Message | KlogError]]:
            return self._ask_about(END_TXN, rest, {"committed": commits}, doing)

        return self._each_of_many(transactions, ask)

    @call
    def fence_transactions(
        self, transactions: Iterable[PreparedTransaction]
    ) -> Steps[Outcomes[PreparedTransaction, None]]:
        """Abort transactions with the next epoch, so that leaders refuse what their producers still send.

        After an abort by `end_transactions` brokers from 3.0 to 3.5 take a record of the same epoch, and open a
        transaction with it that no coordinator ends (KIP-890). A producer that has another epoch already is fenced:
        a repeated call succeeds again. Kafka aborts a transaction that its producer has begun with a later epoch
        as well: the caller excludes that. With transaction.version 2 a producer that aborts late gets this epoch, and
        goes on: see `fence_producers`. Bounded as `end_transactions`. InitProducerId and DescribeTransactions (Kafka
        3.0), at the coordinators.
        """
        more = {"transaction_timeout_ms": self.cluster.config.transaction_timeout_ms}

        def is_open(txn: PreparedTransaction, now: TransactionDescription) -> bool:
            return (now.state, now.producer_id, now.producer_epoch) == ("Ongoing", txn.producer_id, txn.epoch)

        def ask(rest: list[PreparedTransaction]) -> Steps[dict[PreparedTransaction, Message | KlogError]]:
            doing = "abort of a transaction of"
            answers = yield from self._ask_about(
                INIT_PRODUCER_ID, rest, more, doing, _FENCED | {_BUSY}, _FIRST_WITH_EPOCH
            )
            # the broker has begun to abort, or is ending another transaction; markers may take long to be written
            busy = [
                txn for txn, answer in answers.items() if isinstance(answer, dict) and answer["error_code"] == _BUSY
            ]
            described = yield from steps_of(self.describe_transactions)(txn.transactional_id for txn in busy)
            for txn in busy:
                now = described[txn.transactional_id]
                if isinstance(now, KlogError):
                    answers[txn] = now
                elif is_open(txn, now):
                    answers[txn] = answer_error(INIT_PRODUCER_ID, _BUSY, f"{doing} {txn.transactional_id}")
            return answers

        return self._each_of_many(transactions, ask)

    @call
    def fence_producers(self, transactional_ids: Iterable[str]) -> Steps[Outcomes[str, None]]:
        """Abort the open transactions of transactional ids, and refuse whatever their producers do next, as Kafka does.

        Bounded as `end_transactions`. InitProducerId (Kafka 0.11), at the coordinators.
        """
        more = {"transaction_timeout_ms": self.cluster.config.transaction_timeout_ms}
        doing = "fencing of the producer of"

        def ask(rest: list[PreparedTransaction]) -> Steps[dict[PreparedTransaction, Message | KlogError]]:
            # asked again while a transaction ends
            return self._ask_about(INIT_PRODUCER_ID, rest, more, doing)

        names = names_of("transactional_ids", transactional_ids)
        outcomes = yield from self._each_of_many([PreparedTransaction(name, -1, -1) for name in names], ask)
        return Outcomes({transaction.transactional_id: outcome for transaction, outcome in outcomes.items()})

    def _each_of_many(
        self,
        transactions: Iterable[PreparedTransaction],
        ask: Callable[[list[PreparedTransaction]], Steps[dict[PreparedTransaction, Message | KlogError]]],
    ) -> Steps[Outcomes[PreparedTransaction, None]]:
        """Ask as `_each` does, with a deadline for each group: a decision may have tens of thousands.

        After a group of which one has an error that can be retried, the rest is not asked for, and has that error.
        """
        wanted = list(dict.fromkeys(items_of("transactions", transactions)))
        outcomes: Outcomes[PreparedTransaction, Message] = Outcomes()
        for start in range(0, len(wanted), _MOST_IN_FLIGHT):
            try:
                group = yield from self._each(wanted[start : start + _MOST_IN_FLIGHT], ask)
                outcomes.update(group)
                passing = [error for error in group.failures.values() if is_retriable(error)]
            except KlogError as error:
                if not outcomes:
                    raise
                passing = [error]
            if passing:
                outcomes.update({transaction: passing[0] for transaction in wanted if transaction not in outcomes})
                break
        return mapped(outcomes)

    def _ask_about(
        self,
        api: Api,
        transactions: list[PreparedTransaction],
        more: Message,
        doing: str,
        accepted: Collection[ErrorCode] = (),
        first_version: int = 0,
    ) -> Steps[dict[PreparedTransaction, Message | KlogError]]:
        """Ask the coordinators about transactions, each by a request of its own, with `more` fields."""

        def places(rest: list[PreparedTransaction]) -> Steps[Routes[PreparedTransaction]]:
            by_node, failures = yield from self._at_coordinators(rest, TRANSACTION, lambda txn: txn.transactional_id)
            for node in by_node:
                if (yield from self.cluster.asking_version(node, api)) < first_version:
                    raise UnsupportedVersionError(f"{api.name} with a producer's epoch needs Kafka 2.5 or later")
            return by_node, failures

        def request(some: list[PreparedTransaction]) -> Message:
            (txn,) = some
            identity = {"transactional_id": txn.transactional_id, "producer_id": txn.producer_id}
            return {**identity, "producer_epoch": txn.epoch, **more}

        return self._ask(places, api, transactions, request, whole, doing, accepted=accepted, one_by_one=True)

    @call
    def describe_producers(
        self, partitions: Iterable[TopicPartition]
    ) -> Steps[Outcomes[TopicPartition, tuple[ProducerState, ...]]]:
        """The active producers of partitions. DescribeProducers (Kafka 2.8), at the leaders."""
        return self._each_at(
            DESCRIBE_PRODUCERS,
            partitions_of("partitions", partitions),
            lambda keys: {"topics": topic_numbers(keys, numbers="partition_indexes")},
            by_partition(),
            "DescribeProducers of",
            places=self.cluster.asking_by_leader,
            result=lambda entry: tuple(_producer(producer) for producer in entry["active_producers"]),
        )

    @call
    def hanging_transactions(
        self, partitions: Iterable[TopicPartition], *, longer_than_ms: int | None = None
    ) -> Steps[Outcomes[TopicPartition, tuple[ProducerState, ...]]]:
        """The producers of partitions with a hanging transaction: one that is open, and that no coordinator will end.

        read_committed consumers stop before it until `abort_transaction` ends it. The coordinators name the partitions
        of each transaction whose markers are still to be written; a transaction hangs if they don't name its partition.
        With `longer_than_ms` only those whose last record has an older timestamp. ListTransactions leaves out the ids
        that this user may not describe: their transactions seem to hang. DescribeProducers, ListTransactions and
        DescribeTransactions (Kafka 3.0; KIP-664).
        """
        wanted = partitions_of("partitions", partitions)
        oldest = None
        if longer_than_ms is not None:
            oldest = time.time() * 1000 - number_of("longer_than_ms", longer_than_ms)
        described: dict[TopicPartition, tuple[ProducerState, ...] | KlogError] = {}
        for start in range(0, len(wanted), _MOST_DESCRIBED):
            described |= yield from steps_of(self.describe_producers)(wanted[start : start + _MOST_DESCRIBED])

        def is_candidate(state: ProducerState) -> bool:
            is_old = oldest is None or state.last_timestamp is None or state.last_timestamp < oldest
            return state.transaction_start is not None and is_old

        suspects = _chosen(described, lambda _, state: is_candidate(state))
        awaited = yield from self._awaited_markers(
            {state.producer_id for states in suspects.values() for state in states}
        )
        suspects = _chosen(suspects, lambda key, state: (key, state.producer_id) not in awaited)
        # the coordinator may have written the markers between the two requests
        again = (yield from steps_of(self.describe_producers)(list(suspects))) if suspects else {}
        there = {
            (key, state.producer_id, state.transaction_start)
            for key, states in again.items()
            if not isinstance(states, KlogError)
            for state in states
        }
        hanging = _chosen(suspects, lambda key, state: (key, state.producer_id, state.transaction_start) in there)
        failures = {key: error for key, error in (described | again).items() if isinstance(error, KlogError)}
        return Outcomes({key: failures.get(key, hanging.get(key, ())) for key in described})

    def _awaited_markers(self, producer_ids: Collection[int]) -> Steps[set[tuple[TopicPartition, int]]]:
        """The partitions in which coordinators will write markers of producers, each with its producer id."""
        if not producer_ids:
            return set()
        names = {
            transaction.transactional_id
            for transaction in (yield from steps_of(self.list_transactions)(producer_ids=producer_ids))
        }
        awaited = set()
        for described in (yield from steps_of(self.describe_transactions)(names)).values():
            if isinstance(described, ProtocolError) and described.code == ErrorCode.TRANSACTIONAL_ID_NOT_FOUND:
                continue
            if isinstance(described, KlogError):
                raise described
            awaited |= {(key, described.producer_id) for key in described.partitions}
        return awaited

    @call
    def abort_transaction(
        self, partition: TopicPartition, producer_id: int, producer_epoch: int, coordinator_epoch: int = -1
    ) -> Steps[None]:
        """Abort a transaction that its coordinator has forgotten, in one partition; `ProtocolError` if refused.

        The ids and epochs are those of `describe_producers`; a coordinator_epoch of -1 is written as 0. Consumers with
        read_committed go on behind the transaction. A transaction that its coordinator knows ends by its timeout or by
        a new producer: aborting it here leaves its other partitions open. INVALID_TXN_STATE if this producer has no
        open transaction in the partition, which only Kafka 2.8 and later tell. WriteTxnMarkers (Kafka 0.11), at the
        leader.
        """
        key = partition_of("partition", partition)
        marker = {
            "producer_id": number_of("producer_id", producer_id),
            "producer_epoch": number_of("producer_epoch", producer_epoch, 0, _MAX_INT16),
            "transaction_result": False,
            "topics": [{"name": name_of("the topic", key[0]), "partition_indexes": [key[1]]}],
            "coordinator_epoch": max(0, number_of("coordinator_epoch", coordinator_epoch, -1, INT32_MAX)),
        }

        def entries(answer: Message, _: Collection[TopicPartition]) -> Iterator[tuple[TopicPartition, Message]]:
            for marker in answer["markers"]:
                if marker["producer_id"] != producer_id:
                    raise DecodeError(f"WriteTxnMarkers response with producer {marker['producer_id']}, not asked for")
                yield from partition_entries(marker)

        def request(_: list[TopicPartition]) -> Message:
            return {"markers": [marker]}

        with self._turn, self._call():
            yield from self._check_open(key, producer_id)
            leaders, doing = self.cluster.asking_by_leader, "WriteTxnMarkers of"
            (yield from self._each_at(WRITE_TXN_MARKERS, [key], request, entries, doing, places=leaders)).check()

    def _check_open(self, key: TopicPartition, producer_id: int) -> Steps[None]:
        """Brokers write any marker, also of a producer that never was."""
        try:
            states = (yield from steps_of(self.describe_producers)([key])).check()[key]
        except UnsupportedVersionError:
            return
        if not any(state.producer_id == producer_id and state.transaction_start is not None for state in states):
            what = f"abort of a transaction of producer {producer_id} in {key[0]}-{key[1]}"
            advice = "it has no open transaction there: see describe_producers"
            raise ProtocolError(ErrorCode.INVALID_TXN_STATE, what, advice=advice)


class Admin(TopicCalls, GroupCalls, UserCalls, TransactionCalls):
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


def _chosen(
    states: Mapping[TopicPartition, Sequence[ProducerState] | KlogError],
    is_chosen: Callable[[TopicPartition, ProducerState], bool],
) -> dict[TopicPartition, tuple[ProducerState, ...]]:
    """The chosen producers of partitions, without partitions that have none or an error."""
    answered = {key: some for key, some in states.items() if not isinstance(some, KlogError)}
    chosen = {key: tuple(value for value in some if is_chosen(key, value)) for key, some in answered.items()}
    return {key: some for key, some in chosen.items() if some}


def _described(entry: Message) -> TransactionDescription:
    return TransactionDescription(
        entry["transactional_id"],
        entry["transaction_state"],
        entry["transaction_timeout_ms"],
        known(entry["transaction_start_time_ms"]),
        entry["producer_id"],
        entry["producer_epoch"],
        tuple((topic["topic"], partition) for topic in entry["topics"] for partition in topic["partitions"]),
        entry["answered_by"],
    )


def _producer(entry: Message) -> ProducerState:
    return ProducerState(
        entry["producer_id"],
        entry["producer_epoch"],
        known(entry["last_sequence"]),
        known(entry["last_timestamp"]),
        entry["coordinator_epoch"],
        known(entry["current_txn_start_offset"]),
    )


def replicas_for(admin: Admin) -> int:
    """The replicas of a topic that a program keeps its state in: three, or one for each broker if there are fewer."""
    return max(1, min(_MOST_REPLICAS, len(admin.cluster.nodes)))


def create_compacted(admin: Admin, topic: str, settings: Callable[[int | None], Mapping[str, str]]) -> bool:
    """Create a topic of one partition for a program's state; False if it is there.

    `settings` get its replicas, None: as many as brokers give it by default, since they do not replicate as asked.
    """
    replicas: int | None = replicas_for(admin)
    while True:
        try:
            configs = {"cleanup.policy": "compact", **settings(replicas)}
            admin.create_topic(topic, 1, replication_factor=replicas, configs=configs)
            return True
        except ProtocolError as error:
            if error.code == ErrorCode.TOPIC_ALREADY_EXISTS:
                return False
            if error.code != ErrorCode.INVALID_REPLICATION_FACTOR or replicas is None:
                raise
            replicas = None


def settings_of_compacted(admin: Admin, topic: str, losses: str) -> dict[str, str | None]:
    """The settings of a topic that keeps a program's state; `ConfigError` names the `losses` if it is not compacted."""
    (entries,) = admin.describe_configs([("topic", topic)]).check().values()
    settings = {name: entry.value for name, entry in entries.items()}
    if (policy := settings["cleanup.policy"]) != "compact":
        raise ConfigError(
            f"topic {topic} has cleanup.policy={policy}: {losses} would be lost; set cleanup.policy=compact "
            f"(klog topics alter {topic} --config cleanup.policy=compact)"
        )
    return settings
