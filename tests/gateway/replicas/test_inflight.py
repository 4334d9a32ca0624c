"""What piles up while a client reads slowly leaves its mailbox in one piece, and nothing of it is lost."""

from __future__ import annotations

import asyncio

from engine.wire import Output, TokenLogprobs
from gateway.replicas.inflight import Mailbox


def _output(token: int, index: int = 0, **fields: object) -> Output:
    entry = TokenLogprobs(token, -0.1 * token, token, ((token, -0.5),))
    return Output(1, f"w{token} ", (token,), index=index, logprobs=(entry,), **fields)  # type: ignore[arg-type]


def test_outputs_of_one_choice_are_taken_as_one() -> None:
    mailbox = Mailbox(1, choices=2)
    prompt = (TokenLogprobs(9, -2.0, 3),)
    first = _output(1, cached_tokens=16, prefill_s=0.5, queue_s=0.25, prompt_logprobs=prompt)
    others = [_output(5, 1), _output(2), _output(6, 1, finish_reason="length"), _output(3, finish_reason="stop")]
    for output in (first, *others):
        mailbox.put(output)
    assert mailbox.ended
    taken = [asyncio.run(mailbox.take()) for _ in range(2)]
    assert mailbox.emptied
    assert [output.index for output in taken] == [0, 1]
    whole, other = taken
    assert (whole.text, whole.token_ids, whole.finish_reason) == ("w1 w2 w3 ", (1, 2, 3), "stop")
    assert [entry.token_id for entry in whole.logprobs] == [1, 2, 3]
    assert (whole.cached_tokens, whole.prefill_s, whole.queue_s) == (16, 0.5, 0.25)
    assert whole.prompt_logprobs == prompt
    assert (other.text, other.token_ids, other.finish_reason) == ("w5 w6 ", (5, 6), "length")
    assert [entry.token_id for entry in other.logprobs] == [5, 6]
