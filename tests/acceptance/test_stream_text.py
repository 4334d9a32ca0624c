"""Cases of the kind stream-text: where an answer ends, and that a stream says the same."""

from __future__ import annotations

import codecs

from .models import SCRIPT, SCRIPT_TEXT, START
from .servers import Client, Server, tok

PROMPT = [*tok(0, 20), START]


async def _answer(client: Client, prompt: list[int], **fields: object) -> tuple[str, str, int]:
    """Text, finish reason and completion tokens, which stream and answer agree on."""
    whole = await client.complete(prompt, **fields)
    usage = whole.json["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert usage["prompt_tokens"] == len(prompt)
    reason = whole.json["choices"][0]["finish_reason"]
    streamed = await client.complete(prompt, stream=True, stream_options={"include_usage": True}, **fields)
    *events, last, done = streamed.events
    assert done == "[DONE]"
    assert "".join(event["choices"][0]["text"] for event in events) == whole.text
    assert events[-1]["choices"][0]["finish_reason"] == reason
    assert last["usage"] | {"prompt_tokens_details": None} == usage | {"prompt_tokens_details": None}
    return whole.text, reason, usage["completion_tokens"]


def test_h2_an_answer_that_ends_within_a_character_leaves_it_out(roomy: Server) -> None:
    """The model writes emoji, accents, ideographs and a byte that is no character; the limit cuts them everywhere."""

    async def scenario(client: Client) -> None:
        pieces = [roomy.gateway.renderer.spellings.bytes_of(token) for token in SCRIPT[:-1]]
        texts = []
        for limit in range(1, len(SCRIPT) + 2):
            text, reason, count = await _answer(client, PROMPT, max_tokens=limit)
            decoder = codecs.getincrementaldecoder("utf-8")("replace")
            assert text == decoder.decode(b"".join(pieces[:limit]))  # of a character that is cut, nothing
            assert (reason, count) == (("stop", len(SCRIPT)) if limit >= len(SCRIPT) else ("length", limit))
            texts.append(text)
        assert texts[-1] == SCRIPT_TEXT
        assert "" in texts

    roomy.run(scenario)


def test_h8_limits_and_ends_are_counted_exactly(roomy: Server) -> None:
    """The token that ends the text counts as one of the completion."""
    k = len(SCRIPT)

    async def scenario(client: Client) -> None:
        for limit in (1, 5, 20):
            _, reason, count = await _answer(client, tok(50, 30), max_tokens=limit, ignore_eos=True)
            assert (reason, count) == ("length", limit)
            _, reason, count = await _answer(client, PROMPT, max_tokens=limit, ignore_eos=True)
            assert (reason, count) == ("length", limit)
        for limit, expected in ((k - 1, ("length", k - 1)), (k, ("stop", k)), (k + 1, ("stop", k))):
            text, *ended = await _answer(client, PROMPT, max_tokens=limit)
            assert tuple(ended) == expected
            assert text == SCRIPT_TEXT

    roomy.run(scenario)


def test_h2_each_part_of_a_character_has_its_own_logprobs(roomy: Server) -> None:
    async def scenario(client: Client) -> None:
        whole = await client.complete(PROMPT, logprobs=2, max_tokens=30)
        logprobs = whole.json["choices"][0]["logprobs"]
        *parts, last, end = logprobs["tokens"]
        assert (last, end) == ("!", "<|im_end|>")
        assert all(set(part) == {"\ufffd"} for part in parts)
        assert logprobs["text_offset"] == [0, 0, 1, 1, 2, 2, 3, 3, 4, 5, 6]
        assert len(logprobs["token_logprobs"]) == whole.json["usage"]["completion_tokens"] == len(SCRIPT)
        streamed = await client.complete(PROMPT, logprobs=2, max_tokens=30, stream=True)
        pieces = [event["choices"][0]["logprobs"] for event in streamed.events[:-1]]
        for name, entries in logprobs.items():
            assert [entry for piece in pieces if piece for entry in piece[name]] == entries

    roomy.run(scenario)
