"""The cause of every missed token of one prompt, and the sum over many of them, by cause and template."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from typing import Final, NamedTuple, get_args

import msgspec

from gateway.attribution.history import Cause, Verdict

__all__ = ["CAUSES", "CauseRow", "CauseTable", "Example", "Loss", "Occurrence", "Run", "Sighting", "attribute", "runs"]

CAUSES: Final[tuple[Cause, ...]] = get_args(Cause)
"""All causes, as they are called everywhere."""


class Sighting(msgspec.Struct, frozen=True):
    """What is known of one prompt when it is attributed, in tokens.

    ``length`` is the prompt's, of which ``cached`` were found in the cache that served it. A cache that had forgotten
    nothing would have had ``remembered``, the one that forgets least of the other replicas ``elsewhere``. With some
    earlier prompt of the same namespace it has ``common`` tokens in common. ``ends`` are the ends of its parts.
    """

    length: int
    cached: int
    remembered: int
    common: int
    ends: Sequence[int]
    elsewhere: int = 0
    block_size: int = 16
    bypass: bool = False


class Loss(msgspec.Struct, frozen=True):
    """``tokens`` missed for one cause. The longest run of them begins at ``token``, in the part with index ``part``."""

    cause: Cause
    tokens: int
    token: int
    part: int


class Run(NamedTuple):
    """The tokens from ``start`` to ``end`` were missed for one cause."""

    cause: Cause
    start: int
    end: int


def attribute(sighting: Sighting, verdicts: Sequence[Verdict]) -> list[Loss]:
    """Give every token of the prompt that was not cached one cause; the losses are in order of appearance.

    ``verdicts`` are those of its parts (``PartHistory.judge``). The tokens of all losses sum up to what was missed.
    """
    tokens: dict[Cause, int] = {}
    longest: dict[Cause, tuple[int, int]] = {}  # tokens, first of them
    for cause, start, end in runs(sighting, verdicts):
        lost = end - start
        tokens[cause] = tokens.get(cause, 0) + lost
        if cause not in longest or lost > longest[cause][0]:
            longest[cause] = lost, start
    return [
        Loss(cause, lost, longest[cause][1], _part_at(sighting.ends, longest[cause][1]))
        for cause, lost in tokens.items()
    ]


def runs(sighting: Sighting, verdicts: Sequence[Verdict]) -> list[Run]:
    """The tokens that were not cached, from the first to the last, cut where their cause changes."""
    length, ends = sighting.length, sighting.ends
    edges: list[tuple[Cause, int]] = []
    if sighting.bypass:
        edges.append(("bypass", length))
    elif length < sighting.block_size:
        edges.append(("below_minimum", length))
    else:
        elsewhere = max(sighting.elsewhere, sighting.cached)
        edges += [
            ("other_replica", elsewhere),
            ("evicted", max(sighting.remembered, elsewhere)),
            ("block_rounding", sighting.common),
        ]
        start = 0
        for verdict, end in zip(verdicts, ends, strict=True):
            # A part that was there before and yet is left within: its last token reaches into the next part.
            if verdict.cause != "evicted" or start >= sighting.common:
                edges.append((verdict.cause, end))
            start = end
        edges.append(("never_seen", length))
    found = []
    at = sighting.cached
    for cause, end in edges:
        if end > at:
            found.append(Run(cause, at, end))
            at = end
    return found


def _part_at(ends: Sequence[int], token: int) -> int:
    return min(bisect_right(ends, token), max(0, len(ends) - 1))


class Example(msgspec.Struct, frozen=True):
    """Where one prompt left the path that was there before: at token ``token``, behind ``text_before``.

    It goes on with ``here``, the other one with ``there`` (empty where there is no other).
    """

    token: int
    text_before: str
    here: str
    there: str


class CauseRow(msgspec.Struct, frozen=True):
    """What one cause cost the requests of one template: ``requests`` missed ``tokens`` tokens for it."""

    cause: Cause
    template: str
    requests: int
    tokens: int
    example: Example | None


class Occurrence(msgspec.Struct, frozen=True):
    """One loss of request ``serial``, and the request to hold against it.

    ``witness`` is the number of an earlier request that is the same as far as ``depth`` parts apart from differences
    that do not count here; with ``depth`` None the two are the same, token for token, up to the loss.
    """

    serial: int
    loss: Loss
    witness: int | None
    depth: int | None


class _Sum:
    __slots__ = ("occurrence", "requests", "tokens")

    def __init__(self) -> None:
        self.requests = 0
        self.tokens = 0
        self.occurrence: Occurrence | None = None


class CauseTable:
    """Sums losses by cause and template. Owns its sums, one per pair, of which there are at most ``max_rows``.

    What goes beyond is counted under the template that comes last, ``overflow``.
    """

    def __init__(self, max_rows: int = 4096, overflow: str = "others") -> None:
        self._max_rows: Final = max_rows
        self._overflow: Final = overflow
        self._sums: dict[tuple[Cause, str], _Sum] = {}

    def add(self, template: str, occurrences: Iterable[Occurrence]) -> None:
        """Count the losses of one request. Of all its occurrences a row keeps the one that cost most."""
        for occurrence in occurrences:
            loss = occurrence.loss
            key = (loss.cause, template)
            if key not in self._sums and len(self._sums) >= self._max_rows:
                key = (loss.cause, self._overflow)
            row = self._sums.setdefault(key, _Sum())
            row.requests += 1
            row.tokens += loss.tokens
            if row.occurrence is None or loss.tokens > row.occurrence.loss.tokens:
                row.occurrence = occurrence

    def occurrences(self) -> list[Occurrence]:
        """Those that the rows keep."""
        return [row.occurrence for row in self._sums.values() if row.occurrence is not None]

    def rows(self, example: Callable[[Occurrence], Example | None]) -> tuple[CauseRow, ...]:
        """The table by cause and template, most tokens first; ``example`` makes texts of what a row keeps."""
        rows = []
        for (cause, template), sums in self._sums.items():
            shown = None if sums.occurrence is None else example(sums.occurrence)
            rows.append(CauseRow(cause, template, sums.requests, sums.tokens, shown))
        totals: dict[Cause, int] = {}
        for row in rows:
            totals[row.cause] = totals.get(row.cause, 0) + row.tokens
        return tuple(
            sorted(rows, key=lambda row: (-totals[row.cause], CAUSES.index(row.cause), -row.tokens, row.template))
        )
