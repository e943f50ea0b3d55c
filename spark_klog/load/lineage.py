"""OpenLineage events of loads (`jobs/batch_load.py --lineage`): a run of each call, with the offsets that it loaded.

START has the topics and the output, COMPLETE the offsets of all partitions and the records written, once they are
committed. A load of which single partitions failed ends with FAIL, and so does one that raises an error; an interrupted
one with ABORT.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from uuid import uuid4

from spark_klog.base.extras import require
from spark_klog.base.settings import some_of
from spark_klog.lineage.datasets import DatasetUse, folder_use, kafka_namespace, topic_uses
from spark_klog.lineage.emitter import Emitter
from spark_klog.lineage.events import JobSettings, RunEvents, RunState, job_name
from spark_klog.load.driving import Steps
from spark_klog.load.run import Loaded, LoadOptions
from spark_klog.tables.opening import is_table, open_table

_log = logging.getLogger(__name__)
_FLUSH_SECONDS = 5.0


class LoadEvents:
    """The events of a job's loads, which are sent by one emitter.

    `conf` are settings of Spark, of which those of OpenLineage are read, and the application's name.
    `ConfigError` if OpenLineage's settings are wrong.
    """

    def __init__(self, conf: Mapping[str, str]) -> None:
        require("--lineage", "pyspark")
        self._conf, self._emitter = conf, Emitter(conf=conf)

    def around(self, options: LoadOptions, steps: Steps[Loaded]) -> Steps[Loaded]:
        """The steps of a load, which is a run of its own; what they raise is raised here."""
        return _with_events(options, steps, self._conf, self._emitter)

    def close(self) -> None:
        """Wait a short while until all events are sent."""
        self._emitter.close(_FLUSH_SECONDS)


def _with_events(
    options: LoadOptions, steps: Steps[Loaded], conf: Mapping[str, str], emitter: Emitter
) -> Steps[Loaded]:
    import pyspark

    output = folder_use(open_table(options.output).location if is_table(options.output) else options.output)
    settings = JobSettings.of(conf)
    name = job_name(settings.application, output.name.strip("/"))
    events = RunEvents(emitter, settings, name, str(uuid4()), "BATCH", pyspark.__version__)
    namespace = kafka_namespace(options.client["bootstrap.servers"])

    def send(state: RunState, inputs: Iterable[DatasetUse], error: str | None = None) -> None:
        try:
            events.send(state, inputs, [output], error=error)
        except Exception:
            _log.warning("lineage of the load is incomplete", exc_info=True)

    topics = [] if namespace is None else [DatasetUse(namespace, topic) for topic in options.topics]
    send(RunState.START, topics)
    try:
        loaded = yield from steps
    except Exception as error:
        send(RunState.FAIL, topics, f"{type(error).__name__}: {error}")
        raise
    except BaseException:
        send(RunState.ABORT, topics)
        raise
    output.rows = sum(part.records for part in loaded.partitions)
    failed = [f"{part.topic}-{part.partition}: {part.error}" for part in loaded.failed]
    state = RunState.FAIL if failed else RunState.COMPLETE
    send(state, _read(namespace, loaded, topics), some_of(failed, separator="; ") or None)
    return loaded


def _read(namespace: str | None, loaded: Loaded, topics: list[DatasetUse]) -> list[DatasetUse]:
    if namespace is None:
        return []
    ranges = {
        (part.topic, part.partition): (part.start, part.until) for part in loaded.partitions if part.until > part.start
    }
    uses = {use.name: use for use in [*topics, *topic_uses(namespace, ranges)]}
    for use in uses.values():
        use.rows = sum(part.records for part in loaded.partitions if part.topic == use.name)
    return list(uses.values())
