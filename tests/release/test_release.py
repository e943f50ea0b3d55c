"""What makes a release be refused, and its parts: what differs, licences, the SBOM, the index, the sdist's bytes."""

from __future__ import annotations

import io
import re
import shutil
import tarfile
import urllib.request
import zipfile
from pathlib import Path
from typing import Any

import pytest
from packaging.version import Version

from release import ROOT, checks, dist, installs, rehearsal, sbom, wheels
from release.checks import ReleaseError
from spark_klog.base.names import VERSION

_NEXT = Version(VERSION).base_version


def test_two_builds_must_be_the_same(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    for folder in (first, second):
        folder.mkdir()
        (folder / "a.whl").write_bytes(b"a")
        (folder / "b.whl").write_bytes(b"b")
    dist.compare(first, second)
    (second / "b.whl").write_bytes(b"c")
    (second / "d.whl").touch()
    with pytest.raises(ReleaseError, match=r"\['b.whl', 'd.whl'\]"):
        dist.compare(first, second)


def test_a_tag_is_that_of_the_version_and_of_the_changelog(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "VERSION", "0.1.0")
    dist.check_tag("v0.1.0", "# Changelog\n\n## 0.1.0 (2026-11-29)\n")
    with pytest.raises(ReleaseError, match="set VERSION"):
        dist.check_tag("v99.0.0", "")
    with pytest.raises(ReleaseError, match=r"'## 0\.1\.0 "):
        dist.check_tag("v0.1.0", "## 0.1.0 (unreleased)\n")
    for version, reason in (("0.2.0.dev0", "between two releases"), ("99.0.0", "tests.golden.make")):
        monkeypatch.setattr(dist, "VERSION", version)
        with pytest.raises(ReleaseError, match=reason):
            dist.check_tag(f"v{version}", f"## {version} (2026-11-29)\n")


@pytest.mark.parametrize(
    ("metadata", "licence", "is_allowed"),
    [
        ({"license_expression": "MIT"}, "MIT", True),
        ({"license_expression": "MIT OR GPL-2.0-only"}, "MIT OR GPL-2.0-only", True),
        ({"license_expression": "MIT AND GPL-2.0-only"}, "MIT AND GPL-2.0-only", False),
        ({"license_expression": "MIT AND (BSD-3-Clause OR ISC)"}, "MIT AND (BSD-3-Clause OR ISC)", True),
        ({"license": "Apache License,\n Version 2.0"}, "Apache-2.0", True),
        ({"license": "see LICENSE", "classifier": ["License :: OSI Approved :: MIT License"]}, "MIT", True),
        ({"license": "LGPL-2.1-or-later"}, "LGPL-2.1-or-later", True),
        ({"license": "AGPL-3.0"}, "unknown: AGPL-3.0", False),
        ({"classifier": ["License :: OSI Approved :: GNU General Public License v3 (GPLv3)"]}, None, False),
        ({}, "unknown: ", False),
    ],
)
def test_licences(metadata: dict[str, Any], licence: str | None, is_allowed: bool) -> None:
    declared = sbom.licence_of(metadata)
    assert declared == licence or licence is None
    assert sbom.is_allowed(declared) is is_allowed


def _installed(name: str, licence: str, *needs: str) -> dict[str, Any]:
    metadata = {"name": name, "version": "1.0", "license_expression": licence, "requires_dist": list(needs)}
    return {"metadata": metadata, "download_info": {"archive_info": {"hashes": {"sha256": "0" * 64}}}}


def _report(licence: str = "MIT") -> dict[str, Any]:
    return {
        "install": [
            _installed("spark-klog", "Apache-2.0", "click", "httpx; extra == 'web'", "spark-klog[web]; extra == 'ui'"),
            _installed("click", "BSD-3-Clause"),
            _installed("httpx", "BSD-3-Clause", "Idna>=1", "click; extra == 'cli'", "rich; extra == 'cli'"),
            _installed("idna", licence),
        ]
    }


@pytest.fixture
def small_wheel(tmp_path: Path) -> Path:
    path = tmp_path / "spark_klog-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        extras = "".join(f"Provides-Extra: {extra}\n" for extra in ("web", "ui", "test"))
        archive.writestr("spark_klog-1.0.dist-info/METADATA", f"Name: spark-klog\n{extras}\n")
    return path


def test_the_sbom_says_what_each_extra_brings(small_wheel: Path) -> None:
    document = sbom.sbom(_report(), small_wheel, "2026-01-01T00:00:00+00:00")
    extras = {part["name"]: [listed["value"] for listed in part["properties"]] for part in document["components"]}
    assert extras == {"click": ["base"], "httpx": ["ui", "web"], "idna": ["ui", "web"]}
    assert document["components"][2]["licenses"] == [{"license": {"id": "MIT"}}]
    needs = {part["ref"]: part["dependsOn"] for part in document["dependencies"]}
    assert needs["pkg:pypi/httpx@1.0"] == ["pkg:pypi/click@1.0", "pkg:pypi/idna@1.0"]
    assert document == sbom.sbom(_report(), small_wheel, "2026-01-01T00:00:00+00:00")


def test_a_licence_that_can_not_stand_beside_ours_is_refused(small_wheel: Path) -> None:
    with pytest.raises(ReleaseError, match=r"idna \(GPL-3.0-only\)"):
        sbom.sbom(_report("GPL-3.0-only"), small_wheel, "2026-01-01T00:00:00+00:00")


def test_an_index_lists_its_packages(tmp_path: Path) -> None:
    (tmp_path / "spark_klog-1.0.tar.gz").write_bytes(b"content")
    with installs.index_of(tmp_path) as address:
        page = urllib.request.urlopen(f"{address}spark-klog/", timeout=10).read().decode()
        assert 'href="spark_klog-1.0.tar.gz"' in page
        assert urllib.request.urlopen(f"{address}spark-klog/spark_klog-1.0.tar.gz", timeout=10).read() == b"content"


def test_the_bytes_of_an_sdist_do_not_depend_on_times_and_order(tmp_path: Path) -> None:
    made = []
    for name, times in (("a", (1, 2)), ("b", (3, 4))):
        path = tmp_path / f"{name}.tar.gz"
        with tarfile.open(path, "w:gz") as archive:
            for member, time in sorted(zip(("one", "two"), times, strict=True), reverse=name == "b"):
                part = tarfile.TarInfo(member)
                part.size, part.mtime, part.uid, part.uname = 3, time, time, name
                archive.addfile(part, io.BytesIO(member.encode()))
        wheels.normalize(path, 1_000_000_000)
        made.append(path.read_bytes())
    assert made[0] == made[1]
    with tarfile.open(tmp_path / "a.tar.gz") as archive:
        assert [(member.name, member.mtime, member.mode) for member in archive] == [
            ("one", 1_000_000_000, 0o644),
            ("two", 1_000_000_000, 0o644),
        ]


def _wheel(folder: Path, members: dict[str, bytes]) -> Path:
    path = folder / "spark_klog-1.0-cp311-abi3-manylinux_2_17_x86_64.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return path


def test_links_of_the_readme_are_addresses_of_the_version() -> None:
    readme = (ROOT / "README.md").read_text()
    links = wheels.RELATIVE_LINK.findall(readme)
    assert [link for link in links if not (ROOT / link.partition("#")[0]).exists()] == []
    made = wheels.absolute_links(readme, *wheels._repository_and_version(ROOT))
    assert len(links) > 20
    assert wheels.RELATIVE_LINK.findall(made) == []
    text = "[a](docs/a.md#b), ![c](docs/c.png), [`d`](https://d), [e](#e), [f](LICENSE)"
    assert wheels.absolute_links(text, "https://github.com/o/r", "1.2") == (
        "[a](https://github.com/o/r/blob/v1.2/docs/a.md#b), "
        "![c](https://raw.githubusercontent.com/o/r/v1.2/docs/c.png), [`d`](https://d), [e](#e), "
        "[f](https://github.com/o/r/blob/v1.2/LICENSE)"
    )


@pytest.mark.parametrize(
    ("changed", "error"),
    [
        ({"a.dist-info/METADATA": b"[all](docs/index.md)"}, r"can't resolve the links \['docs/index.md'\]"),
        ({"spark_klog/_kernel.abi3.so": None}, r"has the native modules \['s"),
        ({"spark_klog/_kernel.abi3.so": None, "spark_klog/_kernel.so": b""}, "has the native modules"),
        ({"spark_klog/_kernel.abi3.so": b"\0/home/somebody/checkout/_kernel.pyx\0"}, "/home/somebody/checkout/_kernel"),
        ({"spark_klog/_kernel.c": b""}, "files of its build"),
        ({"a.dist-info/licenses/LICENSE": None}, "no licence"),
    ],
)
def test_wheels_that_are_refused(changed: dict[str, bytes | None], error: str, tmp_path: Path) -> None:
    whole = {f"spark_klog/{name}.abi3.so": b"" for name in ("_avro", "_kernel", "_protobuf")}
    members = {**whole, "a.dist-info/licenses/LICENSE": b"", **changed}
    path = _wheel(tmp_path, {name: content for name, content in members.items() if content is not None})
    with pytest.raises(ReleaseError, match=error):
        checks.check_wheel(path, wheels.STABLE, wheels.PLATFORMS[0])


def test_a_folder_must_have_all_wheels_and_the_sdist(tmp_path: Path) -> None:
    _wheel(tmp_path, {})
    with pytest.raises(ReleaseError, match="not an sdist and"):
        checks.check_folder(tmp_path)


def test_what_has_passed_is_not_done_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A second call does what failed or was left out, and prints the same lines; other files begin anew."""
    monkeypatch.setattr(installs, "_RECORD", tmp_path / "build" / "test-dist.json")
    wheel, calls, outcome = tmp_path / "a.whl", list[str](), dict[str, str | Exception]()
    wheel.write_bytes(b"first")

    def work(name: str) -> str:
        calls.append(name)
        came_to = outcome[name]
        if isinstance(came_to, Exception):
            raise came_to
        return came_to

    def call(only: str = "", *, again: bool = False) -> list[str]:
        calls.clear()
        done = installs._Done(tmp_path, only, again=again)
        for name in ("3.10", "3.11", "musl"):
            done.do(name, lambda name=name: work(name))  # type: ignore[misc]
        assert done.failed == [name for name in calls if isinstance(outcome[name], Exception)]
        return [*calls]

    outcome |= {"3.10": "7 passed", "3.11": ReleaseError("pip took another"), "musl": "left out: no sources"}
    assert call() == ["3.10", "3.11", "musl"]
    assert "3.11: FAILED: pip took another" in capsys.readouterr().out
    outcome |= {"3.11": "8 passed", "musl": "it runs"}
    assert call() == ["3.11", "musl"]
    lines = capsys.readouterr().out
    assert lines == "   3.10: 7 passed\n   3.11: 8 passed\n   musl: it runs\n"
    assert call() == []
    assert capsys.readouterr().out == lines
    assert call(again=True) == ["3.10", "3.11", "musl"]
    wheel.write_bytes(b"second")
    assert call("11") == ["3.11"]
    assert call() == ["3.10", "musl"]
    wheel.write_bytes(b"third")
    assert call() == ["3.10", "3.11", "musl"]


def test_a_rehearsal_goes_on_where_it_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    workflow, fails = tmp_path / "release.yml", tmp_path / "fails"
    workflow.write_text(
        "      - run: echo built >>built\n"
        f"      - name: second\n        run: test ! -e {fails} && echo $GITHUB_REF_NAME >tag\n"
        "      - run: echo built >>built\n"
    )
    monkeypatch.setattr(rehearsal, "_WORKFLOW", workflow)
    monkeypatch.setattr(rehearsal, "VERSION", "0.1.0")
    folder = tmp_path / "rehearsal"
    (folder / "clone").mkdir(parents=True)
    fails.touch()
    assert not rehearsal.rehearse(folder, "")
    assert not rehearsal.rehearse(folder, "echo built")
    fails.unlink()
    capsys.readouterr()
    assert rehearsal.rehearse(folder, "")
    assert [line for line in capsys.readouterr().out.splitlines() if "its output" not in line] == [
        "echo built >>built: passed",
        f"test ! -e {fails} && echo $GITHUB_REF_NAME >tag: passed",
    ]
    assert (folder / "clone" / "built").read_text() == "built\n"
    assert (folder / "clone" / "tag").read_text() == "v0.1.0\n"


@pytest.mark.parametrize(("version", "release"), [(_NEXT, _NEXT), (f"{_NEXT}.dev0", f"{_NEXT}rc0")])
@pytest.mark.test_all("long")
def test_a_rehearsal_is_of_an_empty_clone_with_what_a_release_has(
    version: str, release: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between two releases as well: a tag can't be of a version that is in the making."""
    monkeypatch.setattr(rehearsal, "VERSION", version)
    made, own = [], tmp_path / "clone"
    for _ in range(2):
        shutil.rmtree(own, ignore_errors=True)
        rehearsal.clone("HEAD", tmp_path)
        made.append(wheels.git("-C", str(own), "rev-parse", f"v{release}", "HEAD").split())
    assert made[0] == made[1], "the same commit, so that two rehearsals build the same bytes"
    assert len({*made[0]}) == 1
    assert wheels._repository_and_version(own)[1] == release
    section = rf"^## {re.escape(release)} \(\d{{4}}-\d\d-\d\d\)$"
    assert re.search(section, (own / "CHANGELOG.md").read_text(), re.MULTILINE)
    beside = wheels.git("-C", str(own), "status", "--porcelain", "--ignored")
    assert beside == "!! build/", "the checkout of the site's branch"
