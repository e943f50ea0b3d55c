"""Events of a run, by OpenLineage's model: START, RUNNING, and COMPLETE, FAIL or ABORT at its end.

Two facets are ours, as OpenLineage has none for offsets; docs/reference/lineage-facets.json is their schema:

| facet | of | what |
| --- | --- | --- |
| `klog_offsetRanges` | an input | the offsets that were read, by partition: from `start` on, up to and without `end` |
| `klog_query` | a run | the query's id, which its checkpoint keeps, and the micro-batch |

Names of jobs and parents come from the settings that other integrations of OpenLineage have: see `JobSettings`.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from uuid import UUID

import attr
from openlineage.client.event_v2 import InputDataset, Job, OutputDataset, Run, RunEvent, RunState as RunState
from openlineage.client.facet_v2 import (
    DatasetFacet,
    InputDatasetFacet,
    JobFacet,
    OutputDatasetFacet,
    RunFacet,
    dataset_version_dataset,
    datasource_dataset,
    error_message_run,
    input_statistics_input_dataset,
    job_type_job,
    output_statistics_output_dataset,
    parent_run,
    processing_engine_run,
)

from spark_klog.base.addresses import without_user
from spark_klog.base.names import VERSION
from spark_klog.lineage.datasets import DatasetUse
from spark_klog.lineage.emitter import Emitter

_log = logging.getLogger(__name__)
PRODUCER = f"urn:spark-klog:{VERSION}"
#: The version of our facets' schema changes with the schema.
SCHEMA = "urn:spark-klog:lineage-facets:1-0-0"
#: Characters of an error's message.
_LONGEST_MESSAGE = 2000
_SECRET = re.compile(
    r"((?:password|passwd|secret|token|api[_.-]?key|credentials?|jaas\.config|authorization)[\w.-]*[\"']?\s*[=:]\s*)"
    r"(\"[^\"]*\"|'[^']*'|(?:basic|bearer)\s+\S+|[^\s,;]+)",
    re.IGNORECASE,
)
#: Before the lines of a Python error in Spark's text.
_TRACEBACK = "Traceback (most recent call last):"
_CAMEL = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
_NOT_OF_NAMES = re.compile(r"[^a-z0-9_.-]+")


@attr.define
class OffsetRangesInputDatasetFacet(InputDatasetFacet):
    """Offsets that were read: [{"partition", "start", "end"}]."""

    partitions: list[dict[str, int]] = attr.field(factory=list)

    @staticmethod
    def _get_schema() -> str:
        return f"{SCHEMA}#/$defs/OffsetRangesInputDatasetFacet"


@attr.define
class QueryRunFacet(RunFacet):
    """The streaming query, and the micro-batch that the event is about."""

    queryId: str
    batchId: int | None = attr.field(default=None)

    @staticmethod
    def _get_schema() -> str:
        return f"{SCHEMA}#/$defs/QueryRunFacet"


@dataclass(frozen=True)
class JobSettings:
    """The namespace of jobs, and the run that started this one, for example a task of Airflow.

    `conf` has settings of Spark, which come before the environment:

        spark.openlineage.namespace                          OPENLINEAGE_NAMESPACE         "default" without either
        spark.openlineage.appName                            spark.app.name                "spark" without either
        spark.openlineage.parentJobNamespace, .parentJobName, .parentRunId
                                                             OPENLINEAGE_PARENT_ID         NAMESPACE/NAME/RUN_ID
        spark.openlineage.rootParentJobNamespace, ...        OPENLINEAGE_ROOT_PARENT_ID

    A parent that is incomplete, or whose run id is no UUID, is left out with a warning, as OpenLineage would refuse the
    event.
    """

    namespace: str
    parent: parent_run.ParentRunFacet | None
    #: The first part of the names of jobs.
    application: str = "spark"

    @classmethod
    def of(cls, conf: Mapping[str, str], namespace: str | None = None) -> JobSettings:
        namespace = namespace or conf.get("spark.openlineage.namespace") or os.environ.get("OPENLINEAGE_NAMESPACE")
        application = conf.get("spark.openlineage.appName") or conf.get("spark.app.name") or "spark"
        parent = _ancestor(conf, "parent", "OPENLINEAGE_PARENT_ID")
        facet = None
        if parent is not None:
            run = parent_run.Run(runId=parent[2])
            facet = parent_run.ParentRunFacet(run, parent_run.Job(parent[0], parent[1]), producer=PRODUCER)
            root = _ancestor(conf, "rootParent", "OPENLINEAGE_ROOT_PARENT_ID")
            if root is not None:
                facet.root = parent_run.Root(parent_run.RootRun(root[2]), parent_run.RootJob(root[0], root[1]))
        return cls(namespace or "default", facet, application)


def _ancestor(conf: Mapping[str, str], which: str, variable: str) -> tuple[str, str, str] | None:
    """(namespace, name, run id) of the parent's or root's run; warns if what is set is none."""
    settings = [f"spark.openlineage.{which}{part}" for part in ("JobNamespace", "JobName", "RunId")]
    parts = [conf.get(setting, "") for setting in settings]
    if any(parts):
        missing = [setting for setting, part in zip(settings, parts, strict=True) if not part]
        if missing:
            _log.warning("lineage has no %s: %s is not set, but others of it are", which, " and ".join(missing))
            return None
        source, given, needed = settings[2], parts[2], "must be a UUID"
    else:
        source, given = variable, os.environ.get(variable, "")
        if not given:
            return None
        parts, needed = given.rsplit("/", 2), "must be NAMESPACE/NAME/RUN_ID, RUN_ID a UUID"
    try:
        namespace, name, run_id = parts
        if namespace and name:
            return namespace, name, str(UUID(run_id))
    except ValueError:
        pass
    _log.warning("lineage has no %s: %s is %r, but %s", which, source, without_user(given), needed)
    return None


def job_name(*parts: str) -> str:
    """The parts in lower case, `_` for other characters, dots between them: as the agent for Spark names jobs."""
    return ".".join(_NOT_OF_NAMES.sub("_", _CAMEL.sub("_", part).lower()).strip("_") or "_" for part in parts)


def shown(message: str) -> str:
    """An error's message without what may be a secret, and not longer than 2,000 characters."""
    return _SECRET.sub(r"\1[hidden]", without_user(message))[:_LONGEST_MESSAGE]


def cause(failure: str) -> str:
    """The lines of Spark's text that tell what happened: its first one, Python's error, and the last one of ours."""
    lines = failure.splitlines()
    begins = next((number for number, line in enumerate(lines) if line.endswith(_TRACEBACK)), len(lines))
    python = [line.strip() for line in lines[begins + 1 :] if line and not line[0].isspace()]
    ours = [line.strip() for line in lines if line.strip().startswith("spark_klog.")]
    return "\n".join(dict.fromkeys([*lines[:1], *python[:1], *ours[-1:]]))


def ending(failure: str | None, is_stopped: bool) -> tuple[RunState, str | None]:
    """The last event's state of a query that has ended with this text of Spark's, and what failed.

    A session that is stopped makes its queries fail, with texts of many kinds: they have not failed by themselves.
    """
    if failure is None:
        return RunState.COMPLETE, None
    return (RunState.ABORT, None) if is_stopped else (RunState.FAIL, cause(failure))


class RunEvents:
    """Sends the events of one run of a job. `processing` is STREAMING or BATCH."""

    def __init__(
        self, emitter: Emitter, settings: JobSettings, name: str, run_id: str, processing: str, spark_version: str
    ) -> None:
        self._emitter, self._settings = emitter, settings
        self._name, self._run_id = name, run_id
        job_type = job_type_job.JobTypeJobFacet(processing, "SPARK", "JOB", producer=PRODUCER)
        self._job_facets: dict[str, JobFacet] = {"jobType": job_type}
        engine = processing_engine_run.ProcessingEngineRunFacet(
            spark_version, name="spark", openlineageAdapterVersion=VERSION, producer=PRODUCER
        )
        self._facets: dict[str, RunFacet] = {"processing_engine": engine}
        if settings.parent is not None:
            self._facets["parent"] = settings.parent

    def as_parent(self) -> JobSettings:
        """The settings of jobs that this run starts."""
        run, job = parent_run.Run(self._run_id), parent_run.Job(self._settings.namespace, self._name)
        facet = parent_run.ParentRunFacet(run, job, producer=PRODUCER)
        above = self._settings.parent
        if above is not None:
            facet.root = above.root or parent_run.Root(
                parent_run.RootRun(above.run.runId), parent_run.RootJob(above.job.namespace, above.job.name)
            )
        return replace(self._settings, parent=facet)

    def send(
        self,
        state: RunState,
        inputs: Iterable[DatasetUse] = (),
        outputs: Iterable[DatasetUse] = (),
        *,
        query: tuple[str, int | None] | None = None,
        error: str | None = None,
        time: datetime | None = None,
    ) -> None:
        """Queue an event. `query` is (id, micro-batch); `error` the text of what failed; `time` is now by default."""
        facets = dict(self._facets)
        if query is not None:
            facets["klog_query"] = QueryRunFacet(*query, producer=PRODUCER)
        if error is not None:
            facets["errorMessage"] = error_message_run.ErrorMessageRunFacet(shown(error), "PYTHON", producer=PRODUCER)
        self._emitter.emit(
            RunEvent(
                eventTime=(time or datetime.now(timezone.utc)).isoformat(timespec="milliseconds"),
                eventType=state,
                run=Run(self._run_id, facets),
                job=Job(self._settings.namespace, self._name, dict(self._job_facets)),
                inputs=[_input(use) for use in inputs],
                outputs=[_output(use) for use in outputs],
                producer=PRODUCER,
            )
        )


def _input(use: DatasetUse) -> InputDataset:
    own: dict[str, InputDatasetFacet] = {}
    facets = _facets(use)
    if use.rows is not None or use.size is not None:
        own["inputStatistics"] = input_statistics_input_dataset.InputStatisticsInputDatasetFacet(
            use.rows, use.size, producer=PRODUCER
        )
    if use.ranges:
        ranges = sorted(use.ranges.items())
        partitions = [{"partition": number, "start": start, "end": end} for number, (start, end) in ranges]
        own["klog_offsetRanges"] = OffsetRangesInputDatasetFacet(partitions, producer=PRODUCER)
        version = json.dumps({str(number): end for number, (_, end) in ranges})
        facets["version"] = dataset_version_dataset.DatasetVersionDatasetFacet(version, producer=PRODUCER)
    return InputDataset(use.namespace, use.name, own, facets=facets)


def _output(use: DatasetUse) -> OutputDataset:
    own: dict[str, OutputDatasetFacet] = {}
    if use.rows is not None or use.size is not None:
        own["outputStatistics"] = output_statistics_output_dataset.OutputStatisticsOutputDatasetFacet(
            use.rows, use.size, producer=PRODUCER
        )
    return OutputDataset(use.namespace, use.name, own, facets=_facets(use))


def _facets(use: DatasetUse) -> dict[str, DatasetFacet]:
    if "://" not in use.namespace:
        return {}
    source = datasource_dataset.DatasourceDatasetFacet(use.namespace, use.namespace, producer=PRODUCER)
    return {"dataSource": source}
