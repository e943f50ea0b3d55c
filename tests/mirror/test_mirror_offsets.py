"""The offset map, compared with a list of each record's source and target offset."""

from __future__ import annotations

import re
from collections import deque
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import pytest
from hypothesis import given, strategies as st

from spark_klog.client.offsets import Committed
from spark_klog.client.producer.receipts import Receipt
from spark_klog.errors import DecodeError
from spark_klog.mirror.batches import Span
from spark_klog.mirror.mirror import GroupTranslation, Session, _Noted
from spark_klog.mirror.progress import (
    PREFIX,
    PartitionMap,
    Progress,
    Run,
    decode_key,
    decode_run,
    encode_run,
    note_record,
    topic_record,
)

#: copy: records; skip: source offsets without records; foreign: target offsets of other producers; commit.
_STEPS = st.lists(st.tuples(st.sampled_from(["copy", "skip", "foreign", "commit"]), st.integers(1, 5)), max_size=40)


@given(_STEPS)
def test_a_translated_offset_is_that_of_the_next_record(steps: list[tuple[str, int]]) -> None:
    live, stored = PartitionMap(), PartitionMap()
    placed: dict[int, int] = {}
    source = target = 0
    live.moved(0)
    for what, count in [*steps, ("commit", 0)]:
        if what == "copy":
            live.copied(source, count, target)
            placed |= {source + number: target + number for number in range(count)}
            source, target = source + count, target + count
        elif what == "skip":
            source += count
            live.moved(source)
        elif what == "foreign":
            target += count
        else:
            for run in live.take_changes():
                stored.load(decode_run(encode_run(("clicks", 3), run)[1]))
            assert live.take_changes() == []
            assert stored.position == live.position == source
    for known in (live, stored):
        for offset in range(source + 1):
            following = min((place for at, place in placed.items() if at >= offset), default=target)
            before = max((place + 1 for at, place in placed.items() if at < offset), default=0)
            found = known.translate(offset)
            assert found is not None
            # never after the next record, and never before a record that was already read
            assert before <= found <= following
            if offset in placed:
                assert found == placed[offset]


def test_what_is_before_the_first_run_is_not_known() -> None:
    known = PartitionMap()
    known.load(Run(10, 20, 5 + 10))
    assert [known.translate(offset) for offset in (9, 10, 20, 21)] == [None, 5, 15, 15]


def test_a_map_that_was_written_again_replaces_the_old_one() -> None:
    known = PartitionMap()
    for run in (Run(0, 10, 10), Run(0, 15, 15), Run(3, 5, 105)):
        known.load(run)
    assert (known.position, known.translate(4)) == (5, 104)


def test_records_as_mirror_maker_writes_them() -> None:
    # OffsetSync of connect-mirror: topic, partition; upstream offset, downstream offset
    key, value = b"\x00\x06clicks\x00\x00\x00\x03", b"\x00" * 7 + b"\x2a" + b"\x00" * 7 + b"\x09"
    assert (decode_key(key), decode_run(value)) == (("clicks", 3), Run(42, 42, 9))
    assert encode_run(("clicks", 3), Run(40, 42, 9)) == (key, value + b"\x00" * 7 + b"\x28")


def test_a_topic_that_was_created_again_forgets_its_offsets() -> None:
    """This holds even if compaction leaves records of the old topic that the new topic does not replace."""
    first, second = UUID(int=1), UUID(int=2)
    progress = Progress()
    for record in (
        topic_record("clicks", first),
        encode_run(("clicks", 0), Run(0, 10, 10)),
        encode_run(("clicks", 1), Run(0, 20, 20)),
        encode_run(("views", 1), Run(0, 20, 20)),
        note_record(PREFIX, "copy."),
        topic_record("clicks", second),
        encode_run(("clicks", 0), Run(0, 3, 13)),
    ):
        progress.load(*record)
    assert (progress.topic_ids, progress.prefix) == ({"clicks": second}, "copy.")
    assert {key: known.position for key, known in progress.maps.items()} == {("clicks", 0): 3, ("views", 1): 20}
    # readers of MirrorMaker 2 see an offset sync of a partition that does not exist
    key, value = topic_record("clicks", first)
    assert (key, value[:16]) == (b"\x00\x06clicks\xff\xff\xff\xff", b"\xff" * 16)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        (b"", b""),
        (b"\x00\x01ab", b"\x00" * 16),
        (b"\x00\x01a\0\0\0\0", b"\x00" * 9),
        (b"\x00\x01a\xff\xff\xff\xff", b"\xff" * 31),
        (b"\x00\x00\xff\xff\xff\xff", b"\xff" * 17),
    ],
)
def test_other_records(key: bytes, value: bytes) -> None:
    with pytest.raises(DecodeError):
        Progress().load(key, value)


def test_progress_ends_before_the_first_record_that_is_not_confirmed() -> None:
    """Were the mirror killed then, the next one would leave it out."""
    key, receipts = ("t", 0), [Receipt(("t", 0)) for _ in range(2)]
    noted = deque(
        [
            _Noted(receipts[0], [Span(0, 3, 0)], 3),
            _Noted(receipts[1], [Span(3, 2, 0)], 5),
            _Noted(None, (), 7),
        ]
    )
    session = object.__new__(Session)
    session._maps, session._noted_count = {key: PartitionMap()}, len(noted)
    places = []
    for receipt, (offset, count) in zip([None, *receipts], [(0, 0), (10, 3), (13, 2)], strict=True):
        if receipt is not None:
            receipt.confirm(offset, -1, (0, count))
        session._note_confirmed(key, noted)
        places.append((session._maps[key].position, session._maps[key].downstream, len(noted)))
    assert places == [(None, 0, 3), (3, 13, 2), (7, 15, 0)]


def test_offsets_of_groups_only_move_forward() -> None:
    """Consumers that were moved to the target go on there."""
    source, target = ({("t", part): Committed(offset) for part, offset in enumerate(each)} for each in ((5, 5), (9, 2)))

    def alter(_: str, offsets: dict[tuple[str, int], Committed]) -> Any:
        target.update(offsets)
        return SimpleNamespace(failures={})

    groups = [SimpleNamespace(group="g"), SimpleNamespace(group="other")]
    first: Any = SimpleNamespace(list_groups=lambda: groups, list_group_offsets=lambda *_: source)
    second: Any = SimpleNamespace(list_group_offsets=lambda *_: target, alter_group_offsets=alter)
    settings: Any = SimpleNamespace(groups=re.compile("g"), prefix="")
    maps = {key: PartitionMap() for key in source}
    for known in maps.values():
        known.copied(0, 10, 0)
    assert GroupTranslation(settings, first, second).translate(maps) == 1
    assert [target["t", part].offset for part in range(2)] == [9, 5]
