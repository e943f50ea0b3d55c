"""The SBOM of a release: what pip installs with it and its extras, with licences, as CycloneDX 1.6.

`python -m release.sbom WHEEL FILE`, by the Python of `wheels.tool_environment`. pip resolves all extras at once, for
this machine; from the metadata of what it would install comes what each package needs. Licences that can't stand beside
Apache-2.0 are refused. Those of the LGPL can: the packages stay files of their own, which anyone can replace, and this
package contains no part of them.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import uuid
import zipfile
from collections.abc import Mapping
from email.parser import Parser
from pathlib import Path
from typing import Any, NamedTuple

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from release.checks import ReleaseError

_NAME = "spark-klog"
#: Extras of those who work on the package, and one that is the sum of others.
_NOT_OF_USERS = frozenset(("test", "docs", "check", "all"))
#: SPDX's names of licences that what is installed beside an Apache-2.0 package may have.
ALLOWED = frozenset(
    (
        "0BSD",
        "Apache-2.0",
        "BSD-2-Clause",
        "BSD-3-Clause",
        "CC0-1.0",
        "CNRI-Python",
        "HPND",
        "ISC",
        "LGPL-2.1-or-later",
        "LGPL-3.0-or-later",
        "LLVM-exception",
        "MIT",
        "MIT-0",
        "MIT-CMU",
        "MPL-2.0",
        "PSF-2.0",
        "Python-2.0",
        "Unlicense",
        "Zlib",
    )
)
#: SPDX's names for what else packages declare: the text of their field "License", or of their classifier.
_SPDX = {
    "apache 2.0": "Apache-2.0",
    "apache license 2.0": "Apache-2.0",
    "apache license, version 2.0": "Apache-2.0",
    "apache software license": "Apache-2.0",
    "apache-2": "Apache-2.0",
    "3-clause bsd license": "BSD-3-Clause",
    "bsd": "BSD-3-Clause",
    "bsd license": "BSD-3-Clause",
    "bsd 3-clause": "BSD-3-Clause",
    "cc0": "CC0-1.0",
    "isc license (iscl)": "ISC",
    "isc license": "ISC",
    "mit license": "MIT",
    "mozilla public license 2.0 (mpl 2.0)": "MPL-2.0",
    "python software foundation license": "PSF-2.0",
    "psf": "PSF-2.0",
    "the unlicense (unlicense)": "Unlicense",
}
_SECONDS = 900


class Package(NamedTuple):
    """A package that pip would install."""

    name: str
    version: str
    licence: str
    sha256: str
    needs: tuple[Requirement, ...]


def sbom(report: Mapping[str, Any], wheel: Path, timestamp: str) -> dict[str, Any]:
    """A CycloneDX document of pip's installation report of the wheel with all extras; `timestamp` is its time.

    `ReleaseError` names the packages whose licence is not allowed or unknown.
    """
    packages = {package.name: package for package in map(_package, report["install"])}
    refused = [package for package in packages.values() if not is_allowed(package.licence)]
    if refused:
        told = ", ".join(f"{package.name} ({package.licence})" for package in refused)
        raise ReleaseError(f"licences that are not allowed, or unknown (see release/sbom.py): {told}")
    product = packages.pop(_NAME)
    everything = {**packages, _NAME: product}
    base = brought("", everything)
    brought_by = {"base": base, **{extra: brought(extra, everything) - base for extra in extras_of_users(wheel)}}
    extras_of = {name: [extra for extra, names in brought_by.items() if name in names] for name in packages}
    components = [_component(package, extras_of[package.name]) for package in sorted(packages.values())]
    document = {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"timestamp": timestamp, "component": {**_component(product, []), "hashes": []}},
        "components": components,
        "dependencies": [
            {"ref": _url(package), "dependsOn": sorted({_url(packages[name]) for name in _direct(package, packages)})}
            for package in sorted([product, *packages.values()])
        ],
    }
    text = json.dumps(document, sort_keys=True)
    return {**document, "serialNumber": f"urn:uuid:{uuid.uuid5(uuid.NAMESPACE_URL, text)}"}


def is_allowed(licence: str) -> bool:
    """Whether an SPDX expression asks for nothing that is not in ALLOWED; of a pure choice one licence is enough."""
    names = [word for word in re.findall(r"[\w.+-]+", licence) if word not in ("AND", "OR", "WITH")]
    is_choice = " OR " in licence and " AND " not in licence
    return bool(names) and (any if is_choice else all)(name in ALLOWED for name in names)


def extras_of_users(wheel: Path) -> list[str]:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = Parser().parsestr(archive.read(name).decode())
    return sorted(set(metadata.get_all("Provides-Extra") or []) - _NOT_OF_USERS)


def licence_of(metadata: Mapping[str, Any]) -> str:
    """The licence that a package declares, as an SPDX expression; "unknown" if it declares none that is known."""
    if expression := metadata.get("license_expression"):
        return str(expression)
    classified = [
        text.rpartition(" :: ")[2] for text in metadata.get("classifier", []) if text.startswith("License ::")
    ]
    for text in (metadata.get("license") or "", *classified):
        words = " ".join(text.split())
        if words in ALLOWED:
            return words
        if words.lower() in _SPDX:
            return _SPDX[words.lower()]
    return f"unknown: {classified or (metadata.get('license') or '')[:60]}"


def _package(installed: Mapping[str, Any]) -> Package:
    hashes = installed["download_info"].get("archive_info", {}).get("hashes", {})
    return package_of(installed["metadata"], hashes.get("sha256", ""))


def package_of(metadata: Mapping[str, Any], sha256: str = "") -> Package:
    """A package by its metadata, as pip's reports have it."""
    needs = tuple(map(Requirement, metadata.get("requires_dist", [])))
    return Package(canonicalize_name(metadata["name"]), metadata["version"], licence_of(metadata), sha256, needs)


def brought(extra: str, packages: Mapping[str, Package]) -> set[str]:
    """The names of the packages that spark-klog needs with an extra, "" for none, directly or not; without its own."""
    seen: set[tuple[str, str]] = set()
    left = [(_NAME, extra), (_NAME, "")]
    while left:
        pair = left.pop()
        if pair in seen:
            continue
        seen.add(pair)
        for need in packages[pair[0]].needs:
            name = canonicalize_name(need.name)
            if name in packages and (need.marker is None or need.marker.evaluate({"extra": pair[1]})):
                left += [(name, ""), *((name, extra) for extra in need.extras)]
    return {name for name, _ in seen} - {_NAME}


def _direct(package: Package, packages: Mapping[str, Package]) -> set[str]:
    """What a package asks for itself, with any of its extras, and is installed."""
    return {str(canonicalize_name(need.name)) for need in package.needs} & packages.keys()


def _url(package: Package) -> str:
    return f"pkg:pypi/{package.name}@{package.version}"


def _component(package: Package, extras: list[str]) -> dict[str, Any]:
    expression = " " in package.licence
    licence = {"expression": package.licence} if expression else {"license": {"id": package.licence}}
    return {
        "type": "library",
        "bom-ref": _url(package),
        "purl": _url(package),
        "name": package.name,
        "version": package.version,
        "licenses": [licence],
        "hashes": [{"alg": "SHA-256", "content": package.sha256}] if package.sha256 else [],
        "properties": [{"name": "spark-klog:extra", "value": extra} for extra in extras],
    }


def main(wheel: Path, path: Path, timestamp: str) -> None:
    from cyclonedx.schema import SchemaVersion
    from cyclonedx.validation.json import JsonStrictValidator

    pip = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--quiet", "--report", "-"]
    command = [*pip, f"{wheel}[{','.join(extras_of_users(wheel))}]"]
    report = json.loads(subprocess.run(command, stdout=subprocess.PIPE, timeout=_SECONDS, check=True).stdout)
    text = json.dumps(sbom(report, wheel, timestamp), indent=1) + "\n"
    if error := JsonStrictValidator(SchemaVersion.V1_6).validate_str(text):
        raise ReleaseError(f"the SBOM is not valid: {error}")
    path.write_text(text)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
