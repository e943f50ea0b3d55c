"""Split a batch that is larger than the broker takes (KIP-126)."""

from __future__ import annotations

from collections.abc import Sequence

from spark_klog.client.config import ClientConfig
from spark_klog.client.delivery.message import encode_batch
from spark_klog.client.delivery.producer_id import Numbering
from spark_klog.client.delivery.queues import Batch
from spark_klog.records.contract import Record
from spark_klog.records.formats.batch_v2 import read_batch_header
from spark_klog.records.kernels.reference import append_record, iter_records


def split(batch: Batch, config: ClientConfig) -> list[Batch]:
    """Two batches with half of the records each. They share the batch's sequences, so those of later batches stay.

    The broker refuses the first one as out of order if it has written the whole batch at an earlier attempt: it looks
    at a batch's size before it looks for duplicates.
    """
    view = memoryview(batch.data)
    header = read_batch_header(view)
    numbering = None
    if header.base_sequence >= 0:
        numbering = Numbering(header.producer_id, header.producer_epoch, header.base_sequence)
    records = list(iter_records(header, view))
    middle = len(records) // 2
    before = batch.first or 0
    may_be_written = batch.may_be_written or batch.times_sent > 1
    parts: list[Batch] = []
    for first, some in ((before, records[:middle]), (before + middle, records[middle:])):
        base = some[0].timestamp
        latest = max(record.timestamp for record in some)
        data = encode_batch(
            _body(some, base), len(some), base, latest, config, numbering, is_transactional=header.is_transactional
        )
        is_doubtful = may_be_written and not parts
        parts.append(Batch(data, len(some), batch.deadline, batch.receipt, first, may_be_written=is_doubtful))
    if batch.receipt is not None:
        batch.receipt.split()
    return parts


def _body(records: Sequence[Record], base_timestamp: int) -> bytearray:
    body = bytearray()
    for number, record in enumerate(records):
        append_record(body, record.timestamp - base_timestamp, number, record.key, record.value, record.headers)
    return body
