"""What a prompt is made of: the spans of a laid out conversation, and which tokens of the prompt they are.

A system text that a template made is cut at its fields; documents, metadata and question are spans of their own, and
every other turn is one. What the chat template writes between two spans counts to the second.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import msgspec

from gateway.attribution.part import Part
from gateway.canonical.documents import Document
from gateway.canonical.layout import Layout, Pasted
from gateway.canonical.templates import FilledTemplate
from gateway.canonical.text import normalize_text
from gateway.canonical.tools import canonical_tools

__all__ = ["Part", "locate", "prompt_parts"]

_OPENING: Final = 64
_sorted_json: Final = msgspec.json.Encoder(order="sorted")


def prompt_parts(
    layout: Layout, documents: Sequence[Document], filled: FilledTemplate | None, rendered: str
) -> list[Part]:
    """The spans of ``layout`` with ``documents`` in this order, as they follow one another in the prompt ``rendered``.

    ``filled`` is the template of the system message, recognised after normalization: its values are cut out where the
    text stands as the template has it.
    """
    parts: list[Part] = []
    tools_first = True
    blocks = [Part("document", document.block, label=document.id) for document in documents]
    for index, message in enumerate(layout.messages):
        pasted = layout.pasted if layout.pasted is not None and layout.pasted.message == index else None
        metadata = [Part("metadata", layout.metadata)] if layout.metadata is not None and index == layout.target else []
        if message.is_system:
            parts += _system_parts(message.content, filled if index == 0 else None, pasted, blocks)
            if index == 0 and layout.tools and _tools_follow(layout.tools, rendered, message.content):
                parts.append(_tools_part(layout.tools))
                tools_first = False
        elif pasted is not None:
            region = pasted.region
            parts += [Part("turn", region.lead), *blocks, *metadata, Part("question", region.tail.strip("\n"))]
        elif index == layout.target:
            parts += blocks if layout.pasted is None else []
            parts += [Part("turn", reference) for reference in layout.references]
            parts += [*metadata, Part("question", message.content)]
        else:
            parts.append(Part("turn", message.content))
    if layout.tools and tools_first:
        parts.insert(0, _tools_part(layout.tools))
    return parts


def _system_parts(
    text: str, filled: FilledTemplate | None, pasted: Pasted | None, documents: Sequence[Part]
) -> list[Part]:
    """The parts of a system message, which holds ``documents`` where they are ``pasted`` into it."""
    normalized = normalize_text(text)
    if filled is None and pasted is not None:
        return [Part("system", pasted.region.lead), *documents, Part("system", pasted.region.tail)]
    # The application's own documents are never normalized.
    if filled is None or filled.text != (normalized if pasted is None else text):
        return [Part("system", text, None if normalized == text else normalized)]
    template = filled.template
    if pasted is None and normalized != text:
        # Where its fields stand in the text as it came is not known: it counts as a whole.
        return [Part("system", text, normalized, template.fill(dict.fromkeys(template.fields, "\0")))]
    parts = [Part("system", template.literals[0])] if template.literals[0] else []
    for slot, literal in zip(template.slots, template.literals[1:], strict=True):
        if slot == template.documents_slot:
            parts += documents
        else:
            parts.append(Part("value", filled.values[slot], label=slot))
        if literal:
            parts.append(Part("system", literal))
    return parts


def _tools_follow(tools: Sequence[dict[str, Any]], rendered: str, system: str) -> bool:
    """Whether the chat template writes tools behind the system text, to be told by a tool's name."""
    function = tools[0].get("function")
    name = function.get("name") if isinstance(function, dict) else None
    return isinstance(name, str) and rendered.find(system.strip()) < rendered.find(f'"{name}"')


def _tools_part(tools: Sequence[dict[str, Any]]) -> Part:
    text = msgspec.json.encode(tools).decode()
    sorted_tools, _ = canonical_tools(tools)
    spelling = msgspec.json.encode(sorted_tools).decode()
    return Part("tools", text, None if spelling == text else spelling)


def locate(parts: Sequence[Part], text: str) -> list[int]:
    """Where each of ``parts`` ends in the rendered prompt ``text``, in characters, in ascending order.

    A part that a chat template changed is taken to end where it begins; tools end where the next part begins, since
    every template writes them in its own way. The last part ends with the prompt.
    """
    ends: list[int] = []
    at = 0
    for part in parts:
        if part.kind != "tools" and part.text:
            start, size = _find(text, part.text, at), len(part.text)
            if start < 0:  # some templates trim what they are given
                stripped = part.text.strip()
                start, size = text.find(stripped, at), len(stripped)
            if start >= 0:
                if ends and parts[len(ends) - 1].kind == "tools":
                    ends[-1] = start
                at = start + size
        ends.append(at)
    if ends:
        ends[-1] = len(text)
    return ends


def _find(text: str, part: str, at: int) -> int:
    """``text.find(part, at)``, which prepares its search through a long ``part`` for longer than this mostly takes."""
    start = text.find(part[:_OPENING], at)
    return start if start < 0 or text.startswith(part, start) else text.find(part, start)
