"""Run here what the workflows run for a release, from an empty clone of the last commit.

    python -m release.rehearsal [--only WORD] [--again]      make rehearsal

The commands are those of release.yml, in their order; check.yml has no others. The clone's changelog has a date, as a
release's has, its version is one that can be released, and an empty branch stands for that of the site. What has
passed is not done again for the same commit: a call goes on where the one before it was stopped or failed. All is in
build/rehearsal/COMMIT: the clone, the site's branch, a log for each command.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from release import ROOT
from release.wheels import git
from spark_klog.base.names import VERSION

_WORKFLOW = ROOT / ".github" / "workflows" / "release.yml"
_WHO = {f"GIT_{who}_{what}": "rehearsal@localhost" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}


def commands(workflow: str) -> list[str]:
    """The commands of a workflow's steps, each once."""
    return list(dict.fromkeys(re.findall(r"^ *(?:- )?run: (.*)$", workflow, re.MULTILINE)))


def release_of(version: str) -> str:
    """The version to rehearse as: between two releases, when there is X.Y.0.dev0, the first candidate of the next."""
    return version.replace(".dev", "rc")


def clone(commit: str, folder: Path) -> None:
    """Clone the commit into `folder`/clone, with what only a release has: the tag, a date in the changelog, a site."""
    version = release_of(VERSION)
    building, site = folder / "cloning", folder / "site.git"
    for path in (building, site):
        shutil.rmtree(path, ignore_errors=True)
    date = git("show", "--no-patch", "--format=%cI", commit)
    when = {**_WHO, "GIT_AUTHOR_DATE": date, "GIT_COMMITTER_DATE": date}
    _run(["git", "clone", "--quiet", "--no-checkout", ROOT, building])
    _run(["git", "-C", building, "checkout", "--quiet", "--detach", commit])
    section = rf"^## {re.escape(VERSION.partition('.dev')[0])} \(.+\)$"
    _replace(building / "CHANGELOG.md", section, f"## {version} ({date[:10]})")
    _replace(building / "spark_klog" / "base" / "names.py", r'(?<=^VERSION: Final = ").*(?="$)', version)
    _run(["git", "-C", building, "commit", "--quiet", "--allow-empty", "--all", "--message", "A release"], **when)
    _run(["git", "-C", building, "tag", f"v{version}"])
    _run(["git", "init", "--quiet", "--bare", "--initial-branch=gh-pages", site])
    pages = building / "build" / "docs"
    _run(["git", "clone", "--quiet", site, pages])
    _run(["git", "-C", pages, "commit", "--quiet", "--allow-empty", "--message", "Empty"], **when)
    _run(["git", "-C", pages, "push", "--quiet", "origin", "HEAD:gh-pages"])
    building.rename(folder / "clone")


def rehearse(folder: Path, only: str) -> bool:
    """Run the commands that have not passed yet, and print what each came to; whether all have passed."""
    kept, own = folder / "passed.json", folder / "clone"
    passed: dict[str, str] = json.loads(kept.read_text()) if kept.exists() else {}
    told = {"CI": "true", "GITHUB_REF_NAME": f"v{release_of(VERSION)}", "SITE_REMOTE": str(folder / "site.git")}
    others = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "PYSPARK", "SPARK_"))}
    steps = commands(_WORKFLOW.read_text())
    for number, command in enumerate(steps, 1):
        log = folder / f"{number}.log"
        if command not in passed and only in command:
            print(f"{command}: its output goes to {log}", flush=True)
            there = command if shutil.which("sudo") else command.replace("sudo ", "")
            with log.open("w") as output:
                shell = ["bash", "-euo", "pipefail", "-c", there]
                ran = subprocess.run(
                    shell,
                    cwd=own,
                    env=others | told,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    check=False,
                )
            if ran.returncode:
                print(f"{command}: FAILED with {ran.returncode}, see {log}")
                return False
            passed[command] = _came_to(command, own)
            kept.write_text(json.dumps(passed, indent=1) + "\n")
        print(f"{command}: {passed.get(command, 'left out')}", flush=True)
    return len(passed) == len(steps)


def _came_to(command: str, own: Path) -> str:
    """What a command that has passed has made, so that two rehearsals of a commit can be compared."""
    if command.startswith("make dist"):
        return f"SHA256 of its SHA256SUMS {hashlib.sha256((own / 'dist' / 'SHA256SUMS').read_bytes()).hexdigest()}"
    if command == "make test-dist":
        said: dict[str, str] = json.loads((own / "build" / "test-dist.json").read_text())["said"]
        return "; ".join(f"{name}: {text}" for name, text in said.items())
    return "passed"


def _replace(path: Path, pattern: str, text: str) -> None:
    path.write_text(re.sub(pattern, text, path.read_text(), count=1, flags=re.MULTILINE))


def _run(command: list[str | Path], **environment: str) -> None:
    subprocess.run(command, env={**os.environ, **_WHO, **environment}, check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--only", default="", metavar="WORD", help="only commands with this word; the rest another time"
    )
    parser.add_argument("--again", action="store_true", help="from a new clone")
    arguments = parser.parse_args()
    commit = git("rev-parse", "HEAD")
    folder = ROOT / "build" / "rehearsal" / commit[:12]
    if arguments.again:
        shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "clone").exists():
        clone(commit, folder)
    sys.exit(not rehearse(folder, arguments.only))


if __name__ == "__main__":
    main()
