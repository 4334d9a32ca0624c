"""Which tokens are computed in the next step: continuous batching with chunked prefill."""

from __future__ import annotations

from collections import deque

import msgspec

from engine.batch import Chunk
from engine.blocks import BlockManager
from engine.errors import NoSpaceError
from engine.sequence import Sequence

__all__ = ["Scheduled", "Scheduler"]


class Scheduled(msgspec.Struct, frozen=True):
    """One sequence's part in a step. ``decode`` tells it from a prefill chunk."""

    sequence: Sequence
    chunk: Chunk
    decode: bool


class Scheduler:
    """Owns the queues. Every step it mixes decodes and prefill chunks up to ``max_batch_tokens`` tokens.

    * Decodes come first, so that a long prompt never stops a running stream.
    * Requests are admitted first come, first served, each with blocks for its whole prompt.
    * A decode that finds no block preempts the youngest running sequence. That one goes back to the head of the queue
      and is computed again later, but its published blocks stay hittable until they are evicted. An older sequence is
      never preempted for a younger one, so the oldest always gets to its end.
    """

    def __init__(self, blocks: BlockManager, *, max_batch_tokens: int, max_running: int) -> None:
        """Schedule on ``blocks``, at most ``max_running`` sequences at a time.

        Raises:
            ValueError: a limit is not positive.
        """
        if max_batch_tokens < 1 or max_running < 1:
            raise ValueError("max_batch_tokens and max_running must be positive")
        self.waiting: deque[Sequence] = deque()  # oldest first, and all younger than the running ones
        self.running: list[Sequence] = []  # oldest first
        self.preemptions = 0
        self.recomputed_tokens = 0
        self._blocks = blocks
        self._max_batch_tokens = max_batch_tokens
        self._max_running = max_running
        # Prompts that fit this part of a step in one chunk need not wait behind a longer one.
        self._short = max(1, max_batch_tokens // 4)

    def add(self, sequence: Sequence) -> None:
        """Queue a new sequence, the youngest of all. Its prompt plus one token must fit the empty pool."""
        self.waiting.append(sequence)

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

    def schedule(self) -> list[Scheduled]:
        """Decide the next step; empty only when nothing is running or waiting."""
        step = _Step(self._max_batch_tokens)
        self._schedule_decodes(step)
        prefills = [sequence for sequence in self.running if not sequence.decoding]
        if prefills and prefills[0].remaining > step.budget:
            self._schedule_short(step, prefills)
        for sequence in prefills:
            step.add(sequence)
        while step.budget and (admitted := self._admit_next()) is not None:
            step.add(admitted)
        return step.scheduled

    def _schedule_decodes(self, step: _Step) -> None:
        """Schedule every decode, oldest first."""
        at = 0
        while at < len(self.running):  # preempting shortens the list from its end
            sequence = self.running[at]
            at += 1
            if sequence.decoding and step.budget and self._make_room(sequence):
                step.add(sequence)

    def _make_room(self, sequence: Sequence) -> bool:
        """Give the sequence a block for its newest token; False when it had to be preempted itself."""
        while True:
            try:
                self._blocks.extend(sequence.table)
            except NoSpaceError:
                victim = self.running.pop()
                victim.preempted_at = victim.table.computed
                self._blocks.free(victim.table)
                self.waiting.appendleft(victim)
                self.preemptions += 1
                if victim is sequence:
                    return False
            else:
                return True

    def _schedule_short(self, step: _Step, prefills: list[Sequence]) -> None:
        """Let short prompts overtake a prefill that would take the whole step, within their part of it."""
        budget = min(self._short, step.budget)
        for sequence in prefills[1:]:
            if sequence.remaining <= budget:
                budget -= sequence.remaining
                prefills.remove(sequence)
                step.add(sequence)
        while self.waiting:
            head = self.waiting[0].table
            if len(head.tokens) - self._blocks.lookup(head) > budget or (admitted := self._admit_next()) is None:
                break
            budget -= admitted.remaining
            step.add(admitted)

    def _admit_next(self) -> Sequence | None:
        """Start the oldest waiting sequence, if there is one and it fits."""
        if not self.waiting or len(self.running) >= self._max_running:
            return None
        sequence = self.waiting[0]
        try:
            # A block for each running sequence stays: they would soon preempt what was admitted without.
            cached = self._blocks.allocate(sequence.table, headroom=len(self.running))
        except NoSpaceError:
            return None
        if sequence.cached_tokens is None:
            sequence.cached_tokens = cached
        else:
            self.recomputed_tokens += max(0, sequence.preempted_at - cached)
        self.waiting.popleft()
        self.running.append(sequence)
        return sequence


class _Step:
    """A step in the making: the chunks so far and the tokens left in its budget."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.scheduled: list[Scheduled] = []

    def add(self, sequence: Sequence) -> None:
        """Schedule as many of the sequence's tokens as the budget allows, possibly none."""
        table = sequence.table
        start = table.computed
        count = min(sequence.remaining, self.budget)
        if not count:
            return
        self.budget -= count
        end = start + count
        chunk = Chunk(
            request_id=sequence.id,
            tokens=table.tokens[start:end],
            start=start,
            block_table=table.blocks,
            sample=end == len(table.tokens),
            sampling=sequence.sampling,
            seed=sequence.seed,
            output_index=sequence.generated,
        )
        self.scheduled.append(Scheduled(sequence, chunk, sequence.decoding))
