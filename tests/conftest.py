"""Fixtures for all tests (clusters, their folders, certificates); tests are skipped if the registry is unreachable."""

from __future__ import annotations

import gc
import glob
import logging
import os
import re
import shutil
import signal
from collections.abc import Callable, Generator, Iterator
from pathlib import Path

import pytest
from _pytest.terminal import TerminalReporter

from spark_klog.broker.faults import Fault
from spark_klog.embedded import EmbeddedCluster
from tests.support.certificates import Certificates, make_certificates
from tests.support.registries import RegistryUnreachable
from tests.support.shared_kafka import SharedKafkas
from tests.support.spark_home import spark_variables
from tests.support.wheel import wheel_of_run

# A sandbox may have no resolvable host name.
os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")

_LOGS = Path(__file__).parent.parent / "test-logs"
_UNREACHABLE = "registry unreachable"
_failed = pytest.StashKey[set[str]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--quick", action="store_true", help="leave out the tests that are marked with test_all")


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_failed] = set()
    # A shell starts background processes with SIGINT ignored, and their children inherit that.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    for name, value in spark_variables().items():
        os.environ.setdefault(name, value)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Run the longest files first: workers take a file at a time, and then end at about the same time."""
    if config.getoption("--quick"):
        left_out = [item for item in items if item.get_closest_marker("test_all")]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not item.get_closest_marker("test_all")]
    items.sort(key=lambda item: "jobs" not in item.path.parts[-2:-1])


def pytest_collection_finish() -> None:
    gc.freeze()  # the collections that follow need not look at thousands of tests


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Skip a test that can't reach the registry, which is no failure of the code; the summary lists it."""
    report = yield
    if call.excinfo is not None and call.excinfo.errisinstance(RegistryUnreachable):
        reason = str(call.excinfo.value)
        path, line, _ = item.location
        report.outcome = "skipped"
        report.longrepr = (path, line or 0, f"Skipped: the registry is unreachable: {reason.splitlines()[0]}")
        report.user_properties.append((_UNREACHABLE, reason))  # travels from the worker to the main process
    if report.failed:
        item.config.stash[_failed].add(item.nodeid)
    return report


def pytest_terminal_summary(terminalreporter: TerminalReporter) -> None:
    skipped = {
        report.nodeid: str(reason)
        for report in terminalreporter.getreports("skipped")
        for name, reason in report.user_properties
        if name == _UNREACHABLE
    }
    if skipped:
        terminalreporter.section("NOT TESTED: the registry was unreachable", sep="!", red=True, bold=True)
        for nodeid, reason in skipped.items():
            terminalreporter.line(f"{nodeid}: {reason.splitlines()[0]}", red=True)
        terminalreporter.line(f"{len(skipped)} tests did not run against their peer.", red=True, bold=True)


@pytest.fixture(autouse=True, scope="module")
def _garbage() -> Iterator[None]:
    """End clients that a module leaves in reference cycles, such as an exception and the frame that caught it.

    A client of librdkafka goes on connecting to the port of a stopped broker, and another server may get this port.
    """
    yield
    gc.collect()


def _kept_on_failure(request: pytest.FixtureRequest) -> Iterator[Path]:
    """Yield a folder named after the test or module (`shared` for all); remove it unless a test there failed."""
    nodeid = request.node.nodeid
    name = re.sub(r"[^A-Za-z0-9_.-]+", "_", nodeid.removeprefix("tests/"))[-120:] or "shared"
    for left in _LOGS.glob(f"{glob.escape(name)}.*"):
        if not Path(f"/proc/{left.suffix[1:]}").exists():  # left by an earlier run, not by one that still runs
            shutil.rmtree(left, ignore_errors=True)
    folder = _LOGS / f"{name}.{os.getpid()}"
    folder.mkdir(parents=True, exist_ok=True)
    yield folder
    if not any(failed.startswith(nodeid) for failed in request.config.stash[_failed]):
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def server_dir(request: pytest.FixtureRequest) -> Iterator[Path]:
    """Folder for the data and logs of a test's servers; it stays under test-logs/ if the test fails."""
    yield from _kept_on_failure(request)


@pytest.fixture(scope="module")
def module_server_dir(request: pytest.FixtureRequest) -> Iterator[Path]:
    """The same for servers that the tests of a module share."""
    yield from _kept_on_failure(request)


@pytest.fixture(scope="session")
def shared_kafkas(request: pytest.FixtureRequest) -> Iterator[SharedKafkas]:
    """Brokers of Apache Kafka for all tests: use your own topics, groups and transactional ids."""
    for folder in _kept_on_failure(request):
        kafkas = SharedKafkas(folder)
        yield kafkas
        kafkas.close()


@pytest.fixture(scope="module")
def cluster(module_server_dir: Path) -> Iterator[EmbeddedCluster]:
    """One of our brokers, shared by the module's tests: use your own topics."""
    with EmbeddedCluster(data_dir=module_server_dir / "cluster") as running:
        yield running


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    """Certificates of a test CA, for the module's tests."""
    return make_certificates(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Path:
    """The wheel of this checkout, shared by all processes of a test run."""
    folder = tmp_path_factory.getbasetemp()
    return wheel_of_run(folder if worker_id == "master" else folder.parent)


@pytest.fixture
def topic(request: pytest.FixtureRequest) -> str:
    """A topic name that no other test uses."""
    name = re.sub(r"[^A-Za-z0-9]+", "-", request.node.name).strip("-")
    return f"{request.node.path.stem.removeprefix('test_')}-{name}"[:200]


@pytest.fixture
def make_cluster(server_dir: Path) -> Iterator[Callable[..., EmbeddedCluster]]:
    """Start clusters for one test; they stop when it ends."""
    running: list[EmbeddedCluster] = []

    def make(
        brokers: int = 1,
        zookeeper: bool = False,
        settings: dict[str, str] | None = None,
        faults: list[Fault] | None = None,
    ) -> EmbeddedCluster:
        cluster = EmbeddedCluster(brokers, zookeeper, server_dir / f"cluster-{len(running)}", settings, faults)
        running.append(cluster.start())
        return cluster

    yield make
    for cluster in running:
        cluster.stop()


@pytest.fixture
def logging_kept() -> Iterator[None]:
    """Restore logging after a test that runs a command in this process, since commands set up logging."""
    kept = [(logger, logger.level, [*logger.handlers]) for logger in _loggers()]
    yield
    for logger in _loggers():
        logger.setLevel(logging.NOTSET)
    for logger, level, handlers in kept:
        logger.setLevel(level)
        logger.handlers[:] = handlers


def _loggers() -> list[logging.Logger]:
    named = logging.root.manager.loggerDict.values()
    return [logging.root, *(logger for logger in named if isinstance(logger, logging.Logger))]
