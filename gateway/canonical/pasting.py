"""Step 3 for documents that an application pasted into its messages itself: where they are, in their own bytes.

They are the application's text. Nothing of them is normalized, left out or labelled; all that may change is their
order, and that only where a template says so.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from gateway.canonical.layout import Pasted
from gateway.canonical.messages import Message
from gateway.canonical.recognized import Region, cut_documents, find_in_message, find_undeclared
from gateway.canonical.templates import FilledTemplate
from gateway.canonical.text import original_span
from gateway.config import OrderMode, TemplateConfig

__all__ = ["find_pasted", "order_of_pasted", "pasted_into_system", "with_original_documents"]


def with_original_documents(filled: FilledTemplate, original: str) -> FilledTemplate:
    """The same with the documents as they stand in ``original``, the system text before it was normalized."""
    if filled.template.documents_slot is None:
        return filled
    span = original_span(original, *filled.template.around_documents(filled.values))
    return filled if span is None else msgspec.structs.replace(filled, documents=original[slice(*span)])


def pasted_into_system(text: str, original: str) -> Region | None:
    """Documents in a system message of no registered template, which is ``original`` before it was normalized."""
    region = find_undeclared(text, system=True)
    if region is None:
        return None
    span = original_span(original, region.lead, region.tail)
    return region if span is None else find_undeclared(region.lead + original[slice(*span)] + region.tail, system=True)


def find_pasted(
    messages: Sequence[Message], filled: FilledTemplate | None, in_system: Region | None, target: int | None
) -> Pasted | None:
    """Where the conversation holds pasted documents, if anywhere.

    In the place and form that the template of ``filled`` declares; where it declares none, ``in_system`` or, in a form
    that leaves no doubt, the user message ``target``.
    """
    config = None if filled is None else filled.template.config
    if filled is not None and config is not None and config.documents is not None:
        if filled.template.documents_slot is not None:
            return _in_slot(messages[0].content, filled, config)
        region = None if target is None else find_in_message(messages[target].content, config.documents)
    elif in_system is not None:
        return Pasted(0, in_system)
    else:
        region = None if target is None else find_undeclared(messages[target].content, system=False)
    return None if region is None or target is None else Pasted(target, region)


def order_of_pasted(config: TemplateConfig | None, asked: OrderMode | None) -> OrderMode:
    """Their order: the caller's, unless their template says more; then also what the request asks for."""
    if config is None or config.documents is None or config.order is None or config.documents == "numbered":
        return "preserve"
    return asked or config.order


def _in_slot(text: str, filled: FilledTemplate, config: TemplateConfig) -> Pasted | None:
    now = filled.template.read(text)  # its values may have been moved out
    if now is None or config.documents is None:
        return None
    before, after = now.template.around_documents(now.values)
    region = cut_documents(text, config.documents, len(before), len(text) - len(after), config.document_separator)
    return None if region is None else Pasted(0, region)
