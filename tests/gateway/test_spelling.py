"""Tokens as they are written: exact bytes, and offsets that point at their text."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from gateway.spelling import TextOffsets, TokenSpellings

TEXT = "What a prefix shares: naïve 漢字 and 👩‍👩‍👧‍👦\n\n  é"


@pytest.fixture(params=["chatml", "headers"])
def tokenizer(request: pytest.FixtureRequest, model_folder: Callable[[str], Path]) -> Tokenizer:
    return Tokenizer.from_file(str(model_folder(request.param) / "tokenizer.json"))


@pytest.fixture(scope="module")
def words() -> Tokenizer:
    """Metasymbols for blanks, and bytes for what is no word, as SentencePiece vocabularies have them."""
    pieces = ["<s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁Hello", "▁world", "s", "▁"]
    tokenizer = Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, [], byte_fallback=True))
    tokenizer.add_special_tokens(["<s>"])
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


def _offsets(places: TextOffsets, ids: list[int]) -> list[int]:
    return [places.place(token) for token in ids]


def test_the_bytes_of_a_text_are_those_of_its_tokens(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(TEXT, add_special_tokens=False).ids
    spellings = TokenSpellings(tokenizer)
    assert b"".join(spellings.bytes_of(token) for token in ids) == TEXT.encode()
    assert any(b"\x80" <= spellings.bytes_of(token)[:1] < b"\xc0" for token in ids), "no token is part of a character"


def test_control_tokens_are_spelled_by_their_names_and_unknown_ones_not_at_all(tokenizer: Tokenizer) -> None:
    spellings = TokenSpellings(tokenizer)
    assert spellings.special
    for token in spellings.special:
        assert spellings.bytes_of(token).decode() == tokenizer.id_to_token(token)
    assert spellings.bytes_of(10**6) == b""


def test_vocabularies_of_words_keep_their_blanks_and_bytes(words: Tokenizer) -> None:
    spellings = TokenSpellings(words)
    named = {"▁Hello": b" Hello", "s": b"s", "▁": b" ", "<0xE6>": b"\xe6", "<s>": b"<s>"}
    assert {piece: spellings.bytes_of(words.token_to_id(piece)) for piece in named} == named


def test_each_token_begins_where_its_text_does(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(TEXT, add_special_tokens=False).ids
    spellings = TokenSpellings(tokenizer)
    starts = [0, *accumulate(len(spellings.bytes_of(token)) for token in ids)][:-1]
    expected = [len(TEXT.encode()[:start].decode("utf-8", "ignore")) for start in starts]
    assert _offsets(TextOffsets(spellings), ids) == expected
    assert _offsets(TextOffsets(spellings, prompt=TEXT), ids) == expected
    assert _offsets(TextOffsets(spellings, start=100), ids) == [100 + at for at in expected]


def test_offsets_within_a_character_are_that_characters(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("a👩b", add_special_tokens=False).ids
    offsets = _offsets(TextOffsets(TokenSpellings(tokenizer)), ids)
    assert len(ids) >= 4
    assert offsets == [0, *[1] * (len(ids) - 2), 2]


def test_control_tokens_take_room_only_where_the_text_shows_them(tokenizer: Tokenizer) -> None:
    spellings = TokenSpellings(tokenizer)
    control, letter = min(spellings.special), tokenizer.token_to_id("x")
    name, ids = tokenizer.id_to_token(control), [control, letter, control, letter]
    assert _offsets(TextOffsets(spellings), ids) == [0, 0, 1, 1]
    assert _offsets(TextOffsets(spellings, prompt="xx"), ids) == [0, 0, 1, 1]
    size = len(name)
    assert _offsets(TextOffsets(spellings, prompt=f"{name}x{name}x"), ids) == [0, size, size + 1, 2 * size + 1]


def test_the_first_word_of_a_text_has_no_blank(words: Tokenizer) -> None:
    spellings = TokenSpellings(words)
    ids = [words.token_to_id(piece) for piece in ("▁Hello", "s", "▁world", "<0xC3>", "<0xA9>", "s")]
    assert words.decode(ids) == "Hellos worldés"
    expected = [0, 5, 6, 12, 12, 13]
    assert _offsets(TextOffsets(spellings), ids) == expected
    assert _offsets(TextOffsets(spellings, prompt="Hellos worldés"), ids) == expected
    assert _offsets(TextOffsets(spellings, prompt="Hello"), [words.token_to_id("<s>"), ids[0], ids[1]]) == [0, 0, 5]
