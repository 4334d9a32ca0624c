"""How many different keys there were, told from a bounded sample of them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

__all__ = ["DistinctKeys"]

_MOST: Final = 2048


class DistinctKeys:
    """The keys that were seen and whose first eight bytes, as a number, lie below a bound. Owns them.

    The bound is halved whenever there are too many, so that what is kept is a fair sample: exact up to 2,048 keys, then
    right to some 3 %, and two of them can be put together (adaptive sampling, Wegman; Flajolet 1990). Keys must be
    digests.
    """

    def __init__(self, halvings: int = 0, kept: Iterable[int] = ()) -> None:
        self.halvings = halvings
        self._kept = set(kept)

    @property
    def kept(self) -> frozenset[int]:
        """The sample, as numbers of 64 bits."""
        return frozenset(self._kept)

    @property
    def count(self) -> int:
        """How many different keys there were."""
        return len(self._kept) << self.halvings

    def add(self, keys: Iterable[bytes]) -> None:
        """Take keys in."""
        numbers = [int.from_bytes(key[:8], "big") for key in keys]
        bound = _bound(self.halvings)
        self._kept.update(numbers if not self.halvings else [number for number in numbers if number < bound])
        self._shrink()

    def merge(self, other: DistinctKeys) -> None:
        """Take in what another one has seen."""
        self.halvings = max(self.halvings, other.halvings)
        bound = _bound(self.halvings)
        self._kept = {number for kept in (self._kept, other._kept) for number in kept if number < bound}
        self._shrink()

    def _shrink(self) -> None:
        while len(self._kept) > _MOST:
            self.halvings += 1
            bound = _bound(self.halvings)
            self._kept = {number for number in self._kept if number < bound}


def _bound(halvings: int) -> int:
    return 1 << (64 - halvings)
