"""Compression codecs and other libraries for the same formats, in MB of records per second.

The peers are not dependencies of the project; those that are not installed are skipped:
`pip install cramjam isal` (cramjam comes with python-snappy), `backports.zstd` before Python 3.14.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from importlib import import_module
from struct import Struct
from typing import Any

from benchmarks.figures import Result, Side
from benchmarks.work import Bench, Work
from spark_klog.wire.codecs import CODECS as CODEC_TABLE

_LINE = (
    b'{"ts":"2024-05-13T08:%02d:%02d.%03dZ","level":"%s","user":%d,"ip":"10.%d.%d.%d","path":"/products/%d/reviews",'
    b'"ms":%d,"trace":"%016x","agent":"%s"}'
)
_LEVELS = (b"INFO", b"INFO", b"INFO", b"WARN")
_AGENTS = (
    b"Mozilla/5.0 (X11; Linux x86_64) AppleWebKit/537.36 Chrome/126.0",
    b"Mozilla/5.0 (iPhone; CPU iPhone OS 17_5 like Mac OS X)",
    b"curl/8.5.0",
    b"kube-probe/1.29",
)
_SIZE, _BLOCK = 60_000, 32 * 1024
_SECONDS = 0.2
_LIMIT = 1 << 24
_INT32, _UINT32 = Struct(">i"), Struct("<I")

Function = Callable[[bytes], Any]


def _body() -> bytes:
    """Log lines, each with the few bytes that a record has around its value."""
    source = random.Random(7)
    body = bytearray()
    index = 0
    while len(body) < _SIZE:
        line = _LINE % (
            index // 60,
            index % 60,
            source.randrange(1000),
            source.choice(_LEVELS),
            source.randrange(100_000),
            source.randrange(256),
            source.randrange(256),
            source.randrange(256),
            source.randrange(5000),
            source.randrange(900),
            source.getrandbits(64),
            source.choice(_AGENTS),
        )
        body += b"\xd8\x03\x00" + bytes((index & 0x7F | 0x80, index >> 7)) * 2 + b"\x01\xc8\x03" + line + b"\x00"
        index += 1
    return bytes(body)


def _zlib(name: str, level: int) -> tuple[Function, Function]:
    """Functions of a module that has the interface of the standard library's zlib."""
    module = import_module(name)

    def compress(data: bytes) -> bytes:
        deflate = module.compressobj(level, 8, 31)
        result: bytes = deflate.compress(data) + deflate.flush()
        return result

    return compress, lambda data: module.decompressobj(31).decompress(data, _LIMIT)


def _cramjam(name: str, **options: int) -> tuple[Function, Function]:
    module = getattr(import_module("cramjam"), name)
    return lambda data: module.compress(data, **options), module.decompress


def _cramjam_snappy() -> tuple[Function, Function]:
    """The codec's blocks, decompressed into one buffer of the known size, without a check of each block."""
    snappy = import_module("cramjam").snappy

    def compress(data: bytes) -> bytearray:
        view, result = memoryview(data), bytearray(bytes.fromhex("82534e41505059000000000100000001"))
        for start in range(0, len(view), _BLOCK):
            block = memoryview(snappy.compress_raw(view[start : start + _BLOCK]))
            result += _INT32.pack(len(block))
            result += block
        return result

    size = len(BODY)

    def decompress(data: bytes) -> bytearray:
        view, result = memoryview(data), bytearray(size)
        position, target = 16, memoryview(result)
        while position < len(view):
            end = position + 4 + _INT32.unpack_from(view, position)[0]
            target = target[snappy.decompress_raw_into(view[position + 4 : end], target) :]
            position = end
        return result

    return compress, decompress


def _lz4_blocks() -> tuple[Function, Function]:
    """The `lz4` package's block functions, with the frame built here."""
    block = import_module("lz4.block")
    size = 64 * 1024

    def compress(data: bytes) -> bytes:
        view, parts = memoryview(data), [bytes.fromhex("04224d18604082")]
        for start in range(0, len(view), size):
            part = block.compress(view[start : start + size], store_size=False)
            parts += (_UINT32.pack(len(part)), part)
        return b"".join([*parts, bytes(4)])

    def decompress(data: bytes) -> bytes:
        view, parts, position = memoryview(data), [], 7
        while part := _UINT32.unpack_from(view, position)[0]:
            position += 4
            parts.append(block.decompress(view[position : position + part], uncompressed_size=size))
            position += part
        return parts[0] if len(parts) == 1 else b"".join(parts)

    return compress, decompress


def _lz4_frame() -> tuple[Function, Function]:
    """The package's own frame functions, which our codec wraps: shows the cost of its size limit and header check."""
    frame = import_module("lz4.frame")
    return lambda data: frame.compress(data, block_size=4, block_linked=False, store_size=False), frame.decompress


def _standard_zstd(name: str) -> tuple[Function, Function]:
    module = import_module(name)
    return module.compress, module.decompress


#: (codec, peer, function that returns its compress and decompress).
_PEERS: tuple[tuple[int, str, Callable[[], tuple[Function, Function]]], ...] = (
    (1, "zlib", lambda: _zlib("zlib", -1)),
    (1, "isal, level 2", lambda: _zlib("isal.isal_zlib", 2)),
    (1, "cramjam", lambda: _cramjam("gzip", level=6)),
    (2, "cramjam", _cramjam_snappy),
    (3, "lz4.frame", _lz4_frame),
    (3, "lz4.block", _lz4_blocks),
    (3, "cramjam", lambda: _cramjam("lz4", level=0)),
    (4, "cramjam", lambda: _cramjam("zstd", level=3)),
    (4, "compression.zstd", lambda: _standard_zstd("compression.zstd")),
    (4, "backports.zstd", lambda: _standard_zstd("backports.zstd")),
)

BODY = _body()


def _speed(function: Function, data: bytes) -> float:
    """MB of `BODY` per second."""
    calls = 0
    started = time.perf_counter()
    while (elapsed := time.perf_counter() - started) < _SECONDS:
        function(data)
        calls += 1
    return calls * len(BODY) / elapsed / 1e6


def _codecs(bench: Bench) -> Iterator[Result]:
    for codec_id, peer_name, make in _PEERS:
        try:
            peer_compress, peer_decompress = make()
        except ImportError:
            continue
        codec = CODEC_TABLE[codec_id]
        ours, theirs = bytes(codec.compress(BODY)), bytes(peer_compress(BODY))
        if bytes(codec.decompress(theirs, _LIMIT)) != BODY or bytes(peer_decompress(ours)) != BODY:
            raise AssertionError(f"{codec.name} and {peer_name} do not read each other's data")
        for work, sizes, functions, data in (
            ("compress", f" ({len(ours)} B)", (codec.compress, peer_compress), BODY),
            ("decompress", "", (lambda data, codec=codec: codec.decompress(data, _LIMIT), peer_decompress), ours),
        ):
            sides = (Side("klog"), Side(peer_name + (f" ({len(theirs)} B)" if sizes else "")))
            for attempt in range(bench.repeat + 1):
                for side, function in zip(sides, functions, strict=True):
                    speed = _speed(function, data)
                    if attempt:
                        side.samples.append(speed)
                    else:
                        side.cold = speed
            yield Result(f"{codec.name} {work}{sizes}, {peer_name}", "MB/s", *sides, bench.command)


CODECS = Work(
    "codecs",
    _codecs,
    (
        f"Codecs: one process, one core, a body of {len(BODY)} B of JSON log lines at each codec's default level; "
        "MB of it a second. In brackets the compressed size.",
    ),
)
