"""SaslAuthenticate v0-2: tokens of a SASL mechanism (KIP-152). The session's lifetime is 0: unlimited (KIP-368)."""

from __future__ import annotations

import asyncio
import logging

from spark_klog.broker.broker import Broker, Request
from spark_klog.broker.security.refusals import AuthenticationFailed
from spark_klog.broker.security.session import Session
from spark_klog.errors import ErrorCode
from spark_klog.protocol.codec import Message

_log = logging.getLogger(__name__)


async def handle(broker: Broker, request: Request, message: Message) -> Message:
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
