"""Offset files in checkpoints that our source did not write."""

from __future__ import annotations

from pathlib import Path

import pytest

from spark_klog.errors import ConfigError, DecodeError
from spark_klog.groups.checkpoint import checkpoint_offsets, parse_offsets_file

METADATA = '{"batchWatermarkMs":0,"batchTimestampMs":1,"conf":{}}'


def test_several_sources() -> None:
    sources = ['{"a":{"0":5,"1":7}}', "-", "51", '{"logOffset":3}', '{"a":{"1":6},"b.c":{"12":0}}', "{", "[1]"]
    content = "\n".join(["v1", METADATA, *sources]).encode()
    assert parse_offsets_file(content, "x") == {("a", 0): 5, ("a", 1): 6, ("b.c", 12): 0}


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"", "not a file of offsets"),
        (b"v1", "not a file of offsets"),
        (b"\xff\n\n", "not a file of offsets"),
        (b'v2\n{}\n{"a":{"0":5}}', "version 'v2'"),
        (b'v1\n{}\n{"a":{"0":-5}}', "no source of the query reads topics"),
        (b'v1\n{}\n{"a":{"0":true}}', "no source of the query reads topics"),
        (b'v1\n{}\n{"a":{"0":9223372036854775808}}', "no source of the query reads topics"),
        (b'v1\n{}\n{"a":{"x":5}}', "no source of the query reads topics"),
        (b'v1\n{}\n{"a":{"99999999999":5}}', "no source of the query reads topics"),
        (b'v1\n{}\n{"b":{"0":5}}\n{"a":{"0":5}', r"the line of a source is not JSON .* '\{\"a\":\{\"0\":5\}'"),
        (b"v1\n{}\n" + b"[" * 100_000, "no source of the query reads topics"),
    ],
)
def test_what_is_no_file_of_offsets(content: bytes, told: str) -> None:
    with pytest.raises(DecodeError, match=told):
        parse_offsets_file(content, "x")


@pytest.mark.parametrize("form", ["{}", "file://{}"])
def test_the_last_batch_that_is_done(tmp_path: Path, form: str) -> None:
    """The result is the last committed batch: a planned one would be read again, so its end would skip records."""
    tmp_path /= "a b%20c#d?e"
    with pytest.raises(ConfigError, match="no completed micro-batch"):
        checkpoint_offsets(form.format(tmp_path))
    for folder in ("offsets", "commits"):
        (tmp_path / folder).mkdir(parents=True)
    for number in range(9, 12):
        (tmp_path / "offsets" / str(number)).write_text(f'v1\n{METADATA}\n{{"a":{{"0":{number}}}}}')
        (tmp_path / "offsets" / f".{number}.crc").write_bytes(b"crc")
    with pytest.raises(ConfigError, match="no completed micro-batch"):
        checkpoint_offsets(form.format(tmp_path))
    for number in (9, 10):
        (tmp_path / "commits" / str(number)).write_text("v1\n{}")
    assert checkpoint_offsets(form.format(tmp_path)) == {("a", 0): 10}
