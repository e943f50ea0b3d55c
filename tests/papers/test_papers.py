"""README and docs match the code: links, programs, commands and their options, imports, Spark options.

tests/spark/test_snippets.py runs the snippets.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import subprocess
import sys
from collections.abc import Mapping
from functools import cache
from importlib.metadata import metadata
from pathlib import Path

import confluent_kafka
import kafka
import pytest
from confluent_kafka.admin import AdminClient as ConfluentAdmin

from spark_klog.broker.handlers import HANDLERS
from spark_klog.broker.settings import config as broker_settings
from spark_klog.client import Admin, Consumer, Producer
from spark_klog.client.consumer import settings as consumer_settings
from spark_klog.client.settings import is_known
from spark_klog.protocol.apis import BY_KEY, PRODUCE
from spark_klog.spark.option_table import Use, names_for
from spark_klog.spark.options import PREFIX
from tests.support.papers import pages as papers
from tests.support.papers.pages import ROOT, Snippet

sys.path.insert(0, str(ROOT / "docs"))

import generate
from reference_texts import CURES, OPTIONS, SETTINGS

_ELSEWHERE = ["ARCHITECTURE.md", "CHANGELOG.md", "CONTRIBUTING.md", "UNSUPPORTED.md"]
_GENERATED = [f"docs/reference/generated/{name}" for name in generate.PAGES]
_NOTEBOOKS = [str(path.relative_to(ROOT)) for path in sorted((ROOT / "notebooks").glob("*.ipynb"))]
_LANGUAGES = {"python", "bash", "text", "toml", "{toctree}", "{include}"}
#: Programs in snippets that are not ours.
_PROGRAMS = {
    ".",
    "cd",
    "cp",
    "curl",
    "export",
    "java",
    "make",
    "mkdir",
    "mvn",
    "opentelemetry-instrument",
    "pip",
    "printf",
    "psql",
    "python",
    "python3",
    "spark-submit",
    "sudo",
    "tar",
    "uvicorn",
    "venv-pack",
}
#: Options of Spark's own readers and writers, in lower case.
_SPARKS = {"checkpointlocation", "path", "queryname", "txnappid", "txnversion"}
_OPTION = re.compile(r'\.option\(\s*"([^"]+)"')


def _snippets(*languages: str) -> list[Snippet]:
    return [one for page in papers.pages() for one in papers.snippets(page) if one.language in languages]


def test_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


@pytest.mark.parametrize("page", [*papers.pages(), *_GENERATED, *_ELSEWHERE])
def test_links(page: str) -> None:
    """A link leads to a file that a clone has, so that it works on a forge, too."""
    broken = []
    for link in papers.links(page):
        if re.match(r"(https?|mailto):", link):
            continue
        path, _, anchor = link.partition("#")
        target = (ROOT / page).parent / path if path else ROOT / page
        is_there = target.resolve() in papers.tracked()
        if not is_there or (anchor and anchor not in papers.anchors(str(target.resolve().relative_to(ROOT)))):
            broken.append(link)
    assert broken == []


def test_languages() -> None:
    """Every fence names a language, which decides how its snippet is checked and run."""
    fences = [one for page in papers.pages() for one in papers.snippets(page)]
    assert [str(one) for one in fences if one.language not in _LANGUAGES] == []


@pytest.mark.parametrize("snippet", _snippets("python"), ids=str)
def test_python(snippet: Snippet) -> None:
    """Imported names exist, and so do the options of `.option(...)`."""
    for node in ast.walk(ast.parse(snippet.text)):
        if isinstance(node, ast.Import):
            for name in node.names:
                importlib.import_module(name.name)
        elif isinstance(node, ast.ImportFrom):
            assert node.module is not None
            module = importlib.import_module(node.module)
            assert [name.name for name in node.names if not hasattr(module, name.name)] == []
    known = {name.lower() for name in names_for(Use.READ | Use.WRITE)} | _SPARKS
    for option in _OPTION.findall(snippet.text):
        is_setting = option.startswith(PREFIX) and is_known(option[len(PREFIX) :])
        assert is_setting or option.lower() in known, option


@pytest.mark.parametrize("snippet", _snippets("bash"), ids=str)
def test_commands(snippet: Snippet) -> None:
    for pipeline in papers.command_lines(snippet.text):
        for words in pipeline:
            if words[0] == "klog":
                papers.check_klog(words)
            elif words[0] == "spark-submit":
                _check_job(words)
            else:
                program = next(word for word in words if "=" not in word)
                assert program in _PROGRAMS, program


def _check_job(words: list[str]) -> None:
    job = next((word for word in words if word.endswith(".py")), "")
    if not job.startswith("jobs/"):
        return
    known = _options_of(job)
    for word in words[words.index(job) + 1 :]:
        if word.startswith("--"):
            assert word in known, f"{job} has no option {word}"


@pytest.mark.parametrize(("job", "page"), [("batch_load", "load"), ("mirror", "mirror"), ("restore", "restore")])
def test_options_of_jobs_are_in_their_recipes(job: str, page: str) -> None:
    text = (ROOT / "docs" / "recipes" / f"{page}.md").read_text()
    options = _options_of(f"jobs/{job}.py") - {"--help"}
    assert [one for one in sorted(options) if not re.search(rf"{one}(?![a-z-])", text)] == []


def test_names_of_other_clients() -> None:
    """The table names only functions and parameters that the three libraries have."""
    rows = re.findall(
        r"^\| (`.*?) \| (.*?) \| (.*) \|$", (ROOT / "docs/recipes/python-clients.md").read_text(), re.MULTILINE
    )
    libraries: list[tuple[object, ...]] = [
        (
            *(kafka.KafkaProducer, kafka.KafkaConsumer, kafka.KafkaAdminClient),
            *(kafka.KafkaProducer.DEFAULT_CONFIG, kafka.KafkaConsumer.DEFAULT_CONFIG),
        ),
        (confluent_kafka, confluent_kafka.Producer, confluent_kafka.Consumer, ConfluentAdmin),
        (Producer, Consumer, Admin, inspect.signature(Producer.send).parameters),
    ]
    assert len(rows) >= 9
    for row in rows:
        for cell, places in zip(row, libraries, strict=True):
            for name in re.findall(r"`(?:Admin\.)?([a-z_]+)`", cell):
                known = any(hasattr(one, name) or (isinstance(one, Mapping) and name in one) for one in places)
                assert known, f"{cell}: {name}"


@cache
def _options_of(job: str) -> set[str]:
    shown = subprocess.run(
        [sys.executable, ROOT / job, "--help"], check=True, capture_output=True, text=True, timeout=60
    )
    return set(re.findall(r"--[a-z-]+", shown.stdout))


@pytest.mark.parametrize("page", papers.pages())
def test_commands_in_prose(page: str) -> None:
    """`klog ...` in a sentence names a command that exists; options may be missing or have placeholders."""
    for text in re.findall(r"`(klog [a-z][^`]*)`", papers.prose(page)):
        words = text.replace("\\|", "|").split()
        if "|" in text or "..." in words[1:2] or words[1] == "-":
            continue
        papers.check_klog([word for word in words if "..." not in word])


@pytest.mark.parametrize("page", [*papers.pages(), *_NOTEBOOKS])
def test_extras(page: str) -> None:
    """The package declares the extras that pages install. Notebooks install the checkout: no registry has it."""
    text = (ROOT / page).read_text()
    declared = set(metadata("spark-klog").get_all("Provides-Extra") or ())
    named = re.findall(r"(spark-klog|\.)\[([a-z0-9,]+)\]", text)
    assert {extra for _, extras in named for extra in extras.split(",")} <= declared
    assert not page.startswith("notebooks") or "spark-klog" not in {source for source, _ in named}


@pytest.mark.parametrize("page", [*papers.pages(), *_ELSEWHERE])
def test_named_tests_exist(page: str) -> None:
    named = re.findall(r"\btests/[\w/]+(?:\.\w+)?", (ROOT / page).read_text())
    assert [text for text in named if not (ROOT / text).exists()] == []


def test_every_option_is_in_the_tables() -> None:
    pages = {"reading": Use.READ, "writing": Use.WRITE, "functions": Use.FROM | Use.TO}
    for page, uses in pages.items():
        path = ROOT / "docs" / "reference" / f"{page}.md"
        text = path.read_text()
        cells = " ".join(re.findall(r"^\| ([^|]+)\|", text, re.MULTILINE))
        names = names_for(uses)
        assert [name for name in names if not re.search(rf"(?<![\w.]){re.escape(name)}(?!\w)", cells)] == [], page
        assert path.name not in generate.TABLES or text == generate.with_table(path.name, text), "run make docs"
    assert set(OPTIONS) == set(names_for(Use.READ | Use.WRITE))


def test_handlers_say_which_versions_they_serve() -> None:
    for key, handler in HANDLERS.items():
        api = BY_KEY[key]
        served = f"{api.name} v{api.versions.first}" + f"-{api.versions.last}" * (
            api.versions.last > api.versions.first
        )
        assert re.match(rf"{served}\b", handler.__doc__ or ""), f"the docstring of {handler.__name__} begins {served}"


def test_generated_pages(tmp_path: Path) -> None:
    """The pages are those of the code (`make docs` renews them), every setting has a text, and every error a cure."""
    generate.generate(tmp_path)
    made, kept = ({path.name: path.read_text() for path in folder.iterdir()} for folder in (tmp_path, papers.GENERATED))
    assert set(made) == set(kept) == set(generate.PAGES)
    assert [name for name in made if made[name] != kept[name]] == [], (
        "run make docs, and commit docs/reference/generated"
    )
    commands = (tmp_path / "commands.md").read_text()
    assert "## klog offsets copy" in commands
    assert "| `--dry-run` |" in commands
    settings = (tmp_path / "broker-settings.md").read_text()
    assert [name for name in broker_settings.PLACES if f"| `{name}` |" not in settings] == []
    assert re.findall(r"^\| `.*\|  \|$", settings, re.MULTILINE) == []  # rows without a text
    assert f"| 0 | Produce | 0-{PRODUCE.versions.last} |" in (tmp_path / "protocol.md").read_text()
    shared = set(generate.client_setting_names())
    assert set(SETTINGS) == shared | set(consumer_settings._OWN)
    assert set(CURES) == {kind.__name__ for kind in generate.public_errors()}


#: Row of a table with figures -> the row of benchmarks/results.md that it quotes.
_FIGURES = {
    "batch read of 4 million": "Spark batch read, count + sum(length), 4,000,000 records, lz4 | M rows/s",
    "the same into Parquet": "Spark read into Parquet, 4,000,000 records, none | M rows/s",
    "micro-batches of 100": "micro-batches of 100 new records, append to sink, p50 of 100 | ms",
    "stream of large": "Spark stream, AvailableNow, 1,000,000 offsets a trigger, 4,000,000 records, none | M rows/s",
    "write of 2 million": "Spark write, at least once, 2,000,000 rows of 100 B from Parquet, lz4 | M rows/s",
    r"(?:\[load\]\(.*?\)|load) of 4 million": "log to Parquet, all columns, zstd, 4,000,000 records of 100 B, lz4, "
    "local[2] | M records/s",
}


@pytest.mark.parametrize("page", ["README.md", "docs/explanation/speed.md"])
@pytest.mark.parametrize("row", _FIGURES)
def test_figures_are_measured(page: str, row: str) -> None:
    """Figures are within a fifth of the last `make bench`; update the pages if a figure changed more."""
    (line,) = re.findall(rf"^\| {row}.*$", (ROOT / page).read_text(), re.MULTILINE)
    said = [float(text.replace(",", "")) for text in re.findall(r"\| ([\d.,]+) (?:M rows/s|ms)", line)]
    results = (ROOT / "benchmarks" / "results.md").read_text()
    found = re.search(rf"^\| {re.escape(_FIGURES[row])} \| ([\d.]+) \| ([\d.]+) \|", results, re.MULTILINE)
    assert found is not None, _FIGURES[row]
    assert said == pytest.approx([float(found[1]), float(found[2])], rel=0.2)


def test_metrics_are_listed() -> None:
    """The reference lists every metric that the Grafana dashboard draws, and those of the broker."""
    drawn = re.findall(r"\bklog_[a-z_]+", (ROOT / "spark_klog" / "metrics" / "dashboard.json").read_text())
    assert set(drawn) >= {"klog_group_lag_records", "klog_query_lag_records"}
    page = generate.metrics()
    assert [name for name in (*drawn, "klog_broker_bytes_in_total") if f"| {name} |" not in page] == []
