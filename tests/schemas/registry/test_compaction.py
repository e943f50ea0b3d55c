"""What a registry reads from its topic is the same before and after compaction, whatever was done."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from spark_klog.registry.errors import RegistryRefusal
from spark_klog.registry.records import CONTEXT, SCHEMA, Key, Record, dumps
from spark_klog.registry.registry import Registry
from spark_klog.registry.state import Definition, State, schema_value, split
from spark_klog.schemas.registry.schemas import Reference
from tests.schemas.registry.memory_log import MemoryLog

_SUBJECTS = ["a", "b", ":.x:a"]
_TEXTS = ['"int"', '"long"', '"string"']
_ACTIONS = st.one_of(
    st.tuples(st.just("register"), st.sampled_from(_SUBJECTS), st.sampled_from(_TEXTS), st.booleans()),
    st.tuples(st.just("delete_version"), st.sampled_from(_SUBJECTS), st.integers(1, 4), st.booleans()),
    st.tuples(st.just("delete_subject"), st.sampled_from(_SUBJECTS), st.booleans()),
    st.tuples(st.just("configure"), st.sampled_from([None, *_SUBJECTS]), st.sampled_from(["NONE", "FULL"])),
    st.tuples(st.just("delete_config"), st.sampled_from([None, *_SUBJECTS])),
    st.tuples(st.just("set_mode"), st.sampled_from([None, *_SUBJECTS]), st.sampled_from(["READWRITE", "IMPORT"])),
    st.tuples(st.just("delete_mode"), st.sampled_from([None, *_SUBJECTS])),
    st.tuples(st.just("delete_context"), st.just(".x")),
    # another registry, or a late write of an earlier producer
    st.tuples(
        st.just("foreign"), st.sampled_from(_SUBJECTS), st.integers(1, 3), st.integers(1, 4), st.sampled_from(_TEXTS)
    ),
)


def _act(log: MemoryLog, registry: Registry, action: tuple[Any, ...]) -> None:
    name, subject, *rest = action
    if name == "foreign":
        number, id, text = rest
        context, _ = split(subject)
        there = [] if context in log.state.contexts() else [Record(Key(CONTEXT, context), {"context": context})]
        log.append([*there, _schema(subject, number, id, text)])
        registry.restore()
    elif name == "register":
        text, has_reference = rest
        references = (Reference("R", "a", 1),) if has_reference else ()
        registry.register(subject, Definition("AVRO", text, references))
    elif name == "delete_version":
        registry.delete_version(subject, rest[0], permanent=rest[1])
    elif name == "delete_subject":
        registry.delete_subject(subject, permanent=rest[0])
    elif name == "configure":
        registry.configure(subject, {"compatibilityLevel": rest[0]})
    elif name == "set_mode":
        registry.set_mode(subject, rest[0], force=False)
    else:
        getattr(registry, name)(subject)


def _schema(subject: str, number: int, id: int, text: str) -> Record:
    return Record(Key(SCHEMA, subject, number), schema_value(subject, number, id, Definition("AVRO", text), False))


def _seen(state: State) -> dict[str, Any]:
    """What requests can see of a state."""
    versions = [version for subject in state.subjects() for version in state.versions(subject, deleted=True)]
    return {
        "versions": versions,
        "contexts": state.contexts(),
        "configs": {subject: state.config(subject) for subject in [None, *_SUBJECTS]},
        "modes": {subject: state.mode(subject) for subject in [None, *_SUBJECTS]},
        "ids": [state.id_of(context, Definition("AVRO", text)) for context in (".", ".x") for text in _TEXTS],
        "by id": [
            sorted((version.subject, version.version) for version in state.of_id(context, id))
            for context in (".", ".x")
            for id in range(1, 20)
        ],
        "users": [
            sorted((user.subject, user.version) for user in state.users(version.subject, version.version, deleted=True))
            for version in versions
        ],
    }


class _SharedLog(MemoryLog):
    """A log into which another registry writes, just before this one does."""

    def __init__(self, foreign: Record) -> None:
        super().__init__()
        self._foreign = [foreign]

    def append(self, records: Sequence[Record], deadline: float = 0) -> None:
        super().append([self._foreign.pop(), *records] if self._foreign else records)


@pytest.mark.parametrize("subject", ["a", "b"])
def test_another_registry_that_writes(subject: str) -> None:
    log = _SharedLog(_schema(subject, 1, 1, '"long"'))
    registry = Registry(log)  # type: ignore[arg-type]
    with pytest.raises(RegistryRefusal, match="another registry writes to this topic") as refused:
        registry.register("a", Definition("AVRO", '"int"'))
    assert refused.value.code == 50001
    assert log.replayed(log.compacted()).of_id(".", 1)[0].definition.schema == '"long"'
    assert registry.register("c", Definition("AVRO", '"int"')).id == 2


@pytest.mark.parametrize(
    "late",
    [
        pytest.param(_schema("a", 1, 1, '"long"'), id="same place and id"),
        pytest.param(_schema("a", 1, 7, '"long"'), id="same place"),
        pytest.param(_schema("b", 1, 1, '"long"'), id="same id"),
    ],
)
def test_a_late_write_replaces_nothing(late: Record) -> None:
    log = MemoryLog()
    registry = Registry(log)  # type: ignore[arg-type]
    id = registry.register("a", Definition("AVRO", '"int"')).id
    log.append([late])
    registry.configure(None, {"compatibilityLevel": "NONE"})  # any change
    for state in (log.state, log.replayed(log.records), log.replayed(log.compacted())):
        assert [version.definition.schema for version in state.of_id(".", id)] == ['"int"']
        assert state.subjects() == ["a"]


def test_ids_are_not_given_twice() -> None:
    registry = Registry(MemoryLog())  # type: ignore[arg-type]
    for subject, expected in ((":.x:a", 1), (":.x:b", 2)):
        definition = Definition("AVRO", f'{{"type":"fixed","name":"F","size":{expected}}}')
        assert registry.register(subject, definition).id == expected
        registry.delete_subject(subject, permanent=False)
        registry.delete_subject(subject, permanent=True)
        registry.delete_context(".x")
        assert registry.read(lambda state: state.contexts()) == ["."]


@settings(max_examples=200, deadline=None)
@given(st.lists(_ACTIONS, max_size=25), st.integers(0, 60))
def test_replays_of_a_compacted_topic(actions: list[tuple[Any, ...]], clean: int) -> None:
    log = MemoryLog()
    registry = Registry(log)  # type: ignore[arg-type]
    registry.configure(None, {"compatibilityLevel": "NONE"})
    for action in actions:
        with suppress(RegistryRefusal):
            _act(log, registry, action)
    assert _seen(log.replayed(log.records)) == _seen(log.state)
    assert _seen(log.replayed(log.compacted(clean))) == _seen(log.state)
    assert log.replayed(log.records).last_id(".") == log.state.last_id(".")
    ids = {(version.subject[:2] == ":.", version.id): version.definition for version in _seen(log.state)["versions"]}
    for version in _seen(log.state)["versions"]:
        # an id is that of one schema
        assert ids[version.subject[:2] == ":.", version.id].schema == version.definition.schema


def test_a_schema_of_many_subjects_is_read_quickly() -> None:
    state, started = State(), time.thread_time()  # other work on the machine does not count
    for n in range(16_000):
        record = _schema(f"topic-{n}-key", 1, 1, '"string"')
        assert record.value is not None
        state.apply(record.key.encode(), dumps(record.value), timestamp=0)
    assert time.thread_time() - started < 12  # 25 s if each is compared with all that have the id
    assert len(state.of_id(".", 1)) == 16_000
