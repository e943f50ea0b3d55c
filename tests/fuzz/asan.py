"""Run the native kernels under AddressSanitizer and UndefinedBehaviorSanitizer.

    python -m tests.fuzz.asan [--seconds 60]

Builds `records/kernels/_kernel.pyx`, `schemas/avro/_avro.pyx` and `schemas/protobuf/_protobuf.pyx` outside the checkout
with the sanitizers of gcc or clang, and preloads their runtime into a Python process. There the kernels read all kept
inputs, then mutated ones for a while, and run their own tests. The first report of a sanitizer ends the run with a
failure. They get their data in blocks of exactly their size: a `bytes` object has a zero after its end, which would
hide a read of one byte too many.
"""

from __future__ import annotations

import argparse
import ctypes
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

from spark_klog.records.contract import Kernel
from spark_klog.wire.primitives import Buffer

from .envelope import Mode
from .native_build import MODULES, SANITIZE, build, install, sanitizer_environment

_ROOT = Path(__file__).parent.parent.parent


class _Exact:
    """The kernel, which gets copies of the data in blocks of exactly their size."""

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self.name = kernel.name

    def builder(self, columns: frozenset[str]) -> Any:
        return _ExactBuilder(self._kernel.builder(columns))

    def message_run(self, data: Buffer, position: int, end: int) -> int:
        found: int = self._kernel.message_run(_exact(data), position, end)
        return found

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kernel, name)

    def retained(self, body: Buffer, flags: bytes, *rest: Any) -> Any:
        return self._kernel.retained(_exact(body), _exact(flags), *rest)

    def message_set(self, body: Buffer, *rest: Any) -> Any:
        return self._kernel.message_set(_exact(body), *rest)

    def clean_batches(self, offsets: Any, data: Buffer, limits: Any) -> Any:
        return self._kernel.clean_batches(offsets, _exact(data), limits)


class _ExactBuilder:
    def __init__(self, builder: Any) -> None:
        self._builder = builder

    def __getattr__(self, name: str) -> Any:
        return getattr(self._builder, name)

    def append(self, body: Buffer, *rest: Any) -> None:
        self._builder.append(_exact(body), *rest)

    def append_batches(self, data: Buffer, *rest: Any) -> Any:
        return self._builder.append_batches(_exact(data), *rest)

    def append_messages(self, messages: Buffer, *rest: Any) -> None:
        self._builder.append_messages(_exact(messages), *rest)


def _exact(data: Buffer) -> Any:
    return (ctypes.c_char * len(data)).from_buffer_copy(data)


def _large_inputs() -> Iterator[bytes]:
    """Batches with more rows than the kernel's smallest buffers can hold."""
    from spark_klog.records.building.conversion import batch_of
    from spark_klog.records.contract import CREATE_TIME, Record
    from spark_klog.records.formats.message_set import build_message_set

    from .seeds import source_of

    rows = [
        Record(row, row, CREATE_TIME, b"", None if row % 3 else b"v", (("h", b""),) * (row % 2)) for row in range(1500)
    ]
    for log in (batch_of(rows), *(build_message_set(rows, magic) for magic in (0, 1))):
        yield bytes(4) + log
        for mode in (Mode.WRAP, Mode.FIT):
            yield bytes((mode, 0, 0, 0)) + source_of(log * 2)


def _change(rng: random.Random, data: bytes, other: bytes) -> bytes:
    """Mutate an input in one or a few places, as a fuzzer does."""
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 4))):
        at = rng.randrange(len(changed) + 1)
        kind = rng.randrange(5)
        if kind == 0 and at < len(changed):
            changed[at] ^= 1 << rng.randrange(8)
        elif kind == 1 and at < len(changed):
            changed[at] = rng.choice((0, 1, 2, 0x7F, 0x80, 0xFE, 0xFF))
        elif kind == 2:
            changed[at : at + rng.randrange(1, 9)] = b""
        elif kind == 3:
            changed[at:at] = rng.randbytes(rng.randrange(1, 9))
        else:
            start = rng.randrange(len(other) + 1)
            changed[at : at + rng.randrange(9)] = other[start : start + rng.randrange(60)]
    return bytes(changed)


def _run(seconds: float, seed: int, more: Path | None) -> None:
    """Run all kept inputs, then mutated ones."""
    from . import targets
    from .inputs import all_inputs

    assert [kernel.name for kernel in targets.KERNELS] == ["reference", "native"]
    targets.KERNELS = [targets.KERNELS[0], cast(Kernel, _Exact(targets.KERNELS[1]))]
    inputs = [*all_inputs("reader").values(), *_large_inputs()]
    if more:
        inputs += [path.read_bytes() for path in sorted(more.iterdir())]
    _run_target(targets.fuzz_reader, inputs, seconds / 4, seed)
    for target in (targets.fuzz_compaction, targets.fuzz_conversion):
        _run_target(target, inputs, seconds / 8, seed)
    _run_target(targets.fuzz_avro, [*all_inputs("avro").values()], seconds / 4, seed)
    _run_target(targets.fuzz_protobuf, [*all_inputs("protobuf").values()], seconds / 4, seed)


def _run_target(target: Callable[[bytes], None], inputs: list[bytes], seconds: float, seed: int) -> None:
    rng = random.Random(seed)
    runs = 0
    end = time.monotonic() + seconds
    while runs < len(inputs) or time.monotonic() < end:
        data = inputs[runs] if runs < len(inputs) else _change(rng, rng.choice(inputs), rng.choice(inputs))
        try:
            target(data)
        except BaseException:
            sys.stderr.write(f"input: {data.hex()}\n")
            raise
        runs += 1
    sys.stderr.write(f"{target.__name__}: {runs} inputs, {len(inputs)} of them kept ones; seed {seed}\n")


def _inside(arguments: argparse.Namespace) -> int:
    import pytest

    # reusing a buffer would hide accesses to it after its release
    for module in MODULES:
        install(arguments.built / f"{module.rpartition('.')[2]}.so").limit_spare_memory(0)
    _run(arguments.seconds, arguments.seed, arguments.inputs)
    tests = _ROOT / "tests"
    kernels = sorted((tests / "records").glob("test_kernel_*.py"))
    # Spark's JVM is slow, and adds nothing
    avro = sorted(set((tests / "schemas" / "avro").glob("test_*.py")) - {tests / "schemas" / "avro" / "test_spark.py"})
    protobuf = [tests / "schemas" / "protobuf" / f"test_{name}.py" for name in ("damaged", "encoder", "properties")]
    chosen = [str(path) for path in (tests / "records" / "test_fuzz.py", *kernels, *avro, *protobuf)]
    return int(pytest.main(["-q", "-p", "no:cacheprovider", *chosen]))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.asan", description="The native kernel under ASan.")
    parser.add_argument("--seconds", type=float, default=30)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 32))
    parser.add_argument("--inputs", type=Path, help="a folder with more inputs, as run.py's WORK/reader/corpus")
    parser.add_argument("--built", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.built:
        return _inside(arguments)
    with tempfile.TemporaryDirectory() as folder:
        for module in MODULES:
            build(Path(folder), module, *SANITIZE)
        command = [sys.executable, "-m", "tests.fuzz.asan", "--built", folder]
        command += ["--seconds", str(arguments.seconds), "--seed", str(arguments.seed)]
        command += ["--inputs", str(arguments.inputs)] if arguments.inputs else []
        environment = sanitizer_environment() | {"SPARK_KLOG_KERNEL": "native"}
        code = subprocess.call(command, cwd=_ROOT, env=environment)
    sys.stderr.write("no findings\n" if code == 0 else f"FAILED, exit code {code}: see above\n")
    return code


if __name__ == "__main__":
    sys.exit(main())
