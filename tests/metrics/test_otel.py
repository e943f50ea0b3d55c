"""OpenTelemetry's meter reads what Prometheus' pages show: the same names, labels and values."""

from __future__ import annotations

import gc
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from spark_klog.client import Admin, Consumer, Producer
from spark_klog.embedded import EmbeddedCluster
from spark_klog.groups.lag import LagMetrics

metrics = pytest.importorskip("opentelemetry.metrics", reason="without OpenTelemetry")
sdk = pytest.importorskip("opentelemetry.sdk.metrics", reason="without OpenTelemetry's SDK")
#: They say how long ago something was, or how long it took.
_OF_TIME = ("_seconds",)
_Samples = dict[tuple[str, str, frozenset[tuple[str, str]]], float]


@pytest.fixture
def reader(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A configured provider's reader."""
    from opentelemetry.sdk.metrics.export import InMemoryMetricReader

    reader = InMemoryMetricReader()
    provider = sdk.MeterProvider([reader], shutdown_on_exit=False)
    monkeypatch.setattr(metrics, "get_meter_provider", lambda: provider)
    monkeypatch.setattr(metrics, "get_meter", provider.get_meter)
    return reader


def _read(reader: Any) -> _Samples:
    collected = reader.get_metrics_data()
    samples: _Samples = {}
    for resource in collected.resource_metrics if collected is not None else ():
        for scope in resource.scope_metrics:
            for metric in scope.metrics:
                kind = "counter" if type(metric.data).__name__ == "Sum" else "gauge"
                for point in metric.data.data_points:
                    assert kind == "gauge" or metric.data.is_monotonic
                    labels = frozenset((name, str(value)) for name, value in point.attributes.items())
                    samples[metric.name, kind, labels] = point.value
    return samples


def _shown(page: Callable[[], Iterable[str]]) -> _Samples:
    families = text_string_to_metric_families("".join(page()))
    return {
        (sample.name, family.type, frozenset(sample.labels.items())): sample.value
        for family in families
        for sample in family.samples
    }


def _assert_same(read: _Samples, shown: _Samples) -> None:
    assert read.keys() == shown.keys()
    assert shown
    for key, value in shown.items():
        assert key[0].endswith(_OF_TIME) or read[key] == value, key


def test_queries(reader: Any) -> None:
    from spark_klog.spark.listener import QueryMetrics, SourceProgress

    figures = QueryMetrics(lambda: 1000.0)
    held = [{"topic": "t", "partition": 0, "records": 3, "sinceMs": 999_000}]
    progress = SourceProgress(
        *("q", 7, 10, 2.5, {"t-0": 4}, {"t-0": 40}, 1, 5, 3.0, []),
        end={"t-0": 4, "t-1": 9},
        behind={"t-0": 5, "t-1": 1},
        held_up=held,
    )
    figures.add(progress)
    _assert_same(_read(reader), _shown(figures.page))
    figures.add(progress)
    _assert_same(_read(reader), _shown(figures.page))
    other = QueryMetrics(lambda: 1000.0)
    other.add(SourceProgress(*("other", 1, 1, 1.0, {}, {}, 0, 0, 0.0, [])))
    read = _read(reader)
    _assert_same(read, _shown(figures.page) | _shown(other.page))
    del other
    gc.collect()
    _assert_same(_read(reader), _shown(figures.page))


def test_loads(reader: Any) -> None:
    from spark_klog.load.follow import LoadMetrics, RunReport

    figures = LoadMetrics()
    _assert_same(_read(reader), _shown(figures.page))
    figures.add(RunReport(1.0, 2.0, [], OSError("no"), 1))  # now there is a last run
    read = _read(reader)
    _assert_same(read, _shown(figures.page))
    assert ("klog_load_last_run_seconds", "gauge", frozenset()) in read


@pytest.fixture
def lag(cluster: EmbeddedCluster) -> Iterator[LagMetrics]:
    servers = {"bootstrap.servers": cluster.bootstrap_servers}
    with Admin(servers) as admin, Producer(servers) as producer:
        admin.create_topic("of-lag", 2)
        for number in range(5):
            producer.send("of-lag", b"v", partition=number % 2)
        producer.flush()
        with Consumer({**servers, "group.id": "of-lag"}) as consumer:
            consumer.commit({("of-lag", 0): 1, ("of-lag", 1): 2})
        yield LagMetrics(admin, ["of-lag"])


def test_groups(reader: Any, lag: LagMetrics) -> None:
    lag.refresh()
    read = _read(reader)
    _assert_same(read, _shown(lag.page))
    labels = {"group": "of-lag", "topic": "of-lag", "partition": "0", "store": "kafka"}
    assert read["klog_group_lag_records", "gauge", frozenset(labels.items())] == 2


def test_no_provider_no_import() -> None:
    code = """
import sys
from spark_klog.load.follow import LoadMetrics
LoadMetrics()
assert not [name for name in sys.modules if name.startswith("opentelemetry")]
import opentelemetry.metrics
LoadMetrics()
from spark_klog.metrics import otel
assert not otel._meters
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
