"""One request as a whole: its choices or beams, and what it is told."""

from __future__ import annotations

from engine.sequence import Sequence
from engine.wire import Output, TokenLogprobs

__all__ = ["Request"]


class Request:
    """A request that has not ended. Owned by ``EngineCore``.

    ``first`` is the sequence that computes the prompt and accounts for it. ``live`` are those that have not ended:
    of the ``n`` choices, or the beams of a search, from which ``n`` choices come at its end.
    """

    __slots__ = ("first", "id", "live", "n", "reported")

    def __init__(self, first: Sequence, n: int) -> None:
        self.id = first.id
        self.n = n
        self.first = first
        self.live = [first, *first.siblings]
        self.reported = False  # the first output is out, and with it cached_tokens and the times

    @property
    def open(self) -> list[int]:
        """The choices that have not been told their end."""
        return [*range(self.n)] if self.first.search is not None else [sequence.index for sequence in self.live]

    def output(
        self,
        index: int,
        finish_reason: str | None,
        text: str = "",
        token_ids: tuple[int, ...] = (),
        logprobs: tuple[TokenLogprobs, ...] = (),
        error: tuple[str, str] | None = None,
    ) -> Output:
        """An output of choice ``index``; the first one after the admission tells what the prompt has cost."""
        first = self.first
        if self.reported or first.cached_tokens is None:
            return Output(self.id, text, token_ids, finish_reason, error=error, index=index, logprobs=logprobs)
        self.reported = True
        prompt_logprobs = first.take_prompt_logprobs() if token_ids else ()
        return Output(
            self.id,
            text,
            token_ids,
            finish_reason,
            first.cached_tokens,
            first.prefill_s,
            first.queue_s,
            error,
            index,
            logprobs,
            prompt_logprobs,
        )
