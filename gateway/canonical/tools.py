"""Tool definitions in one spelling: a set of tools is a set, and the keys of a JSON object have no order.

Arrays keep their order: that of an ``enum``, of ``required`` or of examples is the caller's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from gateway.plan import Change

__all__ = ["canonical_tools"]

_sorted_json = msgspec.json.Encoder(order="sorted")


def canonical_tools(tools: Sequence[dict[str, Any]]) -> tuple[list[dict[str, Any]], tuple[Change, ...]]:
    """Tools sorted by their sorted-key JSON, function name first; says whether anything moved."""
    spelled = sorted((_name(tool), _sorted_json.encode(tool)) for tool in tools)
    canonical: list[dict[str, Any]] = [msgspec.json.decode(encoded) for _, encoded in spelled]
    if msgspec.json.encode(canonical) == msgspec.json.encode(tools):
        return canonical, ()
    return canonical, (Change("text", "tools sorted by name, the keys of their schemas alphabetically"),)


def _name(tool: dict[str, Any]) -> str:
    function = tool.get("function")
    name = function.get("name") if isinstance(function, dict) else tool.get("name")
    return name if isinstance(name, str) else ""
