"""`klog version` and `klog --version`: what is installed."""

from __future__ import annotations

import json
import platform
from importlib import metadata

import click

from spark_klog import __version__
from spark_klog.errors import ConfigError
from spark_klog.records import kernels


def versions() -> dict[str, str | None]:
    """Versions of klog, Python and pyspark (None if it is not installed), and the kernel in use."""
    try:
        pyspark = metadata.version("pyspark")
    except metadata.PackageNotFoundError:
        pyspark = None
    try:
        kernel = kernels.load().name
    except ConfigError as error:
        kernel = f"none ({error})"
    return {"klog": __version__, "python": platform.python_version(), "pyspark": pyspark, "kernel": kernel}


def version_line() -> str:
    """The versions in a line."""
    found = versions()
    pyspark = "no pyspark" if found["pyspark"] is None else f"pyspark {found['pyspark']}"
    return f"klog {found['klog']}, Python {found['python']}, {pyspark}, kernel {found['kernel']}"


@click.command(
    epilog="""\b
Examples:
  klog version
  klog version --json | jq -r .kernel              native, or reference: in Python, many times slower
"""
)
@click.option("--json", "as_json", is_flag=True, help="Print a line of JSON.")
def version(as_json: bool) -> None:
    """Print the versions of klog, Python and pyspark, and the kernel in use."""
    click.echo(json.dumps(versions()) if as_json else version_line())
