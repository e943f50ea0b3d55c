"""The decoders of one consumer, made when first needed: one needs pyarrow, the other one does not."""

from __future__ import annotations

from typing import TYPE_CHECKING

from spark_klog.client.cluster import TopicPartition
from spark_klog.client.consumer.decoding.records import RecordDecoder
from spark_klog.client.consumer.settings import ConsumerConfig

if TYPE_CHECKING:
    from spark_klog.client.consumer.decoding.arrow import ArrowDecoder


class Decoders:
    """See the module. With `include_headers`, Arrow batches have the column headers."""

    def __init__(self, config: ConsumerConfig, *, include_headers: bool) -> None:
        self._config, self._include_headers = config, include_headers
        self._arrow: ArrowDecoder | None = None
        self._records: RecordDecoder | None = None

    @property
    def arrow(self) -> ArrowDecoder:
        """Fetched batches to Arrow record batches."""
        if self._arrow is None:
            from spark_klog.client.consumer.decoding.arrow import ArrowDecoder

            limit, checks = self._config.client.decompressed_max_bytes, self._config.check_crcs
            self._arrow = ArrowDecoder(limit, self._include_headers, checks)
        return self._arrow

    @property
    def records(self) -> RecordDecoder:
        """Fetched batches to records."""
        if self._records is None:
            limit, config = self._config.client.decompressed_max_bytes, self._config
            self._records = RecordDecoder(limit, config.max_poll_records, config.check_crcs)
        return self._records

    def forget(self, key: TopicPartition) -> None:
        """Drop what is kept for a partition that is no longer assigned."""
        if self._arrow is not None:
            self._arrow.forget(key)
