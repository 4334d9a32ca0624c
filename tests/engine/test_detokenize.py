"""Incremental detokenization: the stream adds up to the whole text, and nothing shown is taken back."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel, Metaspace

from engine.detokenize import IncrementalDetokenizer, StopFilter

TEXT = "삼겹살 漢字 naïve 👩‍👩‍👧‍👦 🇫🇷 é(e\u0301) \U0001f9d1\U0001f3fd"


def byte_level_tokenizer() -> Tokenizer:
    """GPT-2's kind with no merges but a few, so that characters are spread over several tokens."""
    vocab = {token: i for i, token in enumerate(sorted(ByteLevel.alphabet()))}
    for merged in ("ì", "Ĥ"), ("ð", "Ł"):
        vocab["".join(merged)] = len(vocab)
    tokenizer = Tokenizer(BPE(vocab=vocab, merges=[("ì", "Ĥ"), ("ð", "Ł")]))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|end|>", special=True)])
    tokenizer.add_tokens([AddedToken("<tool 漢>", special=False)])
    return tokenizer


def byte_fallback_tokenizer() -> Tokenizer:
    """SentencePiece's kind (Llama 2, Gemma): words with a leading mark, unknown characters as byte tokens."""
    words = ["▁", "a", "b", "n", "v", "e", "(", ")", "▁a", "▁n"]
    vocab = {f"<0x{byte:02X}>": byte for byte in range(256)}
    vocab |= {word: 256 + i for i, word in enumerate(words)}
    tokenizer = Tokenizer(BPE(vocab=vocab, merges=[("▁", "a"), ("▁", "n")], byte_fallback=True, fuse_unk=True))
    tokenizer.pre_tokenizer = Metaspace(split=False)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken("</s>", special=True)])
    return tokenizer


BYTE_LEVEL, BYTE_FALLBACK = byte_level_tokenizer(), byte_fallback_tokenizer()
both_kinds = pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, BYTE_FALLBACK], ids=["byte-level", "byte-fallback"])


def stream(tokenizer: Tokenizer, ids: list[int], stop: tuple[str, ...] = ()) -> list[str]:
    detokenizer = IncrementalDetokenizer(tokenizer, stop)
    pieces = []
    for token_id in ids:
        text, stopped = detokenizer.push(token_id)
        pieces.append(text)
        if stopped:
            break
    pieces.append(detokenizer.finish())
    return pieces


@both_kinds
@pytest.mark.parametrize("group", [1, 2, 3])
def test_h1_pieces_add_up_and_no_character_is_cut(tokenizer: Tokenizer, group: int) -> None:
    ids = tokenizer.encode(TEXT).ids
    assert len(ids) > len(TEXT)  # characters really are spread over tokens
    pieces = stream(tokenizer, ids)
    deltas = ["".join(pieces[i : i + group]) for i in range(0, len(pieces), group)]
    assert "".join(deltas) == tokenizer.decode(ids) == TEXT
    assert not any("\ufffd" in delta for delta in deltas)


@both_kinds
@given(text=st.text(max_size=40))
def test_any_text_comes_back_as_the_tokenizer_decodes_it(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text).ids
    assert "".join(stream(tokenizer, ids)) == tokenizer.decode(ids)


@both_kinds
@pytest.mark.parametrize("cut", range(1, 8))
def test_h2_a_character_cut_by_the_end_is_dropped(tokenizer: Tokenizer, cut: int) -> None:
    whole = "a\U0001f9d1\U0001f3fd"
    ids = tokenizer.encode(whole).ids[:-cut]
    complete = max(n for n in range(4) if len(tokenizer.encode(whole[:n]).ids) <= len(ids))
    assert "".join(stream(tokenizer, ids)) == whole[:complete]


@given(st.lists(st.integers(0, len(BYTE_LEVEL.get_vocab()) - 1), max_size=60))
def test_random_byte_tokens_equal_the_whole_decoding(ids: list[int]) -> None:
    whole = BYTE_LEVEL.decode(ids)
    streamed = "".join(stream(BYTE_LEVEL, ids))
    assert streamed == whole or streamed + "\ufffd" == whole


@both_kinds
def test_h2_invalid_bytes_do_not_stall_the_stream(tokenizer: Tokenizer) -> None:
    invalid = tokenizer.token_to_id("Ģ" if tokenizer is BYTE_LEVEL else "<0x80>")
    pieces = stream(tokenizer, [invalid] * 100)
    shown = [at for at, piece in enumerate(pieces) if piece]
    assert shown
    assert all(later - earlier <= 4 for earlier, later in pairwise(shown))
    assert shown[-1] >= 96
    assert "".join(stream(tokenizer, [invalid] * 8 + tokenizer.encode(" a").ids)).endswith("a")


@both_kinds
def test_special_tokens_are_silent_and_take_no_blank_with_them(tokenizer: Tokenizer) -> None:
    special = next(i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special)
    a = tokenizer.encode(" a").ids
    ids = [*tokenizer.encode("b").ids, special, *a, special, special, *a]
    assert "".join(stream(tokenizer, ids)) == tokenizer.decode(ids)
    assert "".join(stream(tokenizer, ids)).endswith("b a a")


def test_added_tokens_that_are_not_special_are_text() -> None:
    ids = BYTE_LEVEL.encode("a<tool 漢>b<|end|>").ids
    assert "".join(stream(BYTE_LEVEL, ids)) == "a<tool 漢>b"


def test_ids_outside_the_vocabulary_have_no_text() -> None:
    assert "".join(stream(BYTE_LEVEL, [10**6, *BYTE_LEVEL.encode("ok").ids])) == "ok"


def shown(stops: list[str], pieces: list[str]) -> tuple[list[str], bool]:
    stop_filter = StopFilter(stops)
    out = []
    for piece in pieces:
        text, stopped = stop_filter.push(piece)
        out.append(text)
        if stopped:
            return out, True
    return [*out, stop_filter.finish()], False


def test_h3_a_stop_string_over_several_pieces_never_shows() -> None:
    out, stopped = shown(["own fox"], ["The quick br", "own", " fo", "x jumps"])
    assert ("".join(out), stopped) == ("The quick br", True)


def test_h6_the_stop_string_that_starts_first_wins() -> None:
    out, stopped = shown(["bcd", "ab", "abc"], ["xa", "bcd"])
    assert ("".join(out), stopped) == ("x", True)


def test_h6_only_a_real_prefix_of_a_stop_string_is_held() -> None:
    out, stopped = shown(["#" * 40], ["hello", " world"])
    assert out == ["hello", " world", ""]
    assert not stopped


def test_what_was_held_comes_out_at_the_end() -> None:
    out, stopped = shown(["END"], ["the E", "N"])
    assert out == ["the ", "", "EN"]
    assert not stopped


def test_nothing_follows_a_stop() -> None:
    stop_filter = StopFilter(["."])
    assert stop_filter.push("a.b") == ("a", True)
    assert stop_filter.push("c") == ("", True)
    assert stop_filter.finish() == ""


@given(
    st.text(alphabet="abc", max_size=30),
    st.lists(st.text(alphabet="abc", min_size=1, max_size=4), min_size=1, max_size=3),
    st.randoms(use_true_random=False),
)
def test_text_before_a_stop_is_whole_and_nothing_is_held_without_cause(text: str, stops: list[str], random) -> None:  # type: ignore[no-untyped-def]
    stop_filter = StopFilter(stops)
    at, out = 0, ""
    while at < len(text):
        size = random.randint(1, 3)
        piece, stopped = stop_filter.push(text[at : at + size])
        at, out = at + size, out + piece
        if stopped:
            seen = text[:at]
            assert out == seen[: min(seen.index(stop) for stop in stops if stop in seen)]
            return
        held = text[len(out) : at]
        assert not held or any(stop.startswith(held) and stop != held for stop in stops)
    assert not any(stop in text for stop in stops)
    assert out + stop_filter.finish() == text


def test_stop_strings_work_on_characters_made_of_several_tokens() -> None:
    ids = BYTE_LEVEL.encode("ab漢字cd").ids
    assert "".join(stream(BYTE_LEVEL, ids, ("字",))) == "ab漢"
