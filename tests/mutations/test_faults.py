"""The list of faults keeps up with the code: each can be planted, and is a change that Python accepts."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.mutations.faults import FAULTS, ROOT, Fault

_ROOMS = ("wire", "protocol", "records", "columns", "log", "broker", "client", "spark", "load", "mirror/restore")


def test_faults_in_each_room() -> None:
    more = {"broker": 7, "spark": 16, "load": 6, "tables": 23}
    assert Counter(fault.room for fault in FAULTS) == dict.fromkeys(_ROOMS, 4) | more
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_is_one_change_that_compiles(fault: Fault) -> None:
    source = (ROOT / fault.file).read_text()
    changed = fault.applied(source)
    assert changed != source
    compile(changed, fault.file, "exec")
    assert [place for place in fault.where if not (ROOT / place).exists()] == []


def test_a_snippet_that_is_not_there_once_is_refused() -> None:
    fault = FAULTS[0]
    for source in ("", 2 * fault.old):
        with pytest.raises(ValueError, match=f"{fault.name}: its snippet"):
            fault.applied(source)
