"""The conversation as the stages see it: one string of text per message, roles checked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import msgspec

from gateway.errors import InvalidRequestError
from gateway.schema import ChatMessage

__all__ = ["ROLES", "Message", "last_user_message", "read_messages"]

ROLES: Final = frozenset({"system", "developer", "user", "assistant", "tool"})
"""Chat templates paste the role between control tokens, so only these are let through."""

_SYSTEM_ROLES: Final = frozenset({"system", "developer"})


class Message(msgspec.Struct, frozen=True):
    """One turn. ``content`` is its whole text; the other fields reach the chat template as they came."""

    role: str
    content: str
    name: str | None = None
    tool_calls: tuple[dict[str, Any], ...] = ()
    tool_call_id: str | None = None

    @property
    def is_system(self) -> bool:
        """Whether the operator speaks here, not a user or the model."""
        return self.role in _SYSTEM_ROLES

    def with_content(self, content: str) -> Message:
        """The same turn with another text."""
        return self if content == self.content else msgspec.structs.replace(self, content=content)


def read_messages(messages: Sequence[ChatMessage]) -> tuple[Message, ...]:
    """Check the body's messages and flatten lists of text parts, joined by a newline as vLLM does.

    Raises:
        InvalidRequestError: there is no message, a role is unknown, text is missing, or a part is not text.
    """
    if not messages:
        raise InvalidRequestError("messages must hold at least one message.", param="messages")
    return tuple(_read(message, f"messages[{index}]") for index, message in enumerate(messages))


def last_user_message(messages: Sequence[Message]) -> int | None:
    """The index of the last message of a user: where documents and moved fields go. None when there is none."""
    return next((index for index in reversed(range(len(messages))) if messages[index].role == "user"), None)


def _read(message: ChatMessage, place: str) -> Message:
    if message.role not in ROLES:
        raise InvalidRequestError(f"{place}.role must be one of {', '.join(sorted(ROLES))}.", param=f"{place}.role")
    if isinstance(message.content, str):
        content = message.content
    elif message.content is not None:
        content = "\n".join(_part_text(part, f"{place}.content[{index}]") for index, part in enumerate(message.content))
    elif message.role == "assistant" and message.tool_calls:
        content = ""
    else:
        raise InvalidRequestError(f"{place}.content is missing.", param=f"{place}.content")
    return Message(message.role, content, message.name, tuple(message.tool_calls or ()), message.tool_call_id)


def _part_text(part: dict[str, Any], place: str) -> str:
    kind = part.get("type")
    if kind != "text":
        raise InvalidRequestError(f"{place}.type must be 'text': this model reads text only.", param=f"{place}.type")
    text = part.get("text")
    if not isinstance(text, str):
        raise InvalidRequestError(f"{place}.text must be a string.", param=f"{place}.text")
    return text
