"""`klog transactions`: list, describe and abort transactions, and find those that hang, as kafka-transactions does."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

import click

from spark_klog.base.addresses import without_user
from spark_klog.base.clock import system_ms
from spark_klog.base.extras import is_usable
from spark_klog.base.names import DECISION_TOPIC, TopicPartition
from spark_klog.cli.clusters import ChosenCluster, cluster_options
from spark_klog.cli.foreign import CommandGroup, TransactionsCommand
from spark_klog.cli.output import duration_text, escaped, print_lines, say
from spark_klog.client import Admin
from spark_klog.client.admin.admin import ProducerState, TransactionDescription
from spark_klog.client.offsets import numbers_by_topic
from spark_klog.client.producer.transactions import PreparedTransaction
from spark_klog.client.retry import Retry
from spark_klog.errors import ConfigError, KlogError, ProtocolError, RequestTimedOut, UnsupportedVersionError

if TYPE_CHECKING:
    from spark_klog.spark.write.decisions.log_states import Holder, LogState

#: States of a transaction that has begun, and whose markers are not all written.
_OPEN = frozenset({"Ongoing", "PrepareCommit", "PrepareAbort", "PrepareEpochFence"})
_ABORTING = frozenset({"PrepareAbort", "PrepareEpochFence"})
_ONGOING = "Ongoing"
_MINUTE = 60_000
_UUID = "[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}"
#: The transactional ids of exactly-once sinks: prefix, id of the decision log, id of the worker's producer.
_OF_SINK = re.compile(f".+{_UUID}-{_UUID}", re.DOTALL)
_Line = dict[str, Any]
_Command = Callable[..., Any]


class _Group(CommandGroup):
    """The topic and the partition are options here, as they are of kafka-transactions."""

    command_class = TransactionsCommand


@click.group(cls=_Group)
def transactions() -> None:
    """List, describe and abort transactions, and find those that hang."""


def _sink_options(function: _Command) -> _Command:
    """Add the options that say where exactly-once sinks keep their decisions: `checkpoints`, `decision_topic`."""
    checkpoint = click.option(
        "--checkpoint",
        "checkpoints",
        multiple=True,
        metavar="DIRECTORY",
        help="The checkpointLocation of an exactly-once query of this package, by which it is then named, and its "
        "decisions are looked up; repeatable. Without it they are found by the transactional ids.",
    )
    topic = click.option(
        "--decision-topic",
        default=DECISION_TOPIC,
        show_default=True,
        metavar="TOPIC",
        help="The topic in which exactly-once queries keep their decisions, their option decisionTopic.",
    )
    return checkpoint(topic(function))


@transactions.command(
    "list",
    epilog="""\b
Examples:
  klog transactions list -b broker:9092 --state ongoing
  klog transactions list --duration-filter 60000 --json | jq -r .transactionalId
""",
)
@click.option("--state", "states", multiple=True, metavar="STATE", help="Only ids in this state; repeatable.")
@click.option("--producer-id", "producer_ids", multiple=True, type=int, help="Only this producer; repeatable.")
@click.option("--duration-filter", "longer_than", type=int, metavar="MS", help="Only those open for longer.")
@click.option("--transactional-id-pattern", "pattern", metavar="REGEX", help="Only ids that match it as a whole.")
@_sink_options
@cluster_options
def list_(
    states: tuple[str, ...],
    producer_ids: tuple[int, ...],
    longer_than: int | None,
    pattern: str | None,
    checkpoints: tuple[str, ...],
    decision_topic: str,
    cluster: ChosenCluster,
    as_json: bool,
) -> None:
    """List transactional ids, and since when their transactions are open.

    Of an exactly-once sink of this package also the query and the micro-batch that hold the transaction, of a call of
    write_updates its name, and the task if the micro-batch is decided; before that nobody knows it.
    """
    matches = _compiled(pattern)
    with cluster.connect() as admin:
        listed = admin.list_transactions(states=states, producer_ids=producer_ids, longer_than_ms=longer_than)
        chosen = [txn for txn in listed if matches.fullmatch(txn.transactional_id)]
        described = admin.describe_transactions(txn.transactional_id for txn in chosen if txn.state in _OPEN).successes
        logs = _log_states(admin, described.values(), checkpoints, decision_topic)
    lines = []
    for txn in chosen:
        now = described.get(txn.transactional_id)
        lines.append(
            {
                "transactionalId": txn.transactional_id,
                "coordinator": txn.coordinator,
                "producerId": txn.producer_id,
                "state": txn.state,
                **_since(None if now is None else now.started),
                **_held(None if now is None else _holder(logs, now)),
            }
        )
    columns = {
        "transactional id": "transactionalId",
        "coordinator": "coordinator",
        "producer id": "producerId",
        "state": "state",
        "open for": "durationMs",
        "query": "query",
        "name": "name",
        "micro-batch": "batch",
        "task": "task",
        "decided": "isDecided",
    }
    print_lines(as_json, lines if as_json else _readable(lines), columns)


@transactions.command(
    epilog="""\b
Examples:
  klog transactions describe --transactional-id orders-1
"""
)
@click.option("--transactional-id", "ids", multiple=True, required=True, metavar="ID", help="Repeatable.")
@_sink_options
@cluster_options
def describe(
    ids: tuple[str, ...], checkpoints: tuple[str, ...], decision_topic: str, cluster: ChosenCluster, as_json: bool
) -> None:
    """Describe transactional ids with their transactions: state, timeout, producer, partitions.

    Of an exactly-once sink of this package also what holds the transaction, see klog transactions list.
    """
    with cluster.connect() as admin:
        described = admin.describe_transactions(ids)
        states = _log_states(admin, described.successes.values(), checkpoints, decision_topic)
    for now in described.successes.values():
        holder = _holder(states, now) if now.state in _OPEN else None
        say(as_json, _described(now) | _held(holder), _description(now, holder))
    _fail_with(described.failures)


def _log_states(
    admin: Admin, wanted: Iterable[TransactionDescription], checkpoints: Sequence[str], topic: str
) -> list[LogState]:
    """The decision logs in the topic: those of checkpoints, and those that own one of the open transactions."""
    ids = [txn.transactional_id for txn in wanted if txn.state in _OPEN and _OF_SINK.fullmatch(txn.transactional_id)]
    if not checkpoints and not (ids and is_usable("pyarrow")):
        return []
    from spark_klog.spark.write.decisions.log_states import logs_in_topic, logs_of_checkpoint, owning_one_of

    states: list[LogState] = []
    with admin.exclusive() as cluster:
        for location in checkpoints:
            logs = logs_of_checkpoint(location, cluster, topic)
            if not logs.all:
                raise ConfigError(
                    f"--checkpoint {without_user(location)} has no decisions {logs.searched}: is its query exactly "
                    "once? Those of write_updates are found without --checkpoint, by --decision-topic"
                )
            states += logs.all
        try:
            states += logs_in_topic(cluster, topic, owning_one_of(ids)) if ids else []
        except ProtocolError as error:
            click.echo(f"klog: decisions in topic {escaped(topic)} are left out: {escaped(str(error))}", err=True)
    return states


def _holder(states: Iterable[LogState], now: TransactionDescription) -> Holder | None:
    holders = (state.holder(now.transactional_id, now.producer_id, now.producer_epoch) for state in states)
    return next((holder for holder in holders if holder is not None), None)


def _held(holder: Holder | None) -> _Line:
    if holder is None:
        return dict.fromkeys(("query", "name", "decisionLog", "batch", "task", "isDecided"))
    return {
        "query": holder.query,
        "name": holder.name or None,
        "decisionLog": holder.place,
        "batch": holder.batch,
        "task": holder.task,
        "isDecided": holder.is_decided,
    }


def _described(now: TransactionDescription) -> _Line:
    return {
        "transactionalId": now.transactional_id,
        "coordinator": now.coordinator,
        "producerId": now.producer_id,
        "producerEpoch": now.producer_epoch,
        "state": now.state,
        "timeoutMs": now.timeout_ms,
        **_since(now.started),
        "partitions": [{"topic": topic, "partition": partition} for topic, partition in now.partitions],
    }


def _description(now: TransactionDescription, holder: Holder | None) -> str:
    lines = [
        f"{now.transactional_id}  {now.state}  coordinator {now.coordinator}  producer {now.producer_id} "
        f"epoch {now.producer_epoch}  timeout {duration_text(now.timeout_ms)}"
    ]
    if now.started is not None:
        lines.append(f"  open since {_time(now.started)}, for {duration_text(system_ms() - now.started)}")
    for topic, numbers in numbers_by_topic(sorted(now.partitions)).items():
        lines.append(f"  {topic}:{','.join(map(str, numbers))}")
    if holder is not None:
        lines += [f"  {holder}", f"  decisions are in {holder.place}"]
    return "\n".join(map(escaped, lines))


@transactions.command(
    "describe-producers",
    epilog="""\b
Examples:
  klog transactions describe-producers --topic orders --partition 0
""",
)
@click.option("--topic", required=True, help="The topic.")
@click.option("--partition", required=True, type=click.IntRange(0), help="The number of the partition.")
@cluster_options
def describe_producers(topic: str, partition: int, cluster: ChosenCluster, as_json: bool) -> None:
    """Describe the producers of a partition, as its leader knows them, and where their open transactions begin."""
    with cluster.connect() as admin:
        states = admin.describe_producers([(topic, partition)]).check()[topic, partition]
    columns = {
        "producer id": "producerId",
        "producer epoch": "producerEpoch",
        "coordinator epoch": "coordinatorEpoch",
        "last sequence": "lastSequence",
        "last timestamp": "lastTimestampMs",
        "transaction start": "startOffset",
    }
    lines = [_producer(state) for state in sorted(states, key=lambda state: state.producer_id)]
    print_lines(as_json, lines if as_json else _readable(lines), columns)


def _producer(state: ProducerState) -> _Line:
    return {
        "producerId": state.producer_id,
        "producerEpoch": state.producer_epoch,
        "coordinatorEpoch": state.coordinator_epoch,
        "lastSequence": state.last_sequence,
        "lastTimestampMs": state.last_timestamp,
        "startOffset": state.transaction_start,
    }


@transactions.command(
    epilog="""\b
Examples:
  klog transactions hanging --topic orders
  klog transactions hanging --broker-id 2 --max-transaction-timeout 60 --json
"""
)
@click.option("--topic", help="Only this topic. Default: all topics, internal ones too.")
@click.option("--partition", type=click.IntRange(0), help="Only this partition of --topic.")
@click.option("--broker-id", type=click.IntRange(0), help="Only partitions with a copy on this broker.")
@click.option(
    "--max-transaction-timeout",
    "minutes",
    default=15,
    show_default=True,
    type=click.IntRange(0),
    metavar="MINUTES",
    help="The longest transaction.max.timeout.ms of the brokers: only transactions whose last record is older.",
)
@cluster_options
def hanging(
    topic: str | None,
    partition: int | None,
    broker_id: int | None,
    minutes: int,
    cluster: ChosenCluster,
    as_json: bool,
) -> None:
    """Find hanging transactions: open ones that no coordinator will end, so that read_committed readers wait for good.

    It needs no transactional id, but Describe on all of them: a transaction whose id this user may not see seems to
    hang. klog transactions abort --topic --partition --start-offset ends one.
    """
    if partition is not None and topic is None:
        raise click.UsageError("--partition needs --topic")
    with cluster.connect() as admin:
        keys = _partitions(admin, topic, partition, broker_id)
        outcomes = admin.hanging_transactions(keys, longer_than_ms=minutes * _MINUTE)
    lines = [
        {"topic": key[0], "partition": key[1], **_producer(state), **_age(state.last_timestamp)}
        for key, states in outcomes.successes.items()
        for state in states
    ]
    columns = {
        "topic": "topic",
        "partition": "partition",
        "producer id": "producerId",
        "producer epoch": "producerEpoch",
        "coordinator epoch": "coordinatorEpoch",
        "start offset": "startOffset",
        "last record": "lastTimestampMs",
        "age": "durationMs",
    }
    print_lines(as_json, lines if as_json else _readable(lines), columns)
    _fail_with(outcomes.failures)


def _partitions(admin: Admin, topic: str | None, partition: int | None, broker_id: int | None) -> list[TopicPartition]:
    names = [topic] if topic is not None else [listed.name for listed in admin.list_topics(include_internal=True)]
    if broker_id is not None and broker_id not in admin.cluster.nodes:
        known = ", ".join(map(str, sorted(admin.cluster.nodes)))
        raise ConfigError(f"there is no broker {broker_id}: the cluster has {known}")
    keys = [
        (name, entry.partition)
        for name, described in admin.describe_topics(names).check().items()
        for entry in described.partitions
        if partition in (None, entry.partition) and (broker_id is None or broker_id in entry.replicas)
    ]
    if partition is not None and not keys:
        raise ConfigError(f"topic {topic} has no partition {partition}{'' if broker_id is None else ' on the broker'}")
    return keys


@transactions.command(
    epilog="""\b
Examples:
  klog transactions abort --transactional-id orders-1
  klog transactions abort --topic orders --partition 0 --start-offset 1234
  klog transactions abort --topic orders --partition 0 --producer-id 7 --producer-epoch 2 --coordinator-epoch 5
"""
)
@click.option("--transactional-id", "transactional_id", metavar="ID", help="Abort its open transaction, and fence it.")
@click.option("--topic", help="With --partition: abort a hanging transaction there.")
@click.option("--partition", type=click.IntRange(0), help="The number of the partition.")
@click.option("--start-offset", type=click.IntRange(0), help="The first offset of the transaction.")
@click.option("--producer-id", type=click.IntRange(0), help="Without --start-offset (Kafka before 2.8).")
@click.option("--producer-epoch", type=click.IntRange(0), help="With --producer-id.")
@click.option("--coordinator-epoch", type=click.IntRange(-1), help="With --producer-id; -1 if it is not known.")
@click.option("--force", is_flag=True, help="Abort also what does not hang, or what an exactly-once query has decided.")
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
@_sink_options
@cluster_options
def abort(
    transactional_id: str | None,
    topic: str | None,
    partition: int | None,
    start_offset: int | None,
    producer_id: int | None,
    producer_epoch: int | None,
    coordinator_epoch: int | None,
    force: bool,
    yes: bool,
    checkpoints: tuple[str, ...],
    decision_topic: str,
    cluster: ChosenCluster,
    as_json: bool,
) -> None:
    """Abort a transaction, by its transactional id, or in one partition if it hangs there.

    With --transactional-id its coordinator aborts it, in all its partitions, and fences its producer: the next call of
    that producer fails. If the producer has begun a later transaction meanwhile, that goes on, and the command fails.
    In a partition the leader writes the marker by itself, with the rights of an administrator;
    that is refused unless the transaction hangs, as other partitions would stay open.

    A transaction that an exactly-once query of this package has decided is refused: its rows would be lost, and the
    query commits it when it runs again. If the decisions of the query are not found, give its --decision-topic.
    """
    in_partition = (topic, partition, start_offset, producer_id, producer_epoch, coordinator_epoch)
    if (transactional_id is None) == all(option is None for option in in_partition):
        raise click.UsageError("give either --transactional-id, or --topic and --partition with a transaction there")
    if transactional_id is not None:
        with cluster.connect() as admin:

            def checked(name: str) -> TransactionDescription:
                now = admin.describe_transactions([name]).check()[name]
                if now.state != _ONGOING:
                    raise ConfigError(f"{name} has no open transaction: its state is {now.state}")
                if not force:
                    _check_undecided(now, _log_states(admin, [now], checkpoints, decision_topic))
                return now

            now = checked(transactional_id)
            if not yes:
                _confirm(f"Abort the transaction of {transactional_id}, and fence its producer?")
                asked_about, now = now, checked(transactional_id)  # the query may have decided it meanwhile
                if _identity(now) != _identity(asked_about):
                    raise ConfigError(f"{transactional_id} is in another transaction by now: look at it again")
            prepared = PreparedTransaction(transactional_id, now.producer_id, now.producer_epoch)
            admin.fence_transactions([prepared]).check()  # no later transaction: nobody was asked about it
            _fence(admin, transactional_id)
        line: _Line = {"transactionalId": transactional_id, "producerId": now.producer_id, "aborted": True}
        say(as_json, line, f"{escaped(transactional_id)} aborted")
        return
    if topic is None or partition is None:
        raise click.UsageError("--topic and --partition need each other")
    given = (producer_id, producer_epoch, coordinator_epoch)
    if (start_offset is None) == all(option is None for option in given):
        raise click.UsageError("give either --start-offset, or --producer-id, --producer-epoch, --coordinator-epoch")
    key = topic, partition
    with cluster.connect() as admin:
        if start_offset is not None:
            state = _open_at(admin, key, start_offset)
            producer_id, producer_epoch = state.producer_id, state.producer_epoch
            coordinator_epoch = state.coordinator_epoch
        if producer_id is None or producer_epoch is None or coordinator_epoch is None:
            raise click.UsageError("--producer-id, --producer-epoch and --coordinator-epoch need each other")

        def check(producer: int) -> None:
            try:
                if not force:
                    _check_hangs(admin, key, producer)
            except UnsupportedVersionError:  # Kafka before 3.0, which the form with the producer is for
                if start_offset is not None:
                    raise

        check(producer_id)
        if not yes:
            _confirm(f"Abort the transaction of producer {producer_id} in {topic}-{partition}?")
            # its producer may be in a later transaction by now
            if start_offset is not None:
                _open_at(admin, key, start_offset)
            check(producer_id)
        admin.abort_transaction(key, producer_id, producer_epoch, coordinator_epoch)
    line = {"topic": topic, "partition": partition, "producerId": producer_id, "aborted": True}
    say(as_json, line, f"transaction of producer {producer_id} in {topic}-{partition} aborted")


def _fence(admin: Admin, name: str) -> None:
    """Fence the producer of an aborted transaction; `ConfigError` if it has gone on, as fencing aborts that as well."""
    retry = Retry(admin.cluster.config, admin.cluster.deadline())
    while (now := admin.describe_transactions([name]).check()[name]).state in _ABORTING:
        # fencing would wait for the markers, too, but without a look at what the producer does after them
        retry.pause(RequestTimedOut(f"{name} is being aborted (state {now.state}), and its producer is not fenced yet"))
    if now.state not in ("CompleteAbort", "Empty"):
        raise ConfigError(
            f"the transaction of {name} has ended, but its producer goes on, and is not fenced: state {now.state}, "
            f"epoch {now.producer_epoch}. A later transaction is not aborted: look at it again"
        )
    admin.fence_producers([name]).check()


def _identity(now: TransactionDescription) -> tuple[int, int, int | None]:
    return now.producer_id, now.producer_epoch, now.started


def _check_undecided(now: TransactionDescription, states: Sequence[LogState]) -> None:
    """Raise `ConfigError` if a query has decided the transaction, or may have."""
    name = now.transactional_id
    holder = _holder(states, now)
    if holder is not None and holder.is_decided:
        raise ConfigError(f"{name} is of {holder}. To lose its rows nevertheless, give --force")
    if holder is None and _OF_SINK.fullmatch(name):
        raise ConfigError(
            f"{name} looks like a transaction of an exactly-once sink, whose decision log is not known: give the "
            "--decision-topic of its query; or --force, which loses its rows if they are decided"
        )


def _open_at(admin: Admin, key: TopicPartition, start_offset: int) -> ProducerState:
    """The producer with the open transaction that begins at an offset; `ConfigError` without one."""
    states = admin.describe_producers([key]).check()[key]
    for state in states:
        if state.transaction_start == start_offset:
            return state
    others = sorted(state.transaction_start for state in states if state.transaction_start is not None)
    hint = f"; open ones begin at {', '.join(map(str, others))}" if others else "; none is open"
    raise ConfigError(f"{key[0]}-{key[1]} has no open transaction that begins at offset {start_offset}{hint}")


def _check_hangs(admin: Admin, key: TopicPartition, producer_id: int) -> None:
    """Raise `ConfigError` if a producer has no open transaction in a partition, or if a coordinator will end it."""
    states = admin.describe_producers([key]).check()[key]
    if not any(state.producer_id == producer_id and state.transaction_start is not None for state in states):
        raise ConfigError(f"producer {producer_id} has no open transaction in {key[0]}-{key[1]}")
    if any(state.producer_id == producer_id for state in admin.hanging_transactions([key]).check()[key]):
        return
    names = [txn.transactional_id for txn in admin.list_transactions(producer_ids=[producer_id])]
    known = f"--transactional-id {names[0]}" if names else "its id"
    raise ConfigError(
        f"the transaction of producer {producer_id} in {key[0]}-{key[1]} does not hang: its coordinator ends it, "
        f"after its timeout at the latest. Abort it by {known}; or here with --force, which leaves other partitions "
        "of it open"
    )


def _confirm(question: str) -> None:
    click.confirm(escaped(question), abort=True, err=True)


def _compiled(pattern: str | None) -> re.Pattern[str]:
    try:
        return re.compile(".*" if pattern is None else pattern, re.DOTALL)
    except re.error as error:
        raise click.UsageError(f"--transactional-id-pattern {pattern!r}: {error}") from None


def _since(started: int | None) -> _Line:
    return {"startedMs": started, "durationMs": None if started is None else max(0, system_ms() - started)}


def _age(timestamp: int | None) -> _Line:
    return {"durationMs": None if timestamp is None else max(0, system_ms() - timestamp)}


def _readable(lines: Sequence[Mapping[str, Any]]) -> Iterator[_Line]:
    """The lines with times and durations as people read them."""
    for line in lines:
        shown = dict(line)
        if line.get("isDecided") is not None:
            shown["isDecided"] = "yes" if line["isDecided"] else "no"
        if line.get("lastTimestampMs") is not None:
            shown["lastTimestampMs"] = _time(line["lastTimestampMs"])
        if line.get("durationMs") is not None:
            shown["durationMs"] = duration_text(line["durationMs"])
        yield shown


def _time(ms: int) -> str:
    try:
        return datetime.fromtimestamp(ms / 1000, timezone.utc).isoformat(timespec="seconds").replace("+00:00", "Z")
    except (ValueError, OverflowError, OSError):  # a record may have any timestamp
        return str(ms)


def _fail_with(failures: Mapping[Any, KlogError]) -> None:
    """Print the errors of some items, and exit with 1 if there are any; what succeeded is printed before."""
    for error in failures.values():
        click.echo(f"klog: {escaped(str(error))}", err=True)
    if failures:
        sys.exit(1)
