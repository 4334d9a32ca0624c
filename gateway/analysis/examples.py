"""Where prompts part, as text: the examples of the causes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import msgspec

from gateway.attribution.causes import Example, Occurrence
from gateway.attribution.part import Part
from gateway.prompt import PromptRenderer, PromptText

__all__ = ["EXCERPT_CHARS", "ShownPrompt", "show"]

EXCERPT_CHARS: Final = 80
"""Length of each text of an example."""


class ShownPrompt(msgspec.Struct, frozen=True):
    """A prompt as it was rendered, with its parts and their ends in characters."""

    prompt: PromptText
    parts: list[Part]
    ends: list[int]


def show(occurrence: Occurrence, prompts: Mapping[int, ShownPrompt], renderer: PromptRenderer) -> Example:
    """The texts of ``occurrence``; ``prompts`` has the request and its witness under their numbers."""
    own = prompts[occurrence.serial]
    witness = None if occurrence.witness is None else prompts.get(occurrence.witness)
    start, other, depth = 0, "", occurrence.depth
    if witness is not None and depth is None:
        other = witness.prompt.text
    elif depth:
        start = own.ends[depth - 1]
        if witness is not None and _kinds(own, depth) == _kinds(witness, depth):
            other = witness.prompt.text[witness.ends[depth - 1] :]
    text = own.prompt.text[start:]
    common = _common_chars(text, other)
    at = start + common
    # The last token that begins at or before the place where the texts part holds it.
    token = max(0, renderer.begun_before(own.prompt, [at + 1])[0] - 1)
    return Example(
        token,
        own.prompt.text[max(0, at - EXCERPT_CHARS) : at],
        text[common : common + EXCERPT_CHARS],
        other[common : common + EXCERPT_CHARS],
    )


def _kinds(prompt: ShownPrompt, depth: int) -> list[str]:
    return [part.kind for part in prompt.parts[:depth]]


def _common_chars(one: str, other: str) -> int:
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
