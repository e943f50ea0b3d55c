"""What Spark's plans say of topics: addresses, names, offsets of batch reads. They are in the JVM, reached by py4j.

Spark has no other interface that tells a Python program where its sources and sinks are. The names are those of Spark
4.0 to 4.3. A program without a JVM (Spark Connect) has no plans. Of a plan's options only those of brokers and topics
are read: no secret comes into this process.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from pyspark.serializers import CloudPickleSerializer
from pyspark.sql import SparkSession

from spark_klog.base.settings import items
from spark_klog.client.settings import named_cluster
from spark_klog.lineage.datasets import is_uri, kafka_namespace

_OPTIONS = ("kafka.bootstrap.servers", "cluster", "subscribe", "assign", "topic")
#: The name of our source's tables.
_KLOG = "klog"
#: Tasks of a read whose ranges are looked at: each costs a call of the JVM.
_MOST_TASKS = 1000


@dataclass(frozen=True)
class Place:
    """Topics at a cluster, as options name them; without a namespace if they do not say which cluster."""

    namespace: str | None = None
    topics: tuple[str, ...] = ()


@dataclass
class BatchRead:
    """A batch read of topics; `ranges` are offsets (start, end) if its tasks are known; `rows` None if not known."""

    place: Place
    #: The JVM's table, by which its tasks are found.
    table: Any
    ranges: dict[tuple[str, int], tuple[int, int]] = field(default_factory=dict)
    rows: int | None = None


@dataclass
class BatchWrite:
    """A batch write, into topics or into the folder of that address."""

    place: Place = field(default_factory=Place)
    folder: str | None = None
    rows: int | None = None


def stream_execution(spark: SparkSession, query_id: str) -> Any:
    """Spark's object of a running query; None with Spark Connect, and of a query that has ended."""
    if not hasattr(spark, "_jsc"):
        return None
    query = spark._jsparkSession.streams().get(query_id)
    return None if query is None else query.streamingQuery()


def stream_sources(execution: Any) -> list[Place]:
    """A place for each source of a query, in the order of its progress records."""
    if execution is None:
        return []
    relations: list[Any] = []
    for node in _nodes(execution.analyzedPlan()):
        if _kind(node) == "StreamingRelationV2" and not any(node.equals(relation) for relation in relations):
            relations.append(node)
    return [_place_of(relation.extraOptions()) for relation in relations]


def stream_sink(execution: Any) -> Place | None:
    """The place of a query's sink; None if the query has planned no micro-batch yet."""
    planned = None if execution is None else execution.lastExecution()
    if planned is None:
        return None
    plan = planned.logical()
    if _kind(plan) != "WriteToMicroBatchDataSource":
        return Place()  # a sink of Spark's older interface
    return _place_of_map(plan.writeOptions())


def is_stopped(spark: SparkSession) -> bool:
    """Whether the session's Spark context was stopped; False without a JVM."""
    if not hasattr(spark, "_jsc"):
        return False
    context = spark.sparkContext._jsc
    return context is None or bool(context.sc().isStopped())


def qualified(spark: SparkSession, address: str) -> str:
    """The URI of a path as Spark reads it: in the file system `fs.defaultFS`, from its working directory on.

    The address as it is if it is a URI, or without a JVM.
    """
    if is_uri(address) or not hasattr(spark, "_jsc"):
        return address
    path = spark.sparkContext._jvm.org.apache.hadoop.fs.Path(address)
    filesystem = path.getFileSystem(spark._jsparkSession.sessionState().newHadoopConf())
    return str(filesystem.makeQualified(path).toString())


def batch_write(execution: Any) -> BatchWrite | None:
    """What a batch query writes; None if it writes neither topics nor files."""
    plan = execution.analyzed()
    kind = _kind(plan)
    if kind == "AppendData" and _kind(plan.table()) == "DataSourceV2Relation" and plan.table().table().name() == _KLOG:
        return BatchWrite(_place_of_map(plan.writeOptions()))
    if kind == "InsertIntoHadoopFsRelationCommand":
        return BatchWrite(folder=plan.outputPath().toString())
    return None


def batch_reads(execution: Any) -> list[BatchRead]:
    """The topics that a batch query reads; those that the sink's table stands for are not among them."""
    relations = [
        node
        for node in _nodes(execution.analyzed())
        if _kind(node) == "DataSourceV2Relation" and node.table().name() == _KLOG
    ]
    return [BatchRead(_place_of(relation.options()), relation.table()) for relation in relations]


def add_figures(execution: Any, write: BatchWrite | None, reads: list[BatchRead]) -> None:
    """Add to reads and write of a query that has ended well the offsets and rows of its tasks.

    The ranges are those of the reader's plan: a query with a limit may have read less of them.
    """
    for node in _executed(execution.executedPlan()):
        if _kind(node) == "BatchScanExec" and node.table().name() == _KLOG:
            read = next((read for read in reads if not read.ranges and read.table.equals(node.table())), None)
            if read is not None:
                read.ranges = _ranges(node)
                read.rows = _rows(node)
        elif write is not None and _kind(node) in ("AppendDataExec", "DataWritingCommandExec"):
            write.rows = _rows(node)


def _ranges(scan: Any) -> dict[tuple[str, int], tuple[int, int]]:
    tasks = scan.inputPartitions()
    ranges: dict[tuple[str, int], tuple[int, int]] = {}
    if tasks.size() > _MOST_TASKS:
        return ranges
    pickles = CloudPickleSerializer()  # as Spark's workers read them
    for number in range(tasks.size()):
        task = pickles.loads(bytes(tasks.apply(number).pickedPartition()))
        for span in () if task is None else task.ranges:
            key = span.topic, span.partition
            start, end = ranges.get(key, (span.start, span.end))
            ranges[key] = min(start, span.start), max(end, span.end)
    return {key: bounds for key, bounds in ranges.items() if bounds[0] < bounds[1]}


def _rows(node: Any) -> int | None:
    metrics = node.metrics()
    return int(metrics.apply("numOutputRows").value()) if metrics.contains("numOutputRows") else None


def _kind(node: Any) -> str:
    return str(node.getClass().getSimpleName())


def _nodes(plan: Any) -> Iterator[Any]:
    """The plan and what is below it; the table that a write goes to is not below it."""
    yield plan
    yield from (below for child in _children(plan) for below in _nodes(child))


def _executed(plan: Any) -> Iterator[Any]:
    """The plan and what is below it, also within the stages of adaptive execution."""
    kind = _kind(plan)
    if kind == "AdaptiveSparkPlanExec":
        yield from _executed(plan.executedPlan())
    elif kind.endswith("QueryStageExec"):
        yield from _executed(plan.plan())
    elif kind == "CommandResultExec":
        yield from _executed(plan.commandPhysicalPlan())
    else:
        yield plan
        yield from (below for child in _children(plan) for below in _executed(child))


def _children(plan: Any) -> Iterator[Any]:
    children = plan.children()
    for number in range(children.size()):
        yield children.apply(number)


def _place_of(options: Any) -> Place:
    """The place in Spark's CaseInsensitiveStringMap."""
    return _place({name: options.get(name) for name in _OPTIONS})


def _place_of_map(options: Any) -> Place:
    """The place in a map of Scala."""
    values: dict[str, str | None] = {}
    keys = options.keysIterator()
    while keys.hasNext():
        key = keys.next()
        if key.lower() in _OPTIONS:
            values[key.lower()] = options.apply(key)
    return _place(values)


def _place(options: dict[str, str | None]) -> Place:
    servers = options.get("kafka.bootstrap.servers")
    if servers is None and (cluster := options.get("cluster")):
        servers = named_cluster(cluster).get("bootstrap.servers")
    topics = items(options.get("subscribe") or options.get("topic") or "")
    if assign := options.get("assign"):
        topics = list(json.loads(assign))
    return Place(None if servers is None else kafka_namespace(servers), tuple(dict.fromkeys(topics)))
