"""The state machine of a transactional id: its transitions beside Kafka's, any events beside a model; its records."""

from __future__ import annotations

import struct
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings, strategies as st

from spark_klog.broker.transactions import transaction as machine
from spark_klog.broker.transactions.records import decode_key, decode_value, encode_key, encode_value
from spark_klog.broker.transactions.transaction import (
    TRANSITIONS,
    Event,
    NeedsProducerId,
    ProducerIdAndEpoch,
    State,
    Transaction,
)
from spark_klog.errors import DecodeError, ErrorCode

#: Each state's valid predecessors, from `TransactionMetadata` of Kafka 3.9, which never writes PrepareEpochFence.
KAFKAS_PREDECESSORS = {
    State.EMPTY: {State.EMPTY, State.COMPLETE_COMMIT, State.COMPLETE_ABORT},
    State.ONGOING: {State.ONGOING, State.EMPTY, State.COMPLETE_COMMIT, State.COMPLETE_ABORT},
    State.PREPARE_COMMIT: {State.ONGOING},
    State.PREPARE_ABORT: {State.ONGOING, State.PREPARE_EPOCH_FENCE},
    State.COMPLETE_COMMIT: {State.PREPARE_COMMIT},
    State.COMPLETE_ABORT: {State.PREPARE_ABORT},
    State.DEAD: {State.EMPTY, State.COMPLETE_ABORT, State.COMPLETE_COMMIT},
    State.PREPARE_EPOCH_FENCE: {State.ONGOING},
}
NOW, TIMEOUT = 1_700_000_000_000, 60_000
FENCED, BUSY = ErrorCode.PRODUCER_FENCED, ErrorCode.CONCURRENT_TRANSACTIONS
INVALID, NO_MAPPING = ErrorCode.INVALID_TXN_STATE, ErrorCode.INVALID_PRODUCER_ID_MAPPING
P0, P1 = ("t", 0), ("t", 1)


def test_the_states_follow_each_other_as_kafkas_do() -> None:
    for (before, _), after in TRANSITIONS.items():
        assert isinstance(after, ErrorCode) or before in KAFKAS_PREDECESSORS[after]
    reached = {after for after in TRANSITIONS.values() if isinstance(after, State)}
    assert reached == set(State) - {State.PREPARE_EPOCH_FENCE}
    clients = {Event.INIT, Event.ADD, Event.COMMIT, Event.ABORT}
    for state in reached - {State.DEAD}:
        assert {event for before, event in TRANSITIONS if before is state} >= clients


def begun(epoch: int = 0) -> Transaction:
    """An ongoing transaction with one partition."""
    start = Transaction(
        "id", ProducerIdAndEpoch(7, epoch - 1), ProducerIdAndEpoch(-1, -1), 1, State.EMPTY, frozenset(), -1, NOW
    )
    ready = machine.init(start, TIMEOUT, None, NOW)
    assert isinstance(ready, Transaction)
    outcome = machine.add(ready, ProducerIdAndEpoch(7, epoch), frozenset({P0}), NOW + 5)
    assert isinstance(outcome, Transaction)
    return outcome


def test_a_new_instance_aborts_what_the_old_one_left_open() -> None:
    outcome = machine.init(begun(3), TIMEOUT, None, NOW)
    assert isinstance(outcome, Transaction)
    assert (outcome.state, outcome.producer, outcome.partitions) == (
        State.PREPARE_ABORT,
        ProducerIdAndEpoch(7, 4),
        {P0},
    )
    assert machine.init(outcome, TIMEOUT, None, NOW) == BUSY
    assert machine.init(begun(3), TIMEOUT, ProducerIdAndEpoch(7, 2), NOW) == FENCED
    after = machine.init(machine.complete(outcome, NOW), TIMEOUT, None, NOW)
    assert isinstance(after, Transaction)
    assert (after.state, after.producer, after.partitions) == (State.EMPTY, ProducerIdAndEpoch(7, 5), frozenset())
    assert machine.end(after, ProducerIdAndEpoch(7, 3), commits=True, now_ms=NOW) == FENCED


def test_used_up_epochs_take_another_producer_id() -> None:
    done = machine.complete(machine.fence(begun(32766), NOW), NOW)
    assert done.producer == ProducerIdAndEpoch(7, 32767)
    with pytest.raises(NeedsProducerId):
        machine.init(done, TIMEOUT, None, NOW)
    outcome = machine.init(done, TIMEOUT, None, NOW, new_id=8)
    assert isinstance(outcome, Transaction)
    assert outcome.producer == ProducerIdAndEpoch(8, 0)


def test_an_instance_goes_on_after_an_error_and_may_ask_again() -> None:
    """KIP-360: the producer sends its own id and epoch; if the answer is lost, a retry gets the same one."""
    ended = machine.end(begun(3), ProducerIdAndEpoch(7, 3), commits=True, now_ms=NOW)
    assert isinstance(ended, Transaction)
    ended = machine.complete(ended, NOW)
    assert machine.init(ended, TIMEOUT, ProducerIdAndEpoch(7, 2), NOW) == FENCED
    assert machine.init(ended, TIMEOUT, ProducerIdAndEpoch(6, 3), NOW) == FENCED
    first = machine.init(ended, TIMEOUT, ProducerIdAndEpoch(7, 3), NOW)
    assert isinstance(first, Transaction)
    assert first.producer == ProducerIdAndEpoch(7, 4)
    again = machine.init(first, TIMEOUT, ProducerIdAndEpoch(7, 3), NOW)
    assert isinstance(again, Transaction)
    assert again.producer == ProducerIdAndEpoch(7, 4)
    other = machine.init(again, TIMEOUT, None, NOW)
    assert isinstance(other, Transaction)
    assert machine.init(other, TIMEOUT, ProducerIdAndEpoch(7, 4), NOW) == FENCED


def test_the_same_over_a_change_of_the_producer_id() -> None:
    last = machine.end(begun(32766), ProducerIdAndEpoch(7, 32766), commits=False, now_ms=NOW)
    assert isinstance(last, Transaction)
    rotated = machine.init(machine.complete(last, NOW), TIMEOUT, ProducerIdAndEpoch(7, 32766), NOW, new_id=9)
    assert isinstance(rotated, Transaction)
    assert rotated.producer == ProducerIdAndEpoch(9, 0)
    again = machine.init(rotated, TIMEOUT, ProducerIdAndEpoch(7, 32766), NOW, new_id=10)
    assert isinstance(again, Transaction)
    assert again.producer == ProducerIdAndEpoch(9, 0)
    assert machine.init(rotated, TIMEOUT, ProducerIdAndEpoch(7, 32765), NOW) == FENCED


def test_time_counts_from_the_first_partition() -> None:
    transaction = begun()
    more = machine.add(transaction, ProducerIdAndEpoch(7, 0), frozenset({P1}), NOW + 50_000)
    assert isinstance(more, Transaction)
    assert not machine.is_timed_out(more, NOW + 5 + TIMEOUT - 1)
    assert machine.is_timed_out(more, NOW + 5 + TIMEOUT)
    assert not machine.is_timed_out(machine.fence(more, NOW), NOW + 10 * TIMEOUT)
    assert not machine.is_expired(more, NOW + 10 * TIMEOUT)
    assert machine.is_expired(machine.complete(machine.fence(more, NOW), NOW), NOW)


def test_what_may_be_written() -> None:
    """The check before a batch is written (KIP-890)."""
    transaction = begun(2)
    assert machine.verify(transaction, ProducerIdAndEpoch(7, 2), P0) == ErrorCode.NONE
    assert machine.verify(transaction, ProducerIdAndEpoch(7, 2), P1) == ErrorCode.TRANSACTION_ABORTABLE
    assert machine.verify(transaction, ProducerIdAndEpoch(7, 1), P0) == FENCED
    assert machine.verify(transaction, ProducerIdAndEpoch(8, 2), P0) == NO_MAPPING
    ended = machine.end(transaction, ProducerIdAndEpoch(7, 2), commits=True, now_ms=NOW)
    assert isinstance(ended, Transaction)
    assert machine.verify(ended, ProducerIdAndEpoch(7, 2), P0) == BUSY
    assert machine.verify(machine.complete(ended, NOW), ProducerIdAndEpoch(7, 2), P0) == ErrorCode.TRANSACTION_ABORTABLE


@dataclass
class Model:
    """A transactional id modelled by what has happened to it, as Kafka's documentation describes it."""

    epoch: int = 0
    ends: list[str] = field(default_factory=list)
    is_open: bool = False
    deciding: str = ""
    partitions: set[tuple[str, int]] = field(default_factory=set)

    def add(self, epoch: int, partition: tuple[str, int]) -> ErrorCode | None:
        if epoch != self.epoch:
            return FENCED
        if self.deciding:
            return BUSY
        is_known = self.is_open and partition in self.partitions
        self.is_open = True
        self.partitions.add(partition)
        return ErrorCode.NONE if is_known else None

    def end(self, epoch: int, how: str) -> ErrorCode | None:
        if epoch != self.epoch:
            return FENCED
        if self.deciding:
            return BUSY if self.deciding == how else INVALID
        if not self.is_open:
            return ErrorCode.NONE if self.ends[-1:] == [how] else INVALID
        self.is_open, self.deciding = False, how
        return None

    def init(self) -> ErrorCode | None:
        if self.deciding:
            return BUSY
        self.epoch += 1
        if self.is_open:
            self.is_open, self.deciding = False, "abort"
        else:
            self.ends.append("")  # a repeated EndTxn is an error from now on
        return None

    def complete(self) -> None:
        self.ends.append(self.deciding)
        self.deciding = ""
        self.partitions.clear()


@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["add", "add", "commit", "abort", "init", "complete", "restart"]),
            st.integers(-1, 0),
            st.sampled_from([P0, P1]),
        ),
        max_size=40,
    )
)
def test_any_events_are_answered_as_the_model_does(events: list[tuple[str, int, tuple[str, int]]]) -> None:
    model = Model()
    first = machine.init(machine.created("id", 7, TIMEOUT, NOW), TIMEOUT, None, NOW)
    assert isinstance(first, Transaction)
    transaction = first
    for what, age, partition in events:
        producer = ProducerIdAndEpoch(7, model.epoch + age)
        if what == "restart":
            transaction = decode_value("id", encode_value(transaction, 1))
            continue
        if what == "complete":
            if model.deciding:
                assert transaction.commits == (model.deciding == "commit")
                transaction = machine.complete(transaction, NOW)
                model.complete()
            assert not transaction.is_prepared
            continue
        if what == "add":
            expected = model.add(producer.epoch, partition)
            outcome = machine.add(transaction, producer, frozenset({partition}), NOW)
        elif what == "init":
            expected = model.init()
            outcome = machine.init(transaction, TIMEOUT, None, NOW)
        else:
            expected = model.end(producer.epoch, what)
            outcome = machine.end(transaction, producer, commits=what == "commit", now_ms=NOW)
        if expected is not None:
            assert outcome == expected
            continue
        assert isinstance(outcome, Transaction)
        transaction = outcome
        assert transaction.producer == ProducerIdAndEpoch(7, model.epoch)
        assert transaction.partitions == model.partitions
        assert transaction.is_prepared == bool(model.deciding)


Identity = tuple[int, int]
LAST_EPOCH = 32_766


@dataclass
class Model2:
    """A transactional id of clients of transaction.version 2, as KIP-890 describes it: what its producer identifies
    itself by, what the transaction before had, and what becomes of the open one."""

    now: Identity
    before: Identity | None = None
    is_open: bool = False
    #: How it ends, and what its markers have.
    deciding: str = ""
    marker: Identity = (-1, -1)
    ended: str = ""
    partitions: set[tuple[str, int]] = field(default_factory=set)
    new_ids: int = 100

    def _refused(self, who: Identity) -> ErrorCode | None:
        holder = self.marker if self.deciding else self.now
        if self.deciding and who == self.now:
            return BUSY
        if who[0] != holder[0]:
            return NO_MAPPING
        return FENCED if self.deciding or who != holder else None

    def add(self, who: Identity, partition: tuple[str, int]) -> ErrorCode | None:
        if refused := self._refused(who):
            return refused
        is_known = self.is_open and partition in self.partitions
        self.is_open = True
        self.partitions.add(partition)
        return ErrorCode.NONE if is_known else None

    def end(self, who: Identity, how: str) -> ErrorCode | None:
        if who == self.before and not self.is_open:
            if self.deciding:
                return BUSY
            return ErrorCode.NONE if how == self.ended else INVALID
        if refused := self._refused(who):
            return refused
        if how == "commit" and not self.is_open:
            return INVALID
        self._decide(how)
        return None

    def _decide(self, how: str) -> None:
        pid, epoch = self.before = self.now
        self.marker = pid, epoch + 1
        self.now = self.marker if epoch < LAST_EPOCH else (self._new_id(), 0)
        self.is_open, self.deciding = False, how

    def _new_id(self) -> int:
        self.new_ids += 1
        return self.new_ids

    def expire(self) -> bool:
        if self.is_open:
            self._decide("abort")
        return bool(self.deciding)

    def init(self) -> ErrorCode | None:
        if self.deciding:
            return BUSY
        if self.is_open:
            self._decide("abort")
            return None
        pid, epoch = self.now
        self.now = (pid, epoch + 1) if epoch < LAST_EPOCH else (self._new_id(), 0)
        self.before = None
        return None

    def complete(self) -> None:
        self.ended, self.deciding = self.deciding, ""
        self.partitions.clear()


@settings(max_examples=300, deadline=None)
@given(
    st.sampled_from([0, 32_763, 32_765]),
    st.lists(
        st.tuples(
            st.sampled_from(["add", "add", "commit", "commit", "abort", "init", "expire", "complete", "restart"]),
            st.sampled_from(["now", "now", "before", "older", "newer", "stranger"]),
            st.sampled_from([P0, P1]),
        ),
        max_size=40,
    ),
)
def test_any_events_of_version_2_are_answered_as_the_model_does(
    epoch: int, events: list[tuple[str, str, tuple[str, int]]]
) -> None:
    """Commits, aborts, repeated and late requests, timeouts, restarts of the coordinator, also over the last epoch."""
    model = Model2((7, epoch))
    ready = machine.init(
        replace(machine.created("id", 7, TIMEOUT, NOW), producer=ProducerIdAndEpoch(7, epoch - 1)), TIMEOUT, None, NOW
    )
    assert isinstance(ready, Transaction)
    transaction = ready
    for what, age, partition in events:
        pid, current = model.now
        who = {
            "now": model.now,
            "before": model.before or (pid, current - 1),
            "older": (pid, current - 2),
            "newer": (pid, current + 1),
            "stranger": (6, current),
        }[age]
        producer = ProducerIdAndEpoch(*who)
        next_id = model.new_ids + 1
        outcome: Transaction | ErrorCode
        if what == "restart":
            transaction = decode_value("id", encode_value(transaction, 2))
            continue
        if what == "complete":
            if model.deciding:
                assert transaction.commits == (model.deciding == "commit")
                assert transaction.producer == ProducerIdAndEpoch(*model.marker)
                transaction = machine.complete(transaction, NOW)
                model.complete()
                assert transaction.producer == ProducerIdAndEpoch(*model.now)
            assert not transaction.is_prepared
            continue
        if what == "expire":
            if model.is_open:
                assert model.expire()
                transaction = machine.fence(transaction, NOW, version=2, new_id=next_id)
            continue
        if what == "add":
            expected = model.add(who, partition)
            outcome = machine.add(transaction, producer, frozenset({partition}), NOW)
        elif what == "init":
            expected = model.init()
            outcome = machine.init(transaction, TIMEOUT, None, NOW, next_id, version=2)
        else:
            expected = model.end(who, what)
            outcome = machine.end_and_raise(transaction, producer, commits=what == "commit", now_ms=NOW, new_id=next_id)
        if expected is not None:
            assert outcome == expected
        else:
            assert isinstance(outcome, Transaction)
            transaction = outcome
        assert transaction.following == ProducerIdAndEpoch(*model.now)
        assert transaction.partitions == model.partitions
        assert transaction.is_prepared == bool(model.deciding)


def test_version_2_needs_an_id_after_the_last_epoch() -> None:
    transaction, producer = begun(LAST_EPOCH), ProducerIdAndEpoch(7, LAST_EPOCH)
    with pytest.raises(NeedsProducerId):
        machine.end_and_raise(transaction, producer, commits=True, now_ms=NOW)
    with pytest.raises(NeedsProducerId):
        machine.fence(transaction, NOW, version=2)
    fenced = machine.fence(transaction, NOW, version=2, new_id=9)
    assert (fenced.producer, fenced.following) == (ProducerIdAndEpoch(7, 32_767), ProducerIdAndEpoch(9, 0))


def test_an_earlier_end_is_not_taken_for_one_of_version_2() -> None:
    """A producer that was fenced must not learn that its successor's commit is its own."""
    ended = machine.end(begun(3), ProducerIdAndEpoch(7, 3), commits=True, now_ms=NOW)
    assert isinstance(ended, Transaction)
    done = machine.complete(ended, NOW)
    assert machine.end_and_raise(done, ProducerIdAndEpoch(7, 2), commits=True, now_ms=NOW) == FENCED
    assert machine.end_and_raise(done, ProducerIdAndEpoch(7, 3), commits=True, now_ms=NOW) == INVALID


def text(value: str) -> bytes:
    return struct.pack(">h", len(value)) + value.encode()


def test_records_are_kafkas_byte_for_byte() -> None:
    assert encode_key("my-id") == struct.pack(">h", 0) + text("my-id")
    assert decode_key(encode_key("my-id")) == "my-id"
    assert decode_key(struct.pack(">h", 1) + text("of the future")) is None
    transaction = Transaction(
        "my-id", ProducerIdAndEpoch(7, 3), ProducerIdAndEpoch(7, -1), TIMEOUT, State.PREPARE_ABORT,
        frozenset({("b", 2), ("a", 1), ("b", 0)}), NOW, NOW + 1,
    )  # fmt: skip
    topics = struct.pack(">i", 2) + text("a") + struct.pack(">ii", 1, 1) + text("b") + struct.pack(">iii", 2, 0, 2)
    expected = struct.pack(">hqhib", 0, 7, 3, TIMEOUT, 3) + topics + struct.pack(">qq", NOW + 1, NOW)
    assert encode_value(transaction, 0) == expected
    assert decode_value("my-id", expected) == transaction
    empty = machine.created("my-id", 7, TIMEOUT, NOW)
    assert encode_value(empty, 0) == struct.pack(">hqhibiqq", 0, 7, -1, TIMEOUT, 0, -1, NOW, -1)
    assert decode_value("my-id", encode_value(empty, 0)).state is State.EMPTY
    # version 1, where transaction.version is 1: compact arrays, and tagged fields that are not the defaults
    topics = b"\x03" + b"\x02a\x02" + struct.pack(">i", 1) + b"\0" + b"\x02b\x03" + struct.pack(">ii", 0, 2) + b"\0"
    times, previous = struct.pack(">qq", NOW + 1, NOW), b"\0\x08" + struct.pack(">q", 7)
    flexible = struct.pack(">hqhib", 1, 7, 3, TIMEOUT, 3) + topics + times + b"\x01" + previous
    assert encode_value(transaction, 1) == flexible
    raised = replace(transaction, version=2, next_id=9)
    more = b"\x01\x08" + struct.pack(">q", 9) + b"\x02\x02" + struct.pack(">h", 2)
    assert encode_value(raised, 2) == flexible[: -len(previous) - 1] + b"\x03" + previous + more
    assert encode_value(raised, 0) == encode_value(raised, 2)  # what it says must not be lost
    assert decode_value("my-id", encode_value(raised, 2)) == raised


def test_flexible_records_are_read() -> None:
    """Version 1, with previous and next producer id as tagged fields, as Kafka 4 writes it."""
    head = struct.pack(">hqhib", 1, 7, 3, TIMEOUT, 1)
    topics = b"\x02" + b"\x02t" + b"\x03" + struct.pack(">ii", 0, 1) + b"\x00"
    tags = b"\x02" + b"\x00\x08" + struct.pack(">q", 6) + b"\x01\x08" + struct.pack(">q", -1)
    found = decode_value("id", head + topics + struct.pack(">qq", NOW, NOW - 9) + tags)
    assert (found.producer, found.state, found.partitions) == (ProducerIdAndEpoch(7, 3), State.ONGOING, {P0, P1})
    assert (found.started_ms, found.updated_ms, found.timeout_ms) == (NOW - 9, NOW, TIMEOUT)


@given(st.binary(max_size=60))
def test_any_bytes_decode_or_raise(data: bytes) -> None:
    for decode in (
        decode_key,
        lambda found: decode_value("id", found),
        lambda found: decode_value("id", b"\0\1" + found),
    ):
        try:
            decode(data)
        except DecodeError:
            pass
