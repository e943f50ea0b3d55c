"""What it costs a broker to validate the schema ids of produced records."""

from __future__ import annotations

import json
from collections.abc import Iterator

from benchmarks.broker_inside import Client, frame
from benchmarks.figures import Bench, Result, Side, Work
from benchmarks.record_batches import TIME, speed, take_turns, value
from spark_klog.client import Admin
from spark_klog.embedded import EmbeddedCluster
from spark_klog.protocol.apis import PRODUCE
from spark_klog.protocol.codec import decode_response
from spark_klog.records.formats.batch_v2 import build_batch
from spark_klog.records.kernels.reference import append_record
from spark_klog.schemas.registry.client import registry_of
from spark_klog.schemas.registry.schemas import Schema
from spark_klog.wire.codecs import codec_by_name

_VERSION = 9
_SETTING = "confluent.value.schema.validation"
#: Records of batches of about 16 KB, and of nearly 1 MB.
_SIZES = (150, 9_000)


def _batch(codec: str, records: int, schema: int) -> bytes:
    body = bytearray()
    prefix = b"\0" + schema.to_bytes(4, "big")
    for index in range(records):
        append_record(body, index, index, None, prefix + value(0, index)[len(prefix) :])
    times = {"base_timestamp": TIME, "max_timestamp": TIME + records - 1}
    return bytes(build_batch(body, records, codec=codec_by_name(codec), **times))


def _run(bench: Bench) -> Iterator[Result]:
    text = json.dumps({"type": "record", "name": "shop.Order", "fields": []})
    with EmbeddedCluster(
        data_dir=bench.work_dir / "validation", schema_registry=True, settings={"log.retention.bytes": "100000000"}
    ) as cluster:
        with Admin({"bootstrap.servers": cluster.bootstrap_servers}) as admin:
            admin.create_topic("validated", 1, configs={_SETTING: "true"})
            admin.create_topic("plain", 1)
        schema = registry_of({"url": cluster.schema_registry_url or ""}).register("validated-value", Schema(text))
        client = Client(cluster.bootstrap_servers)
        for codec in ("none", "lz4"):
            for records in _SIZES:
                data = [{"index": 0, "records": _batch(codec, records, schema)}]

                def send(topic: str, records: int = records, data: list[dict[str, object]] = data) -> int:
                    asked = {"acks": 1, "timeout_ms": 9000, "topic_data": [{"name": topic, "partition_data": data}]}
                    client.send(frame(PRODUCE, _VERSION, asked))
                    (topic_answer,) = decode_response(PRODUCE, _VERSION, client.receive())[1]["responses"]
                    assert topic_answer["partition_responses"][0]["error_code"] == 0, topic_answer
                    return records

                work = f"Produce with schemas validated, batches of {records:,} records of 100 B, {codec}"
                ours, plain = Side("klog"), Side("the same broker, not validated")
                sides = [
                    (ours, lambda send=send: speed(lambda: send("validated"))),
                    (plain, lambda send=send: speed(lambda: send("plain"))),
                ]
                take_turns(sides, bench.repeat)
                yield Result(work, "M records/s", ours, plain, bench.command)
        client.close()


VALIDATION = Work(
    "validation",
    _run,
    (
        "Validation: one connection sends the same Produce request again when it is answered, to a topic with "
        f"{_SETTING}=true and to one without. The id is looked up once; what is measured is finding the ids of all "
        "records, for which compressed batches are decompressed.",
    ),
)
