"""How log-probabilities are written, apart from any engine."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from engine.wire import TokenLogprobs
from gateway.api.logprobs import ChatLogprobs, CompletionLogprobs, prompt_logprobs
from gateway.spelling import TokenSpellings


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


@pytest.fixture(scope="module")
def spellings(tokenizer: Tokenizer) -> TokenSpellings:
    return TokenSpellings(tokenizer)


def _entries(ids: list[int], top: tuple[tuple[int, float], ...] = ()) -> list[TokenLogprobs]:
    return [TokenLogprobs(token, -0.5 - i, i + 1, top) for i, token in enumerate(ids)]


def test_a_chat_shows_tokens_with_bytes_and_alternatives(tokenizer: Tokenizer, spellings: TokenSpellings) -> None:
    ids = tokenizer.encode("ü", add_special_tokens=False).ids
    assert len(ids) == 2
    writer = ChatLogprobs(spellings)
    pieces = [writer.piece(0, _entries(ids[:1], ((ids[1], -0.1), (ids[0], -0.5)))), writer.piece(0, _entries(ids[1:]))]
    shown = json.loads(writer.joined(pieces))
    assert shown["refusal"] is None
    first, second = shown["content"]
    assert first == {
        "token": "\ufffd",
        "logprob": -0.5,
        "bytes": [0xC3],
        "top_logprobs": [
            {"token": "\ufffd", "logprob": -0.1, "bytes": [0xBC]},
            {"token": "\ufffd", "logprob": -0.5, "bytes": [0xC3]},
        ],
    }
    assert second["bytes"] == [0xBC]
    assert second["top_logprobs"] == []


def test_a_completion_shows_four_lists_of_one_length(tokenizer: Tokenizer, spellings: TokenSpellings) -> None:
    x, y, z = (tokenizer.token_to_id(letter) for letter in "xyz")
    writer = CompletionLogprobs(spellings, 1, "zx")
    pieces = [writer.prompt_piece([z, x], _entries([x], ((y, -0.25), (z, -0.3))))]
    pieces += [writer.piece(3, _entries([y, z], ((z, -0.125), (x, -2.0)))), writer.piece(3, _entries([x]))]
    assert json.loads(writer.joined(pieces)) == {
        "tokens": ["z", "x", "y", "z", "x"],
        "token_logprobs": [None, -0.5, -0.5, -1.5, -0.5],
        "top_logprobs": [None, {"x": -0.5, "y": -0.25}, {"y": -0.5, "z": -0.125}, {"z": -1.5}, {"x": -0.5}],
        "text_offset": [0, 1, 2, 3, 4],
    }
    other = json.loads(writer.joined([writer.piece(0, _entries([x]))]))
    assert other["text_offset"] == [2], "each choice has offsets of its own"
    empty: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    assert json.loads(writer.joined([])) == empty


def test_the_prompts_are_ranked_by_token_id(tokenizer: Tokenizer, spellings: TokenSpellings) -> None:
    x, y = (tokenizer.token_to_id(letter) for letter in "xy")
    entries = [TokenLogprobs(x, -3.0, 40, ((y, -0.5), (x, -3.0))), TokenLogprobs(y, -0.5, 1, ((y, -0.5), (x, -3.0)))]
    likely = {"logprob": -0.5, "rank": 1, "decoded_token": "y"}
    assert json.loads(prompt_logprobs(entries, spellings, 1)) == [
        None,
        {str(x): {"logprob": -3.0, "rank": 40, "decoded_token": "x"}, str(y): likely},
        {str(y): likely},
    ]


@pytest.mark.parametrize("logprob", [-math.inf, math.nan, -1e30])
def test_i9_what_json_has_no_number_for_is_written_as_a_very_small_one(
    spellings: TokenSpellings, logprob: float
) -> None:
    entry = [TokenLogprobs(5, logprob, 1, ((6, logprob),))]
    chat = json.loads(ChatLogprobs(spellings).joined([ChatLogprobs(spellings).piece(0, entry)]))
    assert chat["content"][0]["logprob"] == chat["content"][0]["top_logprobs"][0]["logprob"] == -9999.0
    completion = CompletionLogprobs(spellings, 1)
    assert json.loads(completion.joined([completion.piece(0, entry)]))["token_logprobs"] == [-9999.0]
    assert json.loads(prompt_logprobs(entry, spellings, 1))[1]["6"]["logprob"] == -9999.0
