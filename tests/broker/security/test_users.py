"""The users file as a broker sees it: when the broker reads it again, and what holds if that fails."""

from __future__ import annotations

import errno
import logging
import os
import random
import threading
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from spark_klog.broker.handlers.acls import Rule, add_rules
from spark_klog.broker.security import users as users_module
from spark_klog.broker.security.mechanisms import Credential
from spark_klog.broker.security.users import User, Users, read_users, remove_user, set_credentials
from spark_klog.errors import ConfigError
from spark_klog.protocol.tables.security import AclOperation
from tests.support.clients.klog import klog

_MECHANISM = "SCRAM-SHA-256"


def _credential(key: bytes) -> Credential:
    return Credential(b"salt", key, b"server", 4096)


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file with the users alice and bob; brokers look at it each time."""
    monkeypatch.setattr(users_module, "_LOOK_AGAIN_SECONDS", 0.0)
    path = tmp_path / "users"
    for name in ("alice", "bob"):
        set_credentials(path, name, {_MECHANISM: _credential(b"first")})
    return path


def test_a_password_of_one_mechanism_leaves_the_other(tmp_path: Path) -> None:
    file = tmp_path / "users.conf"
    add = ("users", "add", "ann", "--file", str(file), "--password-stdin")
    assert klog(*add, stdin="first\n").returncode == 0
    before = read_users(file)["ann"].credentials
    told = klog(*add, "--mechanism", "SCRAM-SHA-512", stdin="second\n").stdout
    assert "has SCRAM-SHA-512 in" in told
    assert "SCRAM-SHA-256 keeps its password" in told
    after = read_users(file)["ann"].credentials
    assert after["SCRAM-SHA-256"] == before["SCRAM-SHA-256"]
    assert after["SCRAM-SHA-512"] != before["SCRAM-SHA-512"]


def test_a_user_who_is_removed_while_the_disk_fails_is_not_known_afterwards(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    users, read = Users(path), Path.read_text
    remove_user(path, "alice")

    def fail(self: Path, *arguments: Any, **named: Any) -> str:
        if self == path:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return read(self, *arguments, **named)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_text", fail)
        for _ in range(5):
            assert users.credential("alice", _MECHANISM) is not None
    (record,) = (record for record in caplog.records if record.levelno >= logging.ERROR)
    assert "Input/output error; " in record.getMessage()
    assert record.getMessage().endswith("the users read before stay in force")
    assert users.credential("alice", _MECHANISM) is None
    assert users.credential("bob", _MECHANISM) is not None


def test_a_change_in_place_within_one_tick_of_the_clock_is_seen(path: Path) -> None:
    """On a file system with a coarse clock a changed file may have the same time and size."""
    users = Users(path)
    status, text = path.stat(), path.read_text()
    path.write_text(text.replace("[user alice]", "[user carol]"))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert users.credential("alice", _MECHANISM) is None
    assert users.credential("carol", _MECHANISM) is not None


def test_a_file_that_is_bad_is_told_once_until_it_is_good_again(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    users, text = Users(path), path.read_text()
    for _ in range(2):
        path.write_text(text + "\n[nobody]\n")
        caplog.clear()
        for _ in range(5):
            assert users.credential("alice", _MECHANISM) is not None
        assert [record.levelno for record in caplog.records].count(logging.ERROR) == 1
        path.write_text(text)
        assert users.credential("alice", _MECHANISM) is not None


def test_a_start_without_a_file_that_can_be_read_is_refused(path: Path) -> None:
    path.write_text("[nobody]\n")
    with pytest.raises(ConfigError, match=r"sections are \[user NAME\]"):
        Users(path)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("alice = secret\n", "line 1: it is before the first section; sections are [user NAME]"),
        ("[user a]\nread = *\n[user a]\n", "line 3: the section is there twice"),
        ("[user a]\nread = x\nread = y\n", "line 3: 'read' is there twice in its section"),
        ("[user a]\nsecret\n", "line 2: it is neither [user NAME] nor NAME = VALUE"),
    ],
)
def test_a_file_that_is_none_is_told_by_line_and_reason(path: Path, text: str, told: str) -> None:
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        Users(path)
    assert str(caught.value) == f"users file {path} {told}"


def test_one_change_of_many_users_parses_one(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests wait while the file is read, so the broker parses only the section that changed."""
    path.write_text("".join(f"# of {number}\n[user {number}]\nread = t-{number}\n" for number in range(1000)))
    users, parse, parsed = Users(path), users_module._user, []

    def noted(where: str, values: Mapping[str, str]) -> User:
        parsed.append(where)
        return parse(where, values)

    monkeypatch.setattr(users_module, "_user", noted)
    path.write_text(path.read_text().replace("read = t-500\n", "read = t-500, u\n"))
    rules = users.rules("500")
    assert rules is not None
    assert rules.read == ("t-500", "u")
    assert len(users.all()) == 1000
    assert parsed == [f"users file {path}, section [user 500]"]


def test_a_file_read_again_is_what_its_text_says(path: Path) -> None:
    """Reading again gives the same users as a read of the whole file, or the same error."""
    pieces = [
        *("[user a]\n", "[user b]\nread = x\n", "[user c]\nread = x,\n  y\n", " [user d]\n", "[user e]"),
        *("\n", "admin = true\n", "read = z\n", "  [user g]\n", "[nobody]\n", "[user h]]\nwrite = w\n"),
        *("[user i] ; no comment\n", "write = [v]\n", "# [user f]\n", "oops\n", "; c\n"),
    ]
    rng, reader, good = random.Random(15), users_module.UsersReader(path), 0
    text: list[str] = []
    for _ in range(300):
        for _ in range(rng.randrange(1, 3)):
            if text and rng.random() < 0.5:
                text.pop(rng.randrange(len(text)))
            else:
                text.insert(rng.randrange(len(text) + 1), rng.choice(pieces))
        path.write_text("".join(text))
        results = []
        for read in (partial(users_module.read_users, path), reader.read):
            try:
                results.append(read())
                good += 1
            except ConfigError as error:
                results.append(str(error))
        assert results[0] == results[1], "".join(text)
    assert 30 < good < 570


def test_changes_of_two_brokers_are_both_kept(path: Path) -> None:
    def give(broker: Users, topics: list[str]) -> None:
        for topic in topics:
            broker.change(partial(add_rules, rules=[Rule("bob", AclOperation.READ, topic)]))

    brokers = Users(path), Users(path)
    wanted = [[f"{number}-{other}" for other in range(20)] for number in range(2)]
    threads = [threading.Thread(target=give, args=pair) for pair in zip(brokers, wanted, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for broker in brokers:
        assert set(broker.all()["bob"].read) == {*wanted[0], *wanted[1]}
