"""Build the pages of this version: `python docs/publish.py build/docs` makes build/docs/VERSION.

Each build adds its version to `versions.js` beside the folders, from which the pages' switch is made, and renews what
leads to a version: `stable` (the newest release), `latest` (the newest version, pre-releases too) and `index.html`.
To add a version to a site that is online, build into a copy of the site, or of its `versions.js` alone. A copy of the
site can be read from file://: the search then shows no excerpts, and the switch opens a version at its first page.
"""

from __future__ import annotations

import json
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


def list_version(site: Path, version: str) -> None:
    """Add a version, whose folder is in `site`, to the site's list, and renew what leads to the newest one."""
    path = site / _VERSIONS
    known = json.loads(path.read_text().removeprefix(_BEFORE).rstrip(";\n"))["versions"] if path.exists() else []
    versions = sorted({*known, version}, key=Version, reverse=True)
    releases = [name for name in versions if not Version(name).is_prerelease]
    aliases = {"latest": versions[0]} | ({"stable": releases[0]} if releases else {})
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
    list_version(site, VERSION)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
