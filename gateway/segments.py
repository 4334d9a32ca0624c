"""Tokenizing a prompt piece by piece, so that what repeats is tokenized once.

A text may be cut where the tokenizer's pre-tokenizer is certain to split anyway, whatever stands on either side; then
the pieces' ids put together are the ids of the whole. For the two families of pre-tokenizers in wide use such a place
is found at blank lines, before the newlines or after them. A piece that was not there before is cut again where a
line or a part of a sentence ends, since often only a date or a name in it is new; at lines only where words can be
looked up (``gateway.words``). Every other tokenizer gets the whole text at once.
"""

from __future__ import annotations

import enum
import re
import unicodedata
from bisect import bisect_left
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Any, Final

from tokenizers import Tokenizer

from cache_policy.keys import TOKEN_BYTES, token_bytes, token_list

__all__ = [
    "EXAMINED_PATTERNS",
    "GPT2_PATTERN",
    "CutRule",
    "SegmentEncoder",
    "TooManyTokens",
    "cut_rule",
    "is_ink",
    "refuse_hopeless",
]

_PIECE_OVERHEAD: Final = 32
"""What an entry of the memory costs besides its ids, in tokens."""


class CutRule(enum.Enum):
    """Where a text may be cut at a run of newlines.

    ``BEFORE_NEWLINES``: between a character that is not white space and two newlines. Right for GPT-2's pattern, which
    never joins the two, but decides how a run of white space is split by what follows it.
    ``AFTER_NEWLINES``: between two newlines and a character that is not white space. Right for the patterns after
    cl100k, which take newlines along with punctuation before them, but end a word at them.
    """

    NEVER = enum.auto()
    BEFORE_NEWLINES = enum.auto()
    AFTER_NEWLINES = enum.auto()


_CLAUSES: Final = {
    # A single blank or newline between printable ASCII and a letter: every examined pattern ends a word before the
    # blank, and before or after the newline as it does at blank lines.
    CutRule.BEFORE_NEWLINES: re.compile(r"(?<=[.!?;:,])(?= [A-Za-z])|(?<=[!-~])(?=\n[A-Za-z])"),
    CutRule.AFTER_NEWLINES: re.compile(r"(?<=[.!?;:,])(?= [A-Za-z])|(?<=[!-~]\n)(?=[A-Za-z])"),
}
_SHORT: Final = 96
"""Pieces with less characters are not worth cutting again."""

_LATEST: Final = 4
_MEMORABLE: Final = 8192
_MOST_BEGUN: Final = 1024

_LETTERS_O200K: Final = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*",
)
_CONTRACTIONS: Final = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES: Final = r"\s*[\r\n]+|\s+(?!\S)|\s+"

GPT2_PATTERN: Final = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
"""The pattern behind ``ByteLevel``, which its definition does not spell out."""

EXAMINED_PATTERNS: Final[dict[str, CutRule]] = {
    GPT2_PATTERN: CutRule.BEFORE_NEWLINES,  # and what was trained with its pre-tokenizer
    # cl100k, Llama 3
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}": (
        CutRule.AFTER_NEWLINES
    ),
    # Qwen 2, 2.5, 3
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}": (
        CutRule.AFTER_NEWLINES
    ),
    # o200k, Phi 4, gpt-oss
    "|".join(
        (
            *(f"{letters}(?i:'s|'t|'re|'ve|'m|'ll|'d)?" for letters in _LETTERS_O200K),
            rf"\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}",
        )
    ): CutRule.AFTER_NEWLINES,
    # Mistral's Tekken
    "|".join((*_LETTERS_O200K, rf"\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}")): CutRule.AFTER_NEWLINES,
}
"""Pre-tokenizer patterns that were examined, by the text found in ``tokenizer.json``."""


class TooManyTokens(Exception):
    """A text has more tokens than were allowed. ``at_least`` is what had been counted."""

    def __init__(self, at_least: int) -> None:
        super().__init__(at_least)
        self.at_least = at_least


def refuse_hopeless(tokenizer: Tokenizer, text: str, limit: int) -> None:
    """Raise ``TooManyTokens`` for a long text that has far more than ``limit`` tokens, without tokenizing all of it.

    Parts of it are counted until that is beyond doubt: a word that the cut between two parts tears adds a few tokens,
    which the margin covers. A text that passes may still be too long by a little.
    """
    step = 8 * limit  # text has about four characters to a token
    if len(text) <= step:
        return
    counted = 0
    for parts, start in enumerate(range(0, len(text), step), start=1):
        counted += len(tokenizer.encode(text[start : start + step], add_special_tokens=False).ids)
        if counted > limit + limit // 8 + 16 * parts:
            raise TooManyTokens(counted)


def cut_rule(definition: dict[str, Any]) -> CutRule:
    """Where texts of the tokenizer with this ``tokenizer.json`` may be cut; ``NEVER`` unless it is certain."""
    if any(_is_unruly(token) for token in definition.get("added_tokens") or ()):
        return CutRule.NEVER
    normalizer = definition.get("normalizer")
    if normalizer is not None and normalizer.get("type") != "NFC":  # NFC composes nothing with a newline
        return CutRule.NEVER
    pre_tokenizer = definition.get("pre_tokenizer") or {}
    steps = pre_tokenizer["pretokenizers"] if pre_tokenizer.get("type") == "Sequence" else [pre_tokenizer]
    rules = [_step_rule(step) for step in steps]
    decided = {rule for rule in rules if rule is not None}
    return decided.pop() if len(decided) == 1 else CutRule.NEVER


def _is_unruly(token: dict[str, Any]) -> bool:
    """Whether an added token could lie across a cut or takes white space along."""
    content: str = token["content"]
    return _CROSSES_CUT.search(content) is not None or bool(token.get("lstrip") or token.get("rstrip"))


_CROSSES_CUT: Final = re.compile(r"\n|[.!?;:,] ")


def _step_rule(step: dict[str, Any]) -> CutRule | None:
    """The rule of one pre-tokenizer; None for one that looks at single characters and so never matters."""
    kind = step.get("type")
    if kind == "Digits":
        return None
    if kind == "ByteLevel":
        if step.get("add_prefix_space"):
            return CutRule.NEVER
        return CutRule.BEFORE_NEWLINES if step.get("use_regex", True) else None
    if kind == "Split" and (step.get("behavior"), step.get("invert")) in (("Isolated", False), ("Removed", True)):
        return EXAMINED_PATTERNS.get((step.get("pattern") or {}).get("Regex", ""), CutRule.NEVER)
    return CutRule.NEVER


class SegmentEncoder:
    """A tokenizer with a memory of pieces. Owns that memory; belongs to one thread.

    ``capacity`` bounds it in tokens; the longest unused pieces leave first. A token costs 4 bytes plus the text of its
    piece. ``spelled`` gives a token's bytes where they are known, ``words`` the ids of a text that it can look up word
    by word (``gateway.words``). Ids are ``cache_policy.keys.token_bytes`` throughout.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        rule: CutRule,
        capacity: int,
        spelled: Callable[[int], bytes] | None = None,
        words: Callable[[str], bytes | None] | None = None,
    ) -> None:
        self.rule: Final = rule
        self._sizes = None if spelled is None else _Sizes(spelled)
        self._tokenizer = tokenizer
        self._words = words
        self._capacity = capacity
        self._pieces: OrderedDict[str, bytes] = OrderedDict()
        self._held = 0
        # What was encoded last, to be asked of again: maybe one prompt in several orders of its documents.
        self._latest: deque[tuple[str, list[tuple[str, bytes]]]] = deque(maxlen=_LATEST)
        self._begun: dict[tuple[str, tuple[int, ...]], list[int]] = {}  # the same of pieces that many prompts have

    def encode(self, text: str, limit: int | None = None, places: Sequence[int] = ()) -> bytes:
        """The ids of ``text``, the same as without cuts, no special tokens added.

        ``places`` are further ones at which it may be cut, in ascending order. What stands between two of them is
        remembered as a whole.

        Raises:
            TooManyTokens: there are more than ``limit`` of them; found out without tokenizing all of a long text.
        """
        walked: list[tuple[str, bytes]] = []
        size = 0
        last = len(places)
        for index, (start, stop) in enumerate(pairwise((0, *places, len(text)))):
            part, whole = text[start:stop], 0 < index < last
            for piece in (part,) if whole else self.pieces(part):
                pieces = [(piece, self.encode_whole(piece, limit))] if whole else self._walk(piece, limit)
                walked += pieces
                size += sum([len(data) for _, data in pieces])
                if limit is not None and size > limit * TOKEN_BYTES:
                    raise TooManyTokens(size // TOKEN_BYTES)
        return self.join(text, walked)

    def join(self, text: str, pieces: list[tuple[str, bytes]]) -> bytes:
        """The ids of ``text``, which these ``pieces`` make up: each with its ids, encoded here before."""
        self._latest.append((text, pieces))
        return b"".join([data for _, data in pieces])

    def encode_whole(self, text: str, limit: int | None = None) -> bytes:
        """``encode`` for what comes again as a whole: it is remembered as such, besides its pieces.

        Raises ``TooManyTokens`` early for a long piece that has far more than ``limit``.
        """
        known = self._known(text)
        if known is not None:
            return known
        pieces = [*self.pieces(text)]
        if len(pieces) == 1:
            return self._remember(text, limit)
        return self._keep(text, b"".join([self._remember(piece, limit) for piece in pieces]))

    def begun_before(self, text: str, positions: Sequence[int]) -> list[int]:
        """How many tokens of ``text`` begin before each of ``positions``, characters in ascending order.

        A token that holds only part of a character begins where the character does.
        """
        counts: list[int] = []
        start = tokens = at = 0
        walked = next((pieces for latest, pieces in self._latest if latest == text), None)
        if walked is None:
            walked = [(piece, self._remember(piece, None)) for piece in self.pieces(text)]
        for piece, data in walked:
            end = start + len(piece)
            first = at
            while at < len(positions) and positions[at] < end:
                at += 1
            if at > first:
                within = [max(0, position - start) for position in positions[first:at]]
                begun = self._begun_before_again(piece, data, within) if any(within) else [0] * len(within)
                counts += [tokens + count for count in begun]
            tokens += len(data) // TOKEN_BYTES
            start = end
        return counts + [tokens] * (len(positions) - at)

    def _begun_before_again(self, piece: str, data: bytes, positions: list[int]) -> list[int]:
        """``_begun_before``, found out once for pieces of middling length: all prompts ask it of a system text."""
        if not _SHORT <= len(piece) <= _MEMORABLE:
            return self._begun_before(piece, data, positions)
        key = piece, tuple(positions)
        begun = self._begun.get(key)
        if begun is None:
            if len(self._begun) >= _MOST_BEGUN:
                self._begun.clear()
            begun = self._begun[key] = self._begun_before(piece, data, positions)
        return begun

    def _begun_before(self, piece: str, data: bytes, positions: Sequence[int]) -> list[int]:
        """``begun_before`` of one piece, whose ids these are."""
        if self._sizes is not None:
            starts = [*accumulate(map(self._sizes.__getitem__, token_list(data)), initial=0)]
            size = starts.pop()
            if piece.isascii():
                if size == len(piece):  # the vocabulary is one of bytes
                    return [bisect_left(starts, position) for position in positions]
            elif size == len(piece.encode("utf-8", "surrogatepass")):
                sizes = [len(piece[:position].encode("utf-8", "surrogatepass")) for position in positions]
                return [bisect_left(starts, place) for place in sizes]
        encoding = self._tokenizer.encode(piece, add_special_tokens=False)
        starts = [first for first, _ in encoding.offsets]
        return [bisect_left(starts, position) for position in positions]

    def pieces(self, text: str) -> Iterator[str]:
        """``text`` cut wherever the rule allows it, piece by piece, so that whoever has seen enough can stop."""
        start = 0
        if self.rule is not CutRule.NEVER:
            before = self.rule is CutRule.BEFORE_NEWLINES
            first = text.find("\n\n")
            while first >= 0:
                last = first + 2
                while text.startswith("\n", last):
                    last += 1
                if before:
                    cut = first if first and is_ink(text[first - 1]) else 0
                else:  # o200k: "!\n\n/" is one word
                    cut = last if last < len(text) and is_ink(text[last]) and text[last] != "/" else 0
                if cut:
                    yield text[start:cut]
                    start = cut
                first = text.find("\n\n", last)
        yield text[start:]

    def _clauses(self, piece: str) -> Iterator[str]:
        start = 0
        if self.rule is not CutRule.NEVER and len(piece) >= _SHORT:
            for match in _CLAUSES[self.rule].finditer(piece):
                yield piece[start : match.start()]
                start = match.start()
        yield piece[start:]

    def _lines(self, piece: str) -> Iterator[str]:
        """``piece`` cut as ``_clauses`` cuts it, but at lines only."""
        start = 0
        if self.rule is not CutRule.NEVER and len(piece) >= _SHORT:
            behind = self.rule is CutRule.AFTER_NEWLINES
            at = piece.find("\n", 1)
            while at >= 0:
                if "!" <= piece[at - 1] <= "~" and piece[at + 1 : at + 2].isalpha():
                    yield piece[start : at + behind]
                    start = at + behind
                at = piece.find("\n", at + 1)
        yield piece[start:]

    def _remember(self, text: str, limit: int | None) -> bytes:
        return b"".join([data for _, data in self._walk(text, limit)])

    def _walk(self, text: str, limit: int | None) -> list[tuple[str, bytes]]:
        """The ids of a piece; of one that was not there before, part by part."""
        known = self._known(text)
        if known is not None:
            return [(text, known)]
        if limit is not None:
            refuse_hopeless(self._tokenizer, text, limit)
        parts = [*(self._lines(text) if self._words is not None and text.isascii() else self._clauses(text))]
        if len(parts) == 1:
            return [(text, self._keep(text, self._tokenized(text)))]
        walked = [(part, self._known(part) or self._part(part)) for part in parts]
        self._keep(text, b"".join([data for _, data in walked]))
        return walked

    def _part(self, text: str) -> bytes:
        data = self._tokenized(text)
        return data if self._words is not None and len(text) < _SHORT else self._keep(text, data)

    def _known(self, text: str) -> bytes | None:
        data = self._pieces.get(text)
        if data is not None:
            self._pieces.move_to_end(text)
        return data

    def _tokenized(self, text: str) -> bytes:
        data = None if self._words is None else self._words(text)
        return token_bytes(self._tokenizer.encode(text, add_special_tokens=False).ids) if data is None else data

    def _keep(self, text: str, data: bytes) -> bytes:
        size = len(data) // TOKEN_BYTES
        if size <= self._capacity // 8:
            self._pieces[text] = data
            self._held += size + _PIECE_OVERHEAD
            while self._held > self._capacity:
                self._held -= len(self._pieces.popitem(last=False)[1]) // TOKEN_BYTES + _PIECE_OVERHEAD
        return data


class _Sizes(dict[int, int]):
    """How many bytes each token has, found out once."""

    def __init__(self, spelled: Callable[[int], bytes]) -> None:
        super().__init__()
        self._spelled = spelled

    def __missing__(self, token: int) -> int:
        size = self[token] = len(self._spelled(token))
        return size


@lru_cache(maxsize=1024)
def is_ink(character: str) -> bool:
    """Certainly no white space to any engine, and nothing that composes with its neighbour."""
    return not character.isspace() and unicodedata.category(character)[0] != "C"
