"""The decision log in a checkpoint: only one driver gets each number, whatever others do and whenever they die."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import signal
from pathlib import Path

import pytest

from spark_klog.errors import ConfigError, DecodeError
from spark_klog.spark.write.decisions import hard_link_log
from spark_klog.spark.write.decisions.decision_log import Identity
from spark_klog.spark.write.decisions.hard_link_log import HardLinkLog, checkpoint_folder, planned
from spark_klog.spark.write.exactly_once import Claim, Decision, Ended, Entry, Log, Transaction

DECISION = Decision(3, (Transaction("klog-a-0", 7, 2, 0), Transaction("klog-b-0", 1 << 40, 32766, 5)), "5eed")


def entries(folder: Path) -> list[str]:
    """The names of the entries in a checkpoint."""
    return sorted(name for name in os.listdir(folder / "klog_sink") if not name.startswith("."))


def fill(log: HardLinkLog, *more: Entry) -> None:
    for entry in more:
        assert log.append(log.read().end, entry)


def test_entries_are_read_by_another_driver(tmp_path: Path) -> None:
    log = HardLinkLog(tmp_path, Identity())
    assert log.read() == Log()
    fill(log, Claim(), DECISION, Ended(), Claim())
    other = HardLinkLog(tmp_path, Identity())
    assert other.read() == Log((DECISION, Ended(), Claim()), 1)
    assert other.identity == log.identity
    assert json.loads((tmp_path / "klog_sink" / "1").read_text()) == {
        "version": 1,
        "log": log.identity.log,
        "prefix": "klog-",
        "entry": "decision",
        "batch": 3,
        "transactions": [["klog-a-0", 7, 2, 0], ["klog-b-0", 1 << 40, 32766, 5]],
        "planned": "5eed",
    }


def test_a_number_is_taken_once_and_never_again(tmp_path: Path) -> None:
    log = HardLinkLog(tmp_path, Identity())
    fill(log, Claim(), Claim())
    late = HardLinkLog(tmp_path, log.identity)
    assert not late.append(1, DECISION)
    assert log.read() == Log((Claim(), Claim()))
    fill(log, DECISION, Ended(), Claim(), DECISION)
    assert log.read().first == 5
    assert entries(tmp_path) == ["5"]
    for number in range(6):  # also numbers whose files are removed
        assert not late.append(number, DECISION)
    assert log.read() == Log((DECISION,), 5)
    assert entries(tmp_path) == ["5"]


def test_a_driver_of_a_log_that_was_removed_appends_nothing(tmp_path: Path) -> None:
    late = HardLinkLog(tmp_path, Identity())
    fill(late, Claim())
    (tmp_path / "klog_sink" / "0").unlink()
    log = HardLinkLog(tmp_path, Identity())
    fill(log, Claim())
    assert log.identity != late.identity
    assert not late.append(1, DECISION)
    assert not late.append(5, DECISION)
    assert log.read() == Log((Claim(),))


def test_a_restart_with_another_prefix_is_refused(tmp_path: Path) -> None:
    log = HardLinkLog(tmp_path, Identity("team-a."))
    assert log.identity.id_prefix == f"team-a.{log.identity.log}-"
    fill(log, DECISION, Ended())
    for prefix in ("klog-", "team-a", "team-b."):
        other = HardLinkLog(tmp_path, Identity(prefix))
        with pytest.raises(ConfigError, match=rf"option transactionalIdPrefix is {prefix}, but .* with team-a\. until"):
            other.read()
    again = HardLinkLog(tmp_path, Identity("team-a."))
    fill(again, Claim())
    assert again.identity == log.identity
    for path in (tmp_path / "klog_sink").iterdir():  # the error advises this
        path.unlink()
    fill(HardLinkLog(tmp_path, Identity("team-b.")), Claim())


def test_a_log_from_before_prefixes_and_plans(tmp_path: Path) -> None:
    log = HardLinkLog(tmp_path, Identity())
    fill(log, Decision(4, ()))
    path = tmp_path / "klog_sink" / "0"
    old = {"version": 1, "log": log.identity.log, "entry": "decision", "batch": 4, "transactions": []}
    path.write_text(json.dumps(old))
    again = HardLinkLog(tmp_path, Identity())
    assert again.read() == Log((Decision(4, ()),))
    assert again.identity == log.identity


def _append(folder: Path, barrier: object, won: object) -> None:
    log = HardLinkLog(folder, Identity(log="6ba7b810-9dad-11d1-80b4-00c04fd430c8"))
    for number in range(50):
        barrier.wait()  # type: ignore[attr-defined]
        if log.append(number, Claim()):
            won.put(number)  # type: ignore[attr-defined]


def test_of_drivers_at_once_one_wins(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    barrier, won = context.Barrier(3, timeout=60), context.Queue()
    drivers = [context.Process(target=_append, args=(tmp_path, barrier, won)) for _ in range(3)]
    for driver in drivers:
        driver.start()
    assert sorted(won.get(timeout=60) for _ in range(50)) == list(range(50))
    for driver in drivers:
        driver.join(60)
        assert driver.exitcode == 0
    assert won.empty()


def _append_for_ever(folder: Path, seen: object) -> None:
    log = HardLinkLog(folder, Identity())
    while True:
        end = log.read().end
        assert log.append(end, Decision(end, ()))
        seen.send(end)  # type: ignore[attr-defined]


def test_a_killed_driver_leaves_a_log_that_goes_on(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    end = 0
    for _ in range(10):
        receive, send = context.Pipe(False)
        driver = context.Process(target=_append_for_ever, args=(tmp_path, send))
        driver.start()
        send.close()
        appended = -1
        for _ in range(5):
            assert receive.poll(60)
            appended = receive.recv()
        assert driver.pid is not None
        os.kill(driver.pid, signal.SIGKILL)
        driver.join(60)
        found = HardLinkLog(tmp_path, Identity()).read()
        assert found.end > max(appended, end)
        assert found.entries == (Decision(found.end - 1, ()),)
        end = found.end
    assert len(entries(tmp_path)) <= 3


def test_damage_is_named(tmp_path: Path) -> None:
    log = HardLinkLog(tmp_path, Identity())
    fill(log, DECISION, Ended(), Claim(), Claim())
    path = tmp_path / "klog_sink" / "2"
    for text in ("", "{", "[]", '{"version": 2}', '{"version": 1, "entry": "decision", "log": "x"}'):
        path.unlink()  # not overwritten: both claims are links to one file
        path.write_text(text)
        with pytest.raises(DecodeError, match=r"klog_sink/2 is not an entry of a decision log"):
            log.read()
    path.unlink()
    with pytest.raises(DecodeError, match=r"klog_sink/2 is missing"):
        log.read()


def test_a_shared_file_that_is_damaged_is_written_again(tmp_path: Path) -> None:
    log = HardLinkLog(tmp_path, Identity())
    fill(log, Claim(), Claim())
    for path in (tmp_path / "klog_sink").iterdir():
        path.write_text("{")
    for number in range(2):  # a user removes the damaged entries
        (tmp_path / "klog_sink" / str(number)).unlink()
    fill(log, Claim())
    assert HardLinkLog(tmp_path, Identity()).read() == Log((Claim(),))


def test_a_shared_file_has_few_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every restart without a decision adds a claim; file systems limit a file's links."""
    monkeypatch.setattr(hard_link_log, "_MOST_LINKS", 4)
    log = HardLinkLog(tmp_path, Identity())
    for _ in range(10):
        fill(HardLinkLog(tmp_path, Identity()), Claim())
    assert log.read() == Log((Claim(),) * 10)
    folder = tmp_path / "klog_sink"
    assert sorted((folder / str(number)).stat().st_nlink for number in range(10)) == [2, 3, 3, 3, 3, 3, 3, 3, 3, 3]
    fill(log, DECISION, Ended())
    assert log.read() == Log((DECISION, Ended()), 10)
    assert entries(tmp_path) == ["10", "11"]
    assert len(list(folder.glob(".claim-*"))) == 1


def test_what_is_flushed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A micro-batch flushes the decision's file, and the folder after the decision and after its end."""
    log = HardLinkLog(tmp_path, Identity())
    fill(log, Claim(), Decision(0, ()), Ended())
    flushed: list[str] = []
    fsync = os.fsync

    def flush(descriptor: int) -> None:
        flushed.append(os.readlink(f"/proc/self/fd/{descriptor}").rpartition("/")[2][:5])
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", flush)
    fill(log, Claim())
    assert flushed == []
    fill(log, DECISION)
    assert flushed == [".new-", "klog_"]
    fill(log, Ended())
    assert flushed == [".new-", "klog_", "klog_"]


def test_a_plan_is_known_by_its_offsets(tmp_path: Path) -> None:
    (tmp_path / "offsets").mkdir()
    found = [planned(tmp_path, 3)]
    for text in ("", "v1\n", "v1\n{1}", "v1\n{1}\na\nb", "v1\n{2}\na\nb", "v1\n{1}\na\nc"):
        (tmp_path / "offsets" / "3").write_text(text)
        found.append(planned(tmp_path, 3))
    assert found[:4] == [""] * 4
    assert found[4] == found[5] != found[6]
    assert all(found[4:])


def test_a_checkpoint_with_batches_and_no_log_is_refused(tmp_path: Path) -> None:
    (tmp_path / "commits").mkdir()
    HardLinkLog(tmp_path, Identity())
    (tmp_path / "commits" / "0").touch()
    with pytest.raises(ConfigError, match=r"create that directory, empty"):
        HardLinkLog(tmp_path, Identity())
    (tmp_path / "klog_sink").mkdir()
    fill(HardLinkLog(tmp_path, Identity()), Claim())


def test_locations(tmp_path: Path) -> None:
    """Locations are not decoded, as in Hadoop's Path: Spark creates the folder a%20b for file:///a%20b."""
    name = "a b%20c#d?e"
    folder = tmp_path / name
    folder.mkdir()
    with pytest.raises(ConfigError, match=r"is not a folder of the driver's machine with Spark's checkpoint in it"):
        checkpoint_folder(str(folder))
    (folder / "metadata").touch()
    for location in (
        str(folder),
        f"file:{tmp_path}/{name}",
        f"FILE://{tmp_path}/{name}",
        f"file://localhost{tmp_path}/{name}",
    ):
        assert checkpoint_folder(location) == folder
    for location in ("s3a://bucket/a", "hdfs:///a", "abfss://c@a.example/b", "dbfs:/a"):
        with pytest.raises(ConfigError, match=r"needs a checkpointLocation that is a local or mounted folder"):
            checkpoint_folder(location)
    with pytest.raises(ConfigError, match=r"'file://host/a' is not a local folder: write file:///PATH"):
        checkpoint_folder("file://host/a")
    with pytest.raises(ConfigError, match=r"is not a folder of the driver's machine"):
        checkpoint_folder(str(tmp_path / "none"))


@pytest.mark.parametrize("number", [errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS])
def test_a_file_system_without_hard_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    def refuse(source: Path, target: Path) -> None:
        raise OSError(number, os.strerror(number), str(source), None, str(target))

    monkeypatch.setattr(os, "link", refuse)
    with pytest.raises(ConfigError, match=r"klog_sink is on a file system without hard links \(.*checkpointLocation"):
        HardLinkLog(tmp_path, Identity()).append(0, Claim())
    assert entries(tmp_path) == []
    number = errno.ENOSPC
    with pytest.raises(OSError, match=os.strerror(number)):
        HardLinkLog(tmp_path, Identity()).append(0, Claim())
