"""What records of a log are like: a small fetch from each partition, all of a broker's in one request."""

from __future__ import annotations

from collections.abc import Mapping

from spark_klog.client.cluster import Cluster, TopicPartition
from spark_klog.errors import DecodeError
from spark_klog.protocol.apis import FETCH
from spark_klog.records.batch import Header, iter_batches

_SAMPLE_BYTES = 64 * 1024


def record_sizes(cluster: Cluster, offsets: Mapping[TopicPartition, int]) -> dict[TopicPartition, float]:
    """Bytes in the log, as they are compressed, for each offset from the given one on; of partitions that have some.

    An estimate from the first batches. Errors as of `Cluster.attempt`.
    """
    return {
        key: sum(header.size for header in headers) / max(1, headers[-1].next_offset - _first_offset(headers[0]))
        for key, headers in _sample(cluster, offsets).items()
    }


def timestamp_types(cluster: Cluster, offsets: Mapping[TopicPartition, int]) -> dict[TopicPartition, int]:
    """The type of timestamps (see `records.contract`) of the batch with the offset, where there is one."""
    return {key: headers[0].timestamp_type for key, headers in _sample(cluster, offsets).items()}


def _first_offset(header: Header) -> int:
    return header.base_offset or header.last_offset


def _sample(cluster: Cluster, offsets: Mapping[TopicPartition, int]) -> dict[TopicPartition, list[Header]]:
    """The headers of a few batches from each offset on; without those partitions that give none."""

    def ask() -> dict[TopicPartition, list[Header]]:
        found: dict[TopicPartition, list[Header]] = {}
        for node, topics in cluster.by_leader(offsets).items():
            request = {
                "max_wait_ms": 0,
                "max_bytes": cluster.config.fetch_max_bytes,
                "topics": [
                    {
                        "topic": topic,
                        "partitions": [
                            {
                                "partition": partition,
                                "fetch_offset": offsets[topic, partition],
                                "partition_max_bytes": _SAMPLE_BYTES,
                            }
                            for partition in partitions
                        ],
                    }
                    for topic, partitions in topics.items()
                ],
            }
            answer = cluster.connection(node).request(FETCH, request)
            for topic in answer["responses"]:
                for entry in topic["partitions"]:
                    headers = _headers(entry["records"])
                    if headers:
                        found[topic["topic"], entry["partition_index"]] = headers
        return found

    return cluster.attempt(ask)


def _headers(records: memoryview | None) -> list[Header]:
    """Nothing where they are no batches: reading will say what is wrong."""
    try:
        return [header for header, _ in iter_batches(records or b"")]
    except DecodeError:
        return []
