"""Texts of one template, aligned token by token: what stays is a skeleton, what differs is a gap in it.

Tokens are compared by salted digests, so that a skeleton holds no text: until enough requests have shown which tokens
never change, each of them may be somebody's name. The alignment is a patience diff (Bram Cohen): tokens that occur
once on both sides, in the longest order that both keep, are anchors; between them the same again, to a fixed depth.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Sequence
from itertools import pairwise
from typing import Final

import msgspec

from gateway.canonical.learning.tokens import is_joint

__all__ = ["GAP", "Skeleton", "generalize"]

GAP: Final = 0
"""Stands in a skeleton where texts differ; no token has this digest."""

_MAX_DEPTH: Final = 12


class Skeleton(msgspec.Struct, frozen=True):
    """What a text shares with the texts before it.

    ``digests`` are the tokens' (``array('Q')``), ``GAP`` where texts differ. ``runs`` are the same constant parts as
    spans (start, end) of the text's tokens, in order; with ``opens`` and ``ends`` a gap stands before the first and
    behind the last of them.
    """

    digests: array[int]
    runs: tuple[tuple[int, int], ...]
    opens: bool
    ends: bool

    def literals(self, tokens: Sequence[str]) -> tuple[str, ...]:
        """The constant parts as text, one more than there are gaps; the outer ones may be empty."""
        parts = ["".join(tokens[start:end]) for start, end in self.runs]
        return (*([""] if self.opens or not parts else []), *parts, *([""] if self.ends else []))

    def masked(self, text: array[int]) -> array[int]:
        """The digests ``text`` with a ``GAP`` for every token that is not constant, to be generalized further."""
        masked = array("Q", [GAP]) * len(text)
        for start, end in self.runs:
            masked[start:end] = text[start:end]
        return masked


def generalize(digests: array[int], tokens: Sequence[str], text: array[int], *, shortest: int = 1) -> Skeleton:
    """What the skeleton ``digests`` and a text have in common; ``tokens`` and ``text`` are its tokens, digests too.

    Of the constant parts between two gaps those with fewer than ``shortest`` tokens are left out: by chance, long texts
    have many words in common. Cost grows with the number of tokens times its logarithm.
    """
    pairs = _align(digests, text)
    runs: list[tuple[int, int]] = []
    for index, (at, token) in enumerate(pairs):
        if index and pairs[index - 1] == (at - 1, token - 1):
            runs[-1] = (runs[-1][0], token + 1)
        else:
            runs.append((token, token + 1))
    opens = pairs[0] != (0, 0) if pairs else bool(digests or text)
    ends = pairs[-1] != (len(digests) - 1, len(text) - 1) if pairs else opens
    last = len(runs) - 1
    runs = [
        run
        for index, run in enumerate(runs)
        if (index == 0 and not opens) or (index == last and not ends) or _stands(run, tokens, shortest)
    ]
    merged = array("Q", [GAP] if opens else [])
    for index, (first, stop) in enumerate(runs):
        if index:
            merged.append(GAP)
        merged.extend(text[first:stop])
    if ends and runs:
        merged.append(GAP)
    return Skeleton(merged, tuple(runs), opens, ends)


def _stands(run: tuple[int, int], tokens: Sequence[str], shortest: int) -> bool:
    """Whether a constant part between two gaps is one. A single joint is not: one value is on both sides of it."""
    length = run[1] - run[0]
    return length >= shortest and (length > 1 or not is_joint(tokens[run[0]]))


def _align(left: Sequence[int], right: Sequence[int]) -> list[tuple[int, int]]:
    """Pairs of indexes at which both sides hold the same token, rising on both sides."""
    pairs: list[tuple[int, int]] = []
    regions = [(0, len(left), 0, len(right), 0)]
    while regions:
        low, high, start, end, depth = regions.pop()
        while low < high and start < end and left[low] == right[start] != GAP:
            pairs.append((low, start))
            low, start = low + 1, start + 1
        while low < high and start < end and left[high - 1] == right[end - 1] != GAP:
            high, end = high - 1, end - 1
            pairs.append((high, end))
        if low == high or start == end or depth == _MAX_DEPTH:
            continue
        anchors = _anchors(left, low, high, right, start, end)
        if not anchors:
            continue
        pairs += anchors
        bounds = [(low - 1, start - 1), *anchors, (high, end)]
        regions += [(a + 1, c, b + 1, d, depth + 1) for (a, b), (c, d) in pairwise(bounds)]
    return sorted(pairs)


def _anchors(
    left: Sequence[int], low: int, high: int, right: Sequence[int], start: int, end: int
) -> list[tuple[int, int]]:
    """Tokens that occur once in both regions: the longest sequence of them that rises on both sides."""
    here = _singles(left, low, high)
    there = _singles(right, start, end)
    common = [(at, there[token]) for token, at in here.items() if token != GAP and token in there]
    tails: list[int] = []  # the least last place of a rising sequence, by its length
    owners: list[int] = []
    before: list[int] = []
    for index, (_, place) in enumerate(common):
        length = bisect_left(tails, place)
        before.append(owners[length - 1] if length else -1)
        if length == len(tails):
            tails.append(place)
            owners.append(index)
        else:
            tails[length], owners[length] = place, index
    chain: list[tuple[int, int]] = []
    index = owners[-1] if owners else -1
    while index >= 0:
        chain.append(common[index])
        index = before[index]
    return chain[::-1]


def _singles(tokens: Sequence[int], start: int, end: int) -> dict[int, int]:
    """The places of the tokens that occur once in a region, in order of place."""
    places: dict[int, int] = {}
    repeated: set[int] = set()
    for place in range(start, end):
        token = tokens[place]
        if token in places:
            repeated.add(token)
        else:
            places[token] = place
    for token in repeated:
        del places[token]
    return places
