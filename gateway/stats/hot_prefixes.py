"""Which prefixes are asked for most, by their block keys: here, and over all gateways.

Every block of a prompt counts its key, of one request in four. Counts are halved every ten minutes, so that what was
hot yesterday gives way; of the keys those that hardly anybody asks for are forgotten when there are too many.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from heapq import nlargest
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from cache_policy.keys import KEY_BYTES

__all__ = ["HALF_LIFE_S", "MAX_KEYS", "SAMPLE", "HotPrefix", "HotPrefixes"]

SAMPLE: Final = 4
"""One request in so many is counted."""

HALF_LIFE_S: Final = 600.0
MAX_KEYS: Final = 8_192

_MOST_TOLD: Final = 200
_MOST_SHOWN: Final = 50
_ALIKE: Final = 0.9
"""A prefix that is continued in one way by so many of its requests is shown by its continuation alone."""


class HotPrefix(msgspec.Struct, frozen=True):
    """A prefix of ``blocks`` blocks that ends with ``key`` (hex).

    ``requests`` are about those of the last quarter of an hour that began with it, older ones counting less.
    """

    key: str
    blocks: int
    tenant: str
    template: str
    requests: float


class _Row(msgspec.Struct, array_like=True):
    """How often a key was counted, at which depth, behind which key, for whom first."""

    count: Annotated[float, Meta(ge=0)]
    blocks: Annotated[int, Meta(ge=1)]
    parent: bytes
    tenant: str
    template: str


_Rows = dict[bytes, _Row]
_encode: Final = msgspec.msgpack.Encoder().encode
_decode: Final = msgspec.msgpack.Decoder(_Rows).decode


class HotPrefixes:
    """Counts the keys of this gateway, and adds those that others have told. Owns both; belongs to the event loop."""

    def __init__(self, *, clock: Callable[[], float] = time.time) -> None:
        self._clock: Final = clock
        self._rows: _Rows = {}
        self._others: list[_Rows] = []
        self._skipped = 0
        self._halved_at = clock()

    def __len__(self) -> int:
        return len(self._rows)

    def observe(self, tenant: str, template: str, keys: Sequence[bytes]) -> None:
        """Count a request by the keys of its prompt, if it is its turn."""
        self._skipped += 1
        if self._skipped < SAMPLE:
            return
        self._skipped = 0
        rows, parent = self._rows, b""
        for depth, key in enumerate(keys, 1):
            row = rows.get(key)
            if row is None:
                rows[key] = _Row(1.0, depth, parent, tenant, template)
            else:
                row.count += 1.0
            parent = key
        if self._clock() - self._halved_at >= HALF_LIFE_S:
            self._halved_at = self._clock()
            for row in rows.values():
                row.count /= 2
        least = 1.0
        while len(self._rows) > MAX_KEYS:
            self._rows = {key: row for key, row in self._rows.items() if row.count > least}
            least *= 2

    def report(self) -> list[HotPrefix]:
        """The hottest prefixes of all gateways, those first that save most: requests times blocks."""
        total: _Rows = {}
        for rows in (self._top(), *self._others):
            for key, row in rows.items():
                known = total.get(key)
                if known is None:
                    total[key] = _Row(row.count, row.blocks, row.parent, row.tenant, row.template)
                else:
                    known.count += row.count
        continued: dict[bytes, float] = {}
        for row in total.values():
            continued[row.parent] = max(continued.get(row.parent, 0.0), row.count)
        shown = [
            (key, row) for key, row in total.items() if row.count > 1 and continued.get(key, 0.0) < _ALIKE * row.count
        ]
        shown.sort(key=lambda item: (-item[1].count * item[1].blocks, item[0]))
        return [
            HotPrefix(key.hex(), row.blocks, row.tenant, row.template, row.count * SAMPLE)
            for key, row in shown[:_MOST_SHOWN]
        ]

    # --- what is shared ----------------------------------------------------------------------------

    def write(self) -> bytes:
        """What others are told: the keys that are counted most."""
        return _encode(self._top())

    def read(self, notes: Mapping[str, bytes]) -> bool:
        """What others tell, by their epochs; False when some of it is not to be understood."""
        others, readable = [], True
        for note in notes.values():
            try:
                rows = _decode(note)
            except msgspec.MsgspecError:
                readable = False
                continue
            others.append({key: row for key, row in rows.items() if len(key) == KEY_BYTES})
        self._others = others
        return readable

    # --- inside ------------------------------------------------------------------------------------

    def _top(self) -> _Rows:
        """The keys that matter most: requests times blocks."""
        several = ((key, row) for key, row in self._rows.items() if row.count > 1)
        return dict(nlargest(_MOST_TOLD, several, key=lambda item: item[1].count * item[1].blocks))
