"""The outcome of a call for several items."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Generic, TypeVar

from spark_klog.errors import ItemsFailed, KlogError

_K = TypeVar("_K", bound=Hashable)
_V = TypeVar("_V")


class Outcomes(dict[_K, _V | KlogError], Generic[_K, _V]):
    """The result of each item that was asked for, or the `KlogError` that it failed with.

    The call itself raises only if no broker answered for any item. Use `check` if all items must succeed.
    """

    def check(self) -> dict[_K, _V]:
        """The results if all items succeeded.

        Otherwise raise the item's error if only one was asked for, or else `ItemsFailed`.
        """
        failures = self.failures
        if failures and len(self) == 1:
            raise next(iter(failures.values()))
        if failures:
            raise ItemsFailed(failures, len(self))
        return self.successes

    @property
    def successes(self) -> dict[_K, _V]:
        """The results of the items that succeeded."""
        return {key: result for key, result in self.items() if not isinstance(result, KlogError)}

    @property
    def failures(self) -> dict[_K, KlogError]:
        """The errors of the items that failed."""
        return {key: result for key, result in self.items() if isinstance(result, KlogError)}
