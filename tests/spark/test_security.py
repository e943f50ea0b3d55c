"""Spark over TLS and SASL: batch, stream and write; nothing that Spark shows or stores contains a secret."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession, functions as f

from tests.support.brokers.tcp_proxy import TcpProxy
from tests.support.servers.certificates import Certificates
from tests.support.servers.kafka import HOST, free_port
from tests.support.servers.secure_broker import PASSWORDS, SecureBroker

from .conftest import SparkLog
from .support import Job, create_topic, error_of

SECRETS = (PASSWORDS["alice"], json.dumps(PASSWORDS["alice"])[1:-1], "wrong-secret", "store-secret")


@pytest.fixture(scope="module")
def broker(module_server_dir: Path, certificates: Certificates) -> Iterator[SecureBroker]:
    with SecureBroker(module_server_dir, certificates) as running:
        yield running


def _options(broker: SecureBroker, password: str = PASSWORDS["alice"]) -> dict[str, str]:
    return {
        "kafka.bootstrap.servers": broker.servers("SASL_SSL"),
        "kafka.security.protocol": "SASL_SSL",
        "kafka.sasl.mechanism": "SCRAM-SHA-512",
        "kafka.sasl.jaas.config": "org.apache.kafka.common.security.scram.ScramLoginModule required "
        f'username="alice" password="{password}";',
        "kafka.ssl.truststore.location": str(broker.certificates.ca),
        "kafka.ssl.truststore.password": "store-secret",
    }


def _shown(spark: SparkSession) -> str:
    """What Spark's UI and event log show of all queries: plans with their options, and settings."""
    executions = spark._jsparkSession.sharedState().statusStore().executionsList()
    parts = []
    for number in range(executions.size()):
        execution = executions.apply(number)
        parts += [execution.physicalPlanDescription(), execution.description(), execution.details()]
        parts.append(execution.modifiedConfigs().toString())
    assert parts
    return "\n".join(parts)


def _plans(frame: Any) -> str:
    found = frame._jdf.queryExecution()
    return f"{found.toString()}\n{found.logical().toString()}\n{frame._jdf.toString()}"


def _without_secrets(text: str) -> None:
    for secret in SECRETS:
        assert secret not in text


def test_batch_stream_and_write(spark: SparkSession, spark_log: SparkLog, broker: SecureBroker, tmp_path: Path) -> None:
    topic = "spark-secure"
    create_topic(broker.servers("PLAINTEXT"), topic, partitions=3)
    options = _options(broker)
    number = f.col("id")
    rows = spark.range(3000).select(number.cast("string").alias("value"), (number % 3).cast("int").alias("partition"))
    rows.write.format("klog").options(**options).option("topic", topic).mode("append").save()
    frame = spark.read.format("klog").options(**options).option("subscribe", topic).load()
    assert {int(row.value) for row in frame.select(f.col("value").cast("string")).collect()} == set(range(3000))

    progress = {"kafka.group.id": "g", "commitOffsets": "true", "offsetsPath": str(tmp_path / "offsets")}
    job = Job(spark, "", tmp_path, **options, **progress, subscribe=topic)
    query = job.start(availableNow=True)
    assert query.awaitTermination(60)
    assert job.result.count() == 3000
    _without_secrets(json.dumps([dict(item) for item in query.recentProgress], default=str))
    _without_secrets(query._jsq.toString())

    create_topic(broker.servers("PLAINTEXT"), f"{topic}-2", partitions=3)
    written = job.frame().select("value").writeStream.format("klog").options(**options).option("topic", f"{topic}-2")
    query = written.option("checkpointLocation", str(tmp_path / "again")).trigger(availableNow=True).start()
    assert query.awaitTermination(60)
    assert spark.read.format("klog").options(**options).option("subscribe", f"{topic}-2").load().count() == 3000

    assert "redacted" in _plans(job.frame())  # Spark shows options there
    for plans in (_plans(frame), _plans(job.frame()), _shown(spark), spark_log.text()):
        _without_secrets(plans)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) > 10
    for path in files:
        _without_secrets(path.read_bytes().decode("latin-1"))


def test_a_named_cluster(spark: SparkSession, spark_log: SparkLog, broker: SecureBroker, tmp_path: Path) -> None:
    """A query reads and writes by the cluster's name; tasks get the secret from the file that KLOG_CONFIG refers to."""
    topic, secret = "spark-named", tmp_path / "secret"
    secret.write_text(PASSWORDS["alice"] + "\n")
    create_topic(broker.servers("PLAINTEXT"), topic)
    Path(os.environ["KLOG_CONFIG"]).write_text(
        f"""
        [secure]
        bootstrap.servers = "{broker.servers("SASL_SSL")}"
        security.protocol = "SASL_SSL"
        ssl.ca.location = "{broker.certificates.ca}"
        sasl.mechanism = "SCRAM-SHA-512"
        sasl.username = "alice"
        sasl.password = "file:{secret}"
        """
    )
    rows = spark.range(50).select(f.col("id").cast("string").alias("value"))
    rows.write.format("klog").option("cluster", "secure").option("topic", topic).mode("append").save()
    frame = spark.read.format("klog").option("cluster", "secure").option("subscribe", topic).load()
    assert frame.count() == 50
    query = Job(spark, "", tmp_path, cluster="secure", subscribe=topic)
    del query.options["kafka.bootstrap.servers"]
    assert query.run() == [50]
    for shown in (_plans(frame), _shown(spark), spark_log.text()):
        _without_secrets(shown)
        assert "sasl.username" not in shown
    both = {"cluster": "secure", "kafka.bootstrap.servers": "a:1", "subscribe": topic}
    assert "set only one of the options cluster=secure" in error_of(
        lambda: spark.read.format("klog").options(**both).load().collect()
    )
    secret.write_text("wrong-secret")
    refused = error_of(lambda: spark.read.format("klog").options(cluster="secure", subscribe=topic).load().collect())
    assert "refuses SCRAM-SHA-512" in refused
    _without_secrets(refused)


def test_a_wrong_password(spark: SparkSession, spark_log: SparkLog, broker: SecureBroker, tmp_path: Path) -> None:
    """The error, on the driver for reads and in a task for writes, names the refused mechanism.

    A batch query or stream makes one connection, on the driver; a write one for each of its task's four attempts.
    """
    port = free_port()
    options = _options(broker, "wrong-secret") | {"kafka.bootstrap.servers": f"{HOST}:{port}"}

    def read() -> None:
        spark.read.format("klog").options(**options).option("subscribe", "t").load().collect()

    def write() -> None:
        frame = spark.range(0, 1, 1, 1).select(f.lit("x").alias("value"))
        frame.write.format("klog").options(**options).option("topic", "t").mode("append").save()

    def stream() -> None:
        query = Job(spark, "", tmp_path, **options, subscribe="t").start(availableNow=True)
        query.awaitTermination(60)

    with TcpProxy(port, broker.ports["SASL_SSL"], 0) as proxy:
        for action, most in ((read, 1), (write, 4), (stream, 1)):
            before = proxy.connections
            text = error_of(action)
            assert "[KLOG_AUTHENTICATION_FAILED.SASL] broker" in text
            assert "refuses SCRAM-SHA-512" in text
            _without_secrets(text)
            assert 1 <= proxy.connections - before <= most
    _without_secrets(_shown(spark))
    _without_secrets(spark_log.text())
