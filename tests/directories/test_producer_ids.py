"""Blocks of producer ids, claimed in every kind of tree."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest

from spark_klog.broker.transactions.coordinator import claim_in_file, claim_in_tree
from spark_klog.errors import DecodeError, DirectoryError
from spark_klog.trees.paths import PRODUCER_IDS_PATH
from spark_klog.trees.tree import Tree
from tests.support.trees import Open


def test_brokers_that_claim_at_once_get_blocks_of_their_own(kind: str, open_another: Open) -> None:
    claimed: list[range] = []

    def claim(tree: Tree, broker_id: int) -> None:
        for _ in range(5):
            claimed.append(claim_in_tree(tree, broker_id, 0))

    trees = [open_another() for _ in range(3)]
    if kind.startswith("arrow"):  # several of these trees can't exclude each other's writers
        trees = trees[:1] * 3
    threads = [threading.Thread(target=claim, args=(tree, at)) for at, tree in enumerate(trees)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(block[0] for block in claimed) == list(range(0, 15_000, 1000))
    assert {len(block) for block in claimed} == {1000}


def test_the_node_is_kafkas(open_another: Open) -> None:
    """The node is as in `ProducerIdBlockZNode` of Kafka 3.9; Kafka creates it without a value at its first start."""
    tree = open_another()
    tree.create(PRODUCER_IDS_PATH, b"")
    assert claim_in_tree(tree, 3, 0) == range(1000)
    expected = {"version": 1, "broker": 3, "block_start": "0", "block_end": "999"}
    assert json.loads(tree.get(PRODUCER_IDS_PATH) or b"") == expected
    assert claim_in_tree(tree, 4, 2500) == range(2500, 3500)
    tree.put(PRODUCER_IDS_PATH, json.dumps(expected | {"block_end": str(2**63 - 1)}).encode())
    with pytest.raises(DirectoryError, match="no producer ids are left"):
        claim_in_tree(tree, 3, 0)


def test_in_a_file(tmp_path: Path) -> None:
    path = tmp_path / "ids"
    assert claim_in_file(path, 0, 0) == range(1000)
    assert claim_in_file(path, 0, 0) == range(1000, 2000)
    for bad in (b"no JSON", b'{"block_end":"-1"}', b'{"block_end":7}', b'{"block_end":"' + b"9" * 30 + b'"}'):
        path.write_bytes(bad)
        with pytest.raises(DecodeError):
            claim_in_file(path, 0, 0)
