"""Batches, and Produce requests of them."""

from __future__ import annotations

from spark_klog.client.config import ClientConfig
from spark_klog.client.delivery.producer_id import Numbering
from spark_klog.client.delivery.queues import Batch, Queue
from spark_klog.errors import UnsupportedVersionError
from spark_klog.protocol.codec import Message
from spark_klog.records.building.conversion import down_convert
from spark_klog.records.formats.batch_v2 import TRANSACTIONAL_BIT, build_batch
from spark_klog.wire.primitives import Buffer

#: The first version of Produce with magic 2, and the one with magic 1.
_FIRST_MAGIC_2, _MAGIC_1 = 3, 2


def encode_batch(
    body: Buffer,
    count: int,
    base_timestamp: int,
    max_timestamp: int,
    config: ClientConfig,
    numbering: Numbering | None,
    is_transactional: bool,
) -> bytes:
    """A batch of `count` encoded records, compressed, with the next sequences of the numbering, if any."""
    return build_batch(
        body,
        count,
        base_timestamp=base_timestamp,
        max_timestamp=max_timestamp,
        codec=config.codec,
        level=config.compression_level,
        attributes=TRANSACTIONAL_BIT if is_transactional else 0,
        producer_id=numbering.producer_id if numbering else -1,
        producer_epoch=numbering.epoch if numbering else -1,
        base_sequence=numbering.take(count) if numbering else -1,
    )


def produce_message(
    batches: list[tuple[Queue, Batch]], version: int, config: ClientConfig, transactional_id: str | None
) -> Message:
    """The request of a batch per partition; `UnsupportedVersionError` if a broker before 0.11 can't have them."""
    topics: dict[str, list[Message]] = {}
    for queue, batch in batches:
        data = batch.data
        records = data if version >= _FIRST_MAGIC_2 else _as_message_set(bytes(data), version, queue.name)
        topics.setdefault(queue.key[0], []).append({"index": queue.key[1], "records": records})
    return {
        "transactional_id": transactional_id,
        "acks": config.acks,
        "timeout_ms": config.request_timeout_ms,
        "topic_data": [{"name": topic, "partition_data": data} for topic, data in topics.items()],
    }


def _as_message_set(batch: bytes, version: int, where: str) -> bytearray:
    """Convert a batch for a broker before 0.11; `UnsupportedVersionError` if records have headers."""
    converted = down_convert(batch, 1 if version == _MAGIC_1 else 0)
    if converted.lost_headers:
        raise UnsupportedVersionError(
            f"records for {where} have headers, but the broker supports only Produce {version}, which has none: "
            "leave them out"
        )
    return converted.data
