"""Where a prompt can be cut into its documents, so that each has the same token ids at every place.

Documents that are laid out here have a blank line before each of them. Those that an application pasted may begin
behind one newline and have two between them, or a line of dashes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate

import msgspec

from gateway.segments import CutRule, is_ink

__all__ = ["DocumentCuts", "cut_at_documents"]

_Pieces = tuple[str, ...]


class DocumentCuts(msgspec.Struct, frozen=True):
    """Pieces to tokenize one by one: those in front of the documents, and those of each document.

    A document whose ids depend on what follows it has None. ``places`` are the places in the text, in ascending order,
    at which it is cut. ``tail`` is the one where what stands behind the documents begins: put together, all pieces up
    to there and what is left are the text. None where they would not be.
    """

    head: _Pieces
    documents: Iterable[_Pieces | None]
    places: Sequence[int]
    tail: int | None = None


def cut_at_documents(
    rule: CutRule, text: str, start: int, blocks: Sequence[str], separator: str
) -> DocumentCuts | None:
    """Cut ``text``, in which ``blocks`` joined by ``separator`` begin at ``start``; None where that is not safe."""
    starts = [*accumulate((len(block) + len(separator) for block in blocks[:-1]), initial=start)]
    if rule is CutRule.AFTER_NEWLINES:
        if text[start - 1 : start] != "\n" or separator[-1] != "\n" or not all(map(_begins_word, blocks)):
            return None
        end = starts[-1] + len(blocks[-1]) + len(separator)
        tail = end if text.startswith(separator, end - len(separator)) and _begins_word(text[end : end + 1]) else None
        places = starts if tail is None else [*starts, tail]
        return DocumentCuts((text[:start],), ((f"{block}{separator}",) for block in blocks), places, tail)
    if rule is CutRule.NEVER or separator[0] != "\n":
        return None
    before = start - len(separator)
    if before > 0 and text.startswith(separator, before) and is_ink(text[before - 1]):
        places = [place - len(separator) for place in starts if is_ink(text[place - len(separator) - 1])]
        behind = _end(text, starts, blocks)
        return DocumentCuts(
            (text[:before],),
            ((f"{separator}{block}",) if is_ink(block[-1]) else None for block in blocks),
            places + behind,
            behind[0] if behind else None,
        )
    return _cut_inside_newlines(text, starts, blocks, separator)


def _cut_inside_newlines(
    text: str, starts: Sequence[int], blocks: Sequence[str], separator: str
) -> DocumentCuts | None:
    """Where another run of newlines stands before the first document than between them.

    GPT-2's pattern splits white space that is followed by ink before its last character: of a run of newlines the last
    one is a word of its own. (Digits that are split off before would end the text there, and the run be one word.)
    """
    start = starts[0]
    if text[start - 1 : start] != "\n" or separator[-1] != "\n" or not all(map(_begins_word, blocks)):
        return None
    if any(block[0].isnumeric() for block in blocks):
        return None
    return DocumentCuts(
        (text[: start - 1], "\n"),
        ((f"{block}{separator[:-1]}", "\n") for block in blocks),
        [*(place for begins in starts for place in (begins - 1, begins)), *_end(text, starts, blocks)],
    )


def _end(text: str, starts: Sequence[int], blocks: Sequence[str]) -> list[int]:
    """The place behind the last document, if the text can be cut there by GPT-2's pattern."""
    end = starts[-1] + len(blocks[-1])
    return [end] if is_ink(text[end - 1]) and text[end : end + 1] == "\n" else []


def _begins_word(block: str) -> bool:
    """Whether a text is certain to be a word of its own behind newlines: some patterns take a slash along with them."""
    return block[:1] not in ("", "/") and is_ink(block[0])
