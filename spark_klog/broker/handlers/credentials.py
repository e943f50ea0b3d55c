"""Authentication (SaslHandshake, SaslAuthenticate), and the SCRAM credentials of the users file."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from typing import Any

from spark_klog.broker.broker import Broker, Request
from spark_klog.broker.security.config import ANONYMOUS
from spark_klog.broker.security.mechanisms import AuthenticationFailed, Credential, credential_of_salted
from spark_klog.broker.security.session import Session
from spark_klog.broker.security.users import User, check_user_name
from spark_klog.errors import ConfigError, ErrorCode
from spark_klog.protocol.codec import Message
from spark_klog.protocol.tables.security import MAX_ITERATIONS, MIN_ITERATIONS, SCRAM_MECHANISMS

_log = logging.getLogger(__name__)
_MAX_SALT_BYTES = 1024
_WITHOUT_ADMINS = "only admins alter credentials: give a user admin = true in the file klog.users.file"
#: Changes of one user: a new credential by mechanism, None to remove it.
_Changes = dict[str, Credential | None]


def sasl_handshake(broker: Broker, request: Request, message: Message) -> Message:
    """SaslHandshake v0-1 (KIP-43): the client chooses a mechanism."""
    session = request.session
    code = session.handshake(message["mechanism"], request.version)
    if code:
        _log.warning("%s asks for SASL mechanism %.50r: %s", request.peer, message["mechanism"], code.name)
    return {"error_code": code, "mechanisms": session.mechanisms}


async def sasl_authenticate(broker: Broker, request: Request, message: Message) -> Message:
    """SaslAuthenticate v0-2: tokens of a SASL mechanism (KIP-152). The session's lifetime is 0: unlimited (KIP-368)."""
    if not request.session.takes_tokens:
        return {"error_code": ErrorCode.ILLEGAL_SASL_STATE, "error_message": "send SaslHandshake first, and once"}
    try:
        return {"error_code": ErrorCode.NONE, "auth_bytes": await step(broker, request.session, message["auth_bytes"])}
    except AuthenticationFailed as error:
        _log.warning("%s: authentication failed: %s; closing the connection", request.peer, error)
        return {"error_code": ErrorCode.SASL_AUTHENTICATION_FAILED, "error_message": "wrong name or password"}


async def step(broker: Broker, session: Session, token: bytes | bytearray | memoryview) -> bytes:
    """Answer a token; `AuthenticationFailed` is raised after a delay, which slows down password guessing.

    Runs in a thread, since salting a password takes milliseconds.
    """
    try:
        return await asyncio.to_thread(session.authenticate, bytes(token))
    except AuthenticationFailed:
        await asyncio.sleep(broker.config.failed_authentication_delay_ms / 1000)
        raise


def describe_user_scram_credentials(broker: Broker, request: Request, message: Message) -> Message:
    """DescribeUserScramCredentials v0 (KIP-554): mechanisms and iterations of users in the users file."""
    if not broker.authorizer.is_admin(request.session):
        refusal: Message = {
            "error_code": ErrorCode.CLUSTER_AUTHORIZATION_FAILED,
            "error_message": "only admins describe credentials",
        }
        # as in Kafka, the error is repeated for each user
        results = [{"user": entry["name"]} | refusal for entry in message["users"] or ()]
        return refusal | {"results": results}
    users = broker.users.all()
    if message["users"]:
        counts = Counter(entry["name"] for entry in message["users"])
        results = [_result(name, users.get(name), count) for name, count in counts.items()]
    else:
        results = [_result(name, user) for name, user in sorted(users.items()) if user.credentials]
    return {"error_code": ErrorCode.NONE, "results": results}


def _result(name: str, user: User | None, times_asked: int = 1) -> Message:
    if name and times_asked > 1:
        reason = f"user {name[:255]!r} is in the request {times_asked} times"
        return {"user": name, "error_code": ErrorCode.DUPLICATE_RESOURCE, "error_message": reason}
    if user is None or not user.credentials:
        reason = f"user {name[:255]!r} has no SCRAM credentials"
        return {"user": name, "error_code": ErrorCode.RESOURCE_NOT_FOUND, "error_message": reason}
    infos = [
        {"mechanism": number, "iterations": user.credentials[mechanism].iterations}
        for number, mechanism in SCRAM_MECHANISMS.items()
        if mechanism in user.credentials
    ]
    return {"user": name, "error_code": ErrorCode.NONE, "credential_infos": infos}


async def alter_user_scram_credentials(broker: Broker, request: Request, message: Message) -> Message:
    """AlterUserScramCredentials v0 (KIP-554): changes of credentials in the users file.

    If one entry of a user is invalid, none of that user's is applied, as in Kafka; the valid ones are one change of the
    file. A user who loses all credentials keeps its rules. Open connections stay open: there is no re-authentication.
    """
    entries = [*message["deletions"], *message["upsertions"]]
    names = list(dict.fromkeys(entry["name"] for entry in entries))
    if not broker.authorizer.is_admin(request.session):
        code, reason = ErrorCode.CLUSTER_AUTHORIZATION_FAILED, "only admins alter credentials"
        return {"results": [_refused(name, code, reason) for name in names]}
    if not broker.users.has_rules:  # without rules everybody is an admin, but must not take over other users
        return {"results": [_refused(name, ErrorCode.SECURITY_DISABLED, _WITHOUT_ADMINS) for name in names]}
    refused = _bad_entries(message)
    missing: set[str] = set()
    changes_of: dict[str, _Changes] = {}
    for entry in entries:
        if entry["name"] not in refused:
            changes_of.setdefault(entry["name"], {})[SCRAM_MECHANISMS[entry["mechanism"]]] = _credential(entry)

    def change(users: dict[str, User]) -> None:
        for name, changes in changes_of.items():
            there = users[name].credentials if name in users else {}
            if any(credential is None and mechanism not in there for mechanism, credential in changes.items()):
                missing.add(name)
                continue
            user = users.setdefault(name, User())
            kept = {**user.credentials, **changes}.items()
            user.credentials = {mechanism: credential for mechanism, credential in kept if credential is not None}
            if not user.credentials and not user.has_rules:
                del users[name]

    if changes_of:
        try:
            await asyncio.to_thread(broker.users.change, change)
        except ConfigError as error:
            _log.error("credentials can't be altered: %s", error)
            # not UNKNOWN_SERVER_ERROR, which confluent-kafka-python does not report to its caller
            refused |= {name: (ErrorCode.INVALID_CONFIG, str(error)) for name in changes_of}
        altered = [name for name in changes_of if name not in refused | dict.fromkeys(missing)]
        _log.info("%s (%s) altered the credentials of %s", request.client_id, request.peer, altered)
    reason = "a credential that does not exist can't be deleted"
    refused |= dict.fromkeys(missing - refused.keys(), (ErrorCode.RESOURCE_NOT_FOUND, reason))
    return {
        "results": [
            _refused(name, *refused[name]) if name in refused else {"user": name, "error_code": ErrorCode.NONE}
            for name in names
        ]
    }


def _bad_entries(message: Message) -> dict[str, tuple[ErrorCode, str]]:
    """Users whose entries are invalid, with error and reason."""
    refused: dict[str, tuple[ErrorCode, str]] = {}
    entries = [*message["deletions"], *message["upsertions"]]
    for pair, count in Counter((entry["name"], entry["mechanism"]) for entry in entries).items():
        if count > 1:
            refused[pair[0]] = ErrorCode.DUPLICATE_RESOURCE, "the request alters a credential twice"
    for entry in message["upsertions"]:
        if not MIN_ITERATIONS <= entry["iterations"] <= MAX_ITERATIONS:
            reason = f"{entry['iterations']} iterations, but {MIN_ITERATIONS} to {MAX_ITERATIONS} are allowed"
            refused[entry["name"]] = ErrorCode.UNACCEPTABLE_CREDENTIAL, reason
        if not 0 < len(entry["salt"]) <= _MAX_SALT_BYTES or not entry["salted_password"]:
            reason = f"the salt has 1 to {_MAX_SALT_BYTES} bytes, and the salted password is not empty"
            refused[entry["name"]] = ErrorCode.UNACCEPTABLE_CREDENTIAL, reason
    for entry in entries:
        name = entry["name"]
        try:
            check_user_name(name)
        except ConfigError as error:
            refused[name] = ErrorCode.UNACCEPTABLE_CREDENTIAL, str(error)
        if name == ANONYMOUS:
            reason = f"{ANONYMOUS} is the name of clients without authentication: it has no credentials"
            refused[name] = ErrorCode.UNACCEPTABLE_CREDENTIAL, reason
        if entry["mechanism"] not in SCRAM_MECHANISMS:
            reason = f"there is no SCRAM mechanism {entry['mechanism']}; 1 is SCRAM-SHA-256, 2 is SCRAM-SHA-512"
            refused[name] = ErrorCode.UNSUPPORTED_SASL_MECHANISM, reason
    return refused


def _credential(entry: dict[str, Any]) -> Credential | None:
    if "salt" not in entry:
        return None
    salted, salt = bytes(entry["salted_password"]), bytes(entry["salt"])
    return credential_of_salted(SCRAM_MECHANISMS[entry["mechanism"]], salted, salt, entry["iterations"])


def _refused(name: str, code: ErrorCode, reason: str) -> Message:
    return {"user": name, "error_code": code, "error_message": reason}
