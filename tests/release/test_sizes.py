"""The sizes of the extras that docs/recipes/packaging.md gives: measured in one environment with all of them."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterable, Mapping
from importlib.metadata import distributions
from pathlib import Path

import pytest

from release import ROOT, sbom
from tests.support.packages.registries import program
from tests.support.packages.wheel import fresh_environment, site_packages
from tests.support.runs.soak import in_soak

_EVERYTHING = "all,demo,kerberos,notebooks"
_ROW = re.compile(r"^\| `(\w+)` \| .* \| ([\d,]+) \| ", re.MULTILINE)


@pytest.mark.test_all("long")
@in_soak
@pytest.mark.timeout(1800)
@pytest.mark.skipif(shutil.which("cc") is None, reason="gssapi is built here, and there is no C compiler")
def test_the_page_has_the_sizes_of_the_extras(wheel: Path, tmp_path: Path) -> None:
    """As `du -m` counts, with pip's .pyc files, within a tenth: versions of other packages differ from day to day."""
    program(("krb5-config",), "libkrb5-dev")
    python = fresh_environment(tmp_path, f"{wheel}[{_EVERYTHING}]")
    listed = [sbom.package_of(each.metadata.json) for each in distributions(path=[str(site_packages(python))])]
    packages, sizes = {package.name: package for package in listed}, _sizes(python)
    base = sbom.brought("", packages)
    measured = {
        extra: sum(sizes[name] for name in sbom.brought(extra, packages) - base) / (1 << 20)
        for extra in [*sbom.extras_of_users(wheel), "all"]
    }
    page = (ROOT / "docs" / "recipes" / "packaging.md").read_text()
    said = {extra: float(size.replace(",", "")) for extra, size in _ROW.findall(page)}
    assert said.keys() == measured.keys()
    assert said == pytest.approx(measured, rel=0.1, abs=1.5), measured
    assert _said_of_base(page) == pytest.approx(_megabytes(sizes, base), abs=1.5)


@pytest.mark.test_all("long")
@pytest.mark.timeout(900)
def test_the_page_has_the_size_of_the_base(wheel: Path, tmp_path: Path) -> None:
    """All of it, this package, and lz4, whose module has debug symbols: what could be smaller is not this package's."""
    sizes = _sizes(fresh_environment(tmp_path, str(wheel)))
    page = (ROOT / "docs" / "recipes" / "packaging.md").read_text()
    assert _said_of_base(page) == pytest.approx(_megabytes(sizes, sizes.keys()), abs=1.5)


def _said_of_base(page: str) -> list[float]:
    """The page's MB of the base, of klog, and of lz4."""
    (said,) = re.findall(r"plugin: (\d+) MB with all that they need \((\d+) of them klog[^)]* and (\d+) lz4\)", page)
    return [float(size) for size in said]


def _megabytes(sizes: Mapping[str, int], base: Iterable[str]) -> list[float]:
    whole = sum(sizes[name] for name in {*base, "spark-klog"})
    return [size / (1 << 20) for size in (whole, sizes["spark-klog"], sizes["lz4"])]


def _sizes(python: Path) -> dict[str, int]:
    """The bytes on disk of each package of an environment."""
    return {
        sbom.package_of(distribution.metadata.json).name: sum(
            path.lstat().st_blocks * 512
            for path in (Path(str(distribution.locate_file(file))) for file in distribution.files or ())
            if path.exists()
        )
        for distribution in distributions(path=[str(site_packages(python))])
    }
