"""Properties files, against java.util.Properties itself."""

from __future__ import annotations

import random
import subprocess
from pathlib import Path

import pytest

from spark_klog.base.properties import parse_properties
from spark_klog.errors import ConfigError

_READER = r"""
import java.io.*;
import java.nio.charset.StandardCharsets;
import java.nio.file.*;
import java.util.*;

/** Prints a line a file: the entries as hexadecimal UTF-16, or the class of what was thrown. */
public class ReadProperties {
    static String hex(String text) {
        return HexFormat.of().formatHex(text.getBytes(StandardCharsets.UTF_16BE));
    }

    public static void main(String[] arguments) throws IOException {
        for (String name : Files.readAllLines(Path.of(arguments[0]))) {
            Properties properties = new Properties();
            StringBuilder line = new StringBuilder("=");
            try (InputStream input = Files.newInputStream(Path.of(name))) {
                properties.load(input);
                for (Map.Entry<Object, Object> entry : properties.entrySet())
                    line.append(' ').append(hex((String) entry.getKey())).append(':')
                        .append(hex((String) entry.getValue()));
            } catch (IllegalArgumentException error) {
                line = new StringBuilder("refused");
            }
            System.out.println(line);
        }
    }
}
"""
_CASES = (
    b"",
    b"a=b",
    b"a = b \n c:d\nname value with words \n=empty name\nempty.value\nempty.too=",
    b"# comment=1\n  ! comment=2\nkey=1\n#half \\\nnot.a.comment=2",
    b"one=1 \\\n    2 \\\r\n\t3\r4=5\\\\\nsix=\\",
    b"lonely=x\n\\\n\nnext=1\n\\\n# name=2\n\\\n\\\n  last=3",
    rb"tabs=\t\n\r\f\q\"\'" + b"\n" + rb"a\=b\:c\ d\#e=f=g:h",
    b"caf\xe9=\\u00e9\\u20AC \\uD83D\\uDE00\nagain=1\nagain=2",
    b"x \t\f=\f\t y\\ \n\x0c z=1",
)
_BAD = (b"a=\\u12", b"a=\\u12g4", b"\\u=1", b"ok=1\nb=\\uzzzz")


def _java(folder: Path, files: list[bytes]) -> list[dict[str, str] | None]:
    program = folder / "ReadProperties.java"
    program.write_text(_READER)
    names = []
    for number, data in enumerate(files):
        (folder / f"{number}.properties").write_bytes(data)
        names.append(str(folder / f"{number}.properties"))
    (folder / "names").write_text("\n".join(names))
    command = ["java", "-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC", str(program), str(folder / "names")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    found: list[dict[str, str] | None] = []
    for line in done.stdout.splitlines():
        if line == "refused":
            found.append(None)
            continue
        pairs = (entry.split(":") for entry in line.split(" ")[1:])
        found.append({_text(name): _text(value) for name, value in pairs})
    return found


def _text(digits: str) -> str:
    return bytes.fromhex(digits).decode("utf-16-be")


def _ours(data: bytes) -> dict[str, str] | None:
    try:
        return parse_properties(data, "file")
    except ConfigError:
        return None


def test_the_same_as_java(tmp_path: Path) -> None:
    rng = random.Random(7)
    alphabet = [b"a", b"b", b"=", b":", b" ", b"\t", b"\f", b"\\", b"\\", b"\n", b"\n", b"\r", b"\r\n", b"#", b"!"]
    alphabet += [b"\\u0041", b"u", b"\xe9", b"n"]
    generated = [b"".join(rng.choices(alphabet, k=rng.randrange(1, 25))) for _ in range(3000)]
    files = [*_CASES, *_BAD, *generated]
    expected = _java(tmp_path, files)
    assert len(expected) == len(files)
    assert expected[len(_CASES) : len(_CASES) + len(_BAD)] == [None] * len(_BAD)
    assert sum(1 for entries in expected if entries) > 2000
    for data, entries in zip(files, expected, strict=True):
        if entries is not None and entries.get("") == "" and data.rstrip(b"\r\n").endswith(b"\\"):
            del entries[""]  # Java makes a nameless entry of a lonely backslash at the very end
            entries |= {name: value for name, value in (_ours(data) or {}).items() if not name}
        assert _ours(data) == entries, data


def test_a_byte_order_mark_is_no_part_of_a_name() -> None:
    """Java takes it for a part of the name, and ignores the setting; editors on Windows write it."""
    assert _ours("security.protocol=SSL\n".encode("utf-8-sig")) == {"security.protocol": "SSL"}


@pytest.mark.parametrize(("data", "line"), [(_BAD[0], 1), (_BAD[3], 2), (b"\n#\na=\\\n \\\n\\u1", 3)])
def test_a_bad_escape_is_named(data: bytes, line: int) -> None:
    with pytest.raises(ConfigError, match=f"^server.properties, line {line}: "):
        parse_properties(data, "server.properties")
