"""What an analysis found, in words: one sentence per cause that cost tokens, the dearest first."""

from __future__ import annotations

from typing import Final

import msgspec

from gateway.analysis.report import Report
from gateway.attribution.history import Cause

__all__ = ["Finding", "findings"]

_WORDS: Final[dict[Cause, str]] = {
    "never_seen": "Text that no earlier request had: it has to be computed.",
    "evicted": "Was cached and had to leave before it came back: a larger cache, or another policy, would keep more.",
    "other_replica": "Is cached on another replica.",
    "volatile": "Values that change with every request{fields} stand in front of text that repeats. Moved behind it, "
    "they leave it in the cache.",
    "document_order": "Documents that were sent before come back in another order. Given as `documents`, they can be "
    "laid out so that those which are cached lead.",
    "tool_order": "The same tools came in another order, or their schemas with keys in another order.",
    "text_form": "System texts differ in nothing but their spelling: line ends, trailing blanks, a byte order mark, or "
    "the form of accents.",
    "namespace": "Is cached in another namespace (`cache_salt`), which is never shared.",
    "block_rounding": "Was sent before, but fills no whole block.",
    "below_minimum": "Prompts shorter than one block are not cached.",
    "bypass": "Requests that asked to bypass the cache.",
}


class Finding(msgspec.Struct, frozen=True):
    """What one cause cost over all templates: ``share`` of all prompt tokens, a fraction of 1."""

    cause: Cause
    requests: int
    tokens: int
    share: float
    text: str


def findings(report: Report) -> list[Finding]:
    """One per cause that occurs, most tokens first."""
    analysis = report.analysis
    fields = {template.template: template.fields for template in report.templates}
    result = []
    for cause in dict.fromkeys(row.cause for row in analysis.causes):
        rows = [row for row in analysis.causes if row.cause == cause]
        tokens = sum(row.tokens for row in rows)
        named = dict.fromkeys(field for row in rows for field in fields.get(row.template, ()))
        text = _WORDS[cause].format(fields=f" ({', '.join(named)})" if named else "")
        result.append(Finding(cause, sum(row.requests for row in rows), tokens, tokens / analysis.tokens, text))
    return result
