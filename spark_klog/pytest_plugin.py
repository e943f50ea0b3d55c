"""The pytest plugin: brokers for tests. pytest finds it if the package is installed; `-p no:klog` disables it.

    klog_cluster            a cluster shared by the tests of a session (with pytest-xdist: of a worker), or of the
                            scope in the ini option klog_cluster_scope
    klog_cluster_factory    starts clusters for one test, with the arguments of `EmbeddedCluster`
    klog_schema_registry    the URL of a schema registry over klog_cluster's brokers
    klog_topic              the name of a new topic on klog_cluster, with one partition or the arguments of
                            @pytest.mark.klog_topic(partitions=3, settings={...})
    klog_aio_producer, klog_aio_consumer, klog_aio_admin    make a client of `spark_klog.aio` for klog_cluster, for
                            `async with`: they need no plugin for coroutines, and go together with any

Data and logs are in pytest's temporary folders. The report of a failed test includes what brokers logged during it.
Nothing but pytest is imported before a fixture is used.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable, Generator, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from spark_klog import aio
    from spark_klog.broker.faults import Fault
    from spark_klog.embedded import EmbeddedCluster

_AIO_FIXTURES = frozenset({"klog_aio_admin", "klog_aio_consumer", "klog_aio_producer"})
_FIXTURES = _AIO_FIXTURES | {"klog_cluster", "klog_cluster_factory", "klog_schema_registry", "klog_topic"}
_SCOPES = ("session", "package", "module", "class", "function")
#: A report shows at most so many characters of each broker's log, the last ones.
_SHOWN = 20_000
_running = pytest.StashKey[list["EmbeddedCluster"]]()
#: Sizes of the logs at the start of a test.
_began = pytest.StashKey[dict[Path, int]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("klog", "brokers of spark_klog")
    group.addoption("--klog-brokers", type=int, metavar="N", help="brokers of the klog_cluster fixture")
    parser.addini("klog_brokers", "brokers of the klog_cluster fixture", default="1")
    parser.addini("klog_settings", "broker settings of klog_cluster, a line NAME=VALUE each", "linelist")
    parser.addini("klog_cluster_scope", f"scope of klog_cluster: {', '.join(_SCOPES)}", default="session")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "klog_topic(partitions=1, settings=None): how klog_topic creates its topic")
    config.stash[_running] = []


def _scope(fixture_name: str, config: pytest.Config) -> Any:
    scope = config.getini("klog_cluster_scope")
    if scope not in _SCOPES:
        raise pytest.UsageError(f"klog_cluster_scope = {scope}: set it to one of {', '.join(_SCOPES)}")
    return scope


def _shared_brokers(config: pytest.Config) -> int:
    chosen = config.getoption("klog_brokers")
    text = config.getini("klog_brokers") if chosen is None else str(chosen)
    if not text.isdecimal() or int(text) < 1:
        name = "klog_brokers = " if chosen is None else "--klog-brokers "
        raise pytest.UsageError(f"{name}{text}: give a number of brokers, 1 or more")
    return int(text)


def _topic_arguments(marker: pytest.Mark | None) -> dict[str, Any]:
    """The number of partitions and the settings in a klog_topic marker."""
    wanted: dict[str, Any] = {"partitions": 1, "settings": None}
    if marker is None:
        return wanted
    if marker.args or marker.kwargs.keys() - wanted.keys():
        given = [*map(repr, marker.args), *(f"{name}={value!r}" for name, value in marker.kwargs.items())]
        raise pytest.UsageError(f"klog_topic({', '.join(given)}): it takes partitions=N and settings={{...}} by name")
    wanted |= marker.kwargs
    if not isinstance(wanted["partitions"], int) or wanted["partitions"] < 1:
        raise pytest.UsageError(f"klog_topic(partitions={wanted['partitions']!r}): give a number, 1 or more")
    return wanted


@pytest.fixture(scope=_scope)
def klog_cluster(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedCluster]:
    """An `EmbeddedCluster` that tests share: each test should use topics of its own."""
    from spark_klog.base.settings import parse_settings
    from spark_klog.embedded import EmbeddedCluster
    from spark_klog.errors import ConfigError

    count = _shared_brokers(pytestconfig)
    try:
        settings = parse_settings(pytestconfig.getini("klog_settings"))
    except ConfigError as error:
        raise pytest.UsageError(f"klog_settings: {error}") from None
    running = pytestconfig.stash[_running]
    with EmbeddedCluster(count, data_dir=tmp_path_factory.mktemp("klog"), settings=settings) as cluster:
        running.append(cluster)
        yield cluster
        running.remove(cluster)


@pytest.fixture
def klog_cluster_factory(
    pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[..., EmbeddedCluster]]:
    """Start clusters: (brokers=1, zookeeper=False, settings=None, faults=None, schema_registry=False).

    They stop when the test ends.
    """
    from spark_klog.embedded import EmbeddedCluster

    running = pytestconfig.stash[_running]
    own: list[EmbeddedCluster] = []

    def start(
        brokers: int = 1,
        zookeeper: bool = False,
        settings: dict[str, str] | None = None,
        faults: Iterable[Fault] | None = None,
        schema_registry: bool | int | str = False,
    ) -> EmbeddedCluster:
        cluster = EmbeddedCluster(
            *(brokers, zookeeper, tmp_path_factory.mktemp("klog"), settings, faults), schema_registry=schema_registry
        ).start()
        own.append(cluster)
        running.append(cluster)
        return cluster

    yield start
    for cluster in own:
        running.remove(cluster)
        cluster.stop()


@pytest.fixture(scope=_scope)
def klog_schema_registry(klog_cluster: EmbeddedCluster) -> Iterator[str]:
    """The URL of a schema registry that tests share: each test should use subjects of its own."""
    from spark_klog.schema_registry import SchemaRegistry

    with SchemaRegistry({"bootstrap.servers": klog_cluster.bootstrap_servers}, "0") as registry:
        yield registry.url


@pytest.fixture
def klog_topic(request: pytest.FixtureRequest, klog_cluster: EmbeddedCluster) -> str:
    """The name of a new topic."""
    from spark_klog.client import Admin

    wanted = _topic_arguments(request.node.get_closest_marker("klog_topic"))
    test = re.sub(r"[^A-Za-z0-9]+", "-", request.node.name).strip("-")[:100]
    name = f"{test}-{uuid.uuid4().hex[:8]}"
    with Admin({"bootstrap.servers": klog_cluster.bootstrap_servers}) as admin:
        admin.create_topic(name, wanted["partitions"], configs=wanted["settings"])
    return name


@pytest.fixture
def klog_aio_producer(klog_cluster: EmbeddedCluster) -> Callable[..., aio.Producer]:
    """Make a producer, with further settings if given: `async with klog_aio_producer() as producer`."""
    from spark_klog.aio import Producer

    return lambda settings=None: Producer({"bootstrap.servers": klog_cluster.bootstrap_servers, **(settings or {})})


@pytest.fixture
def klog_aio_consumer(klog_cluster: EmbeddedCluster) -> Callable[..., aio.Consumer]:
    """Make a consumer, as `klog_aio_producer` does; auto.offset.reset is earliest unless the settings say otherwise."""
    from spark_klog.aio import Consumer

    own = {"bootstrap.servers": klog_cluster.bootstrap_servers, "auto.offset.reset": "earliest"}
    return lambda settings=None: Consumer(own | (settings or {}))


@pytest.fixture
def klog_aio_admin(klog_cluster: EmbeddedCluster) -> Callable[..., aio.Admin]:
    """Make an admin client, as `klog_aio_producer` does."""
    from spark_klog.aio import Admin

    return lambda settings=None: Admin({"bootstrap.servers": klog_cluster.bootstrap_servers, **(settings or {})})


def _logs(config: pytest.Config) -> list[Path]:
    return [path for cluster in config.stash[_running] for path in sorted(cluster.data_dir.glob("*.log"))]


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    item.stash[_began] = {path: path.stat().st_size for path in _logs(item.config)}


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Show what the brokers logged during a failed test."""
    report = yield
    if report.failed and not _FIXTURES.isdisjoint(getattr(item, "fixturenames", ())):
        began = item.stash.get(_began, {})
        for path in _logs(item.config):
            text = path.read_bytes()[began.get(path, 0) :].decode(errors="replace")
            if text:
                report.sections.append((f"{path.stem} log, all of it in {path}", text[-_SHOWN:]))
    return report
