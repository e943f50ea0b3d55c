"""Nodes of the shared tree, whose values foreign tools may have written."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, TypeVar

from spark_klog.errors import ConfigError, DecodeError, DirectoryError, ErrorCode
from spark_klog.trees.tree import NodeExists, Tree

_log = logging.getLogger(__name__)
_T = TypeVar("_T")


class TopicRefused(ConfigError):
    """A change of a topic that is not made; `code` is Kafka's error for it."""

    code: ErrorCode


class TopicCollides(TopicRefused):
    """The name differs from another topic's only in '.' and '_', which Kafka's metrics do not distinguish."""

    code = ErrorCode.INVALID_TOPIC_EXCEPTION


class TopicExists(TopicRefused):
    """The topic exists already."""

    code = ErrorCode.TOPIC_ALREADY_EXISTS


class UnknownTopic(TopicRefused):
    """The topic does not exist."""

    code = ErrorCode.UNKNOWN_TOPIC_OR_PARTITION


class InvalidPartitions(TopicRefused):
    """The topic can't have that number of partitions."""

    code = ErrorCode.INVALID_PARTITIONS


class InvalidAssignment(TopicRefused):
    """The partitions can't be assigned to these brokers."""

    code = ErrorCode.INVALID_REPLICA_ASSIGNMENT


def refusal(error: ConfigError | DirectoryError) -> dict[str, Any]:
    """The error fields of a response, for a change of a topic that was not made."""
    code = ErrorCode.INVALID_CONFIG if isinstance(error, ConfigError) else ErrorCode.UNKNOWN_SERVER_ERROR
    return {"error_code": error.code if isinstance(error, TopicRefused) else code, "error_message": str(error)}


def create_node(tree: Tree, path: str, value: bytes, *, ephemeral: bool = False) -> bool:
    """Create a node; False if it exists."""
    try:
        tree.create(path, value, ephemeral=ephemeral)
    except NodeExists:
        return False
    return True


def replace_node(tree: Tree, path: str, before: bytes | None, value: bytes) -> bool:
    """Write a node, or create it if `before` is None; False if its value is no longer `before`."""
    return create_node(tree, path, value) if before is None else tree.swap(path, before, value)


def children_with_values(tree: Tree, path: str) -> list[tuple[str, bytes]]:
    """Name and value of each child; those deleted meanwhile, and those without a value, are left out."""
    names = tree.children(path)
    values = tree.get_many([f"{path}/{name}" for name in names])
    return [(name, value) for name, value in zip(names, values, strict=True) if value is not None]


class NodeDecoder:
    """Decodes values of nodes. Logs an error of a node only if it is not the last one logged for it."""

    def __init__(self) -> None:
        self._logged: dict[str, str] = {}

    def decode(self, parse: Callable[[bytes, str], _T], value: bytes, path: str) -> _T | None:
        """Decode a node's value; None if it does not decode, which is logged."""
        try:
            return parse(value, path)
        except DecodeError as error:
            self.log_error(path, str(error))
            return None

    def log_error(self, path: str, error: str) -> None:
        if self._logged.get(path) != error:
            self._logged[path] = error
            _log.error("%s", error)
