"""Replacements for transaction errors that older clients do not know, by API and version.

Sources: KIP-588 (PRODUCER_FENCED), KIP-890 (TRANSACTION_ABORTABLE), KAFKA-7296 (COORDINATOR_LOAD_IN_PROGRESS is fatal
for producers older than 2.0).
"""

from __future__ import annotations

from spark_klog.errors import ErrorCode
from spark_klog.protocol import apis
from spark_klog.protocol.schema import Api

_FENCED = ErrorCode.PRODUCER_FENCED, ErrorCode.INVALID_PRODUCER_EPOCH
_ABORTABLE = ErrorCode.TRANSACTION_ABORTABLE, ErrorCode.INVALID_TXN_STATE
_LOADING = ErrorCode.COORDINATOR_LOAD_IN_PROGRESS, ErrorCode.COORDINATOR_NOT_AVAILABLE
#: By API and error: the first version that knows the error, and its replacement in earlier versions.
_FIRST: dict[tuple[int, ErrorCode], tuple[int, ErrorCode]] = {
    (api.key, code): (version, instead)
    for (code, instead), api, version in (
        (_FENCED, apis.ADD_PARTITIONS_TO_TXN, 2),
        (_FENCED, apis.ADD_OFFSETS_TO_TXN, 2),
        (_FENCED, apis.END_TXN, 2),
        (_FENCED, apis.INIT_PRODUCER_ID, 4),
        (_ABORTABLE, apis.PRODUCE, 11),
        (_ABORTABLE, apis.ADD_PARTITIONS_TO_TXN, 5),
        (_ABORTABLE, apis.TXN_OFFSET_COMMIT, 4),
        (_LOADING, apis.TXN_OFFSET_COMMIT, 2),
    )
}


def as_known(api: Api, version: int, code: ErrorCode) -> ErrorCode:
    """The error to send to a client of this version."""
    first, instead = _FIRST.get((api.key, code), (0, code))
    return instead if version < first else code
