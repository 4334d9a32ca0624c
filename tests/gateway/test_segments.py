"""Cut and whole tokenization are equal for every family of pre-tokenizers that is cut at all."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, normalizers, pre_tokenizers

from cache_policy.keys import token_list
from gateway.segments import EXAMINED_PATTERNS, CutRule, SegmentEncoder, TooManyTokens, cut_rule
from gateway.spelling import TokenSpellings
from gateway.words import WordEncoder

TokenizerBehind = Callable[[pre_tokenizers.PreTokenizer], Tokenizer]

GPT2 = next(pattern for pattern, rule in EXAMINED_PATTERNS.items() if rule is CutRule.BEFORE_NEWLINES)
PRE_TOKENIZERS = {
    "gpt2": pre_tokenizers.ByteLevel(add_prefix_space=False),
    "digits then gpt2": pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    ),
    **{
        f"pattern {index}": pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(pattern), "isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
        for index, pattern in enumerate(EXAMINED_PATTERNS)
    },
}
# Every class of character that a pattern tells apart, with blank lines in between.
FRAGMENT = st.one_of(
    st.sampled_from(["\n\n", "\n\n", "\n\n", "\n", " ", "\r\n", "\t", "\u00a0", "\u3000", "\x1c", "\x85", "\u2028"]),
    st.sampled_from(["a", "Word", "é", "e\u0301", "\u0301", "漢", "ß", "ǅ", "ʰ", "1", "2024", "٣", "'s", "'LL"]),
    st.sampled_from([".", "!", "/", "//", "[", "]", "{}", "—", "€", "😀", "\ufeff", "\u200b", "\u180e", "\x00"]),
    st.sampled_from(["<|im_start|>", "<|im_end|>", "<|im_", "end|>"]),
    st.characters(exclude_categories=["Cs"]),
)
TEXT = st.lists(FRAGMENT, max_size=30).map("".join)


def definition(tokenizer: Tokenizer) -> dict[str, Any]:
    decoded: dict[str, Any] = msgspec.json.decode(tokenizer.to_str())
    return decoded


def encoder(tokenizer: Tokenizer, rule: CutRule, capacity: int = 10_000, *, words: bool = False) -> SegmentEncoder:
    looked_up = WordEncoder(tokenizer, definition(tokenizer)).encode if words else None
    return SegmentEncoder(tokenizer, rule, capacity, words=looked_up)


@pytest.mark.parametrize("words", [False, True])
@pytest.mark.parametrize("name", PRE_TOKENIZERS)
def test_cut_and_whole_tokenization_are_equal(name: str, words: bool, tokenizer_behind: TokenizerBehind) -> None:
    split = PRE_TOKENIZERS[name]
    tokenizer = tokenizer_behind(split)
    rule = cut_rule(definition(tokenizer))
    assert rule is not CutRule.NEVER
    segments = encoder(tokenizer, rule, words=words)
    cuts = 0

    @settings(deadline=None)  # an example can wait for a busy processor
    @given(TEXT)
    def check(text: str) -> None:
        nonlocal cuts
        pieces = list(segments.pieces(text))
        cuts += len(pieces) - 1
        assert "".join(pieces) == text
        found = [word for piece in pieces for word, _ in split.pre_tokenize_str(piece)]
        assert found == [word for word, _ in split.pre_tokenize_str(text)]
        expected = tokenizer.encode(text, add_special_tokens=False).ids
        assert token_list(segments.encode(text)) == expected
        assert token_list(segments.encode_whole(text)) == expected

    check()
    assert cuts > 0


@pytest.mark.parametrize(
    ("name", "wrong", "text"),
    [
        ("gpt2", CutRule.AFTER_NEWLINES, "One.\n\nTwo."),
        ("pattern 1", CutRule.BEFORE_NEWLINES, "One!\n\nTwo."),
    ],
)
def test_the_rule_of_the_other_family_would_be_wrong(
    name: str, wrong: CutRule, text: str, tokenizer_behind: TokenizerBehind
) -> None:
    split = PRE_TOKENIZERS[name]
    pieces = list(encoder(tokenizer_behind(split), wrong).pieces(text))
    assert len(pieces) == 2
    words = [word for piece in pieces for word, _ in split.pre_tokenize_str(piece)]
    assert words != [word for word, _ in split.pre_tokenize_str(text)]


def test_a_slash_behind_newlines_may_belong_to_the_word_before_them(tokenizer_behind: TokenizerBehind) -> None:
    o200k = next(index for index, pattern in enumerate(EXAMINED_PATTERNS) if r"[\r\n/]*" in pattern)
    split = PRE_TOKENIZERS[f"pattern {o200k}"]
    text = "One!\n\n/two"
    assert "!ĊĊ/" in [word for word, _ in split.pre_tokenize_str(text)]
    assert list(encoder(tokenizer_behind(split), CutRule.AFTER_NEWLINES).pieces(text)) == [text]


def test_normalization_to_nfc_allows_cuts(tokenizer_behind: TokenizerBehind) -> None:
    tokenizer = tokenizer_behind(PRE_TOKENIZERS["pattern 1"])
    tokenizer.normalizer = normalizers.NFC()
    rule = cut_rule(definition(tokenizer))
    assert rule is CutRule.AFTER_NEWLINES
    text = "e\u0301\n\n\u0301e\u0301\n\nend"
    assert len(list(encoder(tokenizer, rule).pieces(text))) == 3
    assert token_list(encoder(tokenizer, rule).encode(text)) == tokenizer.encode(text).ids


@pytest.mark.parametrize(
    "change",
    [
        lambda tokenizer: setattr(tokenizer, "normalizer", normalizers.Lowercase()),
        lambda tokenizer: setattr(tokenizer, "pre_tokenizer", pre_tokenizers.ByteLevel(add_prefix_space=True)),
        lambda tokenizer: setattr(tokenizer, "pre_tokenizer", pre_tokenizers.Metaspace()),
        lambda tokenizer: setattr(tokenizer, "pre_tokenizer", pre_tokenizers.Split(Regex(GPT2 + "|x"), "isolated")),
        lambda tokenizer: setattr(tokenizer, "pre_tokenizer", pre_tokenizers.Split(Regex(GPT2), "removed")),
        lambda tokenizer: setattr(tokenizer, "pre_tokenizer", pre_tokenizers.Digits()),
        lambda tokenizer: tokenizer.add_tokens(["\n\n\n"]),
        lambda tokenizer: tokenizer.add_special_tokens([AddedToken("<|end|>", rstrip=True)]),
    ],
)
def test_a_tokenizer_that_is_not_certain_gets_the_whole_text(
    change: Callable[[Tokenizer], object], tokenizer_behind: TokenizerBehind
) -> None:
    tokenizer = tokenizer_behind(PRE_TOKENIZERS["gpt2"])
    assert cut_rule(definition(tokenizer)) is CutRule.BEFORE_NEWLINES
    change(tokenizer)
    rule = cut_rule(definition(tokenizer))
    assert rule is CutRule.NEVER
    assert list(encoder(tokenizer, rule).pieces("One.\n\nTwo.")) == ["One.\n\nTwo."]


def test_a_missing_pre_tokenizer_gets_the_whole_text() -> None:
    assert cut_rule({"pre_tokenizer": None, "normalizer": None, "added_tokens": []}) is CutRule.NEVER


class CountingTokenizer:
    """Counts what is really tokenized."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.texts: list[str] = []

    def encode(self, text: str, add_special_tokens: bool) -> Any:
        self.texts.append(text)
        return self.tokenizer.encode(text, add_special_tokens=add_special_tokens)


def test_repeated_pieces_are_tokenized_once_and_the_unused_leave_first(tokenizer_behind: TokenizerBehind) -> None:
    counting: Any = CountingTokenizer(tokenizer_behind(PRE_TOKENIZERS["gpt2"]))
    segments = SegmentEncoder(counting, CutRule.BEFORE_NEWLINES, 3000)
    common = "common " * 20 + "end."
    segments.encode(common)
    for number in range(200):
        segments.encode(f"{common}\n\nunique question {number}")
    assert counting.texts.count(common) == 1
    assert len(counting.texts) == 201
    counting.texts.clear()
    segments.encode(f"{common}\n\nunique question 0")
    assert counting.texts == ["\n\nunique question 0"]  # long gone, while what is used stayed


LINES = "\n\n".join(f"Line {number} of many." for number in range(5_000))


@pytest.mark.parametrize("text", ["word " * 50_000, " " * 3_000_000, "\n\nshort line" * 20_000, "x" * 60_000, LINES])
def test_a_text_far_over_the_limit_is_refused_without_tokenizing_it_all(
    text: str, tokenizer_behind: TokenizerBehind
) -> None:
    counting: Any = CountingTokenizer(tokenizer_behind(PRE_TOKENIZERS["gpt2"]))
    with pytest.raises(TooManyTokens) as caught:
        SegmentEncoder(counting, CutRule.BEFORE_NEWLINES, 1000).encode(text, limit=500)
    assert caught.value.at_least > 500
    assert sum(map(len, counting.texts)) < len(text)


def test_the_limit_is_exact_for_texts_that_are_tokenized(tokenizer_behind: TokenizerBehind) -> None:
    tokenizer = tokenizer_behind(PRE_TOKENIZERS["gpt2"])
    text = "One.\n\nTwo, and some more.\n\nThree."
    count = len(tokenizer.encode(text).ids)
    assert len(token_list(encoder(tokenizer, CutRule.BEFORE_NEWLINES).encode(text, limit=count))) == count
    with pytest.raises(TooManyTokens):
        encoder(tokenizer, CutRule.BEFORE_NEWLINES).encode(text, limit=count - 1)


def test_the_examined_patterns_are_valid() -> None:
    assert len(EXAMINED_PATTERNS) >= 5
    for pattern in EXAMINED_PATTERNS:
        assert not re.search(r"\{\{|\}\}", pattern)
        Regex(pattern)


@pytest.mark.parametrize("name", PRE_TOKENIZERS)
@pytest.mark.parametrize("spelled", [True, False])
def test_tokens_begun_before_a_place_are_counted_as_in_the_whole(
    name: str, spelled: bool, tokenizer_behind: TokenizerBehind
) -> None:
    tokenizer = tokenizer_behind(PRE_TOKENIZERS[name])
    spelling = TokenSpellings(tokenizer).bytes_of if spelled else None
    segments = SegmentEncoder(tokenizer, cut_rule(definition(tokenizer)), 10_000, spelling)

    @settings(deadline=None)
    @given(TEXT, st.data())
    def check(text: str, data: st.DataObject) -> None:
        places = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=5)))
        starts = [start for start, _ in tokenizer.encode(text, add_special_tokens=False).offsets]
        assert segments.begun_before(text, places) == [sum(start < place for start in starts) for place in places]

    check()


def test_of_a_text_that_differs_in_one_value_only_the_clauses_around_it_are_tokenized(
    tokenizer_behind: TokenizerBehind,
) -> None:
    tokenizer = tokenizer_behind(PRE_TOKENIZERS["gpt2"])
    tokenized: list[str] = []

    class Counting:
        def encode(self, text: str, **options: bool) -> object:
            tokenized.append(text)
            return tokenizer.encode(text, **options)

    segments = SegmentEncoder(Counting(), CutRule.BEFORE_NEWLINES, 10_000)  # type: ignore[arg-type]
    text = "You are the assistant of Acme. Now: {}. Talk to nobody else.\nRules: be brief, name your sources; no more."
    segments.encode(text.format("10:00"))
    del tokenized[:]
    assert token_list(segments.encode(text.format("10:01"))) == tokenizer.encode(text.format("10:01")).ids
    assert tokenized == [" Now: 10:01."]


@pytest.mark.parametrize("rule", [CutRule.BEFORE_NEWLINES, CutRule.AFTER_NEWLINES])
def test_of_a_text_of_known_words_only_the_lines_that_differ_are_looked_up(
    rule: CutRule, tokenizer_behind: TokenizerBehind
) -> None:
    number = [*EXAMINED_PATTERNS.values()].index(rule)
    tokenizer = tokenizer_behind(PRE_TOKENIZERS[f"pattern {number}"])
    words = WordEncoder(tokenizer, definition(tokenizer))
    asked: list[str] = []

    def look_up(text: str) -> bytes | None:
        asked.append(text)
        return words.encode(text)

    segments = SegmentEncoder(tokenizer, rule, 10_000, words=look_up)
    text = f"You assist Acme.\nNow: {{}}.\n{'Be brief, be friendly. ' * 6}\n- Name your sources."
    segments.encode(text.format("10:00"))
    del asked[:]
    assert token_list(segments.encode(text.format("10:01"))) == tokenizer.encode(text.format("10:01")).ids
    assert not any("friendly" in piece for piece in asked)
    assert any("10:01" in piece for piece in asked)
