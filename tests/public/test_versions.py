"""A format of a newer version is refused by an error that names it; fields that are not known are passed over."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from spark_klog.errors import ConfigError, DecodeError, KlogError, LoadError, LogCorrupted
from spark_klog.load.journal import history, letters, paths
from spark_klog.load.journal.store import open_store
from spark_klog.load.places import read_offsets
from spark_klog.log import partition_files
from spark_klog.log.file_system import FileSystem
from spark_klog.mirror import progress
from spark_klog.registry import records
from spark_klog.restore import _noted_extents
from spark_klog.spark.write.decisions.entries import decode_entry
from spark_klog.tables.iceberg_runs import _run_of
from spark_klog.tables.table import Run
from spark_klog.trees.paths import parse_group_configs, parse_producer_ids

Value = dict[str, Any]
#: Makes what holds the JSON, in a folder, and reads it.
Read = Callable[[Value, Path], Any]

_UUID = "11111111-2222-3333-4444-555555555555"
_LETTER = {"topic": "t", "partition": 0, "offset": 7, "reason": "", "timestamp": 5, "key": None, "value": None} | {
    "headers": [],
}
_RUN = {"load": "l", "number": 1, "token": "t", "offsets": {"clicks": {"0": 5}}}
#: As Iceberg has it, in texts.
_TEXTS = {"klog.load": "l", "klog.run": "1", "klog.token": "t", "klog.offsets": '{"clicks": {"0": 5}}'}


def _in_file(name: str, read: Callable[[Path], Any]) -> Read:
    def written_and_read(value: Value, folder: Path) -> Any:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(value) + "\n")
        return read(folder)

    return written_and_read


def _in_journal(name: str, read: Callable[[Any], Any]) -> Read:
    return _in_file(name, lambda folder: read(open_store(str(folder))))


def _owners(value: Value, _: Path) -> Any:
    read = progress.Progress()
    read.load(*progress.note_record(progress.OWNER, json.dumps(value)))
    return read.owners


_LETTERS = "values+t.jsonl"
_CASES: dict[str, tuple[Value, Read, type[KlogError]]] = {
    "load": (
        {"load": "l", "cluster_id": "c", "format": "json"},
        _in_journal(paths.LOAD, history.read_identity),
        LoadError,
    ),
    "latest run": (
        {"run": "00000003", "manifest": "", "finished": ""},
        _in_journal(paths.LATEST, lambda store: history.is_pointed_to(store, 3)),
        LoadError,
    ),
    "idle run": (
        {"run": 3, "finished": "", "partitions": []},
        _in_journal(paths.IDLE, lambda store: history.read_idle(store, 3)),
        LoadError,
    ),
    "letters in a topic": (
        {"topic_id": "i", "until": 3},
        _in_journal(paths.letters_in("t"), lambda store: history.letters_in_topic(store, "t", "i")),
        LoadError,
    ),
    "plan": (
        {"run": 3, "started": "", "topics": [], "tasks": [], "settings": {}},
        _in_journal(paths.plan(3), lambda store: history.read_plan(store, 3)),
        LoadError,
    ),
    "results of a task": (
        {"ranges": []},
        _in_journal(paths.task(3, 0), lambda store: history.task_results(store, 3, 0)),
        LoadError,
    ),
    "dead letter": (
        _LETTER,
        _in_journal(
            paths.dead_letter(_LETTERS),
            lambda store: [letter.offset for letter in letters.dead_letters(store, _LETTERS)],
        ),
        LoadError,
    ),
    "offsets": (
        {"offsets": {"clicks": {"0": 5}}},
        _in_file("o.json", lambda folder: read_offsets("--from-offsets", folder / "o.json").offsets),
        ConfigError,
    ),
    "note of a restore": (
        {"extents": [[0, 9]]},
        lambda value, _: _noted_extents(json.dumps(value), "the note"),
        LoadError,
    ),
    "run in Delta": (_RUN, lambda value, _: Run.of(value, "the table"), LoadError),
    "run in Iceberg": (
        _TEXTS,
        lambda value, _: _run_of({**value, "klog.version": str(value["version"])}, "l", "the table"),
        LoadError,
    ),
    "decision": (
        {"log": _UUID, "prefix": "klog-", "entry": "claim"},
        lambda value, _: decode_entry(json.dumps(value).encode(), "the topic"),
        DecodeError,
    ),
    "owner of a mirror": ({"id": "a", "seconds": 1.5, "is_transactional": True}, _owners, DecodeError),
    "settings of a topic": (
        {"config": {"retention.ms": -1}},
        _in_file("klog.json", lambda folder: partition_files.read_overrides(FileSystem(), folder)),
        LogCorrupted,
    ),
    "settings of groups": (
        {"groups": {"g": {"a": "b"}}},
        lambda value, _: parse_group_configs(json.dumps(value).encode()),
        DecodeError,
    ),
    "producer ids": (
        {"broker": 0, "block_start": "0", "block_end": "9"},
        lambda value, _: parse_producer_ids(json.dumps(value).encode()),
        DecodeError,
    ),
}


@pytest.mark.parametrize("name", _CASES)
def test_a_newer_version_is_refused(name: str, tmp_path: Path) -> None:
    value, read, error = _CASES[name]
    known = read({**value, "version": 1}, tmp_path)
    assert known is not None
    assert read({**value, "version": 1, "later": {"a": [1]}}, tmp_path) == known
    with pytest.raises(error, match=" has version 2, and this klog reads version 1: go on with the klog that"):
        read({**value, "version": 2, "later": 1}, tmp_path)


def test_settings_of_a_topic_that_are_not_known_are_passed_over(tmp_path: Path) -> None:
    files = FileSystem()
    partition_files.write_overrides(files, tmp_path, {"retention_ms": 5, "cleanup_policy": "compact"})
    path = tmp_path / "klog.json"
    assert json.loads(path.read_text()) == {"version": 1, "config": {"retention.ms": 5, "cleanup.policy": "compact"}}
    path.write_text(path.read_text().replace('"cleanup.policy"', '"later.policy"'))
    assert partition_files.read_overrides(files, tmp_path) == {"retention_ms": 5}
    path.write_text("{")  # a power failure's, before anybody synced it
    assert partition_files.read_overrides(files, tmp_path) == {}
    for text, told in (
        ("[]", "has no object config"),
        ('{"config"', "is not JSON"),
        ('{"config": {}}', "has no version"),
    ):
        path.write_text(text)
        with pytest.raises(LogCorrupted, match=told):
            partition_files.read_overrides(files, tmp_path)


def test_a_key_of_a_newer_registry_is_refused() -> None:
    key = records.Key(records.SCHEMA, "s", 1).encode()
    assert records.decode_key(key) == records.Key(records.SCHEMA, "s", 1)
    with pytest.raises(ValueError, match="newer version"):
        records.decode_key(key.replace(b'"magic":1', b'"magic":2'))
