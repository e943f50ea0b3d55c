"""The order in which fetched batches are sent, compared with lists."""

from __future__ import annotations

from collections import defaultdict

from hypothesis import given, strategies as st

from spark_klog.mirror.batches import OutBatch
from spark_klog.mirror.mirror import Waiting

_STEPS = st.lists(
    st.tuples(st.sampled_from(["batch", "offset", "take"]), st.integers(0, 3), st.integers(1, 9)), max_size=60
)


@given(_STEPS)
def test_each_partition_keeps_its_order(steps: list[tuple[str, int, int]]) -> None:
    waiting = Waiting()
    expected: dict[int, list[OutBatch | int]] = defaultdict(list)
    for what, partition, size in steps:
        if what == "take":
            if not waiting:
                assert not any(expected.values())
                continue
            (topic, number), item = waiting.pop_next()
            assert (topic, item) == ("clicks", expected[number].pop(0))
        else:
            item = size if what == "offset" else OutBatch(bytearray(size), 1, size, (), True)
            waiting.append(("clicks", partition), item)
            expected[partition].append(item)
        left = [one for items in expected.values() for one in items]
        assert waiting.size == sum(len(one.data) for one in left if not isinstance(one, int))
        assert bool(waiting) == bool(left)


def test_a_batch_of_each_partition_in_turn() -> None:
    waiting = Waiting()
    for partition, offsets in ((0, (1, 2, 3)), (1, (4,)), (2, (5, 6))):
        for offset in offsets:
            waiting.append(("clicks", partition), offset)
    taken = []
    while waiting:
        taken.append(waiting.pop_next()[1])
    assert taken == [1, 4, 5, 2, 6, 3]
