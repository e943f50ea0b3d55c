"""DescribeLogDirs v1-4 (KIP-113): the data directory, with the sizes of its logs and of the disk."""

from __future__ import annotations

import logging
import shutil
from collections import defaultdict

from spark_klog.broker.broker import Broker, Request
from spark_klog.errors import ErrorCode
from spark_klog.protocol.codec import Message

_log = logging.getLogger(__name__)


def handle(broker: Broker, request: Request, message: Message) -> Message:
    if not broker.authorizer.is_admin(request.session):  # versions before 3 can't carry the error
        return {"error_code": ErrorCode.CLUSTER_AUTHORIZATION_FAILED, "results": []}
    requested = message["topics"]
    chosen = None if requested is None else {topic["topic"]: set(topic["partitions"]) for topic in requested}
    topics: dict[str, list[Message]] = defaultdict(list)
    for (topic, partition), log in sorted(broker.logs.logs.items()):
        if chosen is None or partition in chosen.get(topic, ()):
            topics[topic].append({"partition_index": partition, "partition_size": log.size, "offset_lag": 0})
    path = broker.logs.path
    try:
        disk = shutil.disk_usage(path)
    except OSError as error:
        _log.error("%s can't be measured: %s", path, error)
        return {
            "results": [{"error_code": ErrorCode.KAFKA_STORAGE_ERROR, "log_dir": str(path.absolute()), "topics": []}]
        }
    result = {
        "error_code": ErrorCode.NONE,
        "log_dir": str(path.absolute()),
        "topics": [{"name": name, "partitions": partitions} for name, partitions in topics.items()],
        "total_bytes": disk.total,
        "usable_bytes": disk.free,
    }
    return {"results": [result]}
