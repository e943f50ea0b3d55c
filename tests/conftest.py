"""Fixtures for all tests (clusters, their folders, certificates); tests are skipped if the registry is unreachable."""

from __future__ import annotations

import contextlib
import gc
import glob
import logging
import os
import re
import shutil
import signal
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
from _pytest.terminal import TerminalReporter
from hypothesis import settings

from spark_klog.broker.faults import Fault
from spark_klog.client import cluster as client_cluster
from spark_klog.embedded import EmbeddedCluster
from tests.support.packages.registries import RegistryUnreachable
from tests.support.packages.wheel import wheel_of_run
from tests.support.runs.compiling import compile_share
from tests.support.runs.failures import Failures
from tests.support.runs.figures import Figures
from tests.support.servers.certificates import Certificates, make_certificates
from tests.support.servers.kafka import WORKERS
from tests.support.servers.shared_kafka import Direct, KafkasOfRun, OfMainProcess, SharedKafkas
from tests.support.spark.spark_home import spark_variables

# A sandbox may have no resolvable host name.
os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")

_LOGS = Path(__file__).parent.parent / "test-logs"
_UNREACHABLE = "registry unreachable"
_failed = pytest.StashKey[set[str]]()
#: Node ids of tests and modules, by the folders of their servers.
_folders = pytest.StashKey[dict[Path, str]]()
#: Folders whose servers have ended.
_ended = pytest.StashKey[list[Path]]()
_kafkas = pytest.StashKey[SharedKafkas]()
#: Only in the main process of a run.
_kafkas_of_run = pytest.StashKey[KafkasOfRun]()
_failures = pytest.StashKey[Failures]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--quick", action="store_true", help="leave out the tests that are marked with test_all")
    parser.addoption("--record-seconds", action="store_true", help="write the seconds of files to tests/seconds.json")


def pytest_configure(config: pytest.Config) -> None:
    client_cluster.shuffled = list  # clients of tests ask the brokers in the order in which these are given
    config.stash[_failed] = set()
    config.stash[_folders] = {}
    config.stash[_ended] = []
    if settings.default is None or settings.default.deadline is not None:
        settings.register_profile("patient", deadline=None)  # how long an example takes depends on the machine
        settings.load_profile("patient")
    # A shell starts background processes with SIGINT ignored, and their children inherit that.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    for name, value in spark_variables().items():
        os.environ.setdefault(name, value)
    if config.option.xmlpath:
        config.pluginmanager.register(Figures())
    worker = getattr(config, "workerinput", None)
    if worker is None:
        _configure_main_process(config)
    else:
        compile_share(config, int(worker["workerid"].removeprefix("gw")), worker["workercount"])
    gc.disable()  # during collection, which makes many objects and no garbage


def _configure_main_process(config: pytest.Config) -> None:
    for argument in [] if config.option.pyargs else config.args:  # of which workers say nothing
        if not (config.invocation_params.dir / argument.partition("::")[0]).exists():
            raise pytest.UsageError(f"file or directory not found: {argument}")
    kafkas = config.stash[_kafkas_of_run] = KafkasOfRun(lambda: _new_folder("shared"))
    failures = config.stash[_failures] = Failures(config, kafkas.folders, _folders_of)
    config.pluginmanager.register(failures)
    if config.getoption("--record-seconds"):
        from tests.support.runs.schedule import Recorder

        config.pluginmanager.register(Recorder())


def pytest_unconfigure(config: pytest.Config) -> None:
    if _ended in config.stash:
        _remove_ended(config)
    if _kafkas_of_run not in config.stash:
        return
    kafkas = config.stash[_kafkas_of_run]
    kafkas.close()
    for folder, files in kafkas.files.items():
        if not files & config.stash[_failures].files:
            shutil.rmtree(folder, ignore_errors=True)
            with contextlib.suppress(OSError):  # the others' folder
                folder.parent.rmdir()


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Tell a worker of pytest-xdist where the Kafkas of the run are."""
    os.environ[WORKERS] = str(node.workerinput["workercount"])
    node.workerinput["shared_kafkas"] = node.config.stash[_kafkas_of_run].serve()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    try:
        from tests.support.runs.schedule import scheduler
    except ImportError:
        return None  # another xdist: its own
    return scheduler(config, log)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--quick"):
        left_out = [item for item in items if item.get_closest_marker("test_all")]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not item.get_closest_marker("test_all")]


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop() -> None:
    gc.enable()
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
        folders = [str(path) for path, nodeid in item.config.stash[_folders].items() if item.nodeid.startswith(nodeid)]
        report.server_dirs = folders  # travels to the main process, too
    if call.when == "teardown":
        _remove_ended(item.config)
    return report


def _remove_ended(config: pytest.Config) -> None:
    """Remove the folders of servers that have ended, unless one of their tests failed, perhaps as they ended."""
    for folder in config.stash[_ended]:
        nodeid = config.stash[_folders].pop(folder)
        if not any(failed.startswith(nodeid) for failed in config.stash[_failed]):
            shutil.rmtree(folder, ignore_errors=True)
    config.stash[_ended].clear()


def pytest_terminal_summary(terminalreporter: TerminalReporter, exitstatus: int) -> None:
    if exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED:
        terminalreporter.line(
            "no test has this name or mark, or `make test` leaves it out: `make test-all` runs what is marked test_all"
        )
    skipped = {
        report.nodeid: str(reason)
        for report in terminalreporter.getreports("skipped")
        for name, reason in getattr(report, "user_properties", ())  # a module that is skipped has none
        if name == _UNREACHABLE
    }
    if skipped:
        terminalreporter.section("NOT TESTED: the registry was unreachable", sep="!", red=True, bold=True)
        for nodeid, reason in skipped.items():
            terminalreporter.line(f"{nodeid}: {reason.splitlines()[0]}", red=True)
        terminalreporter.line(f"{len(skipped)} tests did not run against their peer.", red=True, bold=True)


@pytest.fixture(autouse=True, scope="module")
def _garbage(request: pytest.FixtureRequest) -> Iterator[None]:
    """End clients that a module leaves in reference cycles, such as an exception and the frame that caught it.

    A client of librdkafka goes on connecting to the port of a stopped broker, and another server may get this port.
    """
    yield
    gc.collect()
    if _kafkas in request.config.stash:
        request.config.stash[_kafkas].release()


def _folder_name(nodeid: str) -> str:
    return re.sub(r"[^A-Za-z0-9_.-]+", "_", nodeid.removeprefix("tests/"))[-120:]


def _folders_of(nodeid: str) -> list[Path]:
    """The folders under test-logs/ for servers of a test or file, of all processes."""
    return list(_LOGS.glob(f"{glob.escape(_folder_name(nodeid))}.*"))


def _new_folder(nodeid: str) -> Path:
    """That of this process, made if it is not there."""
    folder = _LOGS / f"{_folder_name(nodeid)}.{os.getpid()}"
    for left in _folders_of(nodeid):
        if not Path(f"/proc/{left.suffix[1:]}").exists():  # left by an earlier run, not by one that still runs
            shutil.rmtree(left, ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def kept_on_failure(request: pytest.FixtureRequest, tests: str | None = None) -> Iterator[Path]:
    """A folder under test-logs/ for the servers of the fixture's test or module, or of all `tests` (a folder).

    It stays if one of the tests fails.
    """
    nodeid = tests or request.node.nodeid
    folder = _new_folder(nodeid)
    request.config.stash[_folders][folder] = nodeid
    yield folder
    request.config.stash[_ended].append(folder)


@pytest.fixture
def server_dir(request: pytest.FixtureRequest) -> Iterator[Path]:
    """Folder for the data and logs of a test's servers; it stays under test-logs/ if the test fails."""
    yield from kept_on_failure(request)


@pytest.fixture(scope="module")
def module_server_dir(request: pytest.FixtureRequest) -> Iterator[Path]:
    """The same for servers that the tests of a module share."""
    yield from kept_on_failure(request)


@pytest.fixture(scope="session")
def shared_kafkas(request: pytest.FixtureRequest) -> SharedKafkas:
    """Brokers of Apache Kafka for all tests of a run: use your own topics, groups and transactional ids."""
    given = getattr(request.config, "workerinput", {}).get("shared_kafkas")
    kafkas: SharedKafkas
    if given is None:
        kafkas = Direct(request.config.stash[_kafkas_of_run])
    else:
        kafkas = OfMainProcess(*given, request.config.workerinput["workerid"])
    request.config.stash[_kafkas] = kafkas
    return kafkas


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
        schema_registry: bool | str = False,
    ) -> EmbeddedCluster:
        folder = server_dir / f"cluster-{len(running)}"
        cluster = EmbeddedCluster(brokers, zookeeper, folder, settings, faults, schema_registry=schema_registry)
        running.append(cluster.start())
        return cluster

    yield make
    for cluster in running:
        cluster.stop()


@pytest.fixture(autouse=True, scope="module")
def _levels() -> Iterator[None]:
    """Restore the levels of loggers, which a command that ran in this process has set, for the files that come next."""
    kept = {logger: logger.level for logger in _loggers()}
    yield
    for logger, level in kept.items():
        logger.setLevel(level)


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
