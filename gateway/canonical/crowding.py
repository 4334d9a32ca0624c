"""Who makes room in a memory of fixed size that all tenants share: the tenant that holds most of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Protocol, TypeVar

__all__ = ["first_to_leave"]


class _Owned(Protocol):
    @property
    def tenant(self) -> str: ...


_Key = TypeVar("_Key", bound=_Owned)
_Value = TypeVar("_Value")


def first_to_leave(table: Mapping[_Key, _Value], cost: Callable[[_Value], int]) -> _Key:
    """The key to be dropped from ``table``, which has its longest unused entry first and is not empty.

    Of the tenant whose entries cost most together it is the longest unused, so that nobody drives out others by
    sending ever new names. With one tenant that is the longest unused of all.
    """
    costs: Counter[str] = Counter()
    for key, value in table.items():
        costs[key.tenant] += cost(value)
    largest = max(costs, key=costs.__getitem__)
    return next(key for key in table if key.tenant == largest)
