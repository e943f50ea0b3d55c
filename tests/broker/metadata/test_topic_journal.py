"""Topics of a standalone broker, created and deleted by the thousand: few waits for the disk, and kills between."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from spark_klog.broker import registry_follower, topic_changes
from spark_klog.broker.broker import Broker
from spark_klog.broker.housekeeping import keep_house
from spark_klog.broker.metadata import registry
from spark_klog.errors import DataDirectoryError, DirectoryError
from spark_klog.log import directory, partition_files, partition_log, recovery, topic_journal
from spark_klog.log.config import LogConfig
from spark_klog.log.directory import CLEAN_STOP, LogDirectory
from spark_klog.log.file_system import File, FileSystem
from spark_klog.log.segments import segment
from spark_klog.log.topic_journal import JOURNAL, KeptTopic, TopicJournal
from spark_klog.trees import files
from tests.support.brokers.loop_broker import append, folders, running, running_as
from tests.support.checker.interrupts import LinesRun
from tests.support.runs.soak import SOAK

_KILLS = 400 if SOAK else 16
_SECONDS = 600
_SETTINGS = {"retention.ms": "5", "segment.bytes": "1000"}
#: More than are changed in a step.
_PARTITIONS = 70
_MODULES = (
    directory,
    partition_files,
    partition_log,
    recovery,
    registry,
    registry_follower,
    segment,
    topic_changes,
    topic_journal,
)


async def _create(broker: Broker, name: str, partitions: int, settings: dict[str, str] | None = None) -> None:
    await broker.changes.create_topic(name, partitions, settings)


async def _change(broker: Broker, note: Callable[[str], object]) -> None:
    changes = broker.changes
    made = await changes.create_topics(
        [changes.new_topic("many", _PARTITIONS, _SETTINGS), *(changes.new_topic(name, 1) for name in "abc")]
    )
    note("created " + json.dumps([str(topic_id) for topic_id in made]))
    gone = await changes.delete_topics({"old": None, "a": None})
    assert not any(isinstance(outcome, Exception) for outcome in gone.values())
    note("deleted")


async def _inline(function: Callable[..., Any], /, *arguments: Any) -> Any:
    await asyncio.sleep(0)
    return function(*arguments)


def _run(folder: Path, line: int) -> int:
    """Make the changes, killed at a line; the number of lines that ran."""

    async def run() -> None:
        async with running(folder) as broker:
            with (folder / "notes").open("a", buffering=1) as notes:
                await _change(broker, lambda text: notes.write(text + "\n"))

    with LinesRun(line, *_MODULES) as lines:
        asyncio.run(run())
    return lines.seen


def _check(folder: Path) -> None:
    """Start the broker, and write the names of the topics that are there, each of them whole."""
    notes = (folder / "notes").read_text().splitlines() if (folder / "notes").exists() else []

    async def run() -> None:
        async with running(folder) as broker:
            topics = broker.registry.topics
            for name, topic in topics.items():
                count = _PARTITIONS if name in ("many", "old") else 1
                assert sorted(topic.assignment) == list(range(count)), (name, sorted(topic.assignment))
                for partition in topic.assignment:
                    log = broker.logs.logs[name, partition]
                    assert log.topic_id == topic.topic_id
                    assert log.overrides == ({"retention_ms": 5, "segment_bytes": 1000} if name == "many" else {})
            assert not broker.logs.offline
            there = sorted(f"{name}-{partition}" for name, topic in topics.items() for partition in topic.assignment)
            assert folders(folder) == there
            if notes:
                for name, topic_id in zip(["many", *"abc"], json.loads(notes[0].partition(" ")[2]), strict=True):
                    assert name == "a" or str(topics[name].topic_id) == topic_id
            if len(notes) > 1:
                assert not {"old", "a"} & topics.keys()
            _tell(" ".join(sorted(topics)))

    asyncio.run(run())


def _in_child(work: Callable[[], object]) -> int:
    """Call `work` in a fork of this process; its exit code."""
    child = os.fork()
    if child == 0:
        try:
            work()
            os._exit(0)
        except BaseException:
            sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _tell(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def kill_at_lines(folder: Path, kills: int) -> None:
    """Kill the broker at so many lines of the changes, each time in a copy of the directory, and check what is left."""
    asyncio.to_thread = _inline  # type: ignore[assignment]
    first = folder / "first"

    async def prepare() -> None:
        async with running(first) as broker:
            await _create(broker, "old", _PARTITIONS)

    assert _in_child(lambda: asyncio.run(prepare())) == 0
    counted = folder / "counted"
    shutil.copytree(first, counted)
    assert _in_child(lambda: (folder / "lines").write_text(str(_run(counted, 0)))) == 0
    lines = int((folder / "lines").read_text())
    for kill in range(kills):
        killed = folder / "killed"
        shutil.rmtree(killed, ignore_errors=True)
        shutil.copytree(first, killed)
        line = 1 + (lines - 1) * kill // (kills - 1)
        assert _in_child(partial(_run, killed, line)) == 9, line
        for _ in range(2):
            assert _in_child(partial(_check, killed)) == 0, line
    _tell(str(lines))


def test_killed_between_any_two_lines_of_the_creation_and_deletion_of_many(tmp_path: Path) -> None:
    """A topic is there whole or not at all, what was answered holds, and nothing that was deleted comes back."""
    code = "import sys; from pathlib import Path; from tests.broker.metadata.test_topic_journal import kill_at_lines; "
    command = [sys.executable, "-c", f"{code}kill_at_lines(Path(sys.argv[1]), {_KILLS})", str(tmp_path)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=_SECONDS, check=True)
    *topics, lines = done.stdout.splitlines()
    assert int(lines) > 1000
    assert {"old", "b c many"} <= {*topics}
    assert {*topics} <= {"old", "a b c many old", "b c many old", "a b c many", "b c many"}


def _copied(tmp_path: Path, work: Callable[[Broker], Any]) -> Path:
    """The data directory as a broker that is killed after `work` leaves it."""
    killed = tmp_path / "killed"

    async def run() -> None:
        async with running(tmp_path) as broker:
            await work(broker)
            await broker.changes.ended()
            shutil.copytree(tmp_path / "data", killed / "data")

    asyncio.run(run())
    return killed


def test_what_a_power_failure_has_taken_is_made_again(tmp_path: Path) -> None:
    """Folders, and small files in them, that nobody has synced."""

    async def work(broker: Broker) -> None:
        await _create(broker, "many", _PARTITIONS, _SETTINGS)
        await broker.changes.create_partitions("many", _PARTITIONS + 2)
        await broker.changes.alter_topic_settings("many", lambda before: {**before, "retention.ms": "7"})
        for partition in (4, 7):
            append(broker.logs.logs["many", partition], 3)

    killed = _copied(tmp_path, work)
    data = killed / "data"
    topic_id = (data / "many-0" / "partition.metadata").read_text()
    for lost in (3, _PARTITIONS + 1):
        shutil.rmtree(data / f"many-{lost}")
    for number, left in enumerate((b"", bytes(40), topic_id[:30].encode()), 4):
        (data / f"many-{number}" / "partition.metadata").write_bytes(left)
    for number, left in enumerate((b"", bytes(10), b'{"version": 1, "con'), 5):
        (data / f"many-{number}" / "klog.json").write_bytes(left)

    async def check() -> None:
        async with running(killed) as broker:
            assert sorted(broker.registry.topics["many"].assignment) == list(range(_PARTITIONS + 2))
            assert broker.registry.settings("many") == {**_SETTINGS, "retention.ms": "7"}
            assert {json.dumps({**log.overrides}, sort_keys=True) for log in broker.logs.logs.values()} == {
                json.dumps({**broker.logs.logs["many", 0].overrides}, sort_keys=True)
            }
            assert broker.logs.logs["many", 7].end_offset == 3
            assert broker.logs.logs["many", 4].end_offset == 0  # nothing tells whose records these are

    asyncio.run(check())
    assert {path.read_text() for path in data.glob("many-*[0-9]/partition.metadata")} == {topic_id}
    assert not (data / JOURNAL).exists()
    asyncio.run(check())


def test_after_a_clean_stop_the_folders_tell_all(tmp_path: Path) -> None:
    async def run() -> None:
        async with running(tmp_path) as broker:
            await _create(broker, "t", 3)

    asyncio.run(run())
    shutil.rmtree(tmp_path / "data" / "t-1")

    async def check() -> None:
        async with running(tmp_path) as broker:
            assert sorted(broker.registry.topics["t"].assignment) == [0, 2]
            await broker.changes.delete_topics({"t": None})
            assert not broker.logs.logs
            assert not any(name.startswith("t-") for name in os.listdir(tmp_path / "data") if "delete" not in name)

    asyncio.run(check())


def test_a_start_that_fails_leaves_the_journal_to_the_next_one(tmp_path: Path) -> None:
    killed = _copied(tmp_path, lambda broker: _create(broker, "t", 1, _SETTINGS)) / "data"
    (killed / "t-0" / "klog.json").write_bytes(b"")
    LogDirectory(killed, 0, LogConfig()).close()  # another part of the broker can't start

    async def check() -> None:
        async with running(killed.parent) as broker:
            assert broker.registry.settings("t") == _SETTINGS

    asyncio.run(check())


def test_folders_of_another_topic_of_the_name_count(tmp_path: Path) -> None:
    async def work(broker: Broker) -> None:
        await _create(broker, "t", 2)
        await _create(broker, "u", 1)
        await broker.changes.delete_topics({"u": None})

    killed = _copied(tmp_path, work)
    shutil.rmtree(tmp_path / "data")
    other = _copied(tmp_path / "other", work) / "data"
    shutil.rmtree(killed / "data" / "t-0")
    shutil.rmtree(killed / "data" / "t-1")
    shutil.copytree(other / "t-1", killed / "data" / "t-1")
    shutil.copytree(other / "t-1", killed / "data" / "u-1")

    async def check() -> None:
        async with running(killed) as broker:
            assert {name: [*topic.assignment] for name, topic in broker.registry.topics.items()} == {"t": [1], "u": [1]}

    asyncio.run(check())


def test_syncs_and_descriptors_of_many_partitions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They do not grow with the number of partitions; a partition is one folder with a small file."""
    calls: Counter[str] = Counter()
    sync, opened = os.fsync, os.open

    def synced(descriptor: int) -> None:
        calls["sync"] += 1
        sync(descriptor)

    def noted(*arguments: Any, **options: Any) -> int:
        calls["open"] += 1
        return opened(*arguments, **options)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "open", noted)

    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    async def run() -> None:
        async with running(tmp_path) as broker:
            await _create(broker, "warm", 1)
            counts = []
            for partitions in (10, 200):
                before = descriptors()
                calls.clear()
                await _create(broker, f"t{partitions}", partitions)
                assert calls["open"] <= partitions + 3
                counts.append(calls["sync"])
                assert descriptors() == before
                assert os.listdir(tmp_path / "data" / f"t{partitions}-0") == ["partition.metadata"]
            topics = [broker.changes.new_topic(f"o{number}", 1) for number in range(60)]
            for some in (topics[:2], topics[2:]):
                calls.clear()
                await broker.changes.create_topics(some)
                counts.append(calls["sync"])
            assert counts == [1, 1, 1, 1]
            for names in (["t10"], ["t200"], [name for name, *_ in topics]):
                calls.clear()
                await broker.changes.delete_topics(dict.fromkeys(names))
                assert calls["sync"] == 1
            append(broker.logs.logs["warm", 0], 1)
            assert (tmp_path / "data" / "warm-0" / f"{0:020d}.log").exists()
            calls.clear()
        assert calls["sync"] < 20, "a stop syncs the logs that have changed"

    asyncio.run(run())


def test_a_journal_stays_small(tmp_path: Path) -> None:
    """However many topics come and go; a deleted one is left out when its folders are gone."""
    journal = TopicJournal(FileSystem(), tmp_path)
    left, topic = KeptTopic(uuid4(), [0], {}), KeptTopic(uuid4(), [0], {})
    (tmp_path / "left-0").mkdir()
    journal.note({"left": left})
    journal.note({"left": left._replace(partitions=())})
    journal.note({"left": topic})
    for number in range(3000):
        other = KeptTopic(uuid4(), [0], {})
        journal.note({f"t{number}": other, f"u{number}": KeptTopic(uuid4(), (), {})})
        journal.note({f"t{number}": other._replace(partitions=())})
    lines = (tmp_path / JOURNAL).read_bytes().count(b"\n")
    assert lines < 4000
    again = TopicJournal(FileSystem(), tmp_path)
    again.read()
    assert again.topics == {"left": topic}
    assert again.deleted[left.topic_id] == "left"


_NO_ID = b'{"topic": "u", "id": 5, "partitions": [0], "settings": {}}\n'
_NO_NUMBERS = b'{"topic": "u", "id": "%032d", "partitions": "all", "settings": {}}\n' % 7


@pytest.mark.parametrize(
    "left", [b"{", b'{"topic": "u", "id": "x"}\n', b"\0\0\n", b'[]\n{"topic": "v"}\n', _NO_ID, _NO_NUMBERS]
)
def test_rubbish_in_a_journal(tmp_path: Path, left: bytes) -> None:
    """An unfinished or damaged line is passed over."""
    journal = TopicJournal(FileSystem(), tmp_path)
    topic = KeptTopic(uuid4(), [0, 1], {"a": "b"})
    journal.note({"t": topic})
    with (tmp_path / JOURNAL).open("ab") as file:
        file.write(left)
    again = TopicJournal(FileSystem(), tmp_path)
    again.read()
    assert again.topics == {"t": topic}
    again.note({"u": topic})
    journal.read()
    assert journal.topics == {"t": topic, "u": topic}


def test_a_journal_of_another_version(tmp_path: Path) -> None:
    first = LogDirectory(tmp_path, 0, LogConfig())
    first.set_cluster_id("c")
    first.close()
    (tmp_path / CLEAN_STOP).unlink()
    (tmp_path / JOURNAL).write_text('{"version": 2}\n')
    with pytest.raises(DataDirectoryError, match=r"has version 2, and this klog reads version 1.*go by the folders"):
        LogDirectory(tmp_path, 0, LogConfig())


def _full(*_: object) -> None:
    raise OSError(28, "No space left on device")


def test_a_topic_that_is_not_in_the_journal_is_not_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        async with running(tmp_path) as broker:
            await _create(broker, "t", 1)
            before = (tmp_path / "data" / JOURNAL).read_bytes()
            with monkeypatch.context() as patch:
                patch.setattr(File, "sync", _full)
                with pytest.raises(DirectoryError, match=r"klog-topics.journal can't be written: .*No space left"):
                    await _create(broker, "u", 1)
                assert (tmp_path / "data" / JOURNAL).read_bytes() == before  # nor by a start after a crash
                patch.setattr(FileSystem, "replace", _full)
                with pytest.raises(DirectoryError, match="No space left"):
                    await _create(broker, "u", 1)
                assert list(broker.registry.topics) == ["t"]
            await _create(broker, "u", 1)
            assert set(broker.logs.journal.topics) == {"t", "u"}

    asyncio.run(run())


async def _delete_on_a_full_disk(broker: Broker, name: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(topic_journal, "write_all", _full)
        patch.setattr(FileSystem, "replace", _full)
        assert not isinstance((await broker.changes.delete_topics({name: None}))[name], Exception)
        assert name not in broker.registry.topics
        await broker.follower.retry()
    assert broker.logs.journal.is_behind


def test_topics_are_deleted_while_the_disk_is_full(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It is what gives it room; the journal follows soon after there is some."""

    async def run() -> None:
        async with running(tmp_path) as broker:
            await _create(broker, "t", 1)
            await _delete_on_a_full_disk(broker, "t")
            assert "t-0" not in folders(tmp_path)
            house = asyncio.create_task(keep_house(broker))
            for _ in range(200):
                if not broker.logs.journal.is_behind:
                    break
                await asyncio.sleep(0.05)
            house.cancel()
            again = TopicJournal(FileSystem(), tmp_path / "data")
            again.read()
            assert not again.topics

    asyncio.run(run())
    assert sum(record.levelname == "ERROR" for record in caplog.records) == 1


def test_a_stop_writes_what_a_full_disk_kept_from_the_journal(tmp_path: Path) -> None:
    """Also one that is not clean: a partition is offline."""

    async def prepare() -> None:
        async with running(tmp_path) as broker:
            await _create(broker, "bad", 1)

    asyncio.run(prepare())
    (tmp_path / "data" / "bad-0" / "partition.metadata").write_bytes(b"rubbish")

    async def run() -> None:
        async with running(tmp_path) as broker:
            assert broker.logs.offline
            await _create(broker, "t", 1)
            await _delete_on_a_full_disk(broker, "t")

    asyncio.run(run())

    async def check() -> None:
        async with running(tmp_path) as broker:
            assert [*broker.registry.topics] == ["bad"]

    asyncio.run(check())


def test_a_partition_of_a_cluster_whose_disk_was_full_is_made_after_a_clean_stop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The failure has left a file that is empty, as no crash of a log with records does."""

    async def run() -> None:
        async with running_as(tmp_path, shared=True, watches=False) as broker:
            new = broker.changes.new_topic("t", 1)
            with monkeypatch.context() as patch:
                patch.setattr(partition_files, "write_all", _full)  # another broker creates the topic
                await broker.follower.change(partial(broker.registry.create_topics, [new]))
            assert not broker.logs.logs
        assert (tmp_path / "0" / CLEAN_STOP).exists()
        async with running_as(tmp_path, shared=True, watches=False) as broker:
            assert not broker.logs.offline
            assert broker.logs.logs["t", 0].topic_id == broker.registry.topics["t"].topic_id

    asyncio.run(run())


def test_what_is_done_in_a_shared_folder_is_followed_although_it_can_not_be_synced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run() -> None:
        async with running_as(tmp_path, shared=True, watches=False) as broker:

            async def housekeeping() -> None:
                for _ in range(2):
                    await broker.follower.retry()
                    await broker.changes.ended()

            with monkeypatch.context() as patch:
                patch.setattr(files, "sync_folder", _full)
                with pytest.raises(DirectoryError, match="No space left"):
                    await _create(broker, "t", 1)
                await housekeeping()
                assert broker.logs.logs["t", 0].topic_id == broker.registry.topics["t"].topic_id
                assert isinstance((await broker.changes.delete_topics({"t": None}))["t"], DirectoryError)
                await housekeeping()
                assert not broker.registry.deletions.pending
                assert not (tmp_path / "directories" / "brokers" / "topics" / "t").exists()
                assert not (tmp_path / "0" / "t-0").exists()
            await housekeeping()
            await _create(broker, "t", 1)

    asyncio.run(run())


def test_the_removal_of_a_deleted_topic_that_was_put_back_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Until a clean stop a copy looks like what a kill has left of the deletion."""

    async def work(broker: Broker) -> None:
        await _create(broker, "t", 2)
        append(broker.logs.logs["t", 0], 3)
        shutil.copytree(tmp_path / "data", tmp_path / "backup")
        await broker.changes.delete_topics({"t": None})

    killed = _copied(tmp_path, work)

    async def check(there: list[str]) -> None:
        for name in ("t-0", "t-1"):
            shutil.copytree(tmp_path / "backup" / name, killed / "data" / name)
        async with running(killed) as broker:
            assert [*broker.registry.topics] == there

    asyncio.run(check([]))
    told = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(told) == 1
    assert f"topic t was deleted, says {JOURNAL}" in told[0]
    asyncio.run(check(["t"]))


def test_folders_of_a_deleted_topic_that_a_power_failure_brings_back(tmp_path: Path) -> None:
    """Also after another topic of its name was created: the new one is there, empty, and nothing of the old one."""
    old = tmp_path / "old"

    async def work(broker: Broker) -> None:
        await _create(broker, "t", 2)
        append(broker.logs.logs["t", 0], 3)
        broker.logs.logs["t", 0].flush()
        shutil.copytree(tmp_path / "data", old)
        await broker.changes.delete_topics({"t": None})
        await _create(broker, "t", 1)

    killed = _copied(tmp_path, work)
    topic_id = (killed / "data" / "t-0" / "partition.metadata").read_text()
    shutil.rmtree(killed / "data" / "t-0")
    for name in ("t-0", "t-1"):
        shutil.copytree(old / name, killed / "data" / name)

    async def check() -> None:
        async with running(killed) as broker:
            assert [*broker.registry.topics["t"].assignment] == [0]
            assert broker.logs.logs["t", 0].end_offset == 0
            assert folders(killed) == ["t-0"]

    for _ in range(2):
        asyncio.run(check())
        assert (killed / "data" / "t-0" / "partition.metadata").read_text() == topic_id


def test_names_in_a_shared_folder_are_on_the_disk_before_the_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of topics; what is below them is made again."""
    unsynced: set[str] = set()
    tree = tmp_path / "directories"

    def noting(name: str, which: int) -> None:
        real = getattr(os, name)

        def call(*arguments: Any, **options: Any) -> Any:
            if os.path.isabs(arguments[which]) and not options.get("dir_fd"):
                unsynced.add(os.path.dirname(arguments[which]))
            return real(*arguments, **options)

        monkeypatch.setattr(os, name, call)

    def left() -> list[str]:
        names = ["", "brokers", "brokers/topics", "config", "config/topics", "admin", "admin/delete_topics"]
        return [name for name in names if str(tree / name).rstrip("/") in unsynced]

    for name, which in (("replace", 1), ("rename", 1), ("mkdir", 0), ("unlink", 0), ("rmdir", 0)):
        noting(name, which)
    sync, synced = os.fsync, Counter[str]()

    def fsync(descriptor: int) -> None:
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        unsynced.discard(path)
        synced[path] += os.path.isdir(path)
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)

    async def run() -> None:
        async with running_as(tmp_path, shared=True, watches=False) as broker:
            changes = broker.changes
            assert str(tree / "brokers" / "ids") in unsynced, "an ephemeral node ends with its process"
            for number in range(2):
                synced.clear()
                await changes.create_topics([changes.new_topic(f"{name}{number}", 2) for name in "abc"])
                assert not left()
                assert synced[str(tree / "brokers" / "topics")] == 1, "once for the topics of a request"
            await changes.create_partitions("a0", 4)
            assert not left()
            await changes.alter_topic_settings("a0", lambda before: {**before, "retention.ms": "7"})
            assert not left()
            await changes.delete_topics(dict.fromkeys(["a0", "b0"]))
            assert not left()

    asyncio.run(run())
