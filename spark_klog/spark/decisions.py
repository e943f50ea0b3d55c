"""The decisions of exactly-once streams: what to do when they and the checkpoint say different things."""

from __future__ import annotations

from collections.abc import Mapping

from spark_klog.spark.write.decisions.decision_place import decision_place
from spark_klog.spark.write.exactly_once_driver import continue_at as _continue_at
from spark_klog.spark.write.sink_options import sink_options


def continue_at(options: Mapping[str, str], batch: int) -> None:
    """Have a stopped query go on with a micro-batch that its decision log does not expect.

        continue_at({"kafka.bootstrap.servers": servers, "deliveryGuarantee": "exactly-once",
                     "checkpointLocation": "s3a://bucket/checkpoints/clean"}, 7)

    `options` are those of the query's writer, `batch` is the number that the query's error names. Rows of that
    micro-batch and of those after it may be in the topic already: they are written again. A run that is alive fails
    with `Superseded`.

    Raises `ConfigError` for wrong options, `Superseded` if a run of the query begins a micro-batch meanwhile, and what
    brokers' answers raise.
    """
    if batch < 0:
        raise ValueError(f"batch={batch} must be the number of a micro-batch, at least 0")
    checked = sink_options(dict(options), streaming=True)
    assert checked.checkpoint is not None, "exactly-once options have a checkpoint"
    place = decision_place(checked.checkpoint, checked.decision_log, checked.decision_topic)
    _continue_at(checked.client, place, checked.id_prefix, batch)
