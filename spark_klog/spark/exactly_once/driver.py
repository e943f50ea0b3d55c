"""The driver's part of exactly-once writes: the protocol's programs against the checkpoint and the brokers.

Spark runs it in Python processes: `claim` before the tasks of a micro-batch, `decide` after them, `settle` after a
failure.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from spark_klog.client.admin.admin import Admin
from spark_klog.client.config import client_config
from spark_klog.client.delivery.transactions import PreparedTransaction
from spark_klog.errors import ErrorCode, KlogError, ProtocolError
from spark_klog.spark.exactly_once.clients import CLIENTS
from spark_klog.spark.exactly_once.decision_log import DecisionLog, Identity, planned
from spark_klog.spark.exactly_once.protocol import (
    Abort,
    Action,
    Append,
    Begun,
    Commit,
    Program,
    ReadLog,
    Superseded,
    Transaction,
    begin,
    finish,
    give_up,
)
from spark_klog.spark.options.names import PREFIX

_T = TypeVar("_T")
_log = logging.getLogger(__name__)
_ONGOING = "Ongoing"
#: EndTxn's answers about a transaction that has ended the other way, or whose producer has another epoch by now.
_NOT_COMMITTED = frozenset(
    {ErrorCode.INVALID_TXN_STATE, ErrorCode.PRODUCER_FENCED, ErrorCode.INVALID_PRODUCER_EPOCH}
)  # fmt: skip


class NotDecided(KlogError):
    """A micro-batch that must not be committed. Nothing of it is written, and Spark runs it again after a restart."""


@dataclass(frozen=True)
class Claimed:
    """A claim as tasks get it: `identity` is the decision log's, `at` the driver's clock, in seconds since 1970.

    `is_replanned`: the last decided micro-batch has other offsets in the checkpoint now than when it was decided.
    """

    begun: Begun
    identity: Identity
    at: float
    is_replanned: bool = False


def claim(settings: Mapping[str, str], folder: Path, prefix: str) -> Claimed:
    """Begin a micro-batch; `folder` is the query's checkpoint, `prefix` that of its transactional ids.

    Raises what `protocol.begin`, `DecisionLog` and the brokers' answers raise; `UnsupportedVersionError` before Kafka
    3.0, which has no ListTransactions.
    """
    log = DecisionLog(folder, Identity(prefix))
    at = time.time()
    with CLIENTS.borrow(settings) as admin:
        begun = _run(begin(), log, admin)
    now = planned(folder, begun.decided)
    return Claimed(begun, log.identity, at, bool(begun.planned and now and begun.planned != now))


def decide(
    settings: Mapping[str, str], folder: Path, claimed: Claimed, batch: int, transactions: Sequence[Transaction]
) -> None:
    """Commit a micro-batch. Raises `NotDecided`, and what `protocol.finish` and the brokers' answers raise."""
    log = DecisionLog(folder, claimed.identity, is_claimed=True)
    with CLIENTS.borrow(settings) as admin:
        if batch > claimed.begun.decided:
            _check_time(settings, claimed, batch)
            _check_open(admin, batch, transactions)
        _run(finish(claimed.begun, batch, tuple(transactions), planned(folder, batch)), log, admin)


def settle(settings: Mapping[str, str], folder: Path, claimed: Claimed) -> None:
    """Abort what a failed micro-batch has written, unless it is decided or another run of the query has begun."""
    log = DecisionLog(folder, claimed.identity, is_claimed=True)
    with CLIENTS.borrow(settings) as admin, suppress(Superseded):
        _run(give_up(claimed.begun), log, admin)


def _check_time(settings: Mapping[str, str], claimed: Claimed, batch: int) -> None:
    """Leave half of the transactions' time for restarts: a decided transaction that times out is lost."""
    most = client_config(settings, PREFIX).transaction_timeout_ms / 2000
    took = time.time() - claimed.at
    if took > most:
        raise NotDecided(
            f"micro-batch {batch} took {took:.1f} s, more than half of kafka.transaction.timeout.ms; nothing of it is "
            "written: set it higher, up to the brokers' transaction.max.timeout.ms, or make micro-batches smaller"
        )


def _check_open(admin: Admin, batch: int, transactions: Sequence[Transaction]) -> None:
    """Raise `NotDecided` if the broker has aborted a transaction already."""
    found = admin.describe_transactions([one.transactional_id for one in transactions])
    for one in transactions:
        now = found[one.transactional_id]
        if isinstance(now, KlogError):
            raise now
        if (now.state, now.producer_id, now.producer_epoch) != (_ONGOING, one.producer_id, one.epoch):
            raise NotDecided(
                f"micro-batch {batch}: the transaction of task {one.task} is over before it was decided, after "
                "kafka.transaction.timeout.ms or by an administrator; nothing of the micro-batch is written"
            )


def _run(program: Program[_T], log: DecisionLog, admin: Admin) -> _T:
    """Run a program of the protocol."""
    result: Any = None
    while True:
        try:
            action = program.send(result)
        except StopIteration as stop:
            value: _T = stop.value
            return value
        result = _act(action, log, admin)


def _act(action: Action, log: DecisionLog, admin: Admin) -> Any:
    if isinstance(action, ReadLog):
        return log.read()
    if isinstance(action, Append):
        return log.append(action.number, action.entry)
    if isinstance(action, Commit):
        return _commit(admin, action.transactions)
    if isinstance(action, Abort):
        return _abort(admin, action.transactions)
    return _open_transactions(admin, log.identity.id_prefix)


def _commit(admin: Admin, transactions: Sequence[Transaction]) -> tuple[bool, ...]:
    """Whether each is committed; raises the error of one if the brokers' answer decides nothing about it."""
    results = []
    prepared = [_prepared(one) for one in transactions]
    failures = admin.end_transactions(prepared, commits=True).failures
    for one in prepared:
        error = failures.get(one)
        if isinstance(error, ProtocolError) and error.code == ErrorCode.INVALID_PRODUCER_ID_MAPPING:
            raise ProtocolError(
                error.code,
                error.what,
                advice="the brokers have forgotten this transaction (transactional.id.expiration.ms), so nobody knows "
                "whether it was committed: look for its rows, then see docs/recipes/exactly-once.md, DecidedButAborted",
            )
        is_aborted = isinstance(error, ProtocolError) and error.code in _NOT_COMMITTED
        if error is not None and not is_aborted:
            raise error
        results.append(error is None)
    return tuple(results)


def _abort(admin: Admin, transactions: Sequence[Transaction]) -> None:
    for one in transactions:
        _log.info("aborting a transaction that no micro-batch has: %s", one)
    prepared = [_prepared(one) for one in transactions]
    for error in admin.fence_transactions(prepared).failures.values():
        raise error


def _prepared(one: Transaction) -> PreparedTransaction:
    return PreparedTransaction(one.transactional_id, one.producer_id, one.epoch)


def _open_transactions(admin: Admin, prefix: str) -> tuple[Transaction, ...]:
    listed = admin.list_transactions(states=[_ONGOING])
    names = [one.transactional_id for one in listed if one.transactional_id.startswith(prefix)]
    found = []
    for name, described in admin.describe_transactions(names).items():
        if isinstance(described, KlogError):
            if isinstance(described, ProtocolError) and described.code == ErrorCode.TRANSACTIONAL_ID_NOT_FOUND:
                continue
            raise described
        if described.state == _ONGOING:
            found.append(Transaction(name, described.producer_id, described.producer_epoch))
    return tuple(found)
