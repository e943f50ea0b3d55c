"""State machine of a transactional id (KIP-98, KIP-360, KIP-588, KIP-890), without I/O, clock or waiting.

INIT is InitProducerId; ADD is AddPartitionsToTxn or AddOffsetsToTxn; COMMIT and ABORT are EndTxn. FENCE aborts with the
next epoch, which no producer has: after a timeout, or when another instance sends INIT. COMPLETE means that all markers
are written. Only states that `TRANSITIONS` names are written to __transaction_state.

With transaction.version 2 each end raises the epoch by one: the markers have the new epoch, and so has the producer's
next transaction. What comes late with the epoch before belongs to no transaction any more. The answer to EndTxn names
the new epoch, so a producer that sends it again with the one before has lost that answer; with the new epoch it aborts
a transaction that has not begun. After the last epoch a new producer id follows, from 0 on, once the markers of the
transaction are written.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum, IntEnum, auto

from spark_klog.base.names import TRANSACTIONS_2, TopicPartition
from spark_klog.errors import ErrorCode

NO_ID, NO_EPOCH, NO_TIME = -1, -1, -1
_MAX_EPOCH = 0x7FFF
#: Last epoch that a producer can get; one more is left to fence it.
_LAST_EPOCH = _MAX_EPOCH - 1

_BUSY, _INVALID = ErrorCode.CONCURRENT_TRANSACTIONS, ErrorCode.INVALID_TXN_STATE
_FENCED = ErrorCode.PRODUCER_FENCED


class State(IntEnum):
    """States, with their numbers in records of __transaction_state."""

    EMPTY = 0
    ONGOING = 1
    PREPARE_COMMIT = 2
    PREPARE_ABORT = 3
    COMPLETE_COMMIT = 4
    COMPLETE_ABORT = 5
    DEAD = 6
    PREPARE_EPOCH_FENCE = 7

    @property
    def text(self) -> str:
        """The name as Kafka's tools print it."""
        return self.name.title().replace("_", "")


class Event(Enum):
    """Events, in the order of the columns of `_AFTER`."""

    INIT = auto()
    ADD = auto()
    COMMIT = auto()
    ABORT = auto()
    FENCE = auto()
    COMPLETE = auto()
    EXPIRE = auto()


_ABORT = State.PREPARE_ABORT
#: The next state by state and event, or the error that the client gets; NONE if the event has happened before.
_AFTER: dict[State, tuple[State | ErrorCode | None, ...]] = {
    # INIT, ADD, COMMIT, ABORT, FENCE, COMPLETE, EXPIRE
    State.EMPTY: (State.EMPTY, State.ONGOING, _INVALID, _INVALID, None, None, State.DEAD),
    State.ONGOING: (_ABORT, State.ONGOING, State.PREPARE_COMMIT, _ABORT, _ABORT, None, None),
    State.PREPARE_COMMIT: (_BUSY, _BUSY, _BUSY, _INVALID, None, State.COMPLETE_COMMIT, None),
    State.PREPARE_ABORT: (_BUSY, _BUSY, _INVALID, _BUSY, None, State.COMPLETE_ABORT, None),
    State.COMPLETE_COMMIT: (State.EMPTY, State.ONGOING, ErrorCode.NONE, _INVALID, None, None, State.DEAD),
    State.COMPLETE_ABORT: (State.EMPTY, State.ONGOING, _INVALID, ErrorCode.NONE, None, None, State.DEAD),
}
TRANSITIONS = {
    (state, event): after
    for state, row in _AFTER.items()
    for event, after in zip(Event, row, strict=True)
    if after is not None
}


@dataclass(frozen=True)
class ProducerIdAndEpoch:
    """A producer id with its epoch, by which a client identifies itself."""

    producer_id: int
    epoch: int


@dataclass(frozen=True)
class Transaction:
    """State of a transactional id; times in ms. `last` is the producer's previous id and epoch, if it gave them.

    `version` is the client's transaction.version, 2 after an end that has raised the epoch; `next_id` is the producer
    id that follows when the transaction is complete, if that was the last epoch.
    """

    transactional_id: str
    producer: ProducerIdAndEpoch
    last: ProducerIdAndEpoch
    timeout_ms: int
    state: State
    partitions: frozenset[TopicPartition]
    started_ms: int
    updated_ms: int
    version: int = 0
    next_id: int = NO_ID

    @property
    def following(self) -> ProducerIdAndEpoch:
        """By what the producer identifies itself in the next transaction."""
        return self.producer if self.next_id == NO_ID else ProducerIdAndEpoch(self.next_id, 0)

    @property
    def is_prepared(self) -> bool:
        """Whether the outcome is decided and markers remain to be written."""
        return self.state in (State.PREPARE_COMMIT, State.PREPARE_ABORT)

    @property
    def commits(self) -> bool:
        return self.state in (State.PREPARE_COMMIT, State.COMPLETE_COMMIT)


#: Result of an event: the new state to write, or the error code that the client gets.
Outcome = Transaction | ErrorCode
_NOBODY = ProducerIdAndEpoch(NO_ID, NO_EPOCH)


class NeedsProducerId(Exception):
    """`init`, `end` or `fence` needs a new producer id."""


def created(transactional_id: str, producer_id: int, timeout_ms: int, now_ms: int) -> Transaction:
    """Make the state of a new transactional id; `init` gives it its first epoch."""
    producer = ProducerIdAndEpoch(producer_id, NO_EPOCH)
    return Transaction(
        transactional_id, producer, _NOBODY, timeout_ms, State.EMPTY, frozenset(), NO_TIME, now_ms
    )  # fmt: skip


def init(
    transaction: Transaction,
    timeout_ms: int,
    expected: ProducerIdAndEpoch | None,
    now_ms: int,
    new_id: int | None = None,
    version: int = 0,
) -> Outcome:
    """Handle InitProducerId. `expected` is the producer's id and epoch (KIP-360), None for a new instance.

    In state Ongoing the outcome is the abort, by the brokers' transaction.version; the caller writes it and lets the
    client retry. Raises `NeedsProducerId` if the epochs are used up and `new_id` is None.
    """
    now = transaction.producer
    if expected is not None and not _may_continue(transaction, expected):
        return _FENCED
    state = TRANSITIONS[transaction.state, Event.INIT]
    if isinstance(state, ErrorCode):
        return state
    if state is State.PREPARE_ABORT:
        if expected is not None and expected != now:  # a producer that was fenced must not end its successor's
            return _FENCED
        return fence(transaction, now_ms, version=version, new_id=new_id)
    if expected is not None and now.epoch != NO_EPOCH and expected.epoch != now.epoch:
        if expected.epoch != transaction.last.epoch:
            return _FENCED
        producer, last = now, transaction.last  # a retry: the first response was lost
    elif now.epoch >= _LAST_EPOCH:
        if new_id is None:
            raise NeedsProducerId
        producer = ProducerIdAndEpoch(new_id, 0)
        last = now if expected is not None else ProducerIdAndEpoch(now.producer_id, NO_EPOCH)
    else:
        producer = ProducerIdAndEpoch(now.producer_id, now.epoch + 1)
        last = now if expected is not None else ProducerIdAndEpoch(now.producer_id, NO_EPOCH)
    return replace(
        transaction,
        producer=producer,
        last=last,
        timeout_ms=timeout_ms,
        state=state,
        partitions=frozenset(),
        started_ms=NO_TIME,
        updated_ms=now_ms,
    )


def _may_continue(transaction: Transaction, expected: ProducerIdAndEpoch) -> bool:
    now, last = transaction.producer, transaction.last
    if now.epoch == NO_EPOCH or expected.producer_id == now.producer_id:
        return True
    return expected.producer_id == last.producer_id and expected.epoch >= _LAST_EPOCH


def add(
    transaction: Transaction,
    producer: ProducerIdAndEpoch,
    partitions: frozenset[TopicPartition],
    now_ms: int,
    version: int = 0,
) -> Outcome:
    """Handle AddPartitionsToTxn or AddOffsetsToTxn; NONE if all partitions are in the transaction already.

    `version` is 2 if a leader adds them for its client.
    """
    if transaction.is_prepared and producer == transaction.following:
        return _BUSY
    if code := _refusal(transaction, producer):
        return code
    state = TRANSITIONS[transaction.state, Event.ADD]
    if isinstance(state, ErrorCode):
        return state
    is_open = transaction.state is State.ONGOING
    if is_open and partitions <= transaction.partitions:
        return ErrorCode.NONE
    return replace(
        transaction,
        state=state,
        partitions=transaction.partitions | partitions,
        started_ms=transaction.started_ms if is_open else now_ms,
        updated_ms=now_ms,
        version=version,
    )


def end(transaction: Transaction, producer: ProducerIdAndEpoch, *, commits: bool, now_ms: int) -> Outcome:
    """Handle EndTxn before version 5, which leaves the epoch; NONE if the transaction has already ended that way."""
    if code := _refusal(transaction, producer):
        return code
    state = TRANSITIONS[transaction.state, Event.COMMIT if commits else Event.ABORT]
    return state if isinstance(state, ErrorCode) else replace(transaction, state=state, updated_ms=now_ms, version=0)


def end_and_raise(
    transaction: Transaction,
    producer: ProducerIdAndEpoch,
    *,
    commits: bool,
    now_ms: int,
    new_id: int | None = None,
) -> Outcome:
    """Handle EndTxn of transaction.version 2, which raises the epoch; NONE if the transaction has ended that way.

    An abort of a transaction that has not begun raises the epoch, too: what its producer has sent can't begin it any
    more. Raises `NeedsProducerId` if the epochs are used up and `new_id` is None.
    """
    is_repeated = _has_ended(transaction, producer)
    if transaction.is_prepared:
        is_its_own = is_repeated or producer == transaction.following
        return _BUSY if is_its_own else _refusal(transaction, producer) or _FENCED
    event = Event.COMMIT if commits else Event.ABORT
    if is_repeated:
        outcome = TRANSITIONS[transaction.state, event]
        assert isinstance(outcome, ErrorCode)
        return outcome
    if code := _refusal(transaction, producer):
        return code
    if transaction.state is State.ONGOING:
        after = TRANSITIONS[transaction.state, event]
        assert isinstance(after, State)
        return _raised(replace(transaction, state=after, updated_ms=now_ms), new_id)
    if commits:
        return _INVALID
    return _raised(replace(transaction, state=State.PREPARE_ABORT, started_ms=now_ms, updated_ms=now_ms), new_id)


def _has_ended(transaction: Transaction, producer: ProducerIdAndEpoch) -> bool:
    """Whether a producer that raises epochs names the transaction that ends or has ended last."""
    if transaction.version < TRANSACTIONS_2 or transaction.state in (State.EMPTY, State.ONGOING):
        return False
    now = transaction.producer
    if producer.producer_id == now.producer_id:
        return producer.epoch == now.epoch - 1
    has_rotated = not transaction.is_prepared and now.epoch == 0
    return has_rotated and producer == ProducerIdAndEpoch(transaction.last.producer_id, _LAST_EPOCH)


def _raised(transaction: Transaction, new_id: int | None) -> Transaction:
    """A prepared transaction with the next epoch; `NeedsProducerId` if it was the last one and `new_id` is None."""
    now, next_id = transaction.producer, NO_ID
    if now.epoch >= _LAST_EPOCH:
        if new_id is None:
            raise NeedsProducerId
        next_id = new_id
    raised = ProducerIdAndEpoch(now.producer_id, min(now.epoch + 1, _MAX_EPOCH))
    return replace(transaction, producer=raised, last=now, version=TRANSACTIONS_2, next_id=next_id)


def verify(transaction: Transaction, producer: ProducerIdAndEpoch, partition: TopicPartition) -> ErrorCode:
    """Check whether the producer may write to a partition in its transaction (KIP-890); NONE or the error."""
    if code := _refusal(transaction, producer):
        return code
    if transaction.is_prepared:
        return _BUSY
    is_in_it = transaction.state is State.ONGOING and partition in transaction.partitions
    return ErrorCode.NONE if is_in_it else ErrorCode.TRANSACTION_ABORTABLE


def _refusal(transaction: Transaction, producer: ProducerIdAndEpoch) -> ErrorCode:
    if producer.producer_id != transaction.producer.producer_id:
        return ErrorCode.INVALID_PRODUCER_ID_MAPPING
    return ErrorCode.NONE if producer.epoch == transaction.producer.epoch else _FENCED


def fence(transaction: Transaction, now_ms: int, *, version: int = 0, new_id: int | None = None) -> Transaction:
    """Abort an ongoing transaction with the next epoch, by the brokers' transaction.version.

    With version 2 the epoch is raised as by an abort of the producer. `NeedsProducerId` if the epochs are used up then.
    """
    state = TRANSITIONS[transaction.state, Event.FENCE]
    assert isinstance(state, State)
    if version >= TRANSACTIONS_2:
        return _raised(replace(transaction, state=state, updated_ms=now_ms), new_id)
    now = transaction.producer
    return replace(
        transaction,
        producer=ProducerIdAndEpoch(now.producer_id, min(now.epoch + 1, _MAX_EPOCH)),
        last=ProducerIdAndEpoch(now.producer_id, NO_EPOCH),
        state=state,
        updated_ms=now_ms,
        version=version,
    )


def complete(transaction: Transaction, now_ms: int) -> Transaction:
    """Complete a prepared transaction, after all markers are written."""
    state = TRANSITIONS[transaction.state, Event.COMPLETE]
    assert isinstance(state, State)
    return replace(
        transaction,
        producer=transaction.following,
        state=state,
        partitions=frozenset(),
        updated_ms=now_ms,
        next_id=NO_ID,
    )


def is_timed_out(transaction: Transaction, now_ms: int) -> bool:
    """Whether the transaction has exceeded its timeout and must be fenced."""
    return transaction.state is State.ONGOING and transaction.started_ms + transaction.timeout_ms <= now_ms


def is_expired(transaction: Transaction, before_ms: int) -> bool:
    """Whether the id has been unused since `before_ms` and can be removed."""
    return (transaction.state, Event.EXPIRE) in TRANSITIONS and transaction.updated_ms <= before_ms
