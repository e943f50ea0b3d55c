"""Batches that the broker writes itself: a few rows with one timestamp, uncompressed."""

from __future__ import annotations

from collections.abc import Sequence

from spark_klog.records.formats.batch_v2 import build_batch
from spark_klog.records.kernels.reference import append_record

_NO_PRODUCER = (-1, -1)


def own_batch(
    rows: Sequence[tuple[bytes, bytes | None]],
    now_ms: int,
    *,
    attributes: int = 0,
    producer: tuple[int, int] = _NO_PRODUCER,
) -> bytearray:
    """Build a batch of (key, value) rows, at least one; `producer` is (id, epoch), `attributes` as in `build_batch`."""
    body = bytearray()
    for delta, (key, value) in enumerate(rows):
        append_record(body, 0, delta, key, value)
    producer_id, epoch = producer
    return bytearray(
        build_batch(
            body,
            len(rows),
            base_timestamp=now_ms,
            max_timestamp=now_ms,
            attributes=attributes,
            producer_id=producer_id,
            producer_epoch=epoch,
        )
    )
