"""The transactions of a producer (KIP-98, KIP-360, KIP-447, KIP-890).

    new        -- init                                    --> ready
    ready      -- begin                                   --> open
    open       -- commit, abort                           --> committing, aborting
    open       -- prepare                                 --> prepared: another process ends it; init goes on
    open       -- an error                                --> failed: only abort is allowed, with a new epoch
    committing, aborting -- the coordinator has decided   --> ready
    any        -- another producer uses this transactional.id --> fenced, for good

If the response to a commit is lost, the outcome is unknown: the state stays `committing`, and commit can be repeated.

Where the cluster's transaction.version is 2 (Kafka 4), brokers add partitions and groups to the transaction with the
first records and offsets, and each end gives the producer its next epoch. Each transaction asks anew by which version
it is made, with its first record, and keeps to it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any

from spark_klog.base.names import TRANSACTION_VERSION, TRANSACTIONS_2, TopicPartition
from spark_klog.client.answers import answer_error, by_key, check_code, worst
from spark_klog.client.cluster import Cluster
from spark_klog.client.coordinator import Coordinators
from spark_klog.client.offsets import (
    Committed,
    GroupMetadata,
    check_committable,
    partition_entries,
    topic_numbers,
    topics_to_commit,
)
from spark_klog.client.producer.numbering import Numbering
from spark_klog.client.requests import PendingRequest, Steps
from spark_klog.errors import (
    ErrorCode,
    InvalidTransactionState,
    ProducerFenced,
    ProtocolError,
    UnsupportedVersionError,
)
from spark_klog.protocol.apis import (
    ADD_OFFSETS_TO_TXN,
    ADD_PARTITIONS_TO_TXN,
    END_TXN,
    INIT_PRODUCER_ID,
    TXN_OFFSET_COMMIT,
)
from spark_klog.protocol.codec import Message
from spark_klog.protocol.schema import Api
from spark_klog.protocol.tables.groups import GROUP, TRANSACTION
from spark_klog.protocol.tables.records import PRODUCE_OF_TRANSACTIONS_2
from spark_klog.protocol.tables.transactions import FIRST_END_OF_TRANSACTIONS_2, FIRST_OF_TRANSACTIONS_2
from spark_klog.tracing import trace_client

#: The first InitProducerId with the current producer id and epoch, so that it can't fence a newer producer (KIP-360).
_FIRST_WITH_EPOCH = 3
#: The first TxnOffsetCommit with the member and its generation (KIP-447).
_FIRST_WITH_MEMBER = 3
#: Errors after which the coordinator has not committed and never will: for example it has aborted after the timeout.
NEVER_COMMITTED = frozenset(
    {
        ErrorCode.INVALID_PRODUCER_EPOCH,
        ErrorCode.INVALID_PRODUCER_ID_MAPPING,
        ErrorCode.INVALID_TXN_STATE,
        ErrorCode.TRANSACTION_ABORTABLE,
    }
)


class State(Enum):
    """State of a producer's transactions; see the module's docstring."""

    NEW = "new"
    READY = "ready"
    OPEN = "open"
    PREPARED = "prepared"
    FAILED = "failed"
    COMMITTING = "committing"
    ABORTING = "aborting"
    FENCED = "fenced"


@dataclass(frozen=True)
class PreparedTransaction:
    """A transaction that another process ends, by what EndTxn names."""

    transactional_id: str
    producer_id: int
    epoch: int


class Transactions:
    """The transactions of one transactional.id. Not thread-safe.

    Every call takes up to max.block.ms and raises what `Coordinators.trying` raises, `ProducerFenced`, or
    `InvalidTransactionState` if the state does not allow the call. Those that ask coordinators are steps, which the
    caller runs; they can be closed where they wait, as by an interrupt.
    """

    def __init__(self, cluster: Cluster, transactional_id: str) -> None:
        self._cluster = cluster
        self.transactional_id = transactional_id
        self.state = State.NEW
        self._producer_id, self._epoch = -1, -1
        self._partitions: set[TopicPartition] = set()
        self._groups: set[str] = set()
        #: Whether the coordinator may know of the transaction.
        self._is_begun = False
        #: The producer id and epoch of the next transaction, when the coordinator has told them with the end of this
        #: one: kept by themselves, so that after an interrupt a second end is not asked for with them.
        self._following: tuple[int, int] | None = None
        #: Whether a failed transaction has ended, and only another epoch is missing.
        self._has_aborted = False
        self._coordinators = Coordinators(cluster)
        trace_client(self, cluster, "send_offsets")
        #: The transaction.version by which the open transaction is made; None until that is known.
        self._version: int | None = None
        #: The request for that version, then the one that adds partitions.
        self.asking: PendingRequest[Any] = PendingRequest()

    def numbering(self) -> Numbering:
        """A numbering from 0 for a partition, in the current epoch."""
        return Numbering(self._producer_id, self._epoch)

    def is_of_epoch(self, numbering: Numbering | None) -> bool:
        """Whether a numbering is of the current epoch, so that it goes on."""
        if numbering is None:
            return False
        return (numbering.producer_id, numbering.epoch) == (self._producer_id, self._epoch)

    @property
    def last_produce(self) -> int:
        """The last version of Produce for the open transaction."""
        return PRODUCE_OF_TRANSACTIONS_2 - (0 if self._is_of_2 else 1)

    @property
    def _is_of_2(self) -> bool:
        return self._version is not None and self._version >= TRANSACTIONS_2

    def init(self, known: PreparedTransaction | None = None) -> Steps[None]:
        """Get a producer id and epoch. This fences earlier producers and aborts their open transactions.

        After `prepare` it aborts the prepared transaction, too, if nobody has ended it. With `known`, the last
        transaction of this id, it goes on from there (Kafka 2.5): `ProducerFenced` if the id has another epoch.
        """
        self._expect("init_transactions", State.NEW, State.PREPARED)
        yield from self._init(*((-1, -1) if known is None else (known.producer_id, known.epoch)))

    def begin(self) -> None:
        self._expect("begin_transaction", State.READY)
        self.state = State.OPEN

    @property
    def is_open(self) -> bool:
        return self.state in (State.OPEN, State.FAILED, State.ABORTING)

    @property
    def under_way(self) -> PreparedTransaction | None:
        """The transaction that the coordinator may know of and that has not ended; None if there is none."""
        identity = PreparedTransaction(self.transactional_id, self._producer_id, self._epoch)
        return identity if self._is_begun else None

    def check_open(self, call: str) -> None:
        """Raise `InvalidTransactionState` unless a transaction is open, `ProducerFenced` if fenced."""
        self._expect(call, State.OPEN)

    def fail(self) -> None:
        """Note that a record of the open transaction was not written: from now on only abort is allowed."""
        if self.state is State.OPEN:
            self.state = State.FAILED

    def must_add(self, key: TopicPartition) -> bool:
        """Whether a partition has to be added to the transaction before records are sent to it."""
        return not self._is_of_2 and key not in self._partitions

    def add(self, partitions: Iterable[TopicPartition]) -> None:
        """Add those of the partitions that `must_add` says, without waiting: call it until none is left.

        Raises what the other calls raise; `asking` tells what to wait for.
        """
        if self._version is None:
            self._version = self.asking.step(self._version_steps)
        if self._version is None:
            return
        if self._is_of_2:
            self._is_begun = True  # by the records that are sent now
            return
        while wanted := [key for key in partitions if self.must_add(key)]:
            self._is_begun = True
            added = self.asking.step(partial(self._addition, wanted))
            if added is None:
                return
            self._partitions |= added

    def _version_steps(self) -> Steps[int]:
        def steps(node: int, deadline: float) -> Steps[int]:
            return (yield from self._cluster.asking_features(node, deadline)).get(TRANSACTION_VERSION, 0)

        return self._coordinators.trying(self.transactional_id, steps, TRANSACTION)

    def _addition(self, wanted: list[TopicPartition]) -> Steps[set[TopicPartition]]:
        fields = {**self._identity(), "topics": topic_numbers(wanted)}
        message = {f"v3_and_below_{name}": value for name, value in fields.items()}

        def added(answer: Message) -> set[TopicPartition]:
            entries = (
                ((topic["name"], entry["partition_index"]), entry)
                for topic in answer["results_by_topic_v3_and_below"]
                for entry in topic["results_by_partition"]
            )
            by_partition = by_key(ADD_PARTITIONS_TO_TXN, answer, entries, wanted)
            codes = {key: entry["partition_error_code"] for key, entry in by_partition.items()}
            self._check_each(ADD_PARTITIONS_TO_TXN, codes, "added to the transaction")
            return set(wanted)

        name = self.transactional_id
        return self._coordinators.asking(name, ADD_PARTITIONS_TO_TXN, message, added, TRANSACTION)

    def send_offsets(
        self,
        offsets: Mapping[TopicPartition, int | Committed],
        member: GroupMetadata,
    ) -> Steps[None]:
        """Commit a group's offsets with the transaction. With a generation the broker rejects outdated members.

        `UnsupportedVersionError` for a member if the broker is older than Kafka 2.5; the transaction stays open.
        """
        self._expect("send_offsets_to_transaction", State.OPEN)
        if not offsets:
            return
        wanted = {key: each if isinstance(each, Committed) else Committed(each) for key, each in offsets.items()}
        for key, committed_offset in wanted.items():
            check_committable(key, committed_offset.offset)
        group = member.group
        if member != GroupMetadata(group):
            with self.failing():
                version = yield from self._version_of(TXN_OFFSET_COMMIT, group, GROUP)
            if version < _FIRST_WITH_MEMBER:
                raise UnsupportedVersionError(
                    f"the coordinator of group {group} is older than Kafka 2.5 and can't reject the offsets of outdated"
                    " members: upgrade the brokers, or assign partitions to the consumer and pass the group's name"
                )
        if self._version is None:
            self.asking.close()
            with self.failing():
                self._version = yield from self._version_steps()
        self._is_begun = True
        if not self._is_of_2 and group not in self._groups:
            request = {**self._identity(), "group_id": group}
            with self.failing():
                yield from self._request(ADD_OFFSETS_TO_TXN, request, f"offsets of group {group}")
            self._groups.add(group)
        commit = {
            **self._identity(),
            "group_id": group,
            "generation_id": member.generation,
            "member_id": member.member,
            "group_instance_id": member.instance,
            "topics": topics_to_commit(wanted),
        }

        last = FIRST_OF_TRANSACTIONS_2 if self._is_of_2 else None

        def committed(answer: Message) -> None:
            entries = by_key(TXN_OFFSET_COMMIT, answer, partition_entries(answer), offsets)
            codes = {key: entry["error_code"] for key, entry in entries.items()}
            self._check_each(TXN_OFFSET_COMMIT, codes, f"committed for group {group}")

        with self.failing():
            yield from self._coordinators.asking(group, TXN_OFFSET_COMMIT, commit, committed, GROUP, last)

    def commit(self) -> Steps[None]:
        """Commit the transaction; after an error call it again: the coordinator may have committed it."""
        self._expect("commit_transaction", State.OPEN, State.COMMITTING)
        self.state = State.COMMITTING
        yield from self._end(commits=True)

    def prepare(self) -> PreparedTransaction | None:
        """Leave the transaction to another process; None, and the transaction has ended, if nothing was written."""
        self._expect("prepare_transaction", State.OPEN)
        prepared = self.under_way
        if prepared is None:
            self._ended()
        else:
            self.state = State.PREPARED
        return prepared

    def abort(self) -> Steps[None]:
        """Abort the transaction; after an error call it again.

        After a failure, records may still be in flight: the producer gets a new epoch so that brokers reject them. With
        transaction.version 2 it has that by each end.
        """
        self._expect("abort_transaction", State.OPEN, State.FAILED, State.ABORTING)
        if self.state is State.FAILED:
            yield from self._renew()
        else:
            self.state = State.ABORTING
            yield from self._end(commits=False)

    def _end(self, *, commits: bool) -> Steps[None]:
        if self._is_begun and self._following is None:
            try:
                yield from self._request_end(commits=commits)
            except ProtocolError as error:
                if error.code in NEVER_COMMITTED:  # otherwise an earlier attempt may have succeeded
                    self.state = State.FAILED
                if error.code == ErrorCode.INVALID_PRODUCER_EPOCH:
                    raise ProducerFenced(self.transactional_id) from error
                raise
        self._ended()

    def _request_end(self, *, commits: bool) -> Steps[bool]:
        """End the transaction; return whether the producer has another epoch now."""
        what = f"{'commit' if commits else 'abort'} of a transaction of {self.transactional_id}"
        last = FIRST_END_OF_TRANSACTIONS_2 if self._is_of_2 else None
        answer = yield from self._request(END_TXN, {**self._identity(), "committed": commits}, what, last)
        if answer["producer_id"] < 0:
            return False
        self._following = answer["producer_id"], answer["producer_epoch"]
        return True

    def _ended(self) -> None:
        if self._following is not None:
            self._producer_id, self._epoch = self._following
        self.asking.close()  # of a transaction that has failed: the coordinator rejects its epoch
        self._partitions.clear()
        self._groups.clear()
        self._is_begun = self._has_aborted = False
        self._version = self._following = None
        self.state = State.READY

    def _renew(self) -> Steps[None]:
        """Abort the transaction and get a new epoch, if that is not of the abort."""
        if not self._has_aborted:
            # also for what has not begun: a producer that was fenced learns of it here, before it could fence another
            try:
                if self._following is not None or (yield from self._request_end(commits=False)):
                    self._ended()
                    return
            except ProtocolError as error:
                if error.code not in NEVER_COMMITTED:
                    raise
            self._has_aborted = True
        version = yield from self._version_of(INIT_PRODUCER_ID, self.transactional_id, TRANSACTION)
        if version < _FIRST_WITH_EPOCH:
            self.state = State.FENCED
            raise UnsupportedVersionError(
                f"the transaction of {self.transactional_id} is aborted; brokers before 2.5 give the producer no other "
                "epoch after an error: go on with a new producer"
            )
        yield from self._init(self._producer_id, self._epoch)

    def _init(self, producer_id: int, epoch: int) -> Steps[None]:
        request = {
            "transactional_id": self.transactional_id,
            "transaction_timeout_ms": self._cluster.config.transaction_timeout_ms,
            "producer_id": producer_id,
            "producer_epoch": epoch,
        }
        answer = yield from self._request(INIT_PRODUCER_ID, request, f"producer id of {self.transactional_id}")
        self._producer_id, self._epoch = answer["producer_id"], answer["producer_epoch"]
        self._ended()

    def _expect(self, call: str, *states: State) -> None:
        if self.state is State.FENCED:
            raise ProducerFenced(self.transactional_id)
        if self.state not in states:
            raise InvalidTransactionState(call, self.transactional_id, self.state.value)

    def _identity(self) -> Message:
        return {
            "transactional_id": self.transactional_id,
            "producer_id": self._producer_id,
            "producer_epoch": self._epoch,
        }

    def _check(self, api: Api, code: int, what: str) -> None:
        is_outdated = code == ErrorCode.INVALID_PRODUCER_EPOCH and api is INIT_PRODUCER_ID
        if code == ErrorCode.PRODUCER_FENCED or is_outdated:
            self.state = State.FENCED
            raise ProducerFenced(self.transactional_id)
        if code == ErrorCode.INVALID_PRODUCER_EPOCH and api is not END_TXN:
            raise ProducerFenced(self.transactional_id)  # an abort finds out whether by a timeout or by another one
        check_code(api, code, what)

    def _check_each(self, api: Api, codes: Mapping[TopicPartition, int], done: str) -> None:
        failures = []
        for (topic, partition), code in codes.items():
            what = f"{topic}-{partition} {done}"
            if code in (ErrorCode.PRODUCER_FENCED, ErrorCode.INVALID_PRODUCER_EPOCH):
                self._check(api, code, what)
            if code:
                failures.append(answer_error(api, code, what))
        # OPERATION_NOT_ATTEMPTED: another partition was refused
        refused = [error for error in failures if error.code != ErrorCode.OPERATION_NOT_ATTEMPTED]
        if failures:
            raise worst(refused or failures)

    @contextmanager
    def failing(self) -> Iterator[None]:
        """After an error, a cancellation or an interrupt in the block only abort is allowed: a part may be missing."""
        try:
            yield
        except BaseException:
            self.fail()
            raise

    def _request(self, api: Api, message: Message, what: str, last: int | None = None) -> Steps[Message]:
        """The answer of the coordinator of the transactional id; raises the error in it."""

        def checked(answer: Message) -> Message:
            self._check(api, answer["error_code"], what)
            return answer

        return self._coordinators.asking(self.transactional_id, api, message, checked, TRANSACTION, last)

    def _version_of(self, api: Api, key: str, kind: int) -> Steps[int]:
        """The version of an API that a coordinator has."""
        return self._coordinators.trying(
            key, lambda node, deadline: self._cluster.asking_version(node, api, deadline), kind
        )
