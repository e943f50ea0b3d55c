"""Batches of idempotent and transactional producers, and the markers that end transactions."""

from __future__ import annotations

from tests.support.checker.log_model import CONTROL, TRANSACTIONAL, encoded, marker_pair

TIME = 1_700_000_000_000


def batch(producer: int, epoch: int, sequence: int, records: int, attributes: int = TRANSACTIONAL) -> bytearray:
    pairs, times = [(None, b"v")] * records, [TIME] * records
    return bytearray(encoded(pairs, times, producer=producer, epoch=epoch, sequence=sequence, attributes=attributes))


def marker(producer: int, epoch: int, kind: int) -> bytearray:
    pairs, attributes = [marker_pair(kind)], TRANSACTIONAL | CONTROL
    return bytearray(encoded(pairs, [TIME], producer=producer, epoch=epoch, attributes=attributes))
