from __future__ import annotations

import copy
from typing import Any

from gateway.canonical.tools import canonical_tools


def tool(name: str) -> dict[str, Any]:
    properties = {key: {"type": "string", "enum": ["z", "a"]} for key in ("b", "a", "c")}
    parameters = {"type": "object", "properties": properties, "required": ["c", "a"]}
    return {"type": "function", "function": {"name": name, "description": "d", "parameters": parameters}}


def shuffled_keys(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: shuffled_keys(item) for key, item in reversed(value.items())}
    return [shuffled_keys(item) for item in value] if isinstance(value, list) else value


def spelled(tools: list[dict[str, Any]]) -> str:
    return repr(canonical_tools(tools)[0])


def test_l1_tools_and_keys_in_any_order_are_spelled_the_same() -> None:
    tools = [tool(name) for name in ("delta", "alpha", "charlie", "bravo", "echo")]
    assert spelled(tools) == spelled(tools[::-1]) == spelled(shuffled_keys(tools))


def test_l1_arrays_keep_the_callers_order() -> None:
    tools = [tool("alpha")]
    reversed_enum = copy.deepcopy(tools)
    reversed_enum[0]["function"]["parameters"]["properties"]["a"]["enum"].reverse()
    assert spelled(tools) != spelled(reversed_enum)


def test_a_change_is_reported_and_none_where_there_is_none() -> None:
    tools, changes = canonical_tools([tool("b"), tool("a")])
    assert len(changes) == 1
    assert canonical_tools(tools) == (tools, ())
