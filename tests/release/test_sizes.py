"""The sizes of the extras that docs/recipes/packaging.md gives: measured in one environment with all of them."""

from __future__ import annotations

import re
import shutil
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
    packages, sizes = {}, {}
    for distribution in distributions(path=[str(site_packages(python))]):
        package = sbom.package_of(distribution.metadata.json)
        packages[package.name] = package
        paths = [Path(str(distribution.locate_file(file))) for file in distribution.files or ()]
        sizes[package.name] = sum(path.lstat().st_blocks * 512 for path in paths if path.exists())
    base = sbom.brought("", packages)
    measured = {
        extra: sum(sizes[name] for name in sbom.brought(extra, packages) - base) / (1 << 20)
        for extra in [*sbom.extras_of_users(wheel), "all"]
    }
    page = (ROOT / "docs" / "recipes" / "packaging.md").read_text()
    said = {extra: float(size.replace(",", "")) for extra, size in _ROW.findall(page)}
    assert said.keys() == measured.keys()
    assert said == pytest.approx(measured, rel=0.1, abs=1.5), measured
    all_of_base = {*base, "spark-klog"}
    (base_said,) = re.findall(r"the pytest plugin: (\d+) MB with all that they need \(\d+ of them klog", page)
    assert float(base_said) == pytest.approx(sum(sizes[name] for name in all_of_base) / (1 << 20), abs=1.5)
