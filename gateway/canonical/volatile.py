"""Step 2, volatile fields: values that differ per request leave the prefix and stay visible to the model.

In place of each value stands a reference, and one line ``Metadata: a=…; b=…`` before the question holds the values. The
system message is then the same for every request of its template. A value in which a reader could see the end of the
field, or the beginning of another, is quoted as in JSON.
"""

from __future__ import annotations

import json
import re
from typing import Final

import msgspec

from gateway.canonical.templates import FilledTemplate
from gateway.plan import Change

__all__ = ["REFERENCE", "Hoisted", "hoist"]

REFERENCE: Final = "(see metadata)"
"""What the system message says instead of a moved value."""

_AMBIGUOUS: Final = re.compile(r'^"|[;=\r\n]')


class Hoisted(msgspec.Struct, frozen=True):
    """A system text without its volatile values, and the line that carries them (None when there was none to move)."""

    system: str
    metadata: str | None
    changes: tuple[Change, ...]


def hoist(filled: FilledTemplate) -> Hoisted:
    """Move every declared field out of the system text, in order of declaration.

    A value that is the reference itself was moved by an earlier pass; it stays, so that hoisting is idempotent.
    """
    moved = {field: value for field, value in filled.values.items() if value != REFERENCE}
    if not moved:
        return Hoisted(filled.text, None, ())
    system = filled.template.fill(dict.fromkeys(filled.template.fields, REFERENCE), filled.documents)
    metadata = "Metadata: " + "; ".join(f"{field}={_written(value)}" for field, value in moved.items())
    change = Change("volatile", f"moved behind the stable part: {', '.join(moved)}")
    return Hoisted(system, metadata, (change,))


def _written(value: str) -> str:
    """``value`` as the metadata line has it: what begins with a quote is JSON, everything else is the value itself."""
    if _AMBIGUOUS.search(value) is None:
        return value
    return json.dumps(value, ensure_ascii=False)
