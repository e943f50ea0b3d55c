"""The SASL mechanisms against the RFCs' examples, and the `klog users` command."""

from __future__ import annotations

import hashlib
import hmac
import json
import subprocess
import sys
from base64 import b64decode, b64encode
from pathlib import Path

import pytest

from spark_klog.broker.security.config import Listener
from spark_klog.broker.security.mechanisms import (
    AuthenticationFailed,
    Credential,
    Plain,
    Scram,
    make_credential,
)
from spark_klog.broker.security.session import Session
from spark_klog.broker.security.users import read_users
from spark_klog.errors import ErrorCode

# RFC 7677, chapter 3: user "user", password "pencil"
SALT = b64decode("W22ZaJ0SNY7soEsUEjb6gQ==")
FIRST = b"n,,n=user,r=rOprNGfwEbeRWgbNEkqO"
SERVER_NONCE = "%hvYDpWUa2RaTCAfuxFIlj)hNlF$k0"
SERVER_FIRST = b"r=rOprNGfwEbeRWgbNEkqO%hvYDpWUa2RaTCAfuxFIlj)hNlF$k0,s=W22ZaJ0SNY7soEsUEjb6gQ==,i=4096"
LAST = b"c=biws,r=rOprNGfwEbeRWgbNEkqO%hvYDpWUa2RaTCAfuxFIlj)hNlF$k0,p=dHzbZapWIk4jUhN+Ute9ytag9zjfMHgsqmmiz7AndVQ="
SERVER_LAST = b"v=6rriTRBi23WpRR/wtup+mMhUZUn/dB5nLTJRsjl95G4="


def _of_the_rfc(user: str, mechanism: str) -> Credential | None:
    """Keys by the formulas of RFC 5802."""
    if (user, mechanism) != ("user", "SCRAM-SHA-256"):
        return None
    salted = hashlib.pbkdf2_hmac("sha256", b"pencil", SALT, 4096)
    client_key = hmac.new(salted, b"Client Key", "sha256").digest()
    server_key = hmac.new(salted, b"Server Key", "sha256").digest()
    return Credential(SALT, hashlib.sha256(client_key).digest(), server_key, 4096)


def _scram() -> Scram:
    return Scram("SCRAM-SHA-256", _of_the_rfc, SERVER_NONCE)


def test_the_example_of_rfc_7677() -> None:
    scram = _scram()
    assert scram.step(FIRST) == SERVER_FIRST
    assert scram.user is None
    assert scram.step(LAST) == SERVER_LAST
    assert scram.user == "user"
    with pytest.raises(AuthenticationFailed):
        scram.step(LAST)


@pytest.mark.parametrize(
    "token",
    [
        b"",
        b"n,,",
        b"n,,n=user",
        b"p=tls-unique,,n=user,r=nonce",
        b"y,,m=x,n=user,r=nonce",
        b"n,a=other,n=user,r=nonce",
        b"n,,n=,r=nonce",
        b"n,,n=user,r=",
        b"n,,n=us=er,r=nonce",
        b"n,,n=user,r=nonce,tokenauth=true",
        b"n,,n=" + b"u" * 300 + b",r=nonce",
        b"n,,n=user,r=" + b"n" * 100_000,
        b"\xff\xfe",
        bytes(100),
    ],
)
def test_first_messages_that_are_refused(token: bytes) -> None:
    with pytest.raises(AuthenticationFailed):
        _scram().step(token)


@pytest.mark.parametrize(
    "token",
    [
        b"",
        LAST[:-4],
        LAST.replace(b"dHzb", b"dHzc"),
        LAST.replace(b"c=biws", b"c=eSws"),
        LAST.replace(b"r=rOpr", b"r=rOps"),
        LAST.replace(b"k0,p=", b"k1,p="),
        LAST.replace(b"p=dHzb", b"p=!!!!"),
        LAST[: LAST.index(b",p=") + 3],
        LAST[: LAST.index(b",p=")],
        LAST + b"AAAA",
        FIRST,
        b"\xff" * 20,
    ],
)
def test_last_messages_that_are_refused(token: bytes) -> None:
    scram = _scram()
    scram.step(FIRST)
    with pytest.raises(AuthenticationFailed):
        scram.step(token)
    assert scram.user is None


def test_an_old_librdkafka_repeats_its_nonce() -> None:
    """librdkafka before 2.6.1 sends its nonce twice; the proof covers what it sends."""
    scram = _scram()
    scram.step(FIRST)
    unproved = LAST[: LAST.index(b",p=")].replace(b"r=", b"r=rOprNGfwEbeRWgbNEkqO")
    salted = hashlib.pbkdf2_hmac("sha256", b"pencil", SALT, 4096)
    client_key = hmac.new(salted, b"Client Key", "sha256").digest()
    message = FIRST[3:] + b"," + SERVER_FIRST + b"," + unproved
    signature = hmac.new(hashlib.sha256(client_key).digest(), message, "sha256").digest()
    proof = b64encode(bytes(one ^ other for one, other in zip(client_key, signature, strict=True)))
    assert scram.step(unproved + b",p=" + proof).startswith(b"v=")
    assert scram.user == "user"


def test_an_unknown_user_is_answered_as_one_that_is_there() -> None:
    """The salt has the same size and is the same each time, and the error at the end is the same."""
    answers = {Scram("SCRAM-SHA-256", _of_the_rfc, "x").step(b"n,,n=nobody,r=n") for _ in range(3)}
    assert len(answers) == 1
    (answer,) = answers
    parts = dict(part.split("=", 1) for part in answer.decode().split(","))
    assert (parts["r"], parts["i"], len(b64decode(parts["s"]))) == ("nx", "4096", 20)
    other = Scram("SCRAM-SHA-256", _of_the_rfc, "x").step(b"n,,n=nobody2,r=n")
    assert other != answer
    said = set()
    for user in ("user", "nobody"):
        scram = _scram()
        scram.step(FIRST.replace(b"user", user.encode()))
        with pytest.raises(AuthenticationFailed) as failed:
            scram.step(LAST.replace(b"dHzb", b"dHzc"))
        said.add(str(failed.value).replace(f"'{user}'", "?"))
    assert len(said) == 1


def test_names_are_unescaped() -> None:
    credential = make_credential("SCRAM-SHA-256", "x")
    asked: list[str] = []

    def lookup(user: str, mechanism: str) -> Credential:
        asked.append(user)
        return credential

    Scram("SCRAM-SHA-256", lookup).step(b"n,,n=a=2Cb=3Dc=3D2C,r=nonce")
    assert asked == ["a,b=c=2C"]


@pytest.mark.parametrize(
    "token",
    [
        b"",
        b"\0",
        b"\0user\0",
        b"\0\0pencil",
        b"\0user\0pencil\0",
        b"user\0pencil",
        b"other\0user\0pencil",
        b"\0user\0Pencil",
        b"\0nobody\0pencil",
        b"\xff\0user\0pencil",
        b"\0user\0" + b"p" * 100_000,
    ],
)
def test_plain_tokens_that_are_refused(token: bytes) -> None:
    plain = Plain(_of_the_rfc)
    with pytest.raises(AuthenticationFailed) as failed:
        plain.step(token)
    assert plain.user is None
    assert "pencil" not in str(failed.value).lower()


@pytest.mark.parametrize("token", [b"\0user\0pencil", b"user\0user\0pencil"])
def test_plain(token: bytes) -> None:
    plain = Plain(_of_the_rfc)
    assert plain.step(token) == b""
    assert plain.user == "user"


def test_a_session_admits_what_its_state_allows() -> None:
    session = Session(Listener("IN", "SASL_PLAINTEXT", "h", 1), "h:1", ["SCRAM-SHA-256"], _of_the_rfc)
    assert [key for key in range(100) if session.admits(key)] == [17, 18, 36]
    assert session.handshake("PLAIN", 1) == ErrorCode.UNSUPPORTED_SASL_MECHANISM
    assert session.has_failed
    session = Session(Listener("IN", "SASL_PLAINTEXT", "h", 1), "h:1", ["PLAIN"], _of_the_rfc)
    assert not session.takes_tokens
    assert session.handshake("PLAIN", 1) == ErrorCode.NONE
    assert session.takes_tokens
    assert session.authenticate(b"\0user\0pencil") == b""
    assert session.is_open
    assert session.peer == "h:1 (User:user)"
    assert session.admits(0)
    session = Session(Listener("IN", "PLAINTEXT", "h", 1), "h:1", [], _of_the_rfc)
    assert session.is_open
    assert session.user == "ANONYMOUS"
    assert session.handshake("PLAIN", 1) == ErrorCode.ILLEGAL_SASL_STATE


def _klog(*arguments: str | Path, stdin: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "spark_klog.cli", "users", *map(str, arguments)]
    return subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=30)


def test_the_users_command(tmp_path: Path) -> None:
    file = tmp_path / "users"
    assert _klog("add", "user", "--file", file, "--password-stdin", stdin="pencil\n").returncode == 0
    assert file.stat().st_mode & 0o777 == 0o600
    with file.open("a") as written:
        written.write("read = a*\n\n[user ANONYMOUS]\nwrite = b, c*\n")
    options = ("--mechanism", "SCRAM-SHA-512", "--iterations", "8192", "--password-stdin")
    assert _klog("add", "CN=ü,O=x=y", "--file", file, *options, stdin="two\n").returncode == 0
    assert _klog("add", "user", "--file", file, "--password-stdin", stdin="pencil2\n").returncode == 0
    told = _klog("list", "--file", file).stdout
    assert told.splitlines() == [
        "ANONYMOUS\t-\twrite=b,c*",
        "CN=ü,O=x=y\tSCRAM-SHA-512",
        "user\tSCRAM-SHA-256,SCRAM-SHA-512\tread=a*",
    ]
    both = ["SCRAM-SHA-256", "SCRAM-SHA-512"]
    assert [json.loads(line) for line in _klog("list", "--file", file, "--json").stdout.splitlines()] == [
        {"name": "ANONYMOUS", "mechanisms": [], "admin": False, "read": [], "write": ["b", "c*"]},
        {"name": "CN=ü,O=x=y", "mechanisms": ["SCRAM-SHA-512"], "admin": False, "read": [], "write": []},
        {"name": "user", "mechanisms": both, "admin": False, "read": ["a*"], "write": []},
    ]
    assert "pencil" not in file.read_text()
    users = read_users(file)

    def lookup(user: str, mechanism: str) -> Credential | None:
        return users[user].credentials.get(mechanism)

    plain = Plain(lookup)
    plain.step(b"\0user\0pencil2")
    with pytest.raises(AuthenticationFailed):
        Plain(lookup).step(b"\0user\0pencil")
    assert users["CN=ü,O=x=y"].credentials["SCRAM-SHA-512"].iterations == 8192
    assert _klog("remove", "user", "--file", file).returncode == 0
    assert sorted(read_users(file)) == ["ANONYMOUS", "CN=ü,O=x=y"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["users"]


@pytest.mark.parametrize(
    ("arguments", "stdin", "text"),
    [
        (("remove", "nobody"), "", "no user"),
        (("add", "a]b", "--password-stdin"), "x\n", "user name"),
        (("add", "ANONYMOUS", "--password-stdin"), "x\n", "ANONYMOUS"),
        (("add", "a", "--password-stdin"), "\n", "empty"),
    ],
)
def test_what_the_users_command_refuses(tmp_path: Path, arguments: tuple[str, ...], stdin: str, text: str) -> None:
    file = tmp_path / "users"
    file.write_text("[user there]\nread = x\n")
    done = _klog(*arguments, "--file", file, stdin=stdin)
    assert done.returncode == (1 if arguments[0] == "remove" else 2)
    assert text in done.stderr
    assert "Traceback" not in done.stderr
    assert sorted(read_users(file)) == ["there"]
