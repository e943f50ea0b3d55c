"""All kept inputs: seeds, the minimised corpus, and inputs that once failed."""

from __future__ import annotations

from pathlib import Path

CORPUS = Path(__file__).parent / "corpus"
_REGRESSIONS = Path(__file__).parent / "regressions"


#: Targets whose inputs have a form of their own; all others take inputs of the same form.
_OWN_FORM = ("codecs", "avro", "protobuf")


def kept_folders(target: str) -> list[Path]:
    """Folders with inputs that suit a target."""
    folders = [*CORPUS.iterdir(), *_REGRESSIONS.iterdir()]
    if target in _OWN_FORM:
        return sorted(folder for folder in folders if folder.name == target)
    return sorted(folder for folder in folders if folder.name not in _OWN_FORM)


def all_inputs(target: str) -> dict[str, bytes]:
    """The inputs for `target`, by name."""
    from .seeds import seeds  # late, so that run.py can set up coverage of the imported modules first

    inputs = {f"seed {number}": seed for number, seed in enumerate(seeds(target))}
    for folder in kept_folders(target):
        inputs |= {f"{folder.parent.name}/{folder.name}/{path.name}": path.read_bytes() for path in folder.iterdir()}
    return inputs
