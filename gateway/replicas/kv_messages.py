"""vLLM's KV cache events as they come over ZeroMQ (``vllm/distributed/kv_events.py``): payloads in, events out.

A payload is a msgpack array ``[time, events, rank]``. An event is a map with its ``type``; older versions, and SGLang,
send it as an array that begins with the type, the fields in the same order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

__all__ = ["Cleared", "EngineHash", "KvEvent", "MalformedEvents", "Removed", "Stored", "decode_events"]

EngineHash = int | Annotated[bytes, Meta(max_length=64)]
"""How the engine names a block: the last 8 bytes of its hash as an integer, or the whole of it."""

_TokenId = Annotated[int, Meta(ge=0, lt=2**32)]
_BlockSize = Annotated[int, Meta(ge=1, le=65536)]


class MalformedEvents(ValueError):
    """A payload that is none, or whose events contradict what came before them; in words that quote nothing of it."""


class Stored(msgspec.Struct, tag_field="type", tag="BlockStored"):
    """Blocks became hittable: ``token_ids`` are those of all ``block_hashes``, behind the block ``parent_block_hash``.

    ``extra_keys`` has for each block what went into its hash beside tokens, such as the cache salt in the first block
    of a prompt; None where the engine does not tell.
    """

    block_hashes: list[EngineHash]
    parent_block_hash: EngineHash | None
    token_ids: list[_TokenId]
    block_size: _BlockSize
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: list[list[Any] | None] | None = None
    group_idx: int | None = None


class Removed(msgspec.Struct, tag_field="type", tag="BlockRemoved"):
    """Blocks were evicted."""

    block_hashes: list[EngineHash]
    medium: str | None = None
    group_idx: int | None = None


class Cleared(msgspec.Struct, tag_field="type", tag="AllBlocksCleared"):
    """The whole cache was dropped."""


KvEvent = Stored | Removed | Cleared


class _StoredRow(Stored, array_like=True, tag="BlockStored"):
    pass


class _RemovedRow(Removed, array_like=True, tag="BlockRemoved"):
    pass


class _ClearedRow(Cleared, array_like=True, tag="AllBlocksCleared"):
    pass


class _Batch(msgspec.Struct, array_like=True):
    time: float
    events: list[KvEvent]


class _RawBatch(msgspec.Struct, array_like=True):
    time: float
    events: list[msgspec.Raw]


class _Kind(msgspec.Struct):
    type: str


_batches: Final = msgspec.msgpack.Decoder(_Batch)
_raw_batches: Final = msgspec.msgpack.Decoder(_RawBatch)
_maps: Final = msgspec.msgpack.Decoder(KvEvent)
_rows: Final = msgspec.msgpack.Decoder(_StoredRow | _RemovedRow | _ClearedRow)
_KNOWN: Final = frozenset({"BlockStored", "BlockRemoved", "AllBlocksCleared"})
_ERRORS: Final = (msgspec.DecodeError, RecursionError, UnicodeDecodeError, OverflowError)


def decode_events(payload: bytes) -> Sequence[KvEvent]:
    """The events of one message, those of unknown kinds left out.

    Raises:
        MalformedEvents: It is no such message.
    """
    try:
        return _batches.decode(payload).events
    except _ERRORS:
        pass  # an older form, a kind that is not known here, or rubbish
    try:
        raw_events = _raw_batches.decode(payload).events
        return [event for raw in raw_events if (event := _event(raw)) is not None]
    except _ERRORS as error:
        raise MalformedEvents(f"a message of its cache events is malformed ({type(error).__name__})") from None


def _event(raw: msgspec.Raw) -> KvEvent | None:
    data = bytes(raw)
    is_row = bool(data) and (data[0] & 0xF0 == 0x90 or data[0] in (0xDC, 0xDD))  # msgpack's arrays
    try:
        return _rows.decode(data) if is_row else _maps.decode(data)
    except msgspec.ValidationError:
        if _kind(data, is_row) in _KNOWN:
            raise
        return None


def _kind(data: bytes, is_row: bool) -> str:
    if not is_row:
        return msgspec.msgpack.decode(data, type=_Kind).type
    row = msgspec.msgpack.decode(data, type=list[msgspec.Raw])
    return msgspec.msgpack.decode(row[0], type=str) if row else ""
