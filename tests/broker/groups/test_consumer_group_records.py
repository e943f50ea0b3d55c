"""Records of consumer groups against those that Kafka 4.1.0 has written: a joins, b joins (static), both leave."""

from __future__ import annotations

from uuid import UUID

from spark_klog.broker.groups.consumer_records import (
    ConsumerGroupKey,
    decode_consumer_key,
    encode_changes,
    encode_removal,
    load_record,
)
from spark_klog.broker.groups.membership import ConsumerMember, Membership, MemberState, Subscription

_ID = UUID("cccc24a6-ac83-4991-a04f-0ced01e422d5")
_A, _B = "000167000161", "000167000162"
_TOPIC = f"02{_ID.hex}"
#: Key and value of each record, in hexadecimal digits; None removes the entry.
_JOINED = [
    (
        f"0005{_A}",
        "00000002720c6e6f73792d636c69656e740b2f3132372e302e302e310207636c69636b7301000027100001000100",
    ),
    ("0003000167", "0000000000010100083edc66eda1c765c1"),
    (f"0007{_A}", f"0000{_TOPIC}05000000000000000100000002000000030000"),
    ("0006000167", "00000000000100"),
    (f"0008{_A}", f"0000000000010000000000{_TOPIC}0500000000000000010000000200000003000100"),
    (f"0005{_B}", "0000026902720c6e6f73792d636c69656e740b2f3132372e302e302e310105636c2e2a000027100672616e676501000100"),
    (f"0008{_B}", "0000000000010000000000010100"),
    ("0003000167", "0000000000020100083edc66eda1c765c1"),
    (f"0007{_A}", f"0000{_TOPIC}0300000002000000030000"),
    (f"0007{_B}", f"0000{_TOPIC}0300000000000000010000"),
    ("0006000167", "00000000000200"),
    (f"0008{_A}", f"0000000000010000000101{_TOPIC}03000000020000000300{_TOPIC}0300000000000000010000"),
]
_LEFT = [
    *((f"{kind}{_A}", None) for kind in ("0008", "0007", "0005")),
    ("0003000167", "0000000000030100083edc66eda1c765c1"),
    (f"0008{_B}", "0000fffffffe0000000000010100"),
]


def _load(membership: Membership, rows: list[tuple[str, str | None]]) -> None:
    for key, value in rows:
        data = bytes.fromhex(key)
        decoded = decode_consumer_key(data[1], data)
        assert decoded is not None
        load_record(membership, decoded, None if value is None else bytes.fromhex(value))


def _some(*numbers: int) -> frozenset[tuple[UUID, int]]:
    return frozenset((_ID, number) for number in numbers)


def test_records_of_kafka_are_read() -> None:
    membership = Membership()
    _load(membership, _JOINED)
    assert (membership.epoch, membership.assignment_epoch) == (2, 2)
    client = "nosy-client", "/127.0.0.1"
    assert membership.members == {
        "a": ConsumerMember(
            "a",
            Subscription(None, "r", *client, frozenset({"clicks"}), "", 10_000, None),
            *(1, 1, MemberState.UNREVOKED, _some(2, 3), _some(0, 1)),
        ),
        "b": ConsumerMember("b", Subscription("i", "r", *client, frozenset(), "cl.*", 10_000, "range"), 1, 0),
    }
    assert membership.targets == {"a": _some(2, 3), "b": _some(0, 1)}
    assert membership.holders == dict.fromkeys(_some(0, 1, 2, 3), "a")
    _load(membership, _LEFT)
    assert list(membership.members) == ["b"]
    assert (membership.members["b"].has_left, membership.epoch, membership.holders) == (True, 3, {})


def test_records_are_written_as_by_kafka() -> None:
    """But without the fields that Kafka may leave out."""
    membership = Membership()
    _load(membership, _JOINED)
    ours = {key.hex(): value and value.hex() for key, value in encode_changes("g", Membership(), membership)}
    theirs = dict(_JOINED)
    for key, value in theirs.items():
        if key.startswith(("0006", "0007", "0008")):
            assert ours.pop(key) == value
        else:  # a tagged field: a hash of the topics, the metadata of a member of the classic protocol
            assert value is not None
            tagged = len("0100083edc66eda1c765c1" if key.startswith("0003") else "01000100")
            assert ours.pop(key) == value[:-tagged] + "00"
    assert ours == {}
    assert {key.hex() for key, value in encode_removal("g", membership) if value is None} == theirs.keys()


def test_other_keys_are_left_alone() -> None:
    assert decode_consumer_key(16, bytes.fromhex("001000016700016a")) is None
    key = decode_consumer_key(3, bytes.fromhex("0003000167"))
    assert key is not None
    assert key == ConsumerGroupKey(key.kind, "g")


def test_the_topics_of_a_group() -> None:
    """Against bytes that Kafka 4.4.0's message classes have encoded: 4.0 writes this record, later ones a hash."""
    key, value = "0004000167", "000002cccc24a6ac834991a04f0ced01e422d507636c69636b7300000004010000"
    before, after = Membership(epoch=1), Membership(epoch=1, topics={"clicks": (_ID, 4)})
    assert encode_changes("g", before, after) == [(bytes.fromhex(key), bytes.fromhex(value))]
    assert encode_changes("g", after, before) == [(bytes.fromhex(key), None)]
    assert encode_changes("g", after, after.copy()) == []
    assert (bytes.fromhex(key), None) in encode_removal("g", after)
    loaded = Membership(epoch=1)
    _load(loaded, [(key, value)])
    assert loaded == after
    _load(loaded, [(key, None)])
    assert loaded == before
