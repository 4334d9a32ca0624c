"""The configuration that an analysis speaks for, as TOML to paste: templates that were learned, declared."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Final

from gateway.analysis.passes import Job
from gateway.attribution.causes import CauseRow
from gateway.canonical.learning.proposals import TemplateProposals

__all__ = ["suggest", "toml_text"]

_MIN_SHARE: Final = 0.01
_UNPRINTABLE: Final = re.compile(r"[\x00-\x08\x0b-\x1f\x7f]")


def suggest(job: Job, causes: Sequence[CauseRow], tokens: int, requests: Mapping[str, int]) -> str:
    """TOML that ``headstart serve --config`` takes, for a log whose ``tokens`` were missed for these ``causes``.

    ``requests`` of the log were of each template. A learned template is declared, with its fields as ``{name}``. One in
    which some differing parts should stay where they are cannot be declared: for those learned fields are to be moved
    as they are found.
    """
    lost = dict.fromkeys((row.cause for row in causes), 0)
    for row in causes:
        lost[row.cause] += row.tokens
    worth = {cause for cause, missed in lost.items() if missed >= _MIN_SHARE * tokens}
    canonical: list[str] = []
    templates: list[str] = []
    if "volatile" in worth and job.learner is not None:
        proposals = TemplateProposals(job.learner, "apply").all()
        total = sum(requests.values())
        for number, proposal in enumerate(proposals, start=1):
            if proposal.system is not None:
                templates.append(
                    # Of the whole log, while a proposal counts those that came after it was learned.
                    f"# {requests.get(proposal.name, 0):,} of the log's {total:,} requests have this system text; "
                    "what stands in braces leaves the prefix.\n"
                    f"[templates.learned_{number}]\nsystem = {toml_text(proposal.system)}\n"
                )
        if any(proposal.system is None for proposal in proposals):
            canonical.append('hoist = "apply"       # values that differ per request are moved as they are found')
    if "document_order" in worth and job.canonical.order != "cache-aware":
        canonical.append('order = "cache-aware"  # documents that are cached come first')
    if worth & {"text_form", "tool_order"} and not job.canonical.text:
        canonical.append("text = true           # one spelling of system texts, one order of tools")
    sections = ["[canonical]\n" + "\n".join(canonical) + "\n"] if canonical else []
    sections += templates
    if not sections:
        return "# Nothing to configure: what these requests miss, no setting would bring back.\n"
    return "\n".join(sections)


def toml_text(text: str) -> str:
    """A TOML string of several lines that means exactly ``text``."""
    escaped = text.replace("\\", "\\\\").replace('"""', '""\\"')
    escaped = _UNPRINTABLE.sub(lambda match: f"\\u{ord(match.group()):04x}", escaped)
    if escaped.endswith('"'):
        escaped = escaped[:-1] + '\\"'
    return f'"""\n{escaped}"""'
