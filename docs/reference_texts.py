"""What the code does not say and the generated pages do: what a client setting is for, what to do about an error."""

from __future__ import annotations

#: What each client setting is for.
SETTINGS = {
    "acks": "Confirmations of a write: `0`, `1` or `all`. Default `all`.",
    "allow.auto.create.topics": "Whether brokers with auto.create.topics.enable create missing topics.",
    "auto.commit.interval.ms": "Time between two commits of positions.",
    "auto.offset.reset": "Without a committed offset: `earliest`, `latest` (default), `none`, `by_duration:PT1H`.",
    "batch.size": "Size at which a batch of a partition is sent.",
    "buffer.memory": "Memory for records that are not confirmed yet.",
    "check.crcs": "Whether record batches with a wrong checksum are refused.",
    "client.id": "The client's name in requests, logs and metrics of brokers.",
    "client.rack": "The client's rack, to read from the nearest replica (KIP-392).",
    "compression.gzip.level": "1 to 9.",
    "compression.lz4.level": "1 to 17.",
    "compression.type": "`none`, `gzip`, `snappy`, `lz4` or `zstd`.",
    "compression.zstd.level": "-131072 to 22.",
    "decompressed.max.bytes": "Largest record batch after decompression; a larger one is corrupt. Not Kafka's.",
    "default.api.timeout.ms": "Longest duration of a call that has no timeout of its own.",
    "delivery.timeout.ms": "Longest time from adding a record to its confirmation, retries included.",
    "enable.auto.commit": "Whether positions are committed in the background.",
    "enable.idempotence": "Whether brokers recognize a batch that is sent again. Default: true with acks=all.",
    "dead.letter.deserialization.errors": "Whether records that do not deserialize become dead letters.",
    "dead.letter.topic": "Where records go that can't be processed: see [Dead letters](../../recipes/dead-letters.md).",
    "exclude.internal.topics": "Whether patterns leave out internal topics.",
    "fetch.max.bytes": "Largest response to a fetch.",
    "fetch.max.wait.ms": "Longest time that a broker waits for fetch.min.bytes.",
    "fetch.min.bytes": "Bytes that a broker waits for before it answers a fetch.",
    "group.id": "The group of the consumer.",
    "group.instance.id": "Name of a static member, which keeps its partitions across a restart (KIP-345).",
    "group.protocol": "`classic`, or `consumer` (KIP-848): the coordinator assigns partitions.",
    "group.remote.assignor": "With `group.protocol=consumer`: `uniform` or `range`; by default as the broker says.",
    "heartbeat.interval.ms": "Time between two heartbeats.",
    "isolation.level": "`read_uncommitted` (default) or `read_committed`.",
    "linger.ms": "Time that `send` waits for more records of a batch. Without effect in Spark.",
    "max.block.ms": "Longest time that `send` waits for memory, and a transactional call for its coordinator.",
    "max.in.flight.requests.per.connection": "Requests to a broker without a response; at most 5 with idempotence.",
    "max.partition.fetch.bytes": "Bytes of a partition in a fetch. 1 MiB in a consumer.",
    "max.poll.interval.ms": "Time without a poll after which the member leaves its group.",
    "max.poll.records": "Most records that `poll` returns.",
    "max.request.size": "Largest request, and so the largest record.",
    "metadata.cluster.check.enable": "Whether brokers (Kafka 4.4) refuse connections for another broker (KIP-1242).",
    "metadata.max.age.ms": "Age at which the client asks for metadata again.",
    "partition.assignment.strategy": "A list of `range`, `roundrobin`, `sticky`, `cooperative-sticky`. "
    "Default `range,cooperative-sticky`.",
    "partitioner": "librdkafka's partitioner: `consistent`, `consistent_random`, `murmur2`, `murmur2_random`, "
    "`fnv1a`, `fnv1a_random`, `random`.",
    "partitioner.class": "Kafka's DefaultPartitioner, UniformStickyPartitioner or RoundRobinPartitioner, "
    "by its full name.",
    "partitioner.ignore.keys": "Whether the partitioner treats records with a key as if they had none.",
    "request.timeout.ms": "Longest time that a request, with its retries, may take.",
    "retries": "How often a batch is sent again.",
    "retry.backoff.max.ms": "Longest pause before another attempt.",
    "retry.backoff.ms": "First pause before another attempt; it doubles.",
    "retry.attempts": "How often a record is tried again before it is a dead letter; by default once in each topic.",
    "retry.delays.ms": "The delay of each of retry.topics, none less than the one before.",
    "retry.topics": "Topics in which records wait to be tried again: [Dead letters](../../recipes/dead-letters.md).",
    "session.timeout.ms": "Time without a heartbeat after which the coordinator removes the member.",
    "socket.connection.setup.timeout.ms": "Longest time to connect.",
    "transaction.timeout.ms": "Time after which the broker aborts an open transaction. 900000 in exactly-once streams.",
    "transactional.id": "Name of a transactional producer. Refused in Spark, which names its own.",
}
#: What to do about each error, by its class.
CURES = {
    "AdminClosed": "Make a new `Admin`; after a fork, in the new process.",
    "AuthenticationError": "Compare protocol and credentials with the broker's: `klog doctor`.",
    "BufferExhausted": "Wait and send again; raise `buffer.memory`; check that the brokers can be reached.",
    "CallInterrupted": "Close the client and make another one. With transactions `abort_transaction` suffices.",
    "CheckpointMismatch": "See [Write a stream exactly once](../../recipes/exactly-once.md).",
    "ClusterStartError": "Read the log that the text names.",
    "CommitFailed": "Call `poll`: a member gets the records again. Raise `max.poll.interval.ms` if work takes long.",
    "ConcurrentUse": "Use a consumer from one thread, `wakeup` and `close` from any; an asyncio producer in one loop.",
    "ConfigError": "Change the option that the text names.",
    "MissingPackage": "Run the command that the text gives.",
    "ConnectionFailed": "Check address and network with `klog doctor --bootstrap-server HOST:PORT`.",
    "ConsumerClosed": "Make a new `Consumer`; after a fork, in the new process.",
    "ConsumerTimeout": "Iterate again, or raise `consumer.timeout.ms`.",
    "RecordDeserializationError": "`seek` past its offset to read on; `Consumer.dead_letter` keeps the record.",
    "CorruptBatchError": "Set `badRecords=skip` or `deadletter` to read on; `klog log verify` finds it on disk.",
    "DataDirectoryError": "Name a new folder, or the directory of this broker.",
    "DataLossError": "Set `failOnDataLoss=false` to go on without the records; raise the topic's `retention.ms`.",
    "DecidedButAborted": "See [Write a stream exactly once](../../recipes/exactly-once.md).",
    "DecodeError": "Check files with `klog log verify`; for data of a peer, check that the port is a broker's.",
    "DeliveryPending": "Wait longer, or `flush`.",
    "DirectoryError": "Check that ZooKeeper, or the folder, can be reached and written.",
    "EarlierWrite": "Restore a newer checkpoint, or stop one of two runs.",
    "EncodeError": "Shorten or correct the value that the text names.",
    "FrameTooLarge": "Raise the setting that the text names; without one, check that the port is a broker's.",
    "ForkedClient": "Make a new client in the new process.",
    "HandshakeInterrupted": "Set `security.protocol` as the broker's listener has it.",
    "InvalidRecords": "Cast or fill the column that the text names.",
    "InvalidTransactionState": "Call what the text names first.",
    "ItemsFailed": "Look at `failures`, by item.",
    "LoadError": "The text says what to do; `klog load status OUTPUT` shows the runs.",
    "LogCorrupted": "Restore the files from a copy, or `klog log repair FOLDER`.",
    "LogDirLocked": "Stop the other broker, or name another directory.",
    "LogRetired": "Restart the broker if the error lasts.",
    "LogTruncated": "Seek to `divergence`, or set `auto.offset.reset`.",
    "MemberFenced": "Give each member its own `group.instance.id`.",
    "NoOffsetForPartition": "Seek, or set `auto.offset.reset`.",
    "NoOffsetForTimestamp": "Set `startingOffsetsByTimestampStrategy=latest`, or an earlier time.",
    "NotDecided": "Run it again. Raise `kafka.transaction.timeout.ms` if writes or micro-batches take long.",
    "OffsetOutOfRange": "Start at an offset that the log holds; raise the topic's `retention.ms`.",
    "OtherRunOfWrite": "Let the other run end; run the write again if that one fails.",
    "PartitionsMismatch": "Name exactly the partitions that are read.",
    "PartlyWritten": "See [Exactly once](../../recipes/exactly-once.md#a-batch-write).",
    "ProducerClosed": "Make a new `Producer`; after a fork, in the new process.",
    "MirrorFenced": "Stop one of the two processes; another mirror needs a name of its own (`--name`).",
    "ProducerFenced": "Close this producer. Give each producer its own `transactional.id`.",
    "TransactionAbortable": "Call `abort_transaction`, and do the transaction again.",
    "ProtocolError": "The text says what to do if something can be done; see the codes below.",
    "QueueFull": "Slow down, raise `queue.size`, or leave out `queue.enqueueTimeout.ms`, so that `send` waits.",
    "ReaderClosed": "Call `spark_klog.read` again.",
    "RebalanceFailed": "Look for a member that does not release its partitions; raise `rebalance.max.retries`.",
    "RecordTooLarge": "Raise the setting that the text names.",
    "RecordTooLargeToSend": "Raise `max.request.size`, and the topic's `max.message.bytes`.",
    "RegistryError": "The text has the registry's words: check subject, credentials and compatibility level.",
    "RequestTimedOut": "Check that the brokers run and lead the partition; raise `request.timeout.ms`.",
    "SaslError": "Check mechanism, user and password, and what the broker's listener offers.",
    "ReplannedWrite": "Restore a newer checkpoint, or stop one of two runs.",
    "SchemaChanged": "Restart the query; the option schemaEvolution chooses what happens.",
    "SchemaError": "The text names the field: change the schema, the column's type, or the reader's schema.",
    "SchemaTimedOut": "Try again when the machine is less busy; look at a schema that takes this long everywhere.",
    "StartAfterEnd": "Swap the two, or widen the range.",
    "Superseded": "Stop one of the two runs.",
    "TlsError": "Set `ssl.truststore.location` to the broker's authority; use the name that its certificate has.",
    "TopicRecreated": "Seek in the new topic's partitions, or set `auto.offset.reset`.",
    "TransactionAborted": "Send the records again in a new transaction.",
    "UnsupportedVersionError": "Use a newer broker, or leave out what the text names.",
    "WokenUp": "",
}
_TASKS = "a task for each partition; if there are more than 32, partitions with little to read share a task"
#: What the connector's own options mean, by their names, in Markdown; and their defaults, if the value does not say it.
OPTIONS: dict[str, tuple[str, str | None]] = {
    "cluster": (
        "in place of kafka.bootstrap.servers: a [named cluster](../recipes/named-clusters.md)",
        None,
    ),
    "path": (
        "batch only, in place of kafka.bootstrap.servers: data directories of brokers by comma, as paths or URIs of "
        "pyarrow's file systems; see [Log directories](../recipes/log-directories.md). Without subscribe, "
        "subscribePattern or assign all topics but internal ones. `.load(PATH)` is the same",
        None,
    ),
    "subscribe": (
        "topics by comma; exactly one of this and the two below",
        None,
    ),
    "subscribePattern": (
        "a regular expression, to be found in the name (`^...$` for whole names), as with Spark's connector. What "
        "Java's patterns have and Python's do not is refused (`[a-z&&[^b]]`, `[[:alpha:]]` and other classes in "
        "classes, octal escapes, `\\p{...}`, `\\Q...\\E`, `\\h`, `(?<name>...)`, before Python 3.11 possessive "
        "repeats)",
        None,
    ),
    "assign": (
        '`{"topic":[0,1]}`',
        None,
    ),
    "startingTimestamp": (
        "ms since the epoch, for all partitions; before the two below",
        None,
    ),
    "startingOffsetsByTimestamp": (
        '`{"topic":{"0":1700000000000}}`; before the one below',
        None,
    ),
    "startingOffsets": (
        "earliest, latest (stream only), or JSON by topic and partition, -2 earliest, -1 latest, in which a topic as "
        'a whole may have one of the words (`{"clicks":"earliest","views":{"0":23}}`, as in Spark 4.4); `-10m` before'
        " now (ms, s, m, h, d, w), `-1000` offsets before the end (markers of transactions, aborted records and gaps "
        "of compaction count, so there may be fewer records), an ISO time with its zone (`2026-11-21T10:00:00Z`, "
        "`...+01:00`; without one it is refused, as a source in Python does not learn `spark.sql.session.timeZone`), "
        "`group`: where the group of `kafka.group.id` has committed. Partitions without a committed offset begin at "
        "their first record, and a warning names them. A stream uses this option for a new query only: later starts "
        "use the checkpoint",
        "batch: earliest, stream: latest",
    ),
    "startingOffsetsByTimestampStrategy": (
        "or latest: what to do with partitions that have no record at or after the timestamp. If that is "
        "all of them, a batch query reads nothing and logs a warning",
        None,
    ),
    "endingTimestamp": (
        "batch only; as above",
        None,
    ),
    "endingOffsetsByTimestamp": (
        "batch only; as above",
        None,
    ),
    "endingOffsets": (
        "batch only; as above",
        "latest",
    ),
    "maxOffsetsPerTrigger": (
        "the most offsets of a micro-batch; partitions with more unread records get a larger share",
        "no limit",
    ),
    "maxBytesPerTrigger": (
        "the same for bytes, an estimate",
        "no limit",
    ),
    "minOffsetsPerTrigger": (
        "no micro-batch before so many offsets wait, or maxTriggerDelay has passed",
        "none",
    ),
    "maxTriggerDelay": (
        "see minOffsetsPerTrigger",
        "15m",
    ),
    "availableNow": (
        "all: with pyspark 4.0 and 4.1 the limits above are ignored, so that `Trigger.AvailableNow` reads all in one "
        "micro-batch there ([why](../recipes/switch.md#what-is-different)). Without effect with 4.2 and later, where "
        "it reads all within the limits",
        None,
    ),
    "minPartitions": (
        "split partitions into more tasks, evenly",
        _TASKS,
    ),
    "maxRecordsPerPartition": (
        "split partitions into more tasks, evenly",
        _TASKS,
    ),
    "maxBytesPerPartition": (
        "split partitions into more tasks, evenly",
        f"{_TASKS}. With path about 48 MB a task",
    ),
    "failOnDataLoss": (
        "false: go on without records that are gone, with a warning for each range; report: also in the progress "
        "record of the batch. klog reports lost records before the batch is in the checkpoint",
        "true",
    ),
    "badRecords": (
        "skip: leave out corrupt batches, and records whose timestamp does not fit into microseconds or whose key or "
        "value does not decode; deadletter: also keep their bytes (of a record the value; with valueFormat or "
        "keyFormat key, value and headers), in base64, their place and the reason as JSON files in a folder or URI, "
        "one for each",
        None,
    ),
    "badRecordsPath": (
        "the folder or URI of badRecords=deadletter",
        None,
    ),
    "deadLetterTopic": (
        "the topic of badRecords=deadletter, in place of badRecordsPath: records as they were, with the headers of "
        "Kafka Connect's dead letters, of each query and place one; see [Dead letters](../recipes/dead-letters.md)",
        None,
    ),
    "valueFormat": (
        "avro, protobuf: the column has the type of one schema, and each record is read by the schema that wrote it, "
        "and written by the column's; see [Rows by schemas](../recipes/schemas.md). json-schema: all records are read"
        " by the column's schema. json: JSON by a DDL, or without a schema, to read",
        "bytes",
    ),
    "keyFormat": (
        "avro, protobuf: the column has the type of one schema, and each record is read by the schema that wrote it, "
        "and written by the column's; see [Rows by schemas](../recipes/schemas.md). json-schema: all records are read"
        " by the column's schema. json: JSON by a DDL, or without a schema, to read",
        "bytes",
    ),
    "schemaRegistryUrl": (
        "http(s)://HOST:PORT, several by comma; `schemaRegistry.*` are the registry's other settings, by Confluent's "
        "names. Without a registry all records are bare, of `valueSchema`",
        None,
    ),
    "valueSubject": (
        "whose latest schema's type the column has, or by whose latest or new version it is written. To read several "
        "topics needs this or one of the two below",
        "TOPIC-value",
    ),
    "keySubject": (
        "whose latest schema's type the column has, or by whose latest or new version it is written. To read several "
        "topics needs this or one of the two below",
        "TOPIC-key",
    ),
    "valueSchemaId": (
        "instead: a schema by its id",
        "",
    ),
    "keySchemaId": (
        "instead: a schema by its id",
        "",
    ),
    "valueSchema": (
        "instead: the text of a schema (in JSON; of Protobuf a .proto text; of json DDL, or infer)",
        "",
    ),
    "keySchema": (
        "instead: the text of a schema (in JSON; of Protobuf a .proto text; of json DDL, or infer)",
        "",
    ),
    "valueMessage": (
        "which message of a Protobuf schema the column is, by its full or short name; see [How Protobuf becomes "
        "rows](../explanation/protobuf.md)",
        "the first of the file",
    ),
    "keyMessage": (
        "which message of a Protobuf schema the column is, by its full or short name; see [How Protobuf becomes "
        "rows](../explanation/protobuf.md)",
        "the first of the file",
    ),
    "valueSubjectNameStrategy": (
        "TopicNameStrategy, RecordNameStrategy or TopicRecordNameStrategy: how the subject is called",
        "TopicNameStrategy",
    ),
    "keySubjectNameStrategy": (
        "TopicNameStrategy, RecordNameStrategy or TopicRecordNameStrategy: how the subject is called",
        "TopicNameStrategy",
    ),
    "autoRegisterSchemas": (
        "true: registers the schema under the subject; false: it must be there",
        None,
    ),
    "useLatestVersion": (
        "true: writes by the subject's latest version",
        None,
    ),
    "mode": (
        "PERMISSIVE: a key or value that does not decode is null, instead of what badRecords says, or of an error of "
        "the function",
        "FAILFAST",
    ),
    "validate": (
        "json-schema only: records are checked in full against the schema that wrote them, or before they are sent, "
        "which is slow",
        None,
    ),
    "schemaEvolution": (
        "what a record of a newer version of the subject does: [restart and "
        "fail](../recipes/schemas.md#when-the-schema-changes) end the query, keep (or none) if the query's schema "
        "can't read it",
        None,
    ),
    "includeHeaders": (
        "reads: adds the column headers. Without effect on writes, as with Spark's connector: a column headers is "
        "always written",
        None,
    ),
    "fetchOffset.numRetries": (
        "how often to ask again if latest offsets are smaller than before",
        None,
    ),
    "fetchOffset.retryIntervalMs": (
        "how soon; at least 50 ms pass between two requests",
        None,
    ),
    "kafkaConsumer.pollTimeoutMs": (
        "how long a task waits for records that should be there, all its requests together. If it is longer than "
        "`kafka.request.timeout.ms`, the bound of one request, a task outlives a leader that falls silent and is "
        "replaced",
        "kafka.request.timeout.ms",
    ),
    "estimateRecordBytes": (
        "a stream samples each partition that has records to read once a minute (64 KiB, up to 8 MiB if its batches "
        "are larger), so that `ProgressListener` can report bytes",
        None,
    ),
    "groupIdPrefix": (
        "accepted without effect: reading needs no group",
        None,
    ),
    "commitOffsets": (
        "true: a stream commits its progress as the offsets of `kafka.group.id`, after each micro-batch. Give it a "
        "group that no other application uses",
        "false",
    ),
    "offsetsPath": (
        "offsets of the group as plain files: a folder, or any URI of pyarrow's file systems; needs `commitOffsets` "
        "or `startingOffsets=group`",
        None,
    ),
    "topic": (
        "the topic of all rows; without it the column `topic` names the topic of each row",
        None,
    ),
    "createTopics": (
        "the number of partitions of topics that do not exist, which are then created with the brokers' default "
        "replication (Kafka 2.4 or later). Without it a row for a topic that does not exist is an error within about "
        "a second: the sink, unlike Spark's, does not let the broker create topics",
        None,
    ),
    "deliveryGuarantee": (
        "exactly-once: see [Exactly once](../recipes/exactly-once.md). A batch write needs `writeId`, too; in "
        "`foreachBatch` use "
        "[`spark_klog.write_updates`](../recipes/exactly-once.md#foreachbatch-updates-and-several-outputs)",
        None,
    ),
    "writeId": (
        "exactly-once batch writes only: a name for these rows, of up to 249 characters, by which a second run finds "
        "that they are written",
        None,
    ),
    "writeVersion": (
        "with `writeId`: a number. Versions are written in ascending order, each once; one before the last is refused",
        None,
    ),
    "writePlan": (
        "with `writeVersion`: what the version is made of, such as a hash of its offsets, in up to 249 characters. If"
        " the last version comes again with another one, it is refused (`ReplannedWrite`)",
        None,
    ),
    "transactionalIdPrefix": (
        "exactly-once only: the prefix of its transactional ids, for ACLs. A query keeps its prefix: a restart with "
        "another one is refused, and the error names both",
        None,
    ),
    "decisionTopic": (
        "exactly-once only: the topic of the cluster that keeps the decisions, see [where the decisions "
        "are](../recipes/exactly-once.md#where-the-decisions-are). It is another one than that of the rows. It is "
        "created if it is missing; one that is there must have `cleanup.policy=compact`; its partition 0 is used",
        None,
    ),
}
