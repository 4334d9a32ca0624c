"""Which tokens are computed in the next step: continuous batching with chunked prefill."""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable
from operator import attrgetter
from typing import Final

import msgspec

from engine.batch import BlockCopy, Chunk
from engine.beam import BeamSearch, Branch
from engine.blocks import BlockManager, BlockTable
from engine.errors import NoSpaceError
from engine.sequence import Sequence

__all__ = ["MAX_PREEMPTIONS", "MAX_SCORED", "MAX_WAITS", "Scheduled", "Scheduler", "Step"]

MAX_WAITS: Final = 8
"""For so many sequences, one after the other, another one waits at most to share what they compute."""

MAX_PREEMPTIONS: Final = 4
"""A request that has been preempted so often is of the highest class from then on, so that it gets to its end."""

MAX_SCORED: Final = 128
"""So many prompt tokens are scored in a step at most, as each takes logits of the whole vocabulary."""

_TURN: Final = attrgetter("turn")
_RANK: Final = attrgetter("rank")


class Scheduled(msgspec.Struct, frozen=True):
    """One sequence's part in a step. ``decode`` tells it from a prefill chunk."""

    sequence: Sequence
    chunk: Chunk
    decode: bool


class Scheduler:
    """Owns the queues. Every step it mixes decodes and prefill chunks up to ``max_batch_tokens`` tokens.

    * Decodes come first, so that a long prompt never stops a running stream. No more sequences run than a step has
      tokens, so that each of them gets its token in every step, whatever its class.
    * Requests are admitted first come, first served, each with blocks for its whole prompt. Those of a lower class
      (a higher ``priority``) count as come later by a time that is fixed per class, so that they age. Those of a class
      that has as many running as it may are passed over.
    * A request that would start by computing what a running one is computing at the moment is passed over until that
      is published, and then hits it. It holds nothing meanwhile and nobody waits behind it; whatever ends or preempts
      the other one ends the wait; and it waits for at most ``MAX_WAITS`` others. So no wait is for ever.
    * A decode that finds no block preempts the youngest running sequence of the lowest class. That one goes back to its
      place in the queue and is computed again later, but its published blocks stay hittable until they are evicted.
      Within a class an older sequence is never preempted for a younger one, so the oldest always gets to its end, and
      never one for a lower class; after ``MAX_PREEMPTIONS`` a sequence counts as of the highest.
    * The choices of a request count as running from its admission, and start as forks when its prompt is computed.
    * So do the beams of a search, as long as any of them runs: those that do not have their places kept. Beams that
      have been computed wait for the others with their blocks. They are preempted before these, and when nothing else
      can be scheduled; then they are in no queue until the search goes on. So a search gets on even if its beams fit
      the pool only one by one.
    """

    def __init__(self, blocks: BlockManager, *, max_batch_tokens: int, max_running: int) -> None:
        """Schedule on ``blocks``, at most ``max_running`` sequences at a time, or ``max_batch_tokens`` if that is less.

        Raises:
            ValueError: a limit is not positive.
        """
        if max_batch_tokens < 1 or max_running < 1:
            raise ValueError("max_batch_tokens and max_running must be positive")
        self.waiting: list[Sequence] = []  # by turn
        self.running: list[Sequence] = []  # by turn
        self.preemptions = 0
        self.recomputed_tokens = 0
        self.shared_in_flight = 0
        """Prompt tokens that were hit because their request had waited for another one to compute them."""
        self._added = 0
        self._blocks = blocks
        self._max_batch_tokens = max_batch_tokens
        self.max_running: Final = min(max_running, max_batch_tokens)
        # Prompts that fit this part of a step in one chunk need not wait behind a longer one.
        self._short = max(1, max_batch_tokens // 4)

    def add(self, sequence: Sequence) -> None:
        """Queue a new sequence, the youngest of its class.

        Its prompt plus one token must fit the empty pool, and it may not have more choices than sequences may run.
        """
        self._added += 1
        for choice in (sequence, *sequence.siblings):
            choice.number = self._added
        insort(self.waiting, sequence, key=_TURN)

    def remove(self, sequence: Sequence) -> None:
        """Take an ended sequence out of its queue and give its blocks back."""
        if sequence in self.running:
            self.running.remove(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)
        self._blocks.free(sequence.table)

    def queued_tokens(self) -> int:
        """Prompt tokens still to be computed over all sequences, cache hits of waiting ones not foreseen."""
        running = sum(sequence.remaining for sequence in self.running if not sequence.decoding)
        return running + sum(sequence.remaining for sequence in self.waiting)

    def fork(self, sequence: Sequence) -> None:
        """Start the siblings of a sequence whose prompt has just been computed and committed, on its blocks."""
        for sibling in sequence.siblings:
            sibling.adopt(self._blocks.fork(sequence.table))
            sibling.cached_tokens = sequence.cached_tokens
            sibling.queue_s = sequence.queue_s
            insort(self.running, sibling, key=_TURN)
        sequence.siblings = []

    def branch(self, beams: list[Sequence], branches: list[Branch]) -> list[Sequence]:
        """Let a search go on from its beams: fork those that branch, give up those that end; the beams from then on."""
        parents = {beam.index: beam for beam in beams}
        going = []
        for branch in branches:  # all forks before any token is added
            parent = parents[branch.parent]
            going.append(parent if branch.index == branch.parent else self._fork(parent, branch.index))
        for beam in beams:
            if beam not in going:
                self.remove(beam)
        for branch, beam in zip(branches, going, strict=True):
            beam.tokens.append(branch.token_id)
            queue = self.running if beam.table.blocks else self.waiting
            if beam not in queue:
                insort(queue, beam, key=_TURN)
        return going

    def _fork(self, parent: Sequence, index: int) -> Sequence:
        """One more beam from where ``parent`` is, on its blocks if it has any."""
        table = parent.table
        if table.blocks:
            return parent.branch(index, self._blocks.fork(table))
        return parent.branch(index, BlockTable([*table.tokens], table.root, table.owner))

    def schedule(self) -> Step:
        """Decide the next step; it has parts unless nothing is running or waiting."""
        step = self._plan()
        while not step.scheduled and self.running:
            # No prompt finds a window block, as some have been pinned since: who keeps its blocks longest goes on.
            self._preempt(max(self.running, key=_RANK))
            step = self._plan()
        return step

    def _plan(self) -> Step:
        step = Step(self._max_batch_tokens)
        self._schedule_decodes(step)
        prefills = [sequence for sequence in self.running if not sequence.decoding]
        if prefills and prefills[0].remaining > step.budget:
            self._schedule_short(step, prefills)
        for sequence in prefills:
            self._schedule_waiting(step, before=sequence)
            self._add_prefill(step, sequence)
        self._schedule_waiting(step)
        while not step.scheduled and (idle := [sequence for sequence in self.running if sequence.idle]):
            self._preempt(max(idle, key=_RANK))
            self._schedule_waiting(step)
        return step

    def _schedule_waiting(self, step: Step, before: Sequence | None = None) -> None:
        """Admit and schedule waiting sequences, or only those whose turn comes before that of a running one."""
        while step.budget and (head := self._next_waiting()) is not None:
            if (before is not None and head.turn > before.turn) or not self._admit(head):
                return
            self._add_prefill(step, head)

    def _add_prefill(self, step: Step, sequence: Sequence) -> None:
        """Schedule as many of the sequence's tokens as there are blocks for and the budget allows, possibly none."""
        count = min(sequence.remaining, step.budget)
        step.add(sequence, self._blocks.reserve(sequence.table, count))

    def _schedule_decodes(self, step: Step) -> None:
        """Schedule every decode, those that would be preempted last first."""
        ranked = sorted(self.running, key=_RANK)
        at = 0
        while at < len(ranked):  # preempting shortens the list from its end
            sequence = ranked[at]
            at += 1
            if sequence.decoding and step.budget and self._make_room(sequence, ranked, step):
                step.add(sequence, 1)

    def _make_room(self, sequence: Sequence, ranked: list[Sequence], step: Step) -> bool:
        """Give the sequence a block for its newest token; False when it had to be preempted itself."""
        while True:
            try:
                copy = self._blocks.extend(sequence.table)
            except NoSpaceError:
                victim = ranked.pop()
                self._preempt(victim)
                if victim is sequence:
                    return False
            else:
                if copy is not None:
                    step.copies.append(copy)
                return True

    def _preempt(self, victim: Sequence) -> None:
        """Take a running sequence's blocks and put it back into the queue, if any of it is to be computed."""
        self.running.remove(victim)
        idle = victim.idle
        victim.preempted_at = victim.table.computed
        self._blocks.free(victim.table)
        self.preemptions += 1
        victim.preemptions += 1
        if victim.preemptions >= MAX_PREEMPTIONS:
            for choice in (victim, *victim.siblings):
                choice.urgency = 0
        if not idle:
            insort(self.waiting, victim, key=_TURN)

    def _schedule_short(self, step: Step, prefills: list[Sequence]) -> None:
        """Let short prompts overtake a prefill that would take the whole step, within their part of it."""
        budget = min(self._short, step.budget)
        for sequence in prefills[1:]:
            if sequence.remaining <= budget:
                budget -= sequence.remaining
                prefills.remove(sequence)
                self._add_prefill(step, sequence)
        while (head := self._next_waiting()) is not None:
            table = head.table
            if len(table.tokens) - self._blocks.lookup(table) > budget or not self._admit(head):
                break
            budget -= head.remaining
            self._add_prefill(step, head)

    def _next_waiting(self) -> Sequence | None:
        """The first in turn that has a place in its class and would not compute what a running one is computing."""
        if len(self.running) >= self.max_running:
            return None
        for sequence in self.waiting:
            if self._has_place(sequence) and not self._shall_wait(sequence):
                return sequence
        return None

    def _has_place(self, sequence: Sequence) -> bool:
        """Whether its class may have it running; more choices than the limit run when they are the only ones."""
        if not sequence.class_limit:
            return True
        wanted = _places([sequence, *self.running]) - _places(self.running)
        taken = _places(other for other in self.running if other.priority == sequence.priority)
        return not taken or not wanted or taken + wanted <= sequence.class_limit

    def _shall_wait(self, sequence: Sequence) -> bool:
        """Whether what it would compute first is in flight, and its patience not at an end.

        Nobody waits for a lower class, whose turn may come much later.
        """
        other = self._blocks.in_flight(sequence.table)
        if other is None or any(
            running.table is other and running.urgency > sequence.urgency for running in self.running
        ):
            return False
        if other is not sequence.awaited:
            if not sequence.waits:
                sequence.foreseen = self._blocks.lookup(sequence.table)
            sequence.awaited = other
            sequence.waits += 1
        return sequence.waits <= MAX_WAITS

    def _admit(self, sequence: Sequence) -> bool:
        """Start a waiting sequence; False when it does not fit."""
        taken = _places(self.running)
        wanted = _places([sequence, *self.running]) - taken
        if taken + wanted > self.max_running:
            return False
        # A block for each running sequence stays: they would soon preempt what was admitted without.
        headroom = taken + wanted - 1 if taken else 0
        try:
            cached = self._blocks.allocate(sequence.table, headroom=headroom)
        except NoSpaceError:
            return False
        if sequence.cached_tokens is None:
            sequence.cached_tokens = cached
            if sequence.waits:
                self.shared_in_flight += max(0, cached - sequence.foreseen)
        else:
            self.recomputed_tokens += max(0, sequence.preempted_at - cached)
        sequence.awaited = None
        sequence.waits = 0
        self.waiting.remove(sequence)
        insort(self.running, sequence, key=_TURN)
        return True


def _places(sequences: Iterable[Sequence]) -> int:
    """How many places these sequences take: their choices and beams that are yet to start have one each, too."""
    places = 0
    searches: set[BeamSearch] = set()
    for sequence in sequences:
        if sequence.search is None:
            places += 1 + len(sequence.siblings)
        elif sequence.search not in searches:
            searches.add(sequence.search)
            places += sequence.search.width
    return places


class Step:
    """A step in the making: its parts so far, the blocks to copy before them, and what is left in its budgets.

    These are of tokens, and of prompt tokens that are scored.
    """

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.scores = MAX_SCORED
        self.scheduled: list[Scheduled] = []
        self.copies: list[BlockCopy] = []

    def add(self, sequence: Sequence, count: int) -> None:
        """Schedule up to ``count`` of the sequence's tokens, of which there are so many and within the budget."""
        table = sequence.table
        start = table.computed
        if scored := sequence.scored(start, start + count):
            if len(scored) > self.scores:
                count = scored.start + self.scores - start
            self.scores -= min(len(scored), self.scores)
        if not count:
            return
        self.budget -= count
        end = start + count
        self._append(sequence, table, start, end)
        if end == len(table.tokens):
            for sibling in sequence.siblings:
                self._append(sibling, table, end, end)

    def _append(self, sequence: Sequence, table: BlockTable, start: int, end: int) -> None:
        """Add a part; an empty one is a draw of a sibling on the blocks of the part before."""
        chunk = Chunk(
            request_id=sequence.id,
            tokens=table.tokens[start:end],
            start=start,
            block_table=table.blocks,
            sample=end == len(table.tokens),
            sampling=sequence.sampling,
            seed=sequence.seed,
            output_index=sequence.generated,
            history=sequence.history,
            window_table=table.window,
            scored=sequence.scored(start, end),
            candidates=sequence.search.candidates if sequence.search is not None and end == len(table.tokens) else 0,
        )
        self.scheduled.append(Scheduled(sequence, chunk, sequence.decoding))
