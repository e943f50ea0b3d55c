"""`klog checkpoint`: what the checkpoint of a Spark query holds."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

import click

from spark_klog.base.addresses import without_user
from spark_klog.base.extras import is_usable
from spark_klog.base.names import DECISION_TOPIC
from spark_klog.cli.clusters import ChosenCluster, client_options, servers_option
from spark_klog.cli.output import escaped, print_table
from spark_klog.client import Admin
from spark_klog.groups.checkpoint import CheckpointState, checkpoint_state, to_json

if TYPE_CHECKING:
    from spark_klog.spark.write.decisions.log_states import LogState

_NOT_SAFE = 2
_ONGOING = "Ongoing"
_Line = dict[str, Any]
_NOTHING: _Line = {"decisions": None, "updates": [], "noDecisions": None}
#: What changes with format("klog") and no checkpoint shows.
_CHANGES_TO_KLOG = (
    "a static DataFrame that the stream joins keeps the offsets of its first use: load() it within foreachBatch",
    "Trigger.AvailableNow with limits ends after one micro-batch with pyspark 4.0 and 4.1, and leaves the rest to the "
    "next run: start the query by spark_klog.run_available_now, which keeps the limits, or set availableNow=all, which "
    "ignores them",
    "kafka.group.id commits no offsets here either, unless commitOffsets=true; then no other application may use the "
    "group",
)


@click.group()
def checkpoint() -> None:
    """Look at the checkpoint of a Spark query."""


@checkpoint.command(
    epilog="""\b
Examples:
  klog checkpoint show /mnt/checkpoints/clean
  klog checkpoint show /mnt/checkpoints/clean -b broker:9092          with what an exactly-once sink has open
  klog checkpoint show /mnt/checkpoints/clean --to klog && spark-submit job.py
"""
)
@click.argument("directory")
@click.option("--json", "as_json", is_flag=True, help="Print one line of JSON.")
@click.option("--to", type=click.Choice(["klog", "kafka"]), help="Exit with 2 if this switch is not safe.")
@click.option("--location", metavar="URI", help="The query's checkpointLocation, if DIRECTORY is a copy of it.")
@click.option(
    "--decision-topic",
    default=DECISION_TOPIC,
    show_default=True,
    metavar="TOPIC",
    help="The topic of an exactly-once query's decisions: its option decisionTopic.",
)
@servers_option
@client_options
def show(
    directory: str, as_json: bool, to: str | None, location: str | None, decision_topic: str, cluster: ChosenCluster
) -> None:
    """Show the offsets in DIRECTORY, a query's checkpointLocation, and whether they survive a change of format.

    If the query writes exactly once, also where its decisions are, the last decided micro-batch, and what the next run
    will do; with a cluster (-b, --cluster, --command-config), the sink's, which transactions are open there. Decisions
    in a topic need it, and those of each call of write_updates are there. Of a checkpoint in an object store copy the
    files here, and give its --location.

    With --to klog also what else changes, which no checkpoint shows.

    Stop the query first: its state may change while it is read.
    """
    state = checkpoint_state(directory)
    decisions = _decisions(directory, state, cluster, location, decision_topic)
    if as_json:
        line = {
            "query": state.query,
            "planned": state.planned,
            "done": state.done,
            "stateful": state.is_stateful,
            "sources": [None if source.offsets is None else to_json(source.offsets) for source in state.sources],
            "to_klog": state.to_klog,
            "to_kafka": state.to_kafka,
            **(decisions or _NOTHING),
        }
        click.echo(json.dumps(line))
    else:
        _print(state)
        if decisions is not None:
            _print_all_decisions(decisions)
        if to == "klog":
            click.echo("what else changes (docs/recipes/switch.md):")
            for change in _CHANGES_TO_KLOG:
                click.echo(f"  {change}")
    if to is not None and (state.to_klog if to == "klog" else state.to_kafka):
        sys.exit(_NOT_SAFE)


def _decisions(
    directory: str, checkpoint: CheckpointState, cluster: ChosenCluster, location: str | None, topic: str
) -> _Line | None:
    """What the decision logs of the query say, and where none was found; None if nobody can read them."""
    if not is_usable("pyarrow"):
        return None
    from spark_klog.spark.write.decisions.log_states import logs_of_checkpoint

    copied = f", and --location, if {without_user(directory)} is a copy" if location is None else ""
    if cluster == ChosenCluster():
        told = f"give -b HOST:PORT of the sink's cluster to see decisions{copied}"
        return {"decisions": None, "updates": [], "noDecisions": told}
    with cluster.connect() as admin:
        with admin.exclusive() as connected:
            logs = logs_of_checkpoint(location or directory, connected, topic, checkpoint.folder)
        lines = [_log_line(checkpoint, state, admin) for state in logs.all]
    advice = "--decision-topic" + (copied or " and --location")
    told = f"no decisions {logs.searched}; if the query writes exactly once, check {advice}"
    return {
        "decisions": lines[0] if logs.sink is not None else None,
        "updates": lines[1:] if logs.sink is not None else lines,
        "noDecisions": None if lines else told,
    }


def _log_line(checkpoint: CheckpointState, state: LogState, admin: Admin) -> _Line:
    """What a decision log says."""
    from spark_klog.spark.write.decisions.log_states import Lost, restart

    lost = None
    if state.to_commit:
        lost = Lost.of(state.to_commit, admin.describe_transactions([txn.transactional_id for txn in state.to_commit]))
    return {
        **({"name": state.name} if state.name else {}),
        "place": state.place,
        "transactionalIdPrefix": None if state.identity is None else state.identity.id_prefix,
        "decided": None if state.decided < 0 else state.decided,
        "transactions": 0 if state.decision is None else len(state.decision.transactions),
        "isEnded": not state.to_commit,
        "lostTasks": None if lost is None else [*lost.aborted, *lost.forgotten],
        "open": _open_transactions(admin, state),
        "nextRun": restart(state, checkpoint, lost),
    }


def _open_transactions(admin: Admin, state: LogState) -> list[_Line]:
    listed = admin.list_transactions(states=[_ONGOING])
    names = [txn.transactional_id for txn in listed if state.owns(txn.transactional_id)]
    return [
        {
            "transactionalId": txn.transactional_id,
            "startedMs": txn.started,
            "batch": holder.batch,
            "task": holder.task,
            "isDecided": holder.is_decided,
        }
        for txn in admin.describe_transactions(names).successes.values()
        if (holder := state.holder(txn.transactional_id, txn.producer_id, txn.producer_epoch)) is not None
    ]


def _print_all_decisions(line: _Line) -> None:
    if line["noDecisions"] is not None:
        click.echo(f"exactly once: {escaped(line['noDecisions'])}")
    if line["decisions"] is not None:
        _print_decisions("exactly once", line["decisions"])
    for call in line["updates"]:
        _print_decisions(f"write_updates {escaped(call['name'])}", call)


def _print_decisions(whose: str, decisions: _Line) -> None:
    click.echo(f"{whose}: decisions are in {escaped(decisions['place'])}")
    if decisions["transactionalIdPrefix"] is not None:
        click.echo(f"transactional ids begin with {escaped(decisions['transactionalIdPrefix'])}")
        click.echo(f"last decided micro-batch: {_last(decisions)}")
    for txn in decisions["open"]:
        of_task = f"decided, task {txn['task']}" if txn["isDecided"] else "not decided"
        click.echo(f"open: {escaped(txn['transactionalId'])}, {of_task}")
    if decisions["nextRun"]:
        click.echo("the next run")
    for step in decisions["nextRun"]:
        click.echo(f"  {step}")


def _last(decisions: _Line) -> str:
    """The last decided micro-batch with what is left to do; there is none before the first, or `continue_at(…, 0)`."""
    if decisions["decided"] is None:
        return "none"
    count = decisions["transactions"]
    if not count:
        return f"{decisions['decided']}, no transactions to commit"
    lost = decisions["lostTasks"]
    ended = "all committed" if decisions["isEnded"] else f"{len(lost)} of them lost" if lost else "to be committed"
    return f"{decisions['decided']}, {count} transactions, {ended}"


def _print(state: CheckpointState) -> None:
    kind = "stateful" if state.is_stateful else "stateless"
    click.echo(f"query {state.query or '(no file metadata)'}, {kind}")
    if state.planned >= 0:
        done = "done" if state.done >= state.planned else "not done: the next run repeats it"
        click.echo(f"last micro-batch: {state.planned}, {done}")
        rows = []
        for source in state.sources:
            if source.offsets is None:
                rows.append((str(source.number), "(reads no topics)", "-", "-"))
                continue
            for (topic, partition), offset in sorted(source.offsets.items()):
                rows.append((str(source.number), topic, str(partition), str(offset)))
        print_table(("source", "topic", "partition", "offset"), rows)
    for form, reasons in (("klog", state.to_klog), ("kafka", state.to_kafka)):
        click.echo(f'to format("{form}"): {"not safe: " + "; ".join(reasons) if reasons else "safe"}')
