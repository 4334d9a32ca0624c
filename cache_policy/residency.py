"""Which prefixes are resident where: the index behind routing and document order."""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from typing import Final

__all__ = ["ResidencyIndex"]

_NOTHING: Final[frozenset[bytes]] = frozenset()


class ResidencyIndex:
    """The keys that each replica holds, kept by the replicas' own events. It owns these sets; one thread uses it.

    Keys are unique to a namespace (see ``cache_policy.keys``), so one set per replica serves all tenants. What it says
    is as old as the last event: a hint for a decision, never a promise. It holds one entry per block that a replica
    holds, about 130 bytes each.
    """

    def __init__(self) -> None:
        self._resident: dict[str, set[bytes]] = {}

    def stored(self, replica: str, keys: Iterable[bytes]) -> None:
        """``replica`` now holds these blocks (event ``BlockStored``)."""
        self._resident.setdefault(replica, set()).update(keys)

    def removed(self, replica: str, keys: Iterable[bytes]) -> None:
        """``replica`` has evicted these blocks (event ``BlockRemoved``). Keys it was not known to hold are ignored."""
        resident = self._resident.get(replica)
        if resident is not None:
            resident.difference_update(keys)

    def cleared(self, replica: str) -> None:
        """``replica`` holds nothing any more (event ``AllBlocksCleared``, or it was restarted)."""
        resident = self._resident.get(replica)
        if resident is not None:
            resident.clear()

    def forget(self, replica: str) -> None:
        """``replica`` is gone for good."""
        self._resident.pop(replica, None)

    def match(self, replica: str, keys: Sequence[bytes]) -> int:
        """How many blocks from the start of ``keys``, the chain of one prompt, ``replica`` holds without a gap."""
        resident = self._resident.get(replica, _NOTHING)
        for count, key in enumerate(keys):
            if key not in resident:
                return count
        return len(keys)

    def holds(self, replica: str) -> Set[bytes]:
        """The keys ``replica`` holds, for many membership tests within one decision.

        The set itself, not a copy: it follows later events until the replica is forgotten and must not be changed.
        """
        return self._resident.get(replica, _NOTHING)

    def size(self) -> int:
        """Entries over all replicas."""
        return sum(map(len, self._resident.values()))
