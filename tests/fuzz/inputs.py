"""All inputs that are kept: seeds, the minimised corpus, and inputs that failed once."""

from __future__ import annotations

from pathlib import Path

CORPUS = Path(__file__).parent / "corpus"
_REGRESSIONS = Path(__file__).parent / "regressions"


def kept_folders(target: str) -> list[Path]:
    """Where inputs are kept that are of use to a target: all but `codecs` have the same form."""
    folders = [*CORPUS.iterdir(), *_REGRESSIONS.iterdir()]
    return sorted(folder for folder in folders if (folder.name == "codecs") == (target == "codecs"))


def all_inputs(target: str) -> dict[str, bytes]:
    """By name: what `target` is run with."""
    from .seeds import seeds  # not before run.py has arranged for coverage of what this imports

    inputs = {f"seed {number}": seed for number, seed in enumerate(seeds(target))}
    for folder in kept_folders(target):
        inputs |= {f"{folder.parent.name}/{folder.name}/{path.name}": path.read_bytes() for path in folder.iterdir()}
    return inputs
