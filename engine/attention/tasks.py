"""How a step's attention is cut into tasks for the C++ kernel: plain arithmetic, once per step and window.

A task is a set of query rows and a range of keys in one block table. Tokens of a prefill chunk are taken in tiles.
Decodes whose block tables begin alike attend to that shared part together, so that it is read from memory once; then
each of them, or each smaller group, to its own. With few rows the keys are cut too, so that every core has work.

Keys are cut at multiples of ``GROUP_KEYS`` only, at which the kernel begins new sums in any case, and the parts of a
row are merged in the order of their keys: so however a row is cut, its result is the same bits.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import groupby, pairwise
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from engine.attention.backend import SequenceSlice

__all__ = ["GROUP_KEYS", "AttentionTasks"]

_TILE_ROWS: Final = 192
"""Query rows (tokens times heads) of a task: their sums stay in the second-level cache with a tile of keys."""

GROUP_KEYS: Final = 128
"""Keys whose weighted values the kernel sums by themselves."""

_FEW_TOKENS: Final = 16
"""The tasks of a chunk of at most so many tokens have one group of keys."""

_LEAST_TILES: Final = 2
"""Of a chunk of more tokens than that: the heads of a single tile might not go evenly on the cores."""


class AttentionTasks:
    """The tables of attention.cpp for one step and window.

    ``tasks`` are (first row, rows, first key, last key, table, slot), ``merges`` (token, first, count); the rows are
    tokens of the flat batch and their positions.
    """

    def __init__(self, slices: Sequence[SequenceSlice], block_size: int, group: int, window: int | None) -> None:
        """Cut ``slices``.

        Args:
            slices: of the flat batch.
            block_size: tokens per block.
            group: query heads per KV head.
            window: keys that a token sees, itself included; None for all.
        """
        self.tasks = array("i")
        self.row_token = array("i")
        self.row_position = array("i")
        self.tables = array("i")
        self.merges = array("i")
        self.merge_slots = array("i")
        self.slots = 0
        self._block_size = block_size
        self._tile = max(1, _TILE_ROWS // group)
        self._pieces: list[tuple[list[tuple[int, int]], int, int, int]] = []  # rows, first key, last key, table
        decodes = []
        for piece in slices:
            if piece.length == 1 and window is None:
                decodes.append(piece)
            else:
                self._cut_chunk(piece, window)
        self._cut_decodes(decodes, 0, 0)
        self._lay_out()

    def _cut_chunk(self, piece: SequenceSlice, window: int | None) -> None:
        table = self._add_table(piece)
        tiles = max(-(-piece.length // self._tile), _LEAST_TILES if piece.length > _FEW_TOKENS else 1)
        edges = [piece.length * i // tiles for i in range(tiles + 1)]
        for offset, end in pairwise(edges):
            first, count = piece.start + offset, end - offset
            rows = [(piece.first + offset + i, first + i) for i in range(count)]
            begin = 0 if window is None else max(0, first - window + 1)
            self._pieces += [(rows, *keys, table) for keys in _ranges(begin, first + count, piece.length)]

    def _cut_decodes(self, decodes: list[SequenceSlice], done: int, depth: int) -> None:
        """Attend from key ``done`` on, where all ``decodes`` have the blocks before ``depth`` in common."""
        size = self._block_size
        decodes = sorted(decodes, key=lambda piece: piece.block_table[depth])
        for _, same in groupby(decodes, key=lambda piece: piece.block_table[depth]):
            members = list(same)
            shared = min(_common(members), min(piece.start // size for piece in members))
            edge = shared * size // GROUP_KEYS * GROUP_KEYS
            if len(members) > 1 and edge > done:
                table = self._add_table(members[0])
                for offset in range(0, len(members), self._tile):
                    rows = [(piece.first, piece.start) for piece in members[offset : offset + self._tile]]
                    self._pieces += [(rows, *keys, table) for keys in _ranges(done, edge, 1)]
                self._cut_decodes(members, edge, shared)
            elif len(members) > 1 and shared > depth:
                self._cut_decodes(members, done, shared)  # some of them may share more
            else:
                for piece in members:
                    table = self._add_table(piece)
                    row = [(piece.first, piece.start)]
                    self._pieces += [(row, *keys, table) for keys in _ranges(done, piece.start + 1, 1)]

    def _add_table(self, piece: SequenceSlice) -> int:
        start = len(self.tables)
        self.tables.extend(piece.block_table)
        return start

    def _lay_out(self) -> None:
        """Fill the tables from the pieces, those with most work first so that none of them starts late."""
        self._pieces.sort(key=lambda piece: -len(piece[0]) * (piece[2] - piece[1]))
        parts = Counter(token for rows, _, _, _ in self._pieces for token, _ in rows)
        places: dict[int, list[tuple[int, int]]] = {}  # first key and slot
        for rows, first_key, last_key, table in self._pieces:
            whole = parts[rows[0][0]] == 1  # then so are the other rows
            slot = -1 if whole else self.slots
            self.tasks.extend((len(self.row_token), len(rows), first_key, last_key, table, slot))
            self.row_token.extend(token for token, _ in rows)
            self.row_position.extend(position for _, position in rows)
            if not whole:
                for i, (token, _) in enumerate(rows):
                    places.setdefault(token, []).append((first_key, slot + i))
                self.slots += len(rows)
        for token, found in places.items():
            self.merges.extend((token, len(self.merge_slots), len(found)))
            self.merge_slots.extend(slot for _, slot in sorted(found))


def _ranges(begin: int, end: int, tokens: int) -> Iterator[tuple[int, int]]:
    """The keys ``begin .. end-1`` in one range, or in several where a task has few tokens."""
    first = begin
    while first < end:
        last = min((first // GROUP_KEYS + 1) * GROUP_KEYS, end) if tokens <= _FEW_TOKENS else end
        yield first, last
        first = last


def _common(members: list[SequenceSlice]) -> int:
    """How many blocks all block tables begin with: what the least and the greatest of them share."""
    least, greatest = min(piece.block_table for piece in members), max(piece.block_table for piece in members)
    for index, (one, other) in enumerate(zip(least, greatest, strict=False)):
        if one != other:
            return index
    return min(len(least), len(greatest))
