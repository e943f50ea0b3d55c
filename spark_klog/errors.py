"""The protocol's error codes, which of them a client retries, and the exceptions of this package.

Every exception that this package raises on purpose is a `KlogError`. Bytes from outside either decode or raise
`DecodeError`; an error code in a response becomes a `ProtocolError` that carries the code.
"""

from __future__ import annotations

import concurrent.futures
from collections.abc import Mapping
from enum import Enum, IntEnum
from inspect import signature
from typing import Any
from uuid import UUID


class Remedy(Enum):
    """What a client does about an error code."""

    #: Retry at the same broker, after a pause.
    RETRY = "retry"
    #: Look up the leader, coordinator or controller again and retry there, after a pause.
    REFRESH = "refresh"
    FAIL = "fail"


class ErrorCode(IntEnum):
    """The protocol's error codes (protocol guide, chapter "Error Codes", and the Kafka 4.4 table)."""

    _value_: int
    #: What a client does about it: RETRY or REFRESH for those that are retriable by the guide, all others are final.
    remedy: Remedy

    def __new__(cls, code: int, remedy: Remedy = Remedy.FAIL) -> ErrorCode:
        member = int.__new__(cls, code)
        member._value_, member.remedy = code, remedy
        return member

    UNKNOWN_SERVER_ERROR = -1
    NONE = 0
    OFFSET_OUT_OF_RANGE = 1
    CORRUPT_MESSAGE = 2, Remedy.RETRY
    UNKNOWN_TOPIC_OR_PARTITION = 3, Remedy.REFRESH
    INVALID_FETCH_SIZE = 4
    LEADER_NOT_AVAILABLE = 5, Remedy.REFRESH
    NOT_LEADER_OR_FOLLOWER = 6, Remedy.REFRESH
    REQUEST_TIMED_OUT = 7, Remedy.RETRY
    BROKER_NOT_AVAILABLE = 8
    REPLICA_NOT_AVAILABLE = 9, Remedy.REFRESH
    MESSAGE_TOO_LARGE = 10
    STALE_CONTROLLER_EPOCH = 11
    OFFSET_METADATA_TOO_LARGE = 12
    NETWORK_EXCEPTION = 13, Remedy.REFRESH
    COORDINATOR_LOAD_IN_PROGRESS = 14, Remedy.RETRY
    COORDINATOR_NOT_AVAILABLE = 15, Remedy.REFRESH
    NOT_COORDINATOR = 16, Remedy.REFRESH
    INVALID_TOPIC_EXCEPTION = 17
    RECORD_LIST_TOO_LARGE = 18
    NOT_ENOUGH_REPLICAS = 19, Remedy.RETRY
    NOT_ENOUGH_REPLICAS_AFTER_APPEND = 20, Remedy.RETRY
    INVALID_REQUIRED_ACKS = 21
    ILLEGAL_GENERATION = 22
    INCONSISTENT_GROUP_PROTOCOL = 23
    INVALID_GROUP_ID = 24
    UNKNOWN_MEMBER_ID = 25
    INVALID_SESSION_TIMEOUT = 26
    REBALANCE_IN_PROGRESS = 27
    INVALID_COMMIT_OFFSET_SIZE = 28
    TOPIC_AUTHORIZATION_FAILED = 29
    GROUP_AUTHORIZATION_FAILED = 30
    CLUSTER_AUTHORIZATION_FAILED = 31
    INVALID_TIMESTAMP = 32
    UNSUPPORTED_SASL_MECHANISM = 33
    ILLEGAL_SASL_STATE = 34
    UNSUPPORTED_VERSION = 35
    TOPIC_ALREADY_EXISTS = 36
    INVALID_PARTITIONS = 37
    INVALID_REPLICATION_FACTOR = 38
    INVALID_REPLICA_ASSIGNMENT = 39
    INVALID_CONFIG = 40
    NOT_CONTROLLER = 41, Remedy.REFRESH
    INVALID_REQUEST = 42
    UNSUPPORTED_FOR_MESSAGE_FORMAT = 43
    POLICY_VIOLATION = 44
    OUT_OF_ORDER_SEQUENCE_NUMBER = 45
    DUPLICATE_SEQUENCE_NUMBER = 46
    INVALID_PRODUCER_EPOCH = 47
    INVALID_TXN_STATE = 48
    INVALID_PRODUCER_ID_MAPPING = 49
    INVALID_TRANSACTION_TIMEOUT = 50
    CONCURRENT_TRANSACTIONS = 51, Remedy.RETRY
    TRANSACTION_COORDINATOR_FENCED = 52
    TRANSACTIONAL_ID_AUTHORIZATION_FAILED = 53
    SECURITY_DISABLED = 54
    OPERATION_NOT_ATTEMPTED = 55
    KAFKA_STORAGE_ERROR = 56, Remedy.REFRESH
    LOG_DIR_NOT_FOUND = 57
    SASL_AUTHENTICATION_FAILED = 58
    UNKNOWN_PRODUCER_ID = 59
    REASSIGNMENT_IN_PROGRESS = 60
    DELEGATION_TOKEN_AUTH_DISABLED = 61
    DELEGATION_TOKEN_NOT_FOUND = 62
    DELEGATION_TOKEN_OWNER_MISMATCH = 63
    DELEGATION_TOKEN_REQUEST_NOT_ALLOWED = 64
    DELEGATION_TOKEN_AUTHORIZATION_FAILED = 65
    DELEGATION_TOKEN_EXPIRED = 66
    INVALID_PRINCIPAL_TYPE = 67
    NON_EMPTY_GROUP = 68
    GROUP_ID_NOT_FOUND = 69
    FETCH_SESSION_ID_NOT_FOUND = 70, Remedy.RETRY
    INVALID_FETCH_SESSION_EPOCH = 71, Remedy.RETRY
    LISTENER_NOT_FOUND = 72, Remedy.REFRESH
    TOPIC_DELETION_DISABLED = 73
    FENCED_LEADER_EPOCH = 74, Remedy.REFRESH
    UNKNOWN_LEADER_EPOCH = 75, Remedy.REFRESH
    UNSUPPORTED_COMPRESSION_TYPE = 76
    STALE_BROKER_EPOCH = 77
    OFFSET_NOT_AVAILABLE = 78, Remedy.RETRY
    MEMBER_ID_REQUIRED = 79
    PREFERRED_LEADER_NOT_AVAILABLE = 80, Remedy.REFRESH
    GROUP_MAX_SIZE_REACHED = 81
    FENCED_INSTANCE_ID = 82
    ELIGIBLE_LEADERS_NOT_AVAILABLE = 83, Remedy.REFRESH
    ELECTION_NOT_NEEDED = 84
    NO_REASSIGNMENT_IN_PROGRESS = 85
    GROUP_SUBSCRIBED_TO_TOPIC = 86
    INVALID_RECORD = 87
    UNSTABLE_OFFSET_COMMIT = 88, Remedy.RETRY
    THROTTLING_QUOTA_EXCEEDED = 89, Remedy.RETRY
    PRODUCER_FENCED = 90
    RESOURCE_NOT_FOUND = 91
    DUPLICATE_RESOURCE = 92
    UNACCEPTABLE_CREDENTIAL = 93
    INCONSISTENT_VOTER_SET = 94
    INVALID_UPDATE_VERSION = 95
    FEATURE_UPDATE_FAILED = 96
    PRINCIPAL_DESERIALIZATION_FAILURE = 97
    SNAPSHOT_NOT_FOUND = 98
    POSITION_OUT_OF_RANGE = 99
    UNKNOWN_TOPIC_ID = 100, Remedy.REFRESH
    DUPLICATE_BROKER_REGISTRATION = 101
    BROKER_ID_NOT_REGISTERED = 102
    INCONSISTENT_TOPIC_ID = 103, Remedy.REFRESH
    INCONSISTENT_CLUSTER_ID = 104
    TRANSACTIONAL_ID_NOT_FOUND = 105
    FETCH_SESSION_TOPIC_ID_ERROR = 106, Remedy.RETRY
    INELIGIBLE_REPLICA = 107
    NEW_LEADER_ELECTED = 108
    OFFSET_MOVED_TO_TIERED_STORAGE = 109
    FENCED_MEMBER_EPOCH = 110
    UNRELEASED_INSTANCE_ID = 111
    UNSUPPORTED_ASSIGNOR = 112
    STALE_MEMBER_EPOCH = 113
    MISMATCHED_ENDPOINT_TYPE = 114
    UNSUPPORTED_ENDPOINT_TYPE = 115
    UNKNOWN_CONTROLLER_ID = 116
    UNKNOWN_SUBSCRIPTION_ID = 117
    TELEMETRY_TOO_LARGE = 118
    INVALID_REGISTRATION = 119
    TRANSACTION_ABORTABLE = 120
    INVALID_REGULAR_EXPRESSION = 128
    REBOOTSTRAP_REQUIRED = 129
    GROUP_DELETION_FAILED = 134


class KlogError(Exception):
    """Root of the tree. If there is a `condition`, the text begins with it, as in Spark's errors: [CONDITION] text."""

    condition: str = ""

    def __str__(self) -> str:
        text = super().__str__()
        return f"[{self.condition}] {text}" if self.condition else text


class ErrorWithFields(KlogError):
    """An error that keeps each parameter of its constructor in an attribute of that name; so it can be pickled."""

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), tuple(getattr(self, name) for name in signature(type(self)).parameters)


class DecodeError(KlogError, ValueError):
    """Bytes from outside that violate their format."""


class EncodeError(KlogError, ValueError):
    """A value that the wire format can't hold: a string of more than 32,767 bytes, a number beyond its field."""


class FrameTooLarge(ErrorWithFields, DecodeError):
    """A request or response of `size` bytes, which is above the `limit`; `where` names it, if a broker has sent it."""

    def __init__(self, size: int, limit: int, where: str = "") -> None:
        self.size, self.limit, self.where = size, limit, where
        what = f"{where}: response" if where else "frame"
        advice = ": raise fetch.max.bytes to half of it" if where else ": not the Kafka protocol, or a wrong port?"
        super().__init__(f"{what} of {size} bytes, the limit is {limit}{advice}")


class SchemaError(KlogError, ValueError):
    """A schema that is invalid or not supported, or two that do not fit: names the types, and the field they are of."""


class SchemaTimedOut(KlogError, TimeoutError):
    """A schema was not compiled in time: the machine is busy, or the schema is meant to take for ever. Try again."""


class SchemaChanged(ErrorWithFields):
    """A query met a record of a newer `version` of a `subject` than `read`, the one that it reads by, and ended so that
    the next start reads it."""

    def __init__(self, subject: str, version: int, read: int, remedy: str) -> None:
        self.subject, self.version, self.read, self.remedy = subject, version, read, remedy
        super().__init__(
            f"subject {subject} has records of version {version} now, and the query reads by version {read}: {remedy}"
        )


class RegistryError(ErrorWithFields):
    """A schema registry refuses a request: with an HTTP `status`, and an error `code` of Confluent's API, such as 409
    for a schema that is not compatible, 40401 for a subject that is not there."""

    def __init__(self, text: str, status: int, code: int) -> None:
        self.text, self.status, self.code = text, status, code
        super().__init__(text)


class CorruptBatchError(DecodeError):
    """A record batch whose checksum does not match its bytes."""


class RecordDeserializationError(ErrorWithFields, DecodeError):
    """A record whose `column`, "key" or "value", does not deserialize, with its bytes as they are (KIP-334, KIP-1036).

    `key` and `value` are None if they are null, or were not read, and `timestamp` (ms) is -1.
    """

    def __init__(
        self,
        topic: str,
        partition: int,
        offset: int,
        column: str,
        reason: str,
        key: bytes | None = None,
        value: bytes | None = None,
        headers: tuple[tuple[str, bytes | None], ...] = (),
        timestamp: int = -1,
    ) -> None:
        self.topic, self.partition, self.offset, self.timestamp = topic, partition, offset, timestamp
        self.column, self.reason = column, reason
        self.key, self.value, self.headers = key, value, headers
        super().__init__(
            f"{topic}-{partition}: the record at offset {offset} has a {column} that does not decode: {reason}"
        )


class ConfigError(KlogError, ValueError):
    """An option or setting that is unknown, in conflict, or out of its range."""


class MissingPackage(ConfigError, ImportError):
    """A package of an extra that is not installed, or can't be imported; the message has the command that mends it."""


class PartitionsMismatch(ConfigError):
    """A map of offsets or timestamps that does not name exactly the partitions to read."""

    condition = "KLOG_PARTITIONS_MISMATCH"


class NoOffsetForTimestamp(ConfigError):
    """A partition without a record at or after the starting timestamp."""

    condition = "KLOG_NO_OFFSET_FOR_TIMESTAMP"


class StartAfterEnd(ConfigError):
    """A batch query whose starting offset is after its ending offset."""

    condition = "KLOG_START_OFFSET_AFTER_END_OFFSET"


class InvalidRecords(ErrorWithFields, ConfigError):
    """Arrow rows that can't be records. `column` is the column's name, `row` the row's number from 0, None for all."""

    def __init__(self, text: str, column: str, row: int | None = None) -> None:
        self.text, self.column, self.row = text, column, row
        super().__init__(text)


class ConnectionFailed(KlogError, ConnectionError):
    """No broker could be reached, or a connection broke; safe to retry elsewhere."""

    #: Whether the request was not sent, so that the broker can't have acted on it.
    is_unsent = False
    #: Whether brokers were asked, and the time was over before an answer of one of them.
    is_late = False


class RequestTimedOut(KlogError, TimeoutError):
    """A broker did not answer, or a partition got no leader, within the configured time."""

    #: As of `ConnectionFailed`.
    is_unsent, is_late = False, True


class HandshakeInterrupted(ConnectionFailed):
    """The broker closed a connection before it was of use: often both sides expect another security protocol."""

    #: Whether a broker had answered ApiVersions; else it may be a proxy whose broker is not up yet.
    is_by_broker = False


class AuthenticationError(KlogError):
    """The broker refuses who this client is, or this client the broker. Another attempt would not help."""

    condition = "KLOG_AUTHENTICATION_FAILED"


class TlsError(AuthenticationError):
    """A certificate or another part of a TLS handshake was refused, by the client or the broker."""

    condition = "KLOG_AUTHENTICATION_FAILED.TLS"


class SaslError(AuthenticationError):
    """A SASL mechanism, or the credentials for it, were refused."""

    condition = "KLOG_AUTHENTICATION_FAILED.SASL"


class UnsupportedVersionError(KlogError):
    """The peer and this package share no version of an API."""


class DataDirectoryError(KlogError):
    """A data directory of another kind or another broker, or one that can't be read or written."""


class LogDirLocked(KlogError):
    """The data directory is in use by another broker."""


class LogCorrupted(KlogError):
    """Damaged log files that recovery must not repair by itself."""


class LogRetired(KlogError, OSError):
    """A write to a log that was deleted, set aside or closed; a new log may have its name."""


class DirectoryError(KlogError):
    """A znode, or the tree that holds it, could not be read or written."""


class OffsetOutOfRange(ErrorWithFields):
    """Requested offsets that the partition does not have (any more, or yet).

    `requested` and `available` are half-open ranges (from, until).
    """

    condition = "KLOG_OFFSET_OUT_OF_RANGE"

    def __init__(self, topic: str, partition: int, requested: tuple[int, int], available: tuple[int, int]) -> None:
        self.topic, self.partition = topic, partition
        self.requested, self.available = requested, available
        is_one = requested[1] <= requested[0]  # a position, before anything is read from there
        what = f"offset {requested[0]}" if is_one else f"offsets [{requested[0]}, {requested[1]})"
        super().__init__(
            f"{what} of {topic}-{partition} {'is' if is_one else 'are'} not available: "
            f"the log holds [{available[0]}, {available[1]})"
        )


class LogTruncated(ErrorWithFields):
    """A position whose records a new leader does not have (KIP-320): the former leader had more, and they are lost.

    `position` was reached by a record of leader epoch `epoch`; the logs agree up to `divergence` at most. The next
    record to read is at `divergence`.
    """

    condition = "KLOG_LOG_TRUNCATED"

    def __init__(self, topic: str, partition: int, position: int, epoch: int, divergence: int) -> None:
        self.topic, self.partition, self.position = topic, partition, position
        self.epoch, self.divergence = epoch, divergence
        #: What happened, without what to do.
        self.what = (
            f"{topic}-{partition} was truncated: records before offset {position} were read in leader epoch {epoch}, "
            f"but the leader's log diverges at offset {divergence}"
        )
        super().__init__(f"{self.what}: seek to {divergence} to go on")


class TopicRecreated(ErrorWithFields):
    """A topic that was deleted, and created again, while it was read: offsets read before are of the former topic.

    `former_id` and `topic_id` are the topics' ids.
    """

    condition = "KLOG_TOPIC_RECREATED"

    def __init__(self, topic: str, former_id: UUID, topic_id: UUID) -> None:
        self.topic, self.former_id, self.topic_id = topic, former_id, topic_id
        #: What happened, without what to do.
        self.what = f"topic {topic} was deleted and created again (its id was {former_id}, and is {topic_id})"
        super().__init__(f"{self.what}: seek in its partitions to read the new topic")


class RecordTooLarge(ErrorWithFields):
    """A record batch that is larger than the fetched bytes.

    `size` is the batch's in bytes (0: unknown), `fetched` is the number of bytes that the broker sent, `setting` names
    what limits a fetch.
    """

    condition = "KLOG_RECORD_TOO_LARGE"

    def __init__(
        self,
        topic: str,
        partition: int,
        offset: int,
        size: int,
        fetched: int,
        setting: str = "fetch.max.bytes and max.partition.fetch.bytes",
    ) -> None:
        self.topic, self.partition, self.offset = topic, partition, offset
        self.size, self.fetched, self.setting = size, fetched, setting
        super().__init__(
            f"{topic}-{partition} at offset {offset}: the record batch has {size or 'an unknown number of'} bytes, "
            f"{fetched} were fetched; raise {setting}"
        )


class RecordTooLargeToSend(ErrorWithFields):
    """A record that was not added to a producer, as it is larger than max.request.size or buffer.memory.

    `size` and `limit` are bytes of a batch with this record alone before compression; `setting` names the limit, `row`
    is the number of an Arrow row, None for a record of `send`.
    """

    def __init__(
        self, topic: str, size: int, limit: int, setting: str = "max.request.size", row: int | None = None
    ) -> None:
        self.topic, self.size, self.limit, self.setting, self.row = topic, size, limit, setting, row
        what = f"a record for {topic}" if row is None else f"row {row}, a record for {topic},"
        super().__init__(
            f"{what} takes {size} bytes, {setting}={limit}: it is not sent; make it smaller, or raise "
            f"{setting} and, if need be, the topic's max.message.bytes"
        )


class NoOffsetForPartition(ErrorWithFields):
    """A partition without a position and without a committed offset, with auto.offset.reset=none."""

    def __init__(self, topic: str, partition: int) -> None:
        self.topic, self.partition = topic, partition
        super().__init__(
            f"{topic}-{partition} has no position and no committed offset, and auto.offset.reset is none: "
            f"seek to an offset, or set auto.offset.reset"
        )


class CommitFailed(KlogError):
    """The group has rebalanced: offsets were not committed, and the partitions may be another member's by now."""


class MemberFenced(KlogError):
    """Another member of the group has joined with the same group.instance.id."""


class WokenUp(KlogError):
    """`Consumer.wakeup` ended a call that waits."""


class ConsumerClosed(KlogError):
    """A call to a consumer that is closed, or was closed meanwhile by another thread."""


class ConsumerTimeout(KlogError):
    """A stream of a ConsumerConnector had no message for consumer.timeout.ms. Iterate again to go on."""


class RebalanceFailed(KlogError):
    """A member of a group in ZooKeeper could not take over its partitions in time: other members still own them."""


class ConcurrentUse(KlogError):
    """A call to a consumer that another thread uses, to a producer within one of its calls (a signal handler), or to a
    client of `spark_klog.aio` in another event loop than its own; a second task, or a listener, that reads from one.
    """


class CallInterrupted(KlogError):
    """An interrupt (Ctrl-C, what a signal handler raises) has ended an earlier call halfway: close this client."""


class ReaderClosed(KlogError, ValueError):
    """A call to a reader of `spark_klog.read` that is closed, or that has failed."""


class ProducerClosed(KlogError):
    """A call to a producer that is closed."""


class AdminClosed(KlogError):
    """A call to an admin client that is closed."""


class ForkedClient(KlogError):
    """A call to a client's connections in a process that was forked since they were made."""


class ItemsFailed(ErrorWithFields):
    """Some items of a call failed: `failures` has their errors by item, `count` is the number of all items."""

    def __init__(self, failures: Mapping[Any, KlogError], count: int) -> None:
        self.failures, self.count = dict(failures), count
        shown = "; ".join(str(error) for error in list(failures.values())[:5])
        super().__init__(f"{len(failures)} of {count} items failed: {shown}{'; ...' if len(failures) > 5 else ''}")


class BufferExhausted(KlogError):
    """Records take all of buffer.memory, and none left it within max.block.ms: the record was not added."""


class QueueFull(KlogError):
    """A message was dropped: the queue of an asynchronous classic producer is full (queue.size)."""


class DeliveryPending(ErrorWithFields, concurrent.futures.TimeoutError):
    """A record that was neither confirmed nor failed when `Delivery.result` had waited `timeout` seconds."""

    def __init__(self, topic: str, partition: int, timeout: float) -> None:
        self.topic, self.partition, self.timeout = topic, partition, timeout
        super().__init__(
            f"the record for {topic}-{partition} was not confirmed within {timeout:g} s, the timeout of this call: it "
            "may still be written before delivery.timeout.ms is over; wait longer, or flush the producer"
        )


class TransactionAborted(KlogError):
    """A record that was not written, because its transaction was aborted."""


class ProducerFenced(ErrorWithFields):
    """Another producer with the same transactional.id has begun since: this one can write nothing any more."""

    def __init__(self, transactional_id: str) -> None:
        self.transactional_id = transactional_id
        super().__init__(
            f"another producer with transactional.id={transactional_id} has begun, or the transaction was aborted, as "
            "klog transactions abort and transaction.timeout.ms do: close this producer, make a new one and call "
            "init_transactions"
        )


class MirrorFenced(ErrorWithFields):
    """Another process of a mirror has begun since: this one has committed what it has copied, and ends."""

    def __init__(self, name: str) -> None:
        self.name = name
        super().__init__(
            f"another process of the mirror {name} has begun, and goes on from here: stop one of the two, or give one "
            "another name (--name)"
        )


class InvalidTransactionState(ErrorWithFields):
    """A call that a producer's transaction does not allow in its present state."""

    def __init__(self, call: str, transactional_id: str, state: str) -> None:
        self.call, self.transactional_id, self.state = call, transactional_id, state
        nexts = {
            "new": "call init_transactions first",
            "ready": "call begin_transaction first",
            "open": "end the transaction first",
            "failed": "call abort_transaction",
            "committing": "call commit_transaction again: the coordinator may have decided",
            "aborting": "call abort_transaction again",
        }
        super().__init__(f"{call}: the transaction of {transactional_id} is {state}; {nexts.get(state, '')}")


class DataLossError(KlogError):
    """Records that a query should read are lost, and `failOnDataLoss` is true.

    The condition ends with the cause, if all have the same: .RETENTION, .TRUNCATED, .RECREATED, .DELETED,
    .NOT_THERE_YET, .UNSUBSCRIBED. `cause` is one of `spark.read.ranges`.
    """

    condition = "KLOG_DATA_LOSS"

    def __init__(self, message: str, cause: str = "") -> None:
        super().__init__(message)
        if cause:
            self.condition += f".{cause.upper().replace(' ', '_')}"


class LoadError(KlogError):
    """A load (`spark_klog.load`) that can't go on: its output, its runs' files, or the records to load."""


class ProtocolError(ErrorWithFields):
    """An error code in a broker's response. `what` names the request or the part of it that failed, `advice` says
    what the user may do.
    """

    def __init__(self, code: int, what: str, remedy: Remedy | None = None, advice: str = "") -> None:
        self.code = ErrorCode(code) if code in ErrorCode._value2member_map_ else ErrorCode.UNKNOWN_SERVER_ERROR
        self.what = what
        self.remedy = self.code.remedy if remedy is None else remedy
        name = self.code.name if self.code == code else f"unknown code {code}"
        self.advice = advice
        super().__init__(f"{what}: {name} ({code})" + (f": {advice}" if advice else ""))

    @property
    def retriable(self) -> bool:
        """Whether another attempt may succeed, see `remedy`."""
        return self.remedy is not Remedy.FAIL


class TransactionAbortable(ProtocolError):
    """TRANSACTION_ABORTABLE (KIP-890): the transaction can only be aborted, and done again by the same producer."""


def is_retriable(error: object) -> bool:
    """Whether another attempt may succeed: there was no connection, no response in time, or the code is retriable."""
    if isinstance(error, ProtocolError):
        return error.retriable
    return isinstance(error, ConnectionFailed | RequestTimedOut)
