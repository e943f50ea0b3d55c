"""Keys or values of records → Arrow, each record by the schema that it names."""

from __future__ import annotations

from collections.abc import Callable
from operator import itemgetter
from typing import Any, Literal, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from spark_klog.base.cache import Cache
from spark_klog.errors import SchemaError
from spark_klog.records.contract import BinaryColumn, HeadersColumn
from spark_klog.schemas.codec import Decoder
from spark_klog.schemas.prefix import SchemaKey, schema_keys
from spark_klog.schemas.registry.client import UnknownSchema
from spark_klog.schemas.rows import BadRow, Decoded, cut

_MOST_PROGRAMS = 1000
_NOT_SEEN = "it is not looked up, as a row before does not decode"


class _Outcome(NamedTuple):
    """What the look-up of a schema ended with: the program by which its rows are read, or else a `refusal`."""

    program: Any
    #: Why there is no program; None if there is one.
    refusal: str | None = None


class RecordDecoder:
    """Decodes a column of records to the Arrow type of one reader's schema, `type`.

    `program_of` returns the decoder's program for the schema of an id or GUID, once for each; a `SchemaError` of it
    makes the rows of that schema bad, for good, but `UnknownSchema` only now. Any other error (a registry that is down)
    is raised, and the program is asked for again the next time.
    `column` is what is decoded: its name chooses the header that has the id. `has_indexes` if message indexes follow
    an id, as in Protobuf. If it `has_bare`, rows without an id are of the schema `prefix.BARE`. `advice_of`
    returns what else to say of bad rows of a schema, or raises an error instead.
    With `ends_at_bad` no schema is asked for that only rows after a bad one have: they are null, and bad, too.
    """

    def __init__(
        self,
        decoder: Decoder[Any],
        program_of: Callable[[SchemaKey], Any],
        column: Literal["key", "value"] = "value",
        *,
        has_indexes: bool = False,
        has_bare: bool = False,
        ends_at_bad: bool = False,
        advice_of: Callable[[SchemaKey], str] = lambda _: "",
    ) -> None:
        self._has_indexes, self._has_bare = has_indexes, has_bare
        self._ends_at_bad, self._advice_of = ends_at_bad, advice_of
        self._decoder = decoder
        self._program_of = program_of
        self._column = column
        self.type: pa.DataType = decoder.type
        self._outcomes: Cache[SchemaKey, _Outcome] = Cache(_MOST_PROGRAMS)

    def decode(self, values: pa.Array | BinaryColumn, headers: pa.Array | HeadersColumn | None = None) -> Decoded:
        """Decode a binary column; `headers` are those of the same records, None if there are none to look at.

        A row that does not decode is null, and in the result's `bad` with its reason, which names its schema.
        """
        keys, which, starts, bad = schema_keys(
            values, headers, self._column, has_indexes=self._has_indexes, has_bare=self._has_bare
        )
        programs: list[Any] = []
        # by schema the number of its program; the last is for rows without a schema
        numbers = np.full(len(keys) + 1, -1, np.int32)
        end = min(bad, default=BadRow(len(which), "")).row if self._ends_at_bad else len(which)
        for number, first in self._in_order(len(keys), which):
            key = keys[number]
            if first < end:
                outcome = self._outcome(key)
                if outcome.refusal is None:
                    numbers[number] = len(programs)
                    programs.append(outcome.program)
                    continue
                reason = f"{key}: {outcome.refusal}{self._advice_of(key)}"
                end = first if self._ends_at_bad else end
            else:
                reason = f"{key}: {_NOT_SEEN}"
            bad += [BadRow(row, reason) for row in np.flatnonzero(which == number).tolist()]
        decoded = self._decoder.decode(values, programs, pa.py_buffer(numbers[which]), pa.py_buffer(starts))
        advice = {number: self._advice_of(keys[number]) for number in {int(which[row]) for row, _ in decoded.bad}}
        for row, reason in decoded.bad:
            number = int(which[row])
            bad.append(BadRow(row, f"{keys[number]}: {cut(reason)}{advice[number]}"))
        return Decoded(decoded.values, sorted(bad))

    def _in_order(self, count: int, which: NDArray[np.int32]) -> list[tuple[int, int]]:
        """The number of each schema and, if that matters, its first row, by which they are in order."""
        if not self._ends_at_bad:
            return [(number, -1) for number in range(count)]
        numbers, firsts = np.unique(which, return_index=True)
        pairs = zip(numbers.tolist(), firsts.tolist(), strict=True)
        return sorted((pair for pair in pairs if pair[0] >= 0), key=itemgetter(1))

    def _outcome(self, key: SchemaKey) -> _Outcome:
        outcome = self._outcomes.get(key)
        if outcome is None:
            try:
                outcome = _Outcome(self._program_of(key))
            except UnknownSchema as error:
                return _Outcome(None, str(error))
            except SchemaError as error:
                outcome = _Outcome(None, cut(str(error)))
            self._outcomes.keep(key, outcome)
        return outcome
