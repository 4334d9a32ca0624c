"""ASCII text that is looked up word by word has the tokenizer's own ids, for every pre-tokenizer that is known."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, normalizers, pre_tokenizers
from tokenizers.models import BPE

from cache_policy.keys import token_list
from gateway.segments import EXAMINED_PATTERNS
from gateway.words import _MAX_WORDS, WordEncoder
from tests.gateway.test_segments import PRE_TOKENIZERS

TokenizerBehind = Callable[[pre_tokenizers.PreTokenizer], Tokenizer]

# Words, and every class of ASCII character that a pattern tells apart.
FRAGMENT = st.one_of(
    st.sampled_from(["\n\n", "\n", " ", "  ", "\r\n", "\t", "\x0b", "\x0c", "\x1c", "\x1f", "\x00", "\x7f"]),
    st.sampled_from(["a", "Word", "WORD", "cache", "1", "2024", "'s", "'LL", "'t", "'", "x'S"]),
    st.sampled_from([".", "!", "/", "//", "[", "]", "{}", "-", "_", "!\n", "...\n\n"]),
    st.sampled_from(["<|im_start|>", "<|im_end|>", "<|im_", "end|>", "<end>", "<end", "   ", "<|", "|>"]),
    st.characters(max_codepoint=127),
)
TEXT = st.lists(FRAGMENT, max_size=30).map("".join)


def definition(tokenizer: Tokenizer) -> dict[str, Any]:
    decoded: dict[str, Any] = msgspec.json.decode(tokenizer.to_str())
    return decoded


@pytest.mark.parametrize("name", [*PRE_TOKENIZERS, "runs of digits"])
def test_words_looked_up_are_the_tokenizers_own(name: str, tokenizer_behind: TokenizerBehind) -> None:
    runs = [pre_tokenizers.Digits(individual_digits=False), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    tokenizer = tokenizer_behind(PRE_TOKENIZERS.get(name) or pre_tokenizers.Sequence(runs))
    tokenizer.add_tokens(["<end>", "   ", AddedToken("|im_", normalized=True)])
    tokenizer.normalizer = normalizers.NFC()
    words = WordEncoder(tokenizer, definition(tokenizer))

    @settings(deadline=None, max_examples=150)  # an example can wait for a busy processor
    @given(TEXT)
    def check(text: str) -> None:
        data = words.encode(text)
        assert data is not None
        assert token_list(data) == tokenizer.encode(text, add_special_tokens=False).ids

    check()


@pytest.mark.parametrize("suffix", [None, "</w>"])
@pytest.mark.parametrize("merged", [[], [("1", "2")], [("\u0120", "1")]])
def test_numbers_are_put_together_from_digits_only_where_the_vocabulary_joins_none(
    merged: list[tuple[str, str]], suffix: str | None
) -> None:
    alphabet = [*"0123456789\u0120", *("".join(pair) for pair in merged)]
    ends = [f"{symbol}{suffix}" for symbol in alphabet] if suffix else []
    vocabulary = {symbol: index for index, symbol in enumerate([*alphabet, *ends])}
    tokenizer = Tokenizer(BPE(vocabulary, merged, end_of_word_suffix=suffix or ""))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    words = WordEncoder(tokenizer, definition(tokenizer))
    for text in ("7", "12", "312009", " 12", " 312009 12  9"):
        data = words.encode(text)
        assert data is not None
        assert token_list(data) == tokenizer.encode(text, add_special_tokens=False).ids
    alone = not merged and suffix is None
    assert ("312009" in words._words) != alone
    assert " 12" in words._words


def test_digits_that_the_vocabulary_lacks_are_one_unknown_token_where_the_tokenizer_makes_them_one() -> None:
    tokenizer = Tokenizer(BPE({"0": 0, "\u0120": 1, "<unk>": 2}, [], unk_token="<unk>", fuse_unk=True))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    data = WordEncoder(tokenizer, definition(tokenizer)).encode("0120 34")
    assert data is not None
    assert token_list(data) == tokenizer.encode("0120 34", add_special_tokens=False).ids


def test_other_text_than_ascii_is_left_to_the_tokenizer(tokenizer_behind: TokenizerBehind) -> None:
    tokenizer = tokenizer_behind(PRE_TOKENIZERS["gpt2"])
    assert WordEncoder(tokenizer, definition(tokenizer)).encode("caf\u00e9") is None


def test_the_memory_of_words_is_bounded(tokenizer_behind: TokenizerBehind) -> None:
    tokenizer = tokenizer_behind(PRE_TOKENIZERS["gpt2"])
    words = WordEncoder(tokenizer, definition(tokenizer))
    words.encode(" ".join(f"{number}" for number in range(_MAX_WORDS + 100)))
    assert 0 < len(words._words) <= _MAX_WORDS
    words._words.clear()
    words.encode("x" * 100)
    assert not words._words


@pytest.mark.parametrize(
    "change",
    [
        lambda tokenizer: setattr(tokenizer, "normalizer", normalizers.Lowercase()),
        lambda tokenizer: setattr(tokenizer, "pre_tokenizer", pre_tokenizers.ByteLevel(add_prefix_space=True)),
        lambda tokenizer: setattr(tokenizer, "pre_tokenizer", pre_tokenizers.Metaspace()),
        lambda tokenizer: setattr(tokenizer, "pre_tokenizer", pre_tokenizers.Split(Regex("x"), "isolated")),
        lambda tokenizer: setattr(
            tokenizer, "pre_tokenizer", pre_tokenizers.Split(Regex([*EXAMINED_PATTERNS][1]), "isolated")
        ),
        lambda tokenizer: setattr(tokenizer, "model", BPE(dropout=0.5)),
        lambda tokenizer: tokenizer.add_tokens([AddedToken("end", single_word=True)]),
        lambda tokenizer: tokenizer.add_special_tokens([AddedToken("<|end|>", rstrip=True)]),
    ],
)
def test_a_tokenizer_whose_words_are_not_certain_gets_the_whole_text(
    change: Callable[[Tokenizer], object], tokenizer_behind: TokenizerBehind
) -> None:
    tokenizer = tokenizer_behind(PRE_TOKENIZERS["gpt2"])
    assert WordEncoder.fits(definition(tokenizer))
    change(tokenizer)
    assert not WordEncoder.fits(definition(tokenizer))
    with pytest.raises(ValueError, match="not known for certain"):
        WordEncoder(tokenizer, definition(tokenizer))
