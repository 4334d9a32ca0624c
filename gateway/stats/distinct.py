"""How many different keys there were, told from a bounded sample of them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

__all__ = ["DistinctKeys"]

_MOST: Final = 2048


class DistinctKeys:
    """The keys that were seen and lie below a bound. Owns them.

    The bound is halved whenever there are too many, so that what is kept is a fair sample: exact up to 2,048 keys, then
    right to some 3 %, and two of them can be put together (adaptive sampling, Wegman; Flajolet 1990). Keys must be
    digests, all of one length.
    """

    def __init__(self, halvings: int = 0, kept: Iterable[bytes] = ()) -> None:
        self.halvings = halvings
        self._kept = set(kept)

    @property
    def kept(self) -> frozenset[bytes]:
        """The sample."""
        return frozenset(self._kept)

    @property
    def count(self) -> int:
        """How many different keys there were."""
        return len(self._kept) << self.halvings

    def add(self, keys: Iterable[bytes]) -> None:
        """Take keys in."""
        if self.halvings:
            bound = _bound(self.halvings)
            keys = [key for key in keys if key < bound]
        self._kept.update(keys)
        self._shrink()

    def merge(self, other: DistinctKeys) -> None:
        """Take in what another one has seen."""
        halvings = max(self.halvings, other.halvings)
        self._kept |= other._kept
        if halvings:
            bound = _bound(halvings)
            self._kept = {key for key in self._kept if key < bound}
        self.halvings = halvings
        self._shrink()

    def _shrink(self) -> None:
        while len(self._kept) > _MOST:
            self.halvings += 1
            bound = _bound(self.halvings)
            self._kept = {key for key in self._kept if key < bound}


def _bound(halvings: int) -> bytes:
    """All keys below are the first ``1 / 2**halvings`` of all there can be."""
    return (1 << (64 - halvings)).to_bytes(8, "big")
