"""One request inside the engine: its tokens, its blocks, and what is to be reported of it."""

from __future__ import annotations

import secrets
from typing import Protocol

from engine.blocks import BlockTable
from engine.wire import Sampling

__all__ = ["Detokenizer", "Sequence"]


class Detokenizer(Protocol):
    """Turns one request's generated tokens into text as they come (see ``engine.detokenize``)."""

    def push(self, token_id: int) -> tuple[str, bool]:
        """Add a token; return the text that is certain now and whether a stop string is complete."""
        ...

    def finish(self) -> str:
        """The text still held back, at the end of generation."""
        ...


class Sequence:
    """A request from submission to its last token. Owned by ``EngineCore``; the scheduler moves it between its queues.

    ``id`` is unique among the requests that have not ended. ``cached_tokens`` is fixed at the
    first admission; later re-admissions after a preemption never count as hits. Times are in seconds.
    """

    __slots__ = (
        "arrived",
        "cached_tokens",
        "detokenizer",
        "id",
        "preempted_at",
        "prefill_s",
        "prompt_tokens",
        "queue_s",
        "reported",
        "sampling",
        "seed",
        "table",
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
        self.table = BlockTable(tokens, root)
        self.prompt_tokens = len(tokens)
        self.sampling = sampling
        seed = secrets.randbits(64) if sampling.seed is None else sampling.seed
        self.seed = seed & 0xFFFF_FFFF_FFFF_FFFF
        self.detokenizer = detokenizer
        self.arrived = arrived
        self.cached_tokens: int | None = None
        self.preempted_at = 0  # tokens that had been computed when it was last preempted
        self.prefill_s = 0.0
        self.queue_s: float | None = None
        self.reported = False  # the first output is out, and with it cached_tokens and the times

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
    def decoding(self) -> bool:
        """Whether only its newest generated token is still to be computed."""
        return self.generated > 0 and self.remaining == 1
