"""A server that applies a fault script. A broker without faults uses the plain server and none of this code."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass

from spark_klog.broker.broker import Broker
from spark_klog.broker.faults.script import (
    ANSWER,
    Corrupt,
    Delay,
    Drop,
    ErrorAnswer,
    FaultScript,
    Firing,
    MatchedRequest,
    Truncate,
    flip_bits,
)
from spark_klog.broker.net.connection import AnswerCut
from spark_klog.broker.net.server import Server
from spark_klog.broker.security.session import Session
from spark_klog.log.segments.segment import FileRange
from spark_klog.protocol.apis import BY_KEY, FETCH, METADATA
from spark_klog.protocol.codec import (
    Message,
    decode_request,
    decode_request_header,
    decode_response,
    encode_request,
    encode_response,
)
from spark_klog.protocol.schema import Api
from spark_klog.protocol.tables.records import FINAL_EPOCH, NO_SESSION
from spark_klog.protocol.targets import EVERYTHING, TopicNames, error_response, merge, narrow, set_error, targets
from spark_klog.records.formats.batch import iter_batches
from spark_klog.records.formats.batch_v2 import HEADER_SIZE
from spark_klog.wire.primitives import SIZE, Reader, Writer

_log = logging.getLogger(__name__)
_NO_ANSWER = 0
#: offset, length, checksum, magic, attributes (message_set.py)
_MESSAGE_HEADER_SIZE = 18


@dataclass
class _Request:
    """A request of a known API and version."""

    api: Api
    version: int
    correlation_id: int
    client_id: str | None
    message: Message
    frame: bytearray
    session: Session

    def encoded(self, message: Message) -> bytearray:
        return bytearray(
            encode_request(self.api, self.version, self.correlation_id, self.client_id, message).to_bytes()
        )

    def answered(self, message: Message) -> Writer:
        return encode_response(self.api, self.version, self.correlation_id, message)

    def decoded(self, answer: Writer) -> Message:
        return decode_response(self.api, self.version, _to_bytes(answer))[1]


class FaultyServer(Server):
    """Answers as `Server` does, except for the script's faults."""

    def __init__(self, broker: Broker, script: FaultScript) -> None:
        super().__init__(broker)
        self._script = script

    async def answer(self, frame: bytearray, session: Session) -> Writer | None:
        """As `Server.answer`; raises `AnswerCut` if a fault drops the connection."""
        request = None if session.takes_raw_tokens else _read(frame, session)
        if request is None:
            return await super().answer(frame, session)
        if request.api is FETCH and request.message["session_epoch"] != FINAL_EPOCH:
            # In a session most fetches name no partitions, but faults by topic must know them: fetch without a session.
            request.message |= {"session_id": NO_SESSION, "session_epoch": FINAL_EPOCH}
            request.frame = request.encoded(request.message)
        named = targets(request.api, request.version, request.message, self._topic_names())
        firing = self._script.choose(MatchedRequest(request.api.name, request.client_id, named))
        if firing is None:
            return await self._carry_out(request)
        _say(request, firing)
        return await self._spoil(request, firing)

    def _topic_names(self) -> TopicNames:
        return {topic.topic_id: topic.name for topic in self.broker.registry.topics.values()}

    async def _carry_out(self, request: _Request) -> Writer | None:
        """The true response, with records corrupted if a fault waits for records."""
        answer = await super().answer(request.frame, request.session)
        if answer is None or request.api is not FETCH or not self._script.waits_for_records:
            return answer
        return self._corrupt_records(request, answer)

    async def _spoil(self, request: _Request, firing: Firing) -> Writer | None:
        action = firing.fault.do
        if isinstance(action, ErrorAnswer):
            return await self._fail(request, firing, action)
        if isinstance(action, Drop) and not action.after and not action.sent:
            raise AnswerCut(b"")
        if isinstance(action, Delay) and not action.after:
            await asyncio.sleep(action.ms / 1000)
        answer = await self._carry_out(request)
        if isinstance(action, Delay) and action.after:
            await asyncio.sleep(action.ms / 1000)
        if isinstance(action, Drop):
            whole = b"" if answer is None else SIZE.pack(len(answer)) + _to_bytes(answer)
            raise AnswerCut(whole[: action.sent])
        if answer is None or isinstance(action, Delay):
            return answer
        return _spoiled(answer, action, firing.number)

    async def _fail(self, request: _Request, firing: Firing, action: ErrorAnswer) -> Writer | None:
        api, version, fault, names = request.api, request.version, firing.fault, self._topic_names()
        failed = narrow(api, version, request.message, names, fault.is_about)
        rest = narrow(api, version, request.message, names, lambda *target: not fault.is_about(*target))
        answer = error_response(api, version, failed)
        # Metadata without brokers is of no use to a client, and a response about all topics is needed to know them.
        if action.after or api is METADATA or EVERYTHING in targets(api, version, request.message, names):
            true = await self._carry_out(request)
            answer = answer if true is None else request.decoded(true)
        elif targets(api, version, rest, names):
            true = await super().answer(request.encoded(rest), request.session)
            answer = answer if true is None else merge(api, version, request.decoded(true), answer)
        if request.message.get("acks") == _NO_ANSWER:
            raise AnswerCut(b"")
        return request.answered(set_error(api, version, answer, action.number, names, fault.is_about))

    def _corrupt_records(self, request: _Request, answer: Writer) -> Writer:
        message = request.decoded(answer)
        names = self._topic_names()
        named = {
            (topic["topic"] or names.get(topic.get("topic_id")), entry["partition_index"]): entry
            for topic in message["responses"]
            for entry in topic["partitions"]
            if any(iter_batches(entry["records"] or b""))
        }
        if not named:
            return answer
        firing = self._script.choose(MatchedRequest(request.api.name, request.client_id, list(named), has_records=True))
        if firing is None:
            return answer
        _say(request, firing)
        assert isinstance(firing.fault.do, Corrupt)
        for target, entry in named.items():
            if firing.fault.is_about(*target):
                entry["records"] = _with_corrupt_batch(bytearray(entry["records"]), firing.fault.do, firing.number)
        return request.answered(message)


def _read(frame: bytearray, session: Session) -> _Request | None:
    """Decode a request; None if its API or version is unknown, which `Server` refuses."""
    reader = Reader(frame)
    key, version, correlation_id = decode_request_header(reader)
    api = BY_KEY.get(key)
    if api is None or version not in api.versions:
        return None
    client_id, message = decode_request(api, version, reader)
    return _Request(api, version, correlation_id, client_id, message, frame, session)


def _to_bytes(answer: Writer) -> bytes:
    return b"".join(part.read() if isinstance(part, FileRange) else part for part in answer.parts)  # type: ignore[misc]


def _spoiled(answer: Writer, action: Corrupt | Truncate, number: int) -> Writer:
    data = bytearray(_to_bytes(answer))
    if isinstance(action, Truncate):
        del data[max(len(data) - action.missing, 0) :]
    else:
        assert action.where == ANSWER
        flip_bits(data, 0, len(data), action, number)
    result = Writer()
    result.raw(data)
    return result


def _with_corrupt_batch(records: bytearray, action: Corrupt, number: int) -> bytearray:
    header, batch = next(iter_batches(bytes(records)))
    start = HEADER_SIZE if header.magic == 2 else _MESSAGE_HEADER_SIZE
    flip_bits(records, start, len(batch), action, number)
    return records


def _say(request: _Request, firing: Firing) -> None:
    _log.info("fault for %s of %s (%s): %s", request.api.name, request.client_id, request.session.peer, firing.fault.do)
