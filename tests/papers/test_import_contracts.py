"""Each import contract of pyproject.toml holds, and breaks when one forbidden import is added."""

from __future__ import annotations

from copy import deepcopy
from functools import lru_cache
from pathlib import Path
from typing import Any

import grimp
import pytest
from importlinter.api import read_configuration
from importlinter.contracts.acyclic_siblings import AcyclicSiblingsContract
from importlinter.contracts.forbidden import ForbiddenContract
from importlinter.contracts.layers import LayersContract

CONFIGURATION = read_configuration(str(Path(__file__).parents[2] / "pyproject.toml"))
CONTRACTS: dict[str, dict[str, Any]] = {each["name"]: each for each in CONFIGURATION["contracts_options"]}
TYPES: dict[str, Any] = {
    "acyclic_siblings": AcyclicSiblingsContract,
    "forbidden": ForbiddenContract,
    "layers": LayersContract,
}


@lru_cache(maxsize=1)
def imports() -> grimp.ImportGraph:
    """All imports, those for types too, as pyproject.toml has it."""
    return grimp.build_graph("spark_klog", include_external_packages=True, cache_dir=None)


def crossing(options: dict[str, Any]) -> tuple[str, str]:
    """Return (importer, imported) of an import that the contract forbids."""
    if options["type"] == "forbidden":
        return options["source_modules"][0], options["forbidden_modules"][0]
    if options["type"] == "acyclic_siblings":
        return "spark_klog.wire.crossing", "spark_klog.cli.crossing"  # the command line imports all other packages
    container = "".join(f"{name}." for name in options["containers"])
    layers = options["layers"]
    above, below = layers[0].split(" | "), layers[-1].split(" | ")
    return (
        (container + below[0], container + above[0])
        if len(layers) > 1
        else (container + above[0], container + above[1])
    )


def is_kept(options: dict[str, Any], graph: grimp.ImportGraph) -> bool:
    contract = TYPES[options["type"]](
        name=options["name"], session_options=CONFIGURATION["session_options"], contract_options=options
    )
    return bool(contract.check(graph, verbose=False).kept)


@pytest.mark.parametrize("name", CONTRACTS)
def test_an_import_that_crosses_a_wall_breaks_its_contract(name: str) -> None:
    options = CONTRACTS[name]
    assert is_kept(options, deepcopy(imports()))  # a check removes the imports that its contract ignores
    graph = deepcopy(imports())
    importer, imported = crossing(options)
    graph.add_import(importer=importer, imported=imported)
    assert not is_kept(options, graph)
