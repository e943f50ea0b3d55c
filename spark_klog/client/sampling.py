"""How large records are: a small fetch from each partition, all of a broker's in one request."""

from __future__ import annotations

from collections.abc import Mapping

from spark_klog.client.cluster import Cluster, TopicPartition
from spark_klog.errors import DecodeError
from spark_klog.protocol.apis import FETCH
from spark_klog.records.batch import iter_batches

_SAMPLE_BYTES = 64 * 1024


def record_sizes(cluster: Cluster, offsets: Mapping[TopicPartition, int]) -> dict[TopicPartition, float]:
    """Bytes in the log, as they are compressed, for each offset from the given one on; of partitions that have some.

    An estimate from the first batches. Errors as of `Cluster.attempt`.
    """

    def ask() -> dict[TopicPartition, float]:
        found: dict[TopicPartition, float] = {}
        for node, topics in cluster.by_leader(offsets).items():
            request = {
                "max_wait_ms": 0,
                "max_bytes": cluster.config.fetch_max_bytes,
                "isolation_level": cluster.config.isolation_level,
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
                    key = topic["topic"], entry["partition_index"]
                    size = _record_size(entry["records"], offsets[key])
                    if size is not None:
                        found[key] = size
        return found

    return cluster.attempt(ask)


def _record_size(records: memoryview | None, offset: int) -> float | None:
    """None where there is no whole batch to tell from: then reading will say what is wrong."""
    if not records:
        return None
    try:
        headers = [header for header, _ in iter_batches(records)]
    except DecodeError:
        return None
    if not headers:
        return None
    first = headers[0].base_offset or offset
    return sum(header.size for header in headers) / max(1, headers[-1].next_offset - first)
