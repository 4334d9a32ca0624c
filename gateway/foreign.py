"""Requests that ask for more than this gateway reads: parts, tools and fields that only a remote server knows.

They are passed on as they came. What the gateway owns of them is the model's name, the cache namespace and its own
``headstart`` object; everything else keeps its bytes.
"""

from __future__ import annotations

import secrets
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta, Raw

from gateway.schema import ChatMessage, ChatRequest, CompletionRequest, HeadstartOptions

__all__ = ["ForeignRequest", "Owned", "Route", "foreign_request"]

Route = Literal["/v1/chat/completions", "/v1/completions"]

_ACCOUNT_FIELDS: Final = frozenset(("metadata", "store", "service_tier", "safety_identifier", "prompt_cache_retention"))
"""OpenAI's own book-keeping, which changes no answer: no reason to give up the layout of a prompt."""

_KNOWN: Final = {
    "/v1/chat/completions": frozenset(ChatRequest.__struct_fields__) | _ACCOUNT_FIELDS,
    "/v1/completions": frozenset(CompletionRequest.__struct_fields__) | _ACCOUNT_FIELDS,
}
_MESSAGE_FIELDS: Final = frozenset(ChatMessage.__struct_fields__)
_AFFINITY_BYTES: Final = 4096

_fields_decoder: Final = msgspec.json.Decoder(dict[str, Raw])
_messages_decoder: Final = msgspec.json.Decoder(list[dict[str, Raw]])


class _Part(msgspec.Struct, frozen=True):
    type: str | None = None


class _Kind(msgspec.Struct, frozen=True):
    type: str | None = None


_parts_decoder: Final = msgspec.json.Decoder(list[_Part])
_kind_decoder: Final = msgspec.json.Decoder(_Kind | None)


class Owned(msgspec.Struct, frozen=True):
    """What the gateway reads of a request that it passes on."""

    model: str
    cache_salt: Annotated[str, Meta(min_length=1, max_length=256)] | None = None
    prompt_cache_key: str | None = None
    headstart: HeadstartOptions | None = None


class ForeignRequest(msgspec.Struct, frozen=True):
    """A body to be passed on. ``reasons`` are the fields that only the remote server knows, in words."""

    route: Route
    fields: dict[str, Raw]
    reasons: tuple[str, ...]
    affinity: bytes

    @property
    def streamed(self) -> bool:
        """Whether the answer is wanted piece by piece."""
        return bytes(self.fields.get("stream", b"")) == b"true"

    def body(self, model: str, root: bytes, *, use_cache: bool) -> bytes:
        """The body for a server that calls the model ``model``, in the namespace ``root``."""
        salt = root.hex() if use_cache else secrets.token_hex(16)
        owned = {"model": msgspec.json.encode(model), "cache_salt": msgspec.json.encode(salt)}
        kept: dict[str, Any] = {
            name: Raw(owned.pop(name)) if name in owned else value
            for name, value in self.fields.items()
            if name != "headstart"
        }
        return msgspec.json.encode(kept | {name: Raw(value) for name, value in owned.items()})


def foreign_request(route: Route, data: bytes, *, only_text: bool = False) -> ForeignRequest | None:
    """``data`` as a request to be passed on; None for one that the gateway reads itself, or finds fault with.

    ``only_text``: the servers there are get no token ids, so that every request is passed on.
    """
    try:
        fields = _fields_decoder.decode(data)
        reasons = ["unchecked tokenizer"] if only_text else []
        reasons += [name for name in fields if name not in _KNOWN[route]]
        if route == "/v1/completions":
            reasons += [name for name in ("suffix",) if _given(fields, name)]
            return _foreign(route, fields, reasons, bytes(fields.get("prompt", b"")))
        if _given(fields, "tools") and bytes(fields.get("tool_choice", b"")) != b'"none"':
            reasons.append("tools")
        if _given(fields, "response_format"):
            kind = _kind_decoder.decode(fields["response_format"])
            if kind is not None and kind.type != "text":
                reasons.append("response_format")
        messages = _messages_decoder.decode(fields.get("messages", b"[]"))
        reasons += _foreign_in(messages)
        asked = [
            message["content"]
            for message in messages
            if bytes(message.get("role", b"")) == b'"user"' and "content" in message
        ]
        return _foreign(route, fields, reasons, bytes(asked[0]) if asked else b"")
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None  # told in words by whoever reads it in full


def _foreign(route: Route, fields: dict[str, Raw], reasons: list[str], text: bytes) -> ForeignRequest | None:
    if not reasons:
        return None
    key = bytes(fields.get("prompt_cache_key", b"null"))
    affinity = key if key not in (b"null", b'""') else text[:_AFFINITY_BYTES]
    return ForeignRequest(route, fields, tuple(dict.fromkeys(reasons)), affinity)


def _foreign_in(messages: list[dict[str, Raw]]) -> list[str]:
    reasons = []
    for message in messages:
        reasons += [name for name in message if name not in _MESSAGE_FIELDS]
        if bytes(message.get("content", b""))[:1] == b"[":
            kinds = [part.type for part in _parts_decoder.decode(message["content"])]
            reasons += [f"{kind} part" for kind in kinds if kind not in (None, "text")]
    return reasons


def _given(fields: dict[str, Raw], name: str) -> bool:
    return bytes(fields.get(name, b"null")) not in (b"null", b"[]")
