"""Decode fetched record batches into Arrow record batches. The only module of the consumer that imports Arrow."""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa

from spark_klog.client.cluster import TopicPartition
from spark_klog.client.consumer.fetches import Chunk
from spark_klog.columns.decode import PartitionDecoder
from spark_klog.columns.schema import FULL, WITHOUT_HEADERS
from spark_klog.errors import DecodeError


class ArrowDecoder:
    """Decode chunks into Arrow batches with the columns of the Spark source (see columns/schema.py).

    `limit` bounds the decompressed size of a record batch, in bytes; `checks_crcs`: see `append_visible`.
    """

    def __init__(self, limit: int, include_headers: bool, checks_crcs: bool = True) -> None:
        self._limit, self._checks_crcs = limit, checks_crcs
        self._schema = FULL if include_headers else WITHOUT_HEADERS
        self._decoders: dict[TopicPartition, PartitionDecoder] = {}

    def parts(self, chunk: Chunk) -> Iterator[tuple[pa.RecordBatch, int]]:
        """Yield Arrow batches, each with the offset after it; for the last one that is the chunk's end.

        Raises `DecodeError` for a corrupt batch, after yielding the records before it.
        """
        key = chunk.topic, chunk.partition
        # a decoder abandoned in the middle of a chunk still holds its records, so keep it only at the end
        decoder = self._decoders.pop(key, None) or self._decoder(key)
        held: pa.RecordBatch | None = None
        try:
            for batch in decoder.add(chunk.data, chunk.offset, chunk.following, chunk.aborted, chunk.damaged):
                if held is not None:
                    yield held, _end(held)
                held = batch
        except DecodeError:
            for batch in (held, *decoder.finish()):
                if batch is not None:
                    yield batch, _end(batch)
            raise
        for batch in decoder.finish():
            if held is not None:
                yield held, _end(held)
            held = batch
        self._decoders[key] = decoder
        if held is not None:
            yield held, chunk.following

    def _decoder(self, key: TopicPartition) -> PartitionDecoder:
        return PartitionDecoder(*key, self._schema, self._limit, checks=self._checks_crcs)

    def forget(self, key: TopicPartition) -> None:
        """Drop the decoder of a partition that is no longer assigned."""
        self._decoders.pop(key, None)


def _end(batch: pa.RecordBatch) -> int:
    return int(batch.column("offset")[-1].as_py()) + 1
