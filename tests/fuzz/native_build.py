"""Build the native kernels for tests with gcc or clang: with sanitizers, or with coverage counters for a fuzzer."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import subprocess
import sys
import sysconfig
from pathlib import Path
from types import ModuleType

_ROOT = Path(__file__).parent.parent.parent
#: The native kernels: of records, of Avro, and of Protobuf.
MODULES = (
    "spark_klog.records.kernels._kernel",
    "spark_klog.schemas.avro._avro",
    "spark_klog.schemas.protobuf._protobuf",
)
_CC = os.environ.get("CC", "cc")
SANITIZE = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all")
TRACE = ("-fsanitize-coverage=trace-pc",)

# The compiler calls this at every edge of the control flow; libFuzzer watches the counters.
_TRACE_SOURCE = """
#include <stdint.h>
uint8_t spark_klog_counters[1 << 14];
const char spark_klog_base;
__attribute__((no_sanitize_coverage)) void __sanitizer_cov_trace_pc(void) {
    uint64_t edge = (uint64_t)__builtin_return_address(0) - (uint64_t)&spark_klog_base;
    spark_klog_counters[(edge * 0x9E3779B97F4A7C15u) >> 50]++;
}
"""


def build(folder: Path, module: str, *flags: str) -> Path:
    """Compile a kernel of `MODULES` with additional flags."""
    name = module.rpartition(".")[2]
    source, trace, built = folder / f"{name}.c", folder / "trace.c", folder / f"{name}.so"
    pyx = _ROOT / (module.replace(".", "/") + ".pyx")
    subprocess.run([sys.executable, "-m", "cython", "-3", str(pyx), "-o", str(source)], cwd=_ROOT, check=True)
    trace.write_text(_TRACE_SOURCE)
    options = ("-shared", "-fPIC", "-g", "-O1", "-fno-omit-frame-pointer", "-I" + sysconfig.get_path("include"))
    subprocess.run([_CC, *flags, *options, str(source), str(trace), "-o", str(built)], check=True)
    return built


def install(built: Path) -> ModuleType:
    """Make a built kernel the native kernel of this process."""
    name = next(module for module in MODULES if module.endswith(f".{built.stem}"))
    spec = importlib.util.spec_from_file_location(name, built)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def watch(built: Path) -> None:
    """Register the counters of a kernel built with `TRACE` with atheris' libFuzzer."""
    libfuzzer = importlib.import_module("atheris.core_with_libfuzzer")
    counters = (ctypes.c_uint8 * (1 << 14)).in_dll(ctypes.CDLL(str(built)), "spark_klog_counters")
    ctypes.memset(counters, 0, len(counters))
    start = ctypes.addressof(counters)
    ctypes.CDLL(libfuzzer.__file__).__sanitizer_cov_8bit_counters_init(
        ctypes.c_void_p(start), ctypes.c_void_p(start + len(counters))
    )


def sanitizer_environment() -> dict[str, str]:
    """Preload the sanitizers' runtime; stop at the first report, and report no leaks, as Python itself has some."""
    libraries = []
    for name in ("libasan.so", "libubsan.so", "libstdc++.so.6"):
        command = [_CC, f"-print-file-name={name}"]
        path = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
        if Path(path).is_absolute():
            libraries.append(path)
    return {
        **os.environ,
        "LD_PRELOAD": ":".join(libraries),
        "ASAN_OPTIONS": "detect_leaks=0:detect_stack_use_after_return=1:allocator_may_return_null=1:exitcode=99",
        "UBSAN_OPTIONS": "print_stacktrace=1:halt_on_error=1:exitcode=99",
        "PYTHONMALLOC": "malloc",
    }
