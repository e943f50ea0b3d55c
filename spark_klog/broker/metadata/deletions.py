"""Topics that are being deleted: their nodes stay until each live broker has dropped them.

A topic whose nodes were removed at once could be created again while a broker has not heard of it. A leader would
append the new topic's records to the old log, acknowledge them, and drop them with the log; the coordinator of a group
would drop offsets that were committed for the new topic.

1. A request in the tree names the topic's id. A tool's has none: the controller adds the id.
2. Each broker that reads the request drops the topic, and writes its own id into the request.
3. When all live ones have, the controller, or the broker that was asked if it waits for no other, removes the nodes.

Source: Kafka keeps a topic's nodes likewise until all live replicas are deleted (`TopicDeletionManager`).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from uuid import UUID

from spark_klog.broker.metadata.errors import UnknownTopic
from spark_klog.broker.metadata.nodes import NodeDecoder, children_with_values, create_node, replace_node
from spark_klog.directories import paths
from spark_klog.directories.paths import DeletionRequest
from spark_klog.directories.trees.tree import Tree

_log = logging.getLogger(__name__)
_NONE = DeletionRequest(None, frozenset())


class Deletions:
    """Deletions as one broker sees them. Methods block, and one runs at a time.

    `pending` is read in another thread: it is replaced, never changed.
    """

    def __init__(self, tree: Tree, decoder: NodeDecoder, broker_id: int) -> None:
        self._tree, self._decoder, self._broker_id = tree, decoder, broker_id
        #: Ids, by name, of the topics that are being deleted, and that this broker serves no more.
        self.pending: Mapping[str, UUID] = {}
        #: Topics whose deletion is requested, with the id that the request names, None if it has none.
        self.requested: Mapping[str, UUID | None] = {}

    def read(self) -> None:
        """Read the requests again. Then read the topics, and give them to `match`."""
        requests = children_with_values(self._tree, paths.DELETE_TOPICS_PATH)
        self.requested = {name: self._parse(name, value).topic_id for name, value in requests}

    def match(self, topic_ids: Mapping[str, UUID]) -> None:
        """Find the pending topics among those that were in the tree after `read`, given by name and id."""
        self.pending = {
            name: topic_id
            for name, topic_id in self.requested.items()
            if topic_id is not None and topic_ids.get(name) == topic_id
        }

    def request(self, name: str, topic_id: UUID | None = None, known_id: UUID | None = None) -> UUID | None:
        """Ask for the deletion of the topic that has the name now; its id, None if it is gone or needed no request.

        `known_id` is the id by which brokers know the topic: a tool that altered it since has removed the id. Raises
        `UnknownTopic` if `topic_id` is given and the topic has another id by now.
        """
        path = paths.delete_topic_path(name)
        while True:
            value, found = self._topic(name)
            now = None if found is None else found[1]
            if topic_id is not None and (found is None or now not in (None, topic_id)):
                raise UnknownTopic(f"topic {name} is no longer the one of id {topic_id}")
            request = self._tree.get(path)
            if found is not None and now is None and known_id is not None and self._has_states(name):
                assert value is not None
                self._tree.swap(paths.topic_path(name), value, paths.topic_payload(found[0], known_id))
            elif now is None:  # no request can tell it from a later topic
                if self.remove(name, value, request):
                    return None
            elif self._parse(name, request).topic_id == now or replace_node(
                self._tree, path, request, paths.deletion_payload(now, ())
            ):
                return now

    def add(self, name: str, topic_id: UUID) -> None:
        """Note a deletion that was asked for here, without reading all requests again."""
        self.pending = {**self.pending, name: topic_id}

    def claim(self, name: str) -> None:
        """The controller's part for a request that is not pending: add the topic's id, or remove what is left."""
        path = paths.delete_topic_path(name)
        value, found = self._topic(name)
        request = self._tree.get(path)
        if request is None:
            return  # an earlier controller has done it
        now, asked = None if found is None else found[1], self._parse(name, request).topic_id
        if found is None or (now is None and asked is None):
            _log.info("deleting topic %s, as requested by %s", name, path)
            self.remove(name, value, request)  # if its node has changed, the next round deletes it
        elif now is None:
            return  # a tool has just created it; once it has an id, the request is seen to be for an earlier topic
        elif asked is None:
            _log.info("deleting topic %s, as requested by %s", name, path)
            self._tree.swap(path, request, paths.deletion_payload(now, ()))
        elif asked != now:
            self._tree.delete_if(path, request)  # its topic is gone, this is a later one

    def acknowledge(self) -> None:
        """Tell the other brokers that this one has dropped the pending topics."""
        for name, topic_id in self.pending.items():
            path = paths.delete_topic_path(name)
            while True:
                value = self._tree.get(path)
                request = self._parse(name, value)
                if value is None or request.topic_id != topic_id or self._broker_id in request.dropped:
                    break
                if self._tree.swap(path, value, paths.deletion_payload(topic_id, {*request.dropped, self._broker_id})):
                    break

    def finish(self, name: str) -> bool:
        """Remove the nodes of a pending topic, unless another live broker may still know it; whether it is over."""
        topic_id, path = self.pending[name], paths.delete_topic_path(name)
        while True:
            value, found = self._topic(name)
            request = self._tree.get(path)
            asked = self._parse(name, request)
            if found is not None and found[1] not in (None, topic_id):  # it is gone, this is a later one
                if request is not None and asked.topic_id == topic_id:
                    self._tree.delete_if(path, request)
                break
            if found is not None and asked.topic_id != topic_id:
                break  # the request was withdrawn, by hand
            if value is not None and self._others(asked):
                return False
            if self.remove(name, value, request):
                break
        self.pending = {other: pending for other, pending in self.pending.items() if other != name}
        return True

    def waits_for(self, name: str) -> list[int] | None:
        """The live brokers, other than this one, that have not dropped a topic; None if its node is gone."""
        if self._tree.get(paths.topic_path(name)) is None:
            return None
        return self._others(self._parse(name, self._tree.get(paths.delete_topic_path(name))))

    def _others(self, request: DeletionRequest) -> list[int]:
        """The live brokers, other than this one, that a request does not name.

        Call it after the request was read: a broker registers before it reads the requests, so that one which is not
        live yet will see this one.
        """
        live = {int(number) for number in self._tree.children(paths.BROKER_IDS_PATH) if number.isdecimal()}
        return sorted(live - request.dropped - {self._broker_id})

    def remove(self, name: str, value: bytes | None, request: bytes | None) -> bool:
        """Remove a topic's nodes, the request last; missing nodes are no error.

        `value` and `request` are what the nodes were found with, None if there was none. If the topic's node has
        another value by now, nothing is removed, and the result is False.
        """
        path, config_path = paths.topic_path(name), paths.topic_config_path(name)
        if value is not None and not self._tree.delete_if(path, value):
            return False
        config = self._tree.get(config_path)
        is_gone = config is not None and self._tree.get(path) is None and self._tree.delete_if(config_path, config)
        if config is not None and is_gone and self._tree.get(path) is not None:
            create_node(self._tree, config_path, config)  # another broker has created the topic again meanwhile
        if request is not None:
            self._tree.delete_if(paths.delete_topic_path(name), request)
        return True

    def _topic(self, name: str) -> tuple[bytes | None, tuple[dict[int, list[int]], UUID | None] | None]:
        """The value of a topic's node, and what it says; None if there is none, or it does not decode."""
        path = paths.topic_path(name)
        value = self._tree.get(path)
        return value, self._decoder.decode(paths.parse_topic, value, path) if value else None

    def _has_states(self, name: str) -> bool:
        return bool(self._tree.children(paths.partitions_path(name)))

    def _parse(self, name: str, request: bytes | None) -> DeletionRequest:
        """A request that does not decode asks by the name, as a tool's does."""
        path = paths.delete_topic_path(name)
        return (self._decoder.decode(paths.parse_deletion, request, path) if request else None) or _NONE
