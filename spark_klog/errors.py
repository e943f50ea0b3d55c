"""The protocol's error codes and the one exception tree.

Every exception that this package raises on purpose is a `KlogError`. Bytes from outside either decode or raise
`DecodeError`; an error code in a response becomes a `ProtocolError` that carries the code.
"""

from __future__ import annotations

from enum import Enum, IntEnum


class KlogError(Exception):
    """Root of the tree. If there is a `condition`, the text begins with it, as in Spark's errors: [CONDITION] text."""

    condition: str = ""

    def __str__(self) -> str:
        text = super().__str__()
        return f"[{self.condition}] {text}" if self.condition else text


class DecodeError(KlogError, ValueError):
    """Bytes from outside that violate their format."""


class CorruptBatchError(DecodeError):
    """A record batch whose checksum does not match its bytes."""


class ConfigError(KlogError, ValueError):
    """An option or setting that is unknown, in conflict, or out of its range."""


class PartitionsMismatch(ConfigError):
    """A map of offsets or timestamps that does not name exactly the partitions to read."""

    condition = "KLOG_PARTITIONS_MISMATCH"


class NoOffsetForTimestamp(ConfigError):
    """A partition without a record at or after the starting timestamp."""

    condition = "KLOG_NO_OFFSET_FOR_TIMESTAMP"


class StartAfterEnd(ConfigError):
    """A batch query whose starting offset is after its ending offset."""

    condition = "KLOG_START_OFFSET_AFTER_END_OFFSET"


class ConnectionFailed(KlogError, ConnectionError):
    """No broker could be reached, or a connection broke; safe to retry elsewhere."""


class RequestTimedOut(KlogError, TimeoutError):
    """A broker did not answer, or a partition got no leader, within the configured time."""


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


class OffsetOutOfRange(KlogError):
    """Requested offsets that the partition does not have (any more, or yet).

    `wanted` and `available` are half-open ranges (from, until).
    """

    condition = "KLOG_OFFSET_OUT_OF_RANGE"

    def __init__(self, topic: str, partition: int, wanted: tuple[int, int], available: tuple[int, int]) -> None:
        self.topic = topic
        self.partition = partition
        self.wanted = wanted
        self.available = available
        super().__init__(
            f"offsets [{wanted[0]}, {wanted[1]}) of {topic}-{partition} are not available: "
            f"the log holds [{available[0]}, {available[1]})"
        )

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.topic, self.partition, self.wanted, self.available)


class RecordTooLarge(KlogError):
    """A record batch that is larger than the fetched bytes.

    `size` is the batch's in bytes (0: unknown), `fetched` is the number of bytes that the broker sent.
    """

    condition = "KLOG_RECORD_TOO_LARGE"

    def __init__(self, topic: str, partition: int, offset: int, size: int, fetched: int) -> None:
        self.topic, self.partition, self.offset = topic, partition, offset
        self.size, self.fetched = size, fetched
        super().__init__(
            f"{topic}-{partition} at offset {offset}: the record batch has {size or 'an unknown number of'} bytes, "
            f"{fetched} were fetched; raise fetch.max.bytes and max.partition.fetch.bytes"
        )

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.topic, self.partition, self.offset, self.size, self.fetched)


class DataLossError(KlogError):
    """Records that a query should read are lost, and `failOnDataLoss` is true. `cause` is one of `planning.Lost`'s."""

    def __init__(self, message: str, cause: str = "") -> None:
        super().__init__(message)
        self.condition = "KLOG_DATA_LOSS" + (f".{cause.upper().replace(' ', '_')}" if cause else "")


class ErrorCode(IntEnum):
    """The protocol's error codes (protocol guide, chapter "Error Codes", and the Kafka 4.1 table)."""

    UNKNOWN_SERVER_ERROR = -1
    NONE = 0
    OFFSET_OUT_OF_RANGE = 1
    CORRUPT_MESSAGE = 2
    UNKNOWN_TOPIC_OR_PARTITION = 3
    INVALID_FETCH_SIZE = 4
    LEADER_NOT_AVAILABLE = 5
    NOT_LEADER_OR_FOLLOWER = 6
    REQUEST_TIMED_OUT = 7
    BROKER_NOT_AVAILABLE = 8
    REPLICA_NOT_AVAILABLE = 9
    MESSAGE_TOO_LARGE = 10
    STALE_CONTROLLER_EPOCH = 11
    OFFSET_METADATA_TOO_LARGE = 12
    NETWORK_EXCEPTION = 13
    COORDINATOR_LOAD_IN_PROGRESS = 14
    COORDINATOR_NOT_AVAILABLE = 15
    NOT_COORDINATOR = 16
    INVALID_TOPIC_EXCEPTION = 17
    RECORD_LIST_TOO_LARGE = 18
    NOT_ENOUGH_REPLICAS = 19
    NOT_ENOUGH_REPLICAS_AFTER_APPEND = 20
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
    NOT_CONTROLLER = 41
    INVALID_REQUEST = 42
    UNSUPPORTED_FOR_MESSAGE_FORMAT = 43
    POLICY_VIOLATION = 44
    OUT_OF_ORDER_SEQUENCE_NUMBER = 45
    DUPLICATE_SEQUENCE_NUMBER = 46
    INVALID_PRODUCER_EPOCH = 47
    INVALID_TXN_STATE = 48
    INVALID_PRODUCER_ID_MAPPING = 49
    INVALID_TRANSACTION_TIMEOUT = 50
    CONCURRENT_TRANSACTIONS = 51
    TRANSACTION_COORDINATOR_FENCED = 52
    TRANSACTIONAL_ID_AUTHORIZATION_FAILED = 53
    SECURITY_DISABLED = 54
    OPERATION_NOT_ATTEMPTED = 55
    KAFKA_STORAGE_ERROR = 56
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
    FETCH_SESSION_ID_NOT_FOUND = 70
    INVALID_FETCH_SESSION_EPOCH = 71
    LISTENER_NOT_FOUND = 72
    TOPIC_DELETION_DISABLED = 73
    FENCED_LEADER_EPOCH = 74
    UNKNOWN_LEADER_EPOCH = 75
    UNSUPPORTED_COMPRESSION_TYPE = 76
    STALE_BROKER_EPOCH = 77
    OFFSET_NOT_AVAILABLE = 78
    MEMBER_ID_REQUIRED = 79
    PREFERRED_LEADER_NOT_AVAILABLE = 80
    GROUP_MAX_SIZE_REACHED = 81
    FENCED_INSTANCE_ID = 82
    ELIGIBLE_LEADERS_NOT_AVAILABLE = 83
    ELECTION_NOT_NEEDED = 84
    NO_REASSIGNMENT_IN_PROGRESS = 85
    GROUP_SUBSCRIBED_TO_TOPIC = 86
    INVALID_RECORD = 87
    UNSTABLE_OFFSET_COMMIT = 88
    THROTTLING_QUOTA_EXCEEDED = 89
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
    UNKNOWN_TOPIC_ID = 100
    DUPLICATE_BROKER_REGISTRATION = 101
    BROKER_ID_NOT_REGISTERED = 102
    INCONSISTENT_TOPIC_ID = 103
    INCONSISTENT_CLUSTER_ID = 104
    TRANSACTIONAL_ID_NOT_FOUND = 105
    FETCH_SESSION_TOPIC_ID_ERROR = 106
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


class Remedy(Enum):
    """What a client does about an error code."""

    #: Retry at the same broker, after a pause.
    RETRY = "retry"
    #: Look up the leader, coordinator or controller again and retry there, after a pause.
    REFRESH = "refresh"
    FAIL = "fail"


#: The retriable codes (protocol guide, "Error Codes", column "Retriable"); all others are final.
REMEDIES = {
    ErrorCode.CORRUPT_MESSAGE: Remedy.RETRY,
    ErrorCode.UNKNOWN_TOPIC_OR_PARTITION: Remedy.REFRESH,
    ErrorCode.LEADER_NOT_AVAILABLE: Remedy.REFRESH,
    ErrorCode.NOT_LEADER_OR_FOLLOWER: Remedy.REFRESH,
    ErrorCode.REQUEST_TIMED_OUT: Remedy.RETRY,
    ErrorCode.REPLICA_NOT_AVAILABLE: Remedy.REFRESH,
    ErrorCode.NETWORK_EXCEPTION: Remedy.REFRESH,
    ErrorCode.COORDINATOR_LOAD_IN_PROGRESS: Remedy.RETRY,
    ErrorCode.COORDINATOR_NOT_AVAILABLE: Remedy.REFRESH,
    ErrorCode.NOT_COORDINATOR: Remedy.REFRESH,
    ErrorCode.NOT_ENOUGH_REPLICAS: Remedy.RETRY,
    ErrorCode.NOT_ENOUGH_REPLICAS_AFTER_APPEND: Remedy.RETRY,
    ErrorCode.NOT_CONTROLLER: Remedy.REFRESH,
    ErrorCode.CONCURRENT_TRANSACTIONS: Remedy.RETRY,
    ErrorCode.KAFKA_STORAGE_ERROR: Remedy.REFRESH,
    ErrorCode.FETCH_SESSION_ID_NOT_FOUND: Remedy.RETRY,
    ErrorCode.INVALID_FETCH_SESSION_EPOCH: Remedy.RETRY,
    ErrorCode.LISTENER_NOT_FOUND: Remedy.REFRESH,
    ErrorCode.FENCED_LEADER_EPOCH: Remedy.REFRESH,
    ErrorCode.UNKNOWN_LEADER_EPOCH: Remedy.REFRESH,
    ErrorCode.OFFSET_NOT_AVAILABLE: Remedy.RETRY,
    ErrorCode.PREFERRED_LEADER_NOT_AVAILABLE: Remedy.REFRESH,
    ErrorCode.ELIGIBLE_LEADERS_NOT_AVAILABLE: Remedy.REFRESH,
    ErrorCode.UNSTABLE_OFFSET_COMMIT: Remedy.RETRY,
    ErrorCode.THROTTLING_QUOTA_EXCEEDED: Remedy.RETRY,
    ErrorCode.UNKNOWN_TOPIC_ID: Remedy.REFRESH,
    ErrorCode.INCONSISTENT_TOPIC_ID: Remedy.REFRESH,
    ErrorCode.FETCH_SESSION_TOPIC_ID_ERROR: Remedy.RETRY,
}


class ProtocolError(KlogError):
    """An error code in a broker's response. `what` names the request or the part of it that failed."""

    def __init__(self, code: int, what: str, remedy: Remedy | None = None) -> None:
        self.code = ErrorCode(code) if code in ErrorCode._value2member_map_ else ErrorCode.UNKNOWN_SERVER_ERROR
        self.what = what
        self.remedy = REMEDIES.get(self.code, Remedy.FAIL) if remedy is None else remedy
        name = self.code.name if self.code == code else f"unknown code {code}"
        super().__init__(f"{what}: {name} ({code})")

    @property
    def retriable(self) -> bool:
        """Whether another attempt may succeed, see `remedy`."""
        return self.remedy is not Remedy.FAIL

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (int(self.code), self.what, self.remedy)
