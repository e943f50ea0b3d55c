"""The parts of the report card: commands that are there anyway, and where their figures come from.

Each is a line of pytest, one of `make soak`, or `python -m tests.mutations`. What takes long has a slice, which is what
`make test-all` runs of it: the same command without its variables.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import cache
from typing import Literal

from tests.mutations.faults import FAULTS
from tests.support.clients import ALL
from tests.support.runs.soak import commands
from tests.support.servers.kafka import NEWEST

Kind = Literal["pytest", "mutations"]
#: A test's file.
_FILE = r"^(tests/[^:]+)"
#: Its folder, or the file if it stands beside the folders.
_FOLDER = r"^(tests/\w+/[\w.]+)"


class Section(Enum):
    """A table of the page."""

    CLIENTS = "clients"
    SUITES = "suites"
    OUR_CLIENT = "our client"
    KILLS = "kills"
    FAULTS = "planted faults"
    MODELS = "models"
    FUZZ = "fuzz"


@dataclass(frozen=True)
class Part:
    """A command with its variables; `words` follow `python -m`. The first group of `row` in a test's id is its row.

    `servers` has the server of files whose tests' ids name none, and that ask another than our broker.
    """

    name: str
    section: Section
    words: tuple[str, ...]
    variables: Mapping[str, str] = field(default_factory=dict)
    kind: Kind = "pytest"
    row: str = _FILE
    servers: Mapping[str, str] = field(default_factory=dict)

    @property
    def has_slice(self) -> bool:
        return bool(self.variables)

    def command(self, *, is_slice: bool) -> str:
        """What a reader types to run it."""
        variables = {} if is_slice else self.variables
        return " ".join(
            [*(f"{name}={value}" for name, value in variables.items()), "python -m", shlex.join(self.words)]
        )


def _pytest(
    name: str,
    section: Section,
    *files: str,
    row: str = _FILE,
    servers: Mapping[str, str] | None = None,
    **variables: str,
) -> Part:
    return Part(name, section, ("pytest", *files), variables, row=row, servers=servers or {})


def _soak(name: str, section: Section, mark: str, only: Sequence[str] = (), row: str = _FILE) -> Part:
    """The line of `make soak` that has this word, of whose files and folders `only` these."""
    [line] = (line for line in commands("soak") if mark in line.split())
    words = shlex.split(line.replace("$(ARGS)", ""))
    begin = words.index("-m") + 1
    variables = dict(word.split("=", 1) for word in words[: begin - 2])
    places = [word for word in words if word.startswith("tests/")]
    left = [word for word in words[begin:] if not only or word not in places or word in only]
    assert {*only} <= {*places}, f"{name}: no longer in that line of make soak"
    return Part(name, section, tuple(left), {"SPARK_KLOG_SOAK": "1", **variables}, row=row)


def _rooms() -> Iterator[Part]:
    for room in dict.fromkeys(fault.room for fault in FAULTS):
        words = ("tests.mutations", "--room", room)
        yield Part(f"faults-{room.replace('/', '-')}", Section.FAULTS, words, kind="mutations")


@cache
def parts() -> dict[str, Part]:
    """All parts by name, in the order in which they are run: the shortest first."""
    clients, groups, transactions = "tests/broker/clients", "tests/broker/groups", "tests/broker/transactions"
    kills, fuzz = "SPARK_KLOG_KILLS=30", "SPARK_KLOG_FUZZ_SECONDS=600"
    suites, models = Section.SUITES, Section.MODELS
    listed = [
        _pytest(
            "models-of-groups",
            models,
            f"{groups}/test_group_machine.py",
            f"{groups}/test_consumer_group_machine.py",
            f"{transactions}/test_transaction_machine.py",
            "tests/broker/test_log_checker.py",
        ),
        _pytest(
            "models-of-logs",
            models,
            "tests/log/test_sequences.py",
            "tests/log/test_compaction.py",
            "tests/records/test_kernel_parity.py",
            "tests/records/test_kernel_messages.py",
        ),
        _pytest("log-model", models, "tests/log/test_log_model.py", SPARK_KLOG_MODEL_SECONDS="3600"),
        _pytest(
            "exactly-once-models",
            models,
            "tests/spark/exactly_once/test_model.py",
            "tests/spark/exactly_once/test_topic_model.py",
            SPARK_KLOG_EXACTLY_ONCE="full",
        ),
        _soak("upserts-model", models, "SPARK_KLOG_UPSERTS=2000"),
        _pytest(
            "iceberg-model",
            models,
            "tests/tables/test_iceberg_sequences.py",
            "tests/tables/test_unclear_commits.py",
            SPARK_KLOG_SOAK="1",
        ),
        _pytest("messages", suites, "tests/protocol/test_oracle.py", "tests/broker/handlers/test_wire_oracle.py"),
        _pytest(
            "registry",
            suites,
            "tests/schemas/registry/test_confluent.py",
            "tests/schemas/registry/test_srfake.py",
        ),
        _pytest("librdkafka", suites, f"{clients}/test_clients.py"),
        _pytest("old-clients", suites, f"{clients}/test_old_clients.py"),
        _pytest(
            "kafka-tools",
            suites,
            f"{clients}/test_verifiable_clients.py",
            "tests/log/test_kafka_tools.py",
            "tests/log/test_dump_index.py",
            "tests/log/test_compaction_kafka.py",
        ),
        _pytest("groups-of-kafka", suites, f"{groups}/test_groups_of_kafka.py", SPARK_KLOG_SOAK="1"),
        _pytest(
            "groups-848",
            suites,
            f"{groups}/test_consumer_group_clients.py",
            f"{groups}/test_consumer_groups.py",
        ),
        _pytest(
            "transactions",
            suites,
            f"{transactions}/test_transactions_2.py",
            f"{transactions}/test_transactional_copier.py",
            SPARK_KLOG_SOAK="1",
            SPARK_KLOG_KILLS="30",
        ),
        _pytest("streams", suites, f"{clients}/test_kafka_streams.py"),
        _pytest("franz-go", suites, f"{clients}/test_franz_go_suite.py", SPARK_KLOG_SOAK="1"),
        _pytest("aiokafka", suites, f"{clients}/test_aiokafka_suite.py", SPARK_KLOG_SOAK="1"),
        _pytest(
            "mirror-maker",
            suites,
            "tests/mirror/test_mirror_maker.py",
            servers={"tests/mirror/test_mirror_maker.py": NEWEST},
            SPARK_KLOG_KAFKAS="all",
        ),
        _pytest(
            "client-matrix",
            Section.CLIENTS,
            f"{clients}/test_client_matrix.py",
            row=rf"\[(?:klog-|[\d.]+-)?({'|'.join(_client_names())})[-\]]",
            SPARK_KLOG_KAFKAS="all",
        ),
        _soak("fuzz", Section.FUZZ, fuzz, ["tests/fuzz"], row=r"test_fuzz\[(.+)\]"),
        _soak(
            "fuzz-requests",
            Section.FUZZ,
            fuzz,
            ["tests/broker/handlers/test_api_fuzz.py", "tests/broker/handlers/test_fetch_sessions.py"],
            row=r"::(test_\w+)",
        ),
        *_rooms(),
        _soak("kills-broker", Section.KILLS, kills, ["tests/broker", "tests/zookeeper", "tests/log", "tests/restore"]),
        _soak("kills-mirror", Section.KILLS, "tests/mirror"),
        _soak("kills-tables", Section.KILLS, "SPARK_KLOG_KILLS=50"),
        _soak("kills-load", Section.KILLS, kills, ["tests/jobs", "tests/load"]),
        _soak("kills-spark", Section.KILLS, kills, ["tests/spark"]),
        _soak("our-client", Section.OUR_CLIENT, "tests/client", ["tests/client"], row=_FOLDER),
        _pytest(
            "spark-at-kafka",
            Section.OUR_CLIENT,
            *(
                "tests/spark/test_real_kafka.py",
                "tests/spark/test_old_kafka.py",
                "tests/spark/read/test_broker_trouble.py",
            ),
            servers={"tests/spark/test_old_kafka.py": "0.10.2.2", "tests/spark/read/test_broker_trouble.py": "3.9.1"},
            SPARK_KLOG_KAFKAS="all",
        ),
    ]
    return {part.name: part for part in listed}


def _client_names() -> list[str]:
    """As they stand in the ids of tests; of two that begin alike the longer one comes first."""
    return [kind.name.replace(" ", "_") for kind in sorted(ALL, key=lambda kind: -len(kind.name))]
