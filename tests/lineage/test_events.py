"""Events and names: by OpenLineage's schemas and naming rules, without secrets."""

from __future__ import annotations

import json
from pathlib import Path
from uuid import uuid4

import pytest
from jsonschema import ValidationError
from openlineage.client import OpenLineageClient
from openlineage.client.naming.dataset import Kafka

from spark_klog.lineage.datasets import DatasetUse, DatasetUses, folder_use, kafka_namespace, topic_uses
from spark_klog.lineage.emitter import Emitter
from spark_klog.lineage.events import JobSettings, RunEvents, RunState, ending, job_name, shown
from tests.support.servers.openlineage import check_event

RUN, PARENT, ROOT = (str(uuid4()) for _ in range(3))


def sent(folder: Path, settings: JobSettings, *states: RunState) -> list[dict]:  # type: ignore[type-arg]
    """The events of a run that reads a topic and writes two datasets."""
    path = folder / "events.jsonl"
    transport = {"type": "file", "log_file_path": str(path), "append": True}
    emitter = Emitter(OpenLineageClient(config={"transport": transport}))
    run = RunEvents(emitter, settings, "app.query", RUN, "STREAMING", "4.3.0")
    inputs = topic_uses("kafka://h:9092", {("t", 1): (5, 7), ("t", 0): (0, 3)}, rows=5)
    outputs = [DatasetUse("kafka://h:9092", "out", rows=5, size=50), folder_use("/data/out")]
    for state in states:
        error = "it failed" if state is RunState.FAIL else None
        run.send(state, inputs, outputs, query=(RUN, 3 if state is RunState.RUNNING else None), error=error)
    assert emitter.close(20)
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_events_are_valid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENLINEAGE_PARENT_ID", f"airflow/dag/with/slash.task/{PARENT}")
    monkeypatch.setenv("OPENLINEAGE_ROOT_PARENT_ID", f"airflow/dag/{ROOT}")
    settings = JobSettings.of({"spark.openlineage.namespace": "prod"})
    states = (RunState.START, RunState.RUNNING, RunState.FAIL)
    start, running, fail = events = sent(tmp_path, settings, *states)
    for event in events:
        check_event(event)
        assert event["run"]["runId"] == RUN
        assert (event["job"]["namespace"], event["job"]["name"]) == ("prod", "app.query")
        job_type = event["job"]["facets"]["jobType"]
        assert (job_type["processingType"], job_type["integration"], job_type["jobType"]) == (
            "STREAMING",
            "SPARK",
            "JOB",
        )
        engine = event["run"]["facets"]["processing_engine"]
        assert (engine["name"], engine["version"]) == ("spark", "4.3.0")
        parent = event["run"]["facets"]["parent"]
        assert parent["run"] == {"runId": PARENT, "facets": {}}
        assert (parent["job"]["namespace"], parent["job"]["name"]) == ("airflow/dag/with", "slash.task")
        assert parent["root"]["run"]["runId"] == ROOT
    assert [event["eventType"] for event in events] == ["START", "RUNNING", "FAIL"]
    assert running["run"]["facets"]["klog_query"]["batchId"] == 3
    assert "batchId" not in start["run"]["facets"]["klog_query"]
    assert fail["run"]["facets"]["errorMessage"]["message"] == "it failed"
    (read,) = running["inputs"]
    expected = [{"partition": 0, "start": 0, "end": 3}, {"partition": 1, "start": 5, "end": 7}]
    assert read["inputFacets"]["klog_offsetRanges"]["partitions"] == expected
    assert read["inputFacets"]["inputStatistics"]["rowCount"] == 5
    assert json.loads(read["facets"]["version"]["datasetVersion"]) == {"0": 3, "1": 7}
    topic, files = running["outputs"]
    statistics = topic["outputFacets"]["outputStatistics"]
    assert (statistics["rowCount"], statistics["size"]) == (5, 50)
    assert (files["namespace"], files["name"], files["outputFacets"]) == ("file", "/data/out", {})


def test_the_checker_finds_faults(tmp_path: Path) -> None:
    (event,) = sent(tmp_path, JobSettings("n", None), RunState.RUNNING)
    for change in (
        lambda one: one["run"].update(runId="no uuid"),
        lambda one: one.update(eventType="BEGIN"),
        lambda one: one.update(eventTime="yesterday"),
        lambda one: one["job"].pop("name"),
        lambda one: one["inputs"][0]["inputFacets"]["klog_offsetRanges"].update(partitions=[{"partition": 0}]),
        lambda one: one["inputs"][0]["inputFacets"]["inputStatistics"].update(rowCount="5"),
        lambda one: one["job"]["facets"]["jobType"].pop("integration"),
        lambda one: one["run"]["facets"]["klog_query"].update(batch=1),
        lambda one: one["run"]["facets"]["processing_engine"].pop("_producer"),
    ):
        changed = json.loads(json.dumps(event))
        change(changed)
        with pytest.raises(ValidationError):
            check_event(changed)


@pytest.mark.parametrize(
    ("conf", "environment", "namespace", "parent"),
    [
        ({}, {}, "default", None),
        ({}, {"OPENLINEAGE_NAMESPACE": "env"}, "env", None),
        ({"spark.openlineage.namespace": "conf"}, {"OPENLINEAGE_NAMESPACE": "env"}, "conf", None),
        ({}, {"OPENLINEAGE_PARENT_ID": "no-slashes"}, "default", None),
        ({}, {"OPENLINEAGE_PARENT_ID": "a/b/no-uuid"}, "default", None),
        ({}, {"OPENLINEAGE_PARENT_ID": f"a/b/{PARENT}"}, "default", ("a", "b", PARENT)),
        (
            {f"spark.openlineage.parent{name}": value for name, value in (("JobNamespace", "c"), ("JobName", "d"))},
            {"OPENLINEAGE_PARENT_ID": f"a/b/{PARENT}"},
            "default",
            None,
        ),
        (
            {
                "spark.openlineage.parentJobNamespace": "c",
                "spark.openlineage.parentJobName": "d",
                "spark.openlineage.parentRunId": PARENT.upper(),
            },
            {},
            "default",
            ("c", "d", PARENT),
        ),
    ],
)
def test_settings(
    conf: dict[str, str],
    environment: dict[str, str],
    namespace: str,
    parent: tuple[str, str, str] | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    settings = JobSettings.of(conf)
    assert settings.namespace == namespace
    facet = settings.parent
    assert (facet and (facet.job.namespace, facet.job.name, facet.run.runId)) == parent


@pytest.mark.parametrize(
    ("conf", "environment", "warning"),
    [
        (
            {},
            {"OPENLINEAGE_PARENT_ID": "airflow/dag.task/not-a-uuid"},
            "lineage has no parent: OPENLINEAGE_PARENT_ID is 'airflow/dag.task/not-a-uuid', but must be "
            "NAMESPACE/NAME/RUN_ID, RUN_ID a UUID",
        ),
        (
            {f"spark.openlineage.parent{name}": "oops" for name in ("JobNamespace", "JobName", "RunId")},
            {},
            "lineage has no parent: spark.openlineage.parentRunId is 'oops', but must be a UUID",
        ),
        (
            {"spark.openlineage.parentJobName": "dag.task"},
            {"OPENLINEAGE_PARENT_ID": f"a/b/{PARENT}"},
            "lineage has no parent: spark.openlineage.parentJobNamespace and spark.openlineage.parentRunId is not set, "
            "but others of it are",
        ),
        (
            {},
            {"OPENLINEAGE_PARENT_ID": f"a/b/{PARENT}", "OPENLINEAGE_ROOT_PARENT_ID": "a"},
            "lineage has no rootParent: OPENLINEAGE_ROOT_PARENT_ID is 'a', but must be NAMESPACE/NAME/RUN_ID, "
            "RUN_ID a UUID",
        ),
    ],
)
def test_a_wrong_parent_is_told(
    conf: dict[str, str],
    environment: dict[str, str],
    warning: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    JobSettings.of(conf)
    assert [record.getMessage() for record in caplog.records] == [warning]


def test_jobs_of_an_application_have_its_name() -> None:
    conf = {"spark.app.name": "a", "spark.openlineage.appName": "b"}
    assert JobSettings.of(conf).application == "b"
    assert JobSettings.of({"spark.app.name": "a"}).application == "a"
    emitter = Emitter(conf={"spark.openlineage.disabled": "true"})
    assert RunEvents(emitter, JobSettings.of(conf), "b.q", RUN, "STREAMING", "4.3.0").as_parent().application == "b"


@pytest.mark.parametrize(
    ("servers", "host", "port"),
    [
        ("a.example:9093,b:1", "a.example", "9093"),
        (" broker:1 , b", "broker", "1"),
        ("broker", "broker", "9092"),
        ("SASL_SSL://broker:9094", "broker", "9094"),
        ("[::1]:9092", "[::1]", "9092"),
    ],
)
def test_namespaces_of_topics(servers: str, host: str, port: str) -> None:
    assert kafka_namespace(servers) == Kafka(host, port, "t").get_namespace()


@pytest.mark.parametrize("servers", ["", ",", "user:password@host:1", "a b", "host:port", "/tmp/x"])
def test_no_namespace(servers: str) -> None:
    assert kafka_namespace(servers) is None


@pytest.mark.parametrize(
    ("address", "namespace", "name"),
    [
        ("/data/clicks/", "file", "/data/clicks"),
        ("file:/data/clicks", "file", "/data/clicks"),
        ("file:///data/clicks", "file", "/data/clicks"),
        ("/", "file", "/"),
        ("s3a://bucket/a/b/", "s3://bucket", "a/b"),
        ("s3://KEY:SECRET@bucket/a", "s3://bucket", "a"),
        ("s3a://KEY:SEC/RET@bucket/a", "s3://bucket", "a"),
        ("s3://bucket", "s3://bucket", "/"),
        ("gs://bucket/a", "gs://bucket", "a"),
        ("hdfs://node:8020/a/b", "hdfs://node:8020", "/a/b"),
        ("abfss://container@account.dfs.core.windows.net/a", "abfss://container@account.dfs.core.windows.net", "a"),
    ],
)
def test_folders(address: str, namespace: str, name: str) -> None:
    use = folder_use(address)
    assert (use.namespace, use.name) == (namespace, name)


def test_a_relative_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for address in ("out/a", "./out/a/", "out/b/../a"):
        use = folder_use(address)
        assert (use.namespace, use.name) == ("file", str(tmp_path / "out" / "a"))


def test_uses_are_added() -> None:
    uses = DatasetUses()
    uses.add([DatasetUse("n", "t", {0: (5, 7)}, 2, None), DatasetUse("n", "u", rows=1)])
    uses.add([DatasetUse("n", "t", {0: (7, 9), 1: (0, 1)}, 3, 10)])
    assert uses["n", "t"] == DatasetUse("n", "t", {0: (5, 9), 1: (0, 1)}, 5, None)
    uses.add([DatasetUse("n", "t", {0: (0, 2)}, None)])  # the topic was created again
    assert uses["n", "t"].ranges[0] == (0, 2)
    assert uses["n", "t"].rows is None
    assert uses["n", "u"].rows == 1


@pytest.mark.parametrize(
    ("parts", "name"),
    [
        (("MyApp", "clicks"), "my_app.clicks"),
        (("klog batch load", "q"), "klog_batch_load.q"),
        (("spark", "Über/Query 1"), "spark.ber_query_1"),
        (("", "q"), "_.q"),
    ],
)
def test_names_of_jobs(parts: tuple[str, ...], name: str) -> None:
    assert job_name(*parts) == name


@pytest.mark.parametrize(
    "text",
    [
        "kafka.sasl.password=hunter2 is wrong",
        'sasl.jaas.config: "PlainLoginModule required username=x password=hunter2"',
        "Authorization: Bearer hunter2",
        '{"apiKey": "hunter2"}',
        "token hunter1? token=hunter2, more",
        "s3://KEY:hunter2@bucket/a",
    ],
)
def test_messages_have_no_secrets(text: str) -> None:
    assert "hunter2" not in shown(text)


def test_the_state_of_a_query_that_has_ended() -> None:
    assert ending(None, is_stopped=True) == (RunState.COMPLETE, None)
    assert ending("java.lang.ArithmeticException: / by zero\n\tat x", is_stopped=False) == (
        RunState.FAIL,
        "java.lang.ArithmeticException: / by zero",
    )
    assert ending("java.lang.NullPointerException: of a stopped scheduler", is_stopped=True) == (RunState.ABORT, None)


def test_long_messages_are_cut() -> None:
    assert len(shown("x" * 10_000)) == 2000
