"""One request inside the engine: its tokens, its blocks, and what is to be reported of it."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Iterable
from copy import copy
from typing import Final, Protocol

from engine.batch import History
from engine.beam import BeamSearch
from engine.blocks import BlockTable
from engine.wire import Sampling, TokenLogprobs

__all__ = ["AGEING_S", "Detokenizer", "Sequence", "choice_seed"]

_NOTHING: Final = range(0)

AGEING_S: Final = 30.0
"""For each step of its priority a request gives way to those that arrive so much later, and to no others."""


class Detokenizer(Protocol):
    """Turns one request's generated tokens into text as they come (see ``engine.detokenize``)."""

    def push(self, token_id: int) -> tuple[str, bool]:
        """Add a token; return the text that is certain now and whether a stop string is complete."""
        ...

    def finish(self) -> str:
        """The text still held back, at the end of generation."""
        ...


class Sequence:
    """One choice of a request, from submission to its last token. Owned by ``EngineCore``; the scheduler moves it
    between its queues.

    ``id`` is its request's, ``index`` tells the choices of a request apart. ``cached_tokens`` is fixed at the
    first admission; later re-admissions after a preemption never count as hits. Times are in seconds.

    The first choice computes the prompt. ``siblings`` are the others until then: they have no blocks, are in no queue
    and start as forks of it. ``prompt_logprobs`` are those of the prompt's tokens from the second on, as far as they
    are computed; None where they are not wanted.

    A request that searches has a ``search``; then its sequences are the beams, each with its number there as ``index``.
    Of a beam whose tokens are all computed (``idle``) the next step waits for the other beams.
    """

    __slots__ = (
        "arrived",
        "awaited",
        "cached_tokens",
        "class_limit",
        "detokenizer",
        "foreseen",
        "history",
        "id",
        "index",
        "number",
        "preempted_at",
        "preemptions",
        "prefill_s",
        "priority",
        "prompt_logprobs",
        "prompt_tokens",
        "queue_s",
        "sampling",
        "search",
        "seed",
        "siblings",
        "table",
        "urgency",
        "waits",
    )

    def __init__(
        self,
        id: int,
        tokens: list[int],
        root: bytes | None,
        sampling: Sampling,
        detokenizer: Detokenizer,
        arrived: float,
    ) -> None:
        """``tokens`` is the prompt, ``root`` None keeps it out of the cache, ``arrived`` is on the engine's clock."""
        self.id = id
        self.prompt_tokens = len(tokens)
        self.adopt(BlockTable(tokens, root))
        self.sampling = sampling
        self.prompt_logprobs: list[TokenLogprobs] | None = None
        seed = secrets.randbits(64) if sampling.seed is None else sampling.seed
        self.seed = seed & 0xFFFF_FFFF_FFFF_FFFF
        self.detokenizer = detokenizer
        self.arrived = arrived
        self.cached_tokens: int | None = None
        self.preempted_at = 0  # tokens that had been computed when it was last preempted
        self.prefill_s = 0.0
        self.queue_s: float | None = None
        self.index = 0
        self.search: BeamSearch | None = None
        self.siblings: list[Sequence] = []
        self.number = 0  # place in the order of arrival, given by the scheduler
        self.priority = 0  # of its class
        self.urgency = 0  # its priority, until it has been preempted too often
        self.class_limit = 0  # so many of its priority may run at once, 0 for all
        self.preemptions = 0
        # While it waits for blocks that another sequence is computing:
        self.awaited: BlockTable | None = None  # the last one it waited for
        self.waits = 0  # how many it has waited for
        self.foreseen = 0  # tokens it would have found computed without waiting

    def adopt(self, table: BlockTable) -> None:
        """Go on with ``table``, whose tokens are its own from now on."""
        self.table = table
        self.history = History(table.tokens, self.prompt_tokens)

    def score_prompt(self, logprobs: Iterable[TokenLogprobs] = ()) -> None:
        """Want the log-probabilities of the prompt's tokens, of which the next ones are known now.

        Of blocks that were hit nothing would be known, so no more than what precedes is taken from the cache.
        """
        if self.prompt_logprobs is None:
            self.prompt_logprobs = []
        self.prompt_logprobs += logprobs
        known = len(self.prompt_logprobs)
        self.table.hit_limit = known if known < self.prompt_tokens - 1 else None

    def take_prompt_logprobs(self) -> tuple[TokenLogprobs, ...]:
        """Those of the whole prompt, if they were wanted; they are no more."""
        taken = tuple(self.prompt_logprobs or ())
        self.prompt_logprobs = None
        return taken

    def scored(self, start: int, end: int) -> range:
        """The positions among those from ``start`` to ``end`` after which a prompt token has to be scored."""
        if self.prompt_logprobs is None:
            return _NOTHING
        first = max(start, len(self.prompt_logprobs))
        return range(first, max(first, min(end, self.prompt_tokens - 1)))

    def add_siblings(self, detokenizers: list[Detokenizer]) -> None:
        """Make it the first of several choices, one more for each detokenizer, each with a seed of its own."""
        for index, detokenizer in enumerate(detokenizers, 1):
            sibling = Sequence(self.id, self.tokens, None, self.sampling, detokenizer, self.arrived)
            sibling.index = index
            sibling.priority, sibling.urgency = self.priority, self.urgency
            sibling.class_limit = self.class_limit
            sibling.seed = choice_seed(self.seed, index)
            self.siblings.append(sibling)

    def branch(self, index: int, table: BlockTable) -> Sequence:
        """Another beam of the search, that goes on with ``table`` from the same tokens."""
        beam = copy(self)
        beam.index = index
        beam.adopt(table)
        beam.prompt_logprobs = None
        return beam

    @property
    def turn(self) -> tuple[float, int, int]:
        """Sorts sequences by whose turn it is to be admitted and to compute its prompt.

        That is the order of arrival, a lower class set back by a fixed time: so nobody is overtaken for ever.
        """
        return self.arrived + self.urgency * AGEING_S, self.number, self.index

    @property
    def rank(self) -> tuple[int, int, bool, int]:
        """Sorts sequences by who keeps its blocks: by class, then the oldest first. The last is preempted first."""
        return self.urgency, self.number, self.idle, self.index

    @property
    def tokens(self) -> list[int]:
        """Prompt and generated tokens."""
        return self.table.tokens

    @property
    def generated(self) -> int:
        """Number of generated tokens."""
        return len(self.table.tokens) - self.prompt_tokens

    @property
    def remaining(self) -> int:
        """Tokens whose K and V are still to be computed before the next token can be sampled."""
        return len(self.table.tokens) - self.table.computed

    @property
    def idle(self) -> bool:
        """Whether nothing of it is to be computed until the search that it belongs to goes on."""
        return not self.remaining

    @property
    def decoding(self) -> bool:
        """Whether only its newest generated token is still to be computed."""
        return self.generated > 0 and self.remaining == 1


def choice_seed(seed: int, index: int) -> int:
    """The seed of a request's choice ``index``, 64 bits, from the request's own; that of the first is just it."""
    if not index:
        return seed
    counter = seed.to_bytes(8, "little") + index.to_bytes(4, "little")
    return int.from_bytes(hashlib.blake2b(counter, digest_size=8).digest(), "little")
