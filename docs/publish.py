"""Build the pages of this version: `python docs/publish.py build/docs` makes build/docs/VERSION.

Each build adds its version to `versions.js` beside the folders, from which the pages' switch is made, and renews what
leads to a version: `stable` (the newest release), `latest` (the newest version, released or not) and `index.html`.
To add a version to a site that is online, build into a copy of the site, or of its `versions.js` alone. A copy of the
site can be read from file://: the search then shows no excerpts, and the switch opens a version at its first page.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

from packaging.version import Version

from spark_klog.base.names import VERSION

_HERE = Path(__file__).parent
#: The list is a script, as browsers let no page from file:// read a JSON file.
_VERSIONS, _BEFORE = "versions.js", "window.KLOG_VERSIONS = "
_INDEX = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<title>spark_klog</title>
<meta http-equiv="refresh" content="0; url={target}">
<p><a href="{target}">The documentation of spark_klog</a></p>
</html>
"""


def is_released(version: str = VERSION) -> bool:
    """Whether the sources are those of a release: CHANGELOG.md has its date. Between two, they are of X.Y.0.dev0."""
    changelog = (_HERE.parent / "CHANGELOG.md").read_text()
    return re.search(rf"^## {re.escape(version)} \(\d{{4}}-\d\d-\d\d\)$", changelog, re.MULTILINE) is not None


def list_version(site: Path, version: str, *, is_release: bool) -> None:
    """Add a version, whose folder is in `site`, to the site's list, and renew what leads to the newest one."""
    path = site / _VERSIONS
    known = json.loads(path.read_text().removeprefix(_BEFORE).rstrip(";\n")) if path.exists() else {"versions": []}
    versions = sorted({*known["versions"], version}, key=Version, reverse=True)
    releases = [known["stable"]] if "stable" in known else []
    releases += [version] if is_release and not Version(version).is_prerelease else []
    aliases = {"latest": versions[0]} | ({"stable": max(releases, key=Version)} if releases else {})
    path.write_text(f"{_BEFORE}{json.dumps({'versions': versions, **aliases})};\n")
    for alias, target in aliases.items():
        link = site / alias
        link.unlink(missing_ok=True)
        link.symlink_to(target, target_is_directory=True)
    target = f"{'stable' if releases else 'latest'}/index.html"
    (site / "index.html").write_text(_INDEX.format(target=target))


def main(site: Path) -> None:
    """Build the pages: every warning is an error, a broken internal link among them. Links to elsewhere are not
    fetched.
    """
    options = ["--builder", "html", "--fail-on-warning", "--keep-going", "--nitpicky", "--fresh-env", "--quiet"]
    folders = ["--doctree-dir", str(site.parent / "doctrees"), str(_HERE), str(site / VERSION)]
    command = [sys.executable, "-m", "sphinx", *options, *folders]
    if status := subprocess.run(command).returncode:
        sys.exit(status)
    list_version(site, VERSION, is_release=is_released())


if __name__ == "__main__":
    main(Path(sys.argv[1]))
