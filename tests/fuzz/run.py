"""Fuzz a target with libFuzzer, guided by the coverage of our Python code (atheris).

    python -m tests.fuzz.run reader --seconds 600
    python -m tests.fuzz.run reader -- /tmp/spark_klog_fuzz/reader/crash-0123456789    run one input again
    python -m tests.fuzz.run reader --merge       minimise the found inputs into the committed corpus

New inputs go to WORK/TARGET/corpus; an input that fails goes to WORK/TARGET/crash-* (timeout-*, oom-*) and is printed.

atheris has wheels for Linux on x86_64 only and CPython 3.10 to 3.14 (2.3 for 3.10, 3.0 for 3.11, 3.1 for later ones).
Elsewhere only the corpus test runs.
"""

from __future__ import annotations

import argparse
import hashlib
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import ModuleType

from .inputs import CORPUS, kept_folders
from .native_build import MODULES, TRACE, build, install, watch

#: Most bytes of an input, and most seconds that it may take.
_MAX_LEN = 4096
_TIMEOUT = 20
_MB = 1 << 20
#: MB by which the process may grow after its start.
MEMORY = 128


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.fuzz.run", description="Fuzz a target. What follows -- goes to libFuzzer as it is."
    )
    parser.add_argument("target")
    parser.add_argument("--seconds", type=int, default=60)
    parser.add_argument("--kernel", choices=("reference", "native", "both"), default="both")
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "spark_klog_fuzz")
    parser.add_argument("--memory", type=int, default=MEMORY, help="MB that a run may take beyond the start")
    parser.add_argument(
        "--trace", action="store_true", help="compile the native kernel so that its coverage guides, too"
    )
    parser.add_argument("--seed", type=int, default=0, help="the same inputs each time; 0: others each time")
    parser.add_argument("--merge", action="store_true")
    return parser.parse_args(arguments)


def _load_targets(kernel: str) -> ModuleType:
    from tests.fuzz import targets

    targets.KERNELS = targets.kernels_named(kernel)
    return targets


def _write_seeds(target: str, folder: Path) -> Path:
    """Write the seeds to files, named by their hash as libFuzzer does."""
    from tests.fuzz.seeds import seeds

    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for seed in seeds(target):
        (folder / hashlib.sha1(seed, usedforsecurity=False).hexdigest()).write_bytes(seed)
    return folder


@contextmanager
def bounded_memory(megabytes: int = MEMORY) -> Iterator[None]:
    """Limit the growth of the address space; beyond the limit allocations raise `MemoryError`."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + megabytes * _MB, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def _merge(command: list[str], target: str, found: Path) -> int:
    """Rebuild the committed corpus: of it and the found inputs, keep those that cover more than other kept ones."""
    committed = CORPUS / target
    committed.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        merged = _write_seeds(target, Path(folder, "merged"))
        for other in kept_folders(target):
            if other != committed:
                shutil.copytree(other, merged, dirs_exist_ok=True)
        before = {path.name for path in merged.iterdir()}
        # edges only: with counts there would be ten times as many files
        flags = ["-merge=1", "-use_counters=0", str(merged), str(committed), str(found)]
        if code := subprocess.call([*command, *flags]):
            return code
        shutil.rmtree(committed)
        committed.mkdir()
        for path in merged.iterdir():
            if path.name not in before:
                shutil.copy(path, committed)
    return 0


def main() -> None:
    given = sys.argv[1:]
    split = given.index("--") if "--" in given else len(given)
    passed_on = given[split + 1 :]
    arguments = _parse(given[:split])
    work: Path = arguments.work / arguments.target
    found = work / "corpus"
    found.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "tests.fuzz.run", arguments.target, "--kernel", arguments.kernel]
    command += ["--work", str(arguments.work), *(["--trace"] if arguments.trace else []), "--"]
    if arguments.merge:
        sys.exit(_merge(command, arguments.target, found))
    import atheris

    with atheris.instrument_imports(include=["spark_klog"]):
        if arguments.trace:
            for module in MODULES:
                traced = build(work, module, *TRACE)
                install(traced)
                watch(traced)
        targets = _load_targets(arguments.kernel)
    flags = [
        f"-artifact_prefix={work}/",
        f"-timeout={_TIMEOUT}",
        f"-rss_limit_mb={arguments.memory + 256}",
    ]
    if passed_on:
        flags += passed_on
    else:
        flags += [f"-max_total_time={arguments.seconds}", f"-max_len={_MAX_LEN}", "-use_value_profile=1"]
        flags += [f"-seed={arguments.seed}"]
        flags += [
            "-print_final_stats=1",
            f"-dict={CORPUS.parent / 'tokens.dict'}",
            str(found),
            str(_write_seeds(arguments.target, work / "seeds")),
        ]
        flags += [str(folder) for folder in kept_folders(arguments.target)]
    sys.stderr.write(f"kernels: {', '.join(kernel.name for kernel in targets.KERNELS)}\n")
    # libFuzzer runs the first argument in a shell if it starts processes, as for -merge
    atheris.Setup([" ".join(command), *flags], targets.TARGETS[arguments.target])
    # the processes that -merge=1 starts would inherit the limit; each sets its own
    with nullcontext() if "-merge=1" in passed_on else bounded_memory(arguments.memory):
        atheris.Fuzz()


if __name__ == "__main__":
    main()
