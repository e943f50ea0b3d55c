"""Records of magic 2 as messages, by all kernels; kafka-python reads the results in test_conversion.py."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings, strategies as st

from spark_klog.errors import DecodeError
from spark_klog.records.contract import Kernel, MessageRun
from tests.support.available_kernels import KERNELS
from tests.support.checker.record_model import Row, encode_rows

BASE, TIME = 1000, 1_700_000_000_000
ROWS = [
    Row(1000, TIME, b"key", b"value"),
    Row(1001, TIME + 5, None, b"", (("h", b"v"), ("n", None))),
    Row(1007, TIME - 7, b"", None),
    Row(1008, -1, None, None, (("h", b"v"),)),
]
BODY = encode_rows(ROWS, BASE, TIME)
#: The first row as kafka-python's LegacyRecordBatchBuilder writes it.
GOLDEN = {
    0: "00000000000003e8000000162356c1370000000000036b65790000000576616c7565",
    1: "00000000000003e80000001e6ad05db801000000018bcfe56800000000036b65790000000576616c7565",
}


@pytest.fixture(params=KERNELS, ids=[kernel.name for kernel in KERNELS])
def kernel(request: pytest.FixtureRequest) -> Kernel:
    return request.param


@pytest.mark.parametrize("magic", [0, 1])
def test_a_message_is_the_one_of_kafka(kernel: Kernel, magic: int) -> None:
    run = kernel.message_set(BODY, 0, 4, 1, BASE, TIME, None, 0, magic, False)
    assert bytes(run.data).hex() == GOLDEN[magic]
    assert run[1:] == (len(encode_rows(ROWS[:1], BASE, TIME)), 1, 1, 0, BASE, TIME)


def test_records_in_pieces_are_those_at_once(kernel: Kernel) -> None:
    whole = kernel.message_set(BODY, 0, 4, 100, BASE, TIME, None, 1001, 1, False)
    assert whole[1:] == (len(BODY), 4, 3, 3, 1008, TIME + 5)
    data, position, read = b"", 0, 0
    while read < 4:
        run = kernel.message_set(BODY, position, 4 - read, 1, BASE, TIME, None, 1001, 1, False)
        data, position, read = data + bytes(run.data), run.position, read + run.read
    assert data == bytes(whole.data)


def test_what_is_left_over_or_missing_is_refused(kernel: Kernel) -> None:
    for body, count in ((BODY, 3), (BODY, 0), (BODY, 5), (BODY[:-1], 4), (BODY + b"\0", 4), (b"", 1)):
        with pytest.raises(DecodeError):
            kernel.message_set(body, 0, count, 100, BASE, TIME, None, 0, 0, False)
    with pytest.raises(DecodeError):
        kernel.message_set(BODY, 0, 4, 100, 2**63 - 5, TIME, None, 0, 0, False)
    assert kernel.message_set(b"", 0, 0, 100, BASE, TIME, None, 0, 0, False)[1:5] == (0, 0, 0, 0)


_CHANGES = st.lists(st.tuples(st.integers(0, 1000), st.integers(0, 255)), max_size=3)


@given(
    changes=_CHANGES,
    count=st.integers(0, 5) | st.just(4),
    most=st.sampled_from([1, 2, 100]),
    base=st.sampled_from([0, BASE, 2**63 - 9]),
    append_time=st.sampled_from([None, 0, TIME]),
    first=st.sampled_from([0, 1001, 2**63 - 1]),
)
@settings(max_examples=300, deadline=None)
def test_all_kernels_write_the_same(
    changes: list[tuple[int, int]], count: int, most: int, base: int, append_time: int | None, first: int
) -> None:
    body = bytearray(BODY)
    for position, byte in changes:
        body[position % len(body)] = byte
    for magic, is_inner in itertools.product((0, 1), (False, True)):
        outcomes: list[MessageRun | None] = []
        for kernel in KERNELS:
            try:
                run = kernel.message_set(bytes(body), 0, count, most, base, TIME, append_time, first, magic, is_inner)
                outcomes.append(run._replace(data=bytes(run.data)))
            except DecodeError:
                outcomes.append(None)
        assert outcomes[1:] == outcomes[:-1]
