"""Compression bombs are refused with the reason, in memory bounded by the limit.

Each one is decompressed in its own process, a fork of one that has imported the codecs. Tests measure the process's
peak resident memory, which includes the libraries' buffers.
"""

from __future__ import annotations

import random
import re
import struct
import subprocess
import sys
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import cramjam
import lz4.frame
import pytest
import zstandard

from spark_klog.errors import DecodeError
from spark_klog.wire.codecs import CODECS, MAX_DECOMPRESSED, Codec

MB = 1 << 20
LIMIT = 64 * MB
#: Megabytes, far beyond the memory that a test allows.
LARGE = 250
ZEROS = bytes(MB)
COMPRESSING = [codec for codec in CODECS.values() if codec.id]
_NAMES = [codec.name for codec in COMPRESSING]
XERIAL = bytes.fromhex("82534e4150505900" + "00000001" + "00000001")
_STATUS = Path("/proc/self/status")

#: Program of the parent. Lines of input: codec id, limit and the file of a bomb. For each, a child prints by how many
#: MB its peak rose, and the result. (It does not use ru_maxrss, since a child's begins with its parent's.)
_PARENT = """
import os, sys
if sys.argv[1:]:
    sys.modules[sys.argv[1]] = None  # as if it were not installed
from spark_klog.errors import DecodeError
from spark_klog.wire.codecs import CODECS

def peak():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmHWM")) // 1024

def decompress(codec, limit, path):
    with open(path, "rb") as file:
        data = file.read()
    codec.decompress(codec.compress(bytes(1000)), 1000)  # so that the libraries' first steps do not count
    before = peak()
    try:
        result = f"{len(codec.decompress(data, limit))} bytes"
    except DecodeError as error:
        result = str(error)
    print(peak() - before, result, flush=True)

for codec in CODECS.values():
    codec.decompress(codec.compress(bytes(1000)), 1000)  # imports its library
for line in sys.stdin:
    codec, limit, path = line.split(maxsplit=2)
    if (child := os.fork()) == 0:
        try:
            decompress(CODECS[int(codec)], int(limit), path.strip())
        finally:
            os._exit(0)
    _, status = os.waitpid(child, 0)
    print("end", status, flush=True)
"""


def _gzip(megabytes: int) -> bytes:
    deflate = zlib.compressobj(1, wbits=31)
    return b"".join([*(deflate.compress(ZEROS) for _ in range(megabytes)), deflate.flush()])


def _xerial(megabytes: int) -> bytes:
    block = bytes(cramjam.snappy.compress_raw(ZEROS))
    return XERIAL + (struct.pack(">i", len(block)) + block) * megabytes


def _lz4(megabytes: int) -> bytes:
    with lz4.frame.LZ4FrameCompressor(block_size=lz4.frame.BLOCKSIZE_MAX4MB) as frame:
        return frame.begin() + b"".join([frame.compress(ZEROS) for _ in range(megabytes)]) + frame.flush()


def _zstd(megabytes: int, window_log: int = 21) -> bytes:
    parameters = zstandard.ZstdCompressionParameters.from_level(3, window_log=window_log)
    stream = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    return b"".join([*(stream.compress(ZEROS) for _ in range(megabytes)), stream.flush()])


def _lz4_frame(flags: int, block_size: int, rest: bytes, size: bytes = b"") -> bytes:
    descriptor = bytes((flags, block_size)) + size
    # the second byte of the XXH32, which lz4 computes as a content checksum
    checksum = lz4.frame.compress(descriptor, content_checksum=True)[-3]
    return b"\x04\x22\x4d\x18" + descriptor + bytes((checksum,)) + rest


def _zstd_frame(window_log: int, size: int | None, *blocks: tuple[int, int, bytes]) -> bytes:
    """A frame of blocks (type, size, bytes); `size` is the content size that it claims."""
    head = bytes((0 if size is None else 0xC0, window_log - 10 << 3))
    head += b"" if size is None else struct.pack("<Q", size)
    ends = [False] * (len(blocks) - 1) + [True]
    return (
        b"\x28\xb5\x2f\xfd"
        + head
        + b"".join(
            (block_size << 3 | kind << 1 | end).to_bytes(3, "little") + data
            for end, (kind, block_size, data) in zip(ends, blocks, strict=True)
        )
    )


_RUN = (1, 128 * 1024, b"x")
_EMPTY = (0, 0, b"")
_BEYOND = f"grow beyond {LIMIT} bytes"

#: By name: (codec id, a function that makes the bomb, part of the result)
BOMBS: dict[str, tuple[int, Callable[[], bytes], str]] = {
    "gzip": (1, lambda: _gzip(LARGE), _BEYOND),
    "gzip members": (1, lambda: _gzip(1) * 500, _BEYOND),
    "gzip empty members": (1, lambda: _gzip(0) * (2 * MB // len(_gzip(0))), "0 bytes"),
    "gzip tiny and large members": (1, lambda: (_gzip(0) * 100 + _noise_member()) * 5, f"{5 * MB} bytes"),
    "gzip empty blocks": (1, lambda: _gzip(0)[:10] + b"\0\0\0\xff\xff" * (MB // 5) + _gzip(0)[10:], "0 bytes"),
    "xerial": (2, lambda: _xerial(LARGE), _BEYOND),
    "xerial empty blocks": (2, lambda: XERIAL + b"\0\0\0\1\0" * (MB // 5), "0 bytes"),
    "xerial headers": (2, lambda: XERIAL * (MB // 16), "0 bytes"),
    "snappy raw": (2, lambda: bytes(cramjam.snappy.compress_raw(bytes(LIMIT + 1))), _BEYOND),
    "snappy size claimed": (2, lambda: b"\x80\x80\x80\x0f\x00a", "which it can't hold"),
    "lz4": (3, lambda: _lz4(LARGE), _BEYOND),
    "lz4 frames": (3, lambda: _lz4(1) * 500, _BEYOND),
    "lz4 blocks of 4 MB claimed": (
        3,
        lambda: _lz4_frame(0x40, 0x70, b"\1\0\0\x80x" + bytes(4)) * 50_000,
        "50000 bytes",
    ),
    "lz4 size claimed": (
        3,
        lambda: _lz4_frame(0x68, 0x70, b"\1\0\0\x80x" + bytes(4), b"\xff" * 7 + b"\x7f"),
        "damaged",
    ),
    "lz4 tiny blocks": (3, lambda: _lz4_frame(0x40, 0x70, b"\1\0\0\x80x" * (MB // 5) + bytes(4)), f"{MB // 5} bytes"),
    "zstd": (4, lambda: _zstd(LARGE), _BEYOND),
    "zstd window of 128 MB": (4, lambda: _zstd(LARGE, 27), _BEYOND),
    "zstd frames": (4, lambda: _zstd(1) * 500, _BEYOND),
    "zstd empty frames": (4, lambda: _zstd(0) * (MB // len(_zstd(0))), "0 bytes"),
    "zstd empty blocks": (4, lambda: _zstd_frame(10, None, *[_EMPTY] * (MB // 3)), "0 bytes"),
    "zstd runs": (4, lambda: _zstd_frame(27, None, *[_RUN] * (MB // 4)), _BEYOND),
    "zstd windows claimed": (4, lambda: _zstd_frame(27, None, (0, 1, b"x")) * 10_000, "10000 bytes"),
    "zstd window of 2 GB claimed": (4, lambda: _zstd_frame(31, None, (0, 1, b"x")), "window of 2147483648 bytes"),
    "zstd size claimed": (4, lambda: _zstd_frame(27, 2**31, (0, 1, b"x")), "claims 2147483648 bytes"),
    "zstd size and runs claimed": (4, lambda: _zstd_frame(27, LIMIT, *[(1, (1 << 21) - 1, b"x")] * 33), "damaged"),
}


def _noise_member() -> bytes:
    deflate = zlib.compressobj(0, wbits=31)
    return deflate.compress(random.Random(1).randbytes(MB)) + deflate.flush()


def _start(*missing: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", _PARENT, *missing]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as running:
        yield running
        running.kill()


@pytest.fixture(scope="module")
def parent() -> Iterator[subprocess.Popen[str]]:
    yield from _start()


@pytest.fixture(scope="module")
def base_parent() -> Iterator[subprocess.Popen[str]]:
    """A process of the base install, without the package zstandard."""
    yield from _start("zstandard")


@pytest.mark.skipif(not _STATUS.exists(), reason="the peak of memory is read from /proc")
@pytest.mark.parametrize("name", BOMBS)
def test_bomb_in_bounded_memory(name: str, parent: subprocess.Popen[str], tmp_path: Path) -> None:
    _check_bomb(name, parent, tmp_path)


@pytest.mark.skipif(not _STATUS.exists(), reason="the peak of memory is read from /proc")
@pytest.mark.parametrize("name", [name for name, (codec_id, *_) in BOMBS.items() if codec_id == 4])
def test_bomb_in_bounded_memory_of_the_base(name: str, base_parent: subprocess.Popen[str], tmp_path: Path) -> None:
    _check_bomb(name, base_parent, tmp_path)


def _check_bomb(name: str, parent: subprocess.Popen[str], tmp_path: Path) -> None:
    codec_id, make, expected = BOMBS[name]
    assert parent.stdin is not None
    assert parent.stdout is not None
    (tmp_path / "bomb").write_bytes(make())
    parent.stdin.write(f"{codec_id} {LIMIT} {tmp_path / 'bomb'}\n")
    parent.stdin.flush()
    said, end = parent.stdout.readline(), ""
    if not said.startswith("end"):
        end = parent.stdout.readline()
    assert end == "end 0\n", (said, end)
    rise, result = said.strip().split(" ", 1)
    assert re.search(rf"(?<!\d){re.escape(expected)}", result)
    # the result with room to grow, and pieces of it; zstd also has its window. (malloc may keep as much as 32 MB.)
    assert int(rise) <= LIMIT // MB * (2 if codec_id == 4 else 9 / 8) + 40


def test_default_limit() -> None:
    assert MAX_DECOMPRESSED == 256 * MB


@pytest.mark.parametrize("codec", COMPRESSING, ids=_NAMES)
def test_limit_is_exact(codec: Codec) -> None:
    for data in (bytes(100_000), random.Random(1).randbytes(100_000), bytes(9 * MB)):
        stored = codec.compress(data)
        assert codec.decompress(stored, len(data)) == data
        with pytest.raises(DecodeError, match=f"grow beyond {len(data) - 1} bytes"):
            codec.decompress(stored, len(data) - 1)
        with pytest.raises(DecodeError, match="grow beyond 0 bytes"):
            codec.decompress(stored, 0)
