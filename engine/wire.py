"""The messages between a gateway and an engine process, and how they are framed.

A frame is a 4-byte big-endian length and a msgpack body. Requests go one by one; what an engine step
produced comes back as one ``StepReport``, so that the cost of a message is shared by the whole batch.
Nothing here knows of HTTP, tenants or documents: a prompt is token ids plus the 16-byte key root that
stands for its cache namespace (see ``cache_policy.keys``).
"""

from __future__ import annotations

import struct
from asyncio import StreamReader
from collections.abc import Iterator
from typing import Any, Final

import msgspec

from engine.errors import ProtocolError

__all__ = [
    "MAX_FRAME_BYTES",
    "Abort",
    "AllBlocksCleared",
    "BlockRemoved",
    "BlockStored",
    "CacheEvent",
    "Call",
    "EngineInfo",
    "FromEngine",
    "Load",
    "Output",
    "Reply",
    "Sampling",
    "StepReport",
    "StepTiming",
    "Submit",
    "ToEngine",
    "TokenLogprobs",
    "decode_from_engine",
    "decode_to_engine",
    "frame",
    "read_frame",
    "take_frames",
]

MAX_FRAME_BYTES: Final = 64 * 1024 * 1024
"""A longer frame is a protocol error: the connection is closed."""


class Sampling(msgspec.Struct, frozen=True, omit_defaults=True):
    """How the tokens of one request are chosen and when it ends. Checked at the gateway's edge.

    ``max_tokens`` is already clamped to what the model and the pool can hold. ``temperature`` 0 is greedy.
    ``seed`` fixes the random draws whatever else is in the batch; None draws a fresh one.
    ``stop`` strings end the text before their first character.

    Penalties change the logits before anything else, with the meaning vLLM documents: ``presence_penalty`` and
    ``frequency_penalty`` look at the generated tokens, ``repetition_penalty`` (a factor above 0) at those of the
    prompt too. ``logit_bias`` pairs (token id, addend) come after them.

    ``logprobs`` k asks for the log-probability of each generated token and of the k most likely ones in its place
    (0: of the token alone), ``prompt_logprobs`` for the same of the prompt. They are of the model's own distribution,
    before temperature, penalties and bias. A request that asks for those of its prompt does not read the cache.

    ``beam_width`` 1 and up searches for the most likely continuations instead of drawing one: ``Submit.n`` of the
    beams (at most as many as there are) come out, best first, each as a whole when all have ended; ``length_penalty``
    is the exponent of the length by which a beam's log-probability is divided, ``early_stopping`` ends the search
    with the ``beam_width``-th complete beam. Beams are compared after penalties and bias; temperature, stop strings and
    stop token ids mean nothing to a search, as in vLLM.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_tokens: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    beam_width: int = 0
    length_penalty: float = 1.0
    early_stopping: bool = False


# --- gateway to engine -------------------------------------------------------------------------------


class Submit(msgspec.Struct, frozen=True, tag="submit"):
    """Start one request. ``id`` is chosen by the sender and unique on its connection.

    ``tokens`` is the prompt as little-endian uint32 (``cache_policy.keys.token_bytes``), ``root`` the first parent of
    its block keys. ``use_cache`` False neither reads nor publishes blocks (a bypass). ``n`` choices continue the
    prompt, which is computed once; the seed of each is derived from the request's seed and its index.

    ``priority`` is that of its class, 0 and up, lower ones first. Of one priority at most ``class_limit`` choices run
    at once (0: as many as run at all); the requests of a class that is full wait without holding up others.

    ``owner`` names the tenant whose blocks it publishes, of which at most ``max_cached_blocks`` are resident (0: any
    number). Beyond that the tenant's own idle blocks leave first; when it has none, nothing more is published.
    """

    id: int
    tokens: bytes
    root: bytes
    sampling: Sampling
    use_cache: bool = True
    n: int = 1
    priority: int = 0
    class_limit: int = 0
    owner: str = ""
    max_cached_blocks: int = 0


class Abort(msgspec.Struct, frozen=True, tag="abort"):
    """End requests early; their blocks are released. Unknown ids are ignored (they may just have ended)."""

    ids: tuple[int, ...]


class Call(msgspec.Struct, frozen=True, tag="call"):
    """A control call, answered by ``Reply`` with the same id.

    Methods: ``reset_cache`` (nothing cached before is hit again; result ``{"dropped": n, "kept": m}``: ``dropped`` idle
    blocks became empty, ``kept`` blocks lost their keys but stay with their running requests), ``retell`` (the events
    of the next report tell all listeners from the beginning what is cached), ``set_policy`` (params
    ``{"policy": name}``), ``stats``, ``check`` (run the block manager's invariants), ``shutdown``.

    ``pin`` (params ``{"keys": [key, …]}``, the chain of block keys of a prefix from its first block on): none of its
    blocks is evicted any more, neither those that are cached now nor those that will be, until ``unpin`` with the same
    keys, over any ``reset_cache``. Pinning a chain again changes nothing. Result ``{"blocks": n, "resident": m}``: of
    ``n`` blocks ``m`` are cached now. An error when all pins together would take more than half of the pool, or room
    that a request in hand may need. ``unpin``: result ``{"released": n}``, 0 when there is no such pin. ``pins``:
    result ``{"pins": [{"key", "blocks", "resident"}, …]}`` with the last key of each.
    """

    id: int
    method: str
    params: dict[str, Any] = {}


ToEngine = Submit | Abort | Call

# --- engine to gateway -------------------------------------------------------------------------------


class StepTiming(msgspec.Struct, frozen=True, array_like=True):
    """What one engine step computed and how long it took; the prefill-cost curve is fitted to these.

    ``prefill_context`` is the sum over prefill tokens of the number of tokens before them, the
    quadratic term of attention. ``seconds`` is wall time of the whole step.
    """

    prefill_tokens: int
    prefill_context: int
    decode_tokens: int
    decode_context: int
    seconds: float


class EngineInfo(msgspec.Struct, frozen=True, tag="info"):
    """First message of an engine on every connection: what it serves and what fits.

    ``max_model_len`` is the enforced limit of prompt plus output tokens: the smaller of the model's
    positions and the whole pool. ``fingerprint`` identifies the weights. ``boot_id`` changes at each start,
    so that an index of the former life is dropped. ``profile`` holds the timed steps of the warm-up.
    Layers that see only the last ``window`` tokens (0: there are none) have ``window_blocks`` blocks of their own.
    ``root`` is the Hugging Face folder from which weights and tokenizer are loaded, ``vocabulary`` the digest of its
    tokens and their ids (``engine.detokenize``; empty: not told). ``kv_dtype`` is the format of the
    cache, and ``method`` names the code that computes, for whoever reads a log or a benchmark.
    """

    model: str
    root: str
    fingerprint: str
    boot_id: str
    max_model_len: int
    num_blocks: int
    block_size: int
    dtype: str
    device: str
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    policy: str
    max_batch_tokens: int
    profile: tuple[StepTiming, ...] = ()
    kv_dtype: str = ""
    method: str = ""
    window: int = 0
    window_blocks: int = 0
    vocabulary: str = ""


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """How likely a token was where it stands, and what else was: natural logarithms, float32.

    ``rank`` is its place among all tokens there, 1 for the most likely. ``top`` are (token id, log-probability), the
    most likely first, as many as were asked for.
    """

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()


class Output(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """What one step produced for one choice of a request.

    ``text`` is the new text (complete characters, nothing that may still be the start of a stop string) and
    ``token_ids`` what was generated in this step. ``finish_reason`` is ``stop``, ``length``, ``abort`` or ``error``;
    None while it runs. ``cached_tokens`` is set once, with the first
    output: prompt tokens taken from the cache. ``prefill_s`` comes with it: this request's share of the step
    time spent on its prompt, in seconds, and ``queue_s`` the wait before its first step. ``error`` is a (code,
    message) pair: ``context_length_exceeded``, ``invalid_token``, ``invalid_request`` or ``engine_error``.

    ``index`` is the choice, 0 to ``Submit.n`` - 1. A request has ended when each of its choices has a finish reason, or
    with an ``error``, which ends all of them.

    ``logprobs`` has one entry for each of ``token_ids`` when they were asked for. ``prompt_logprobs`` comes with the
    first output: one entry for each token of the prompt but the first, before which there is nothing.
    """

    id: int
    text: str = ""
    token_ids: tuple[int, ...] = ()
    finish_reason: str | None = None
    cached_tokens: int | None = None
    prefill_s: float | None = None
    queue_s: float | None = None
    error: tuple[str, str] | None = None
    index: int = 0
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()


class BlockStored(msgspec.Struct, frozen=True, tag="BlockStored"):
    """Blocks whose KV is now computed and shareable, parent first (vLLM's event and field names)."""

    block_hashes: tuple[bytes, ...]
    parent_block_hash: bytes | None
    block_size: int


class BlockRemoved(msgspec.Struct, frozen=True, tag="BlockRemoved"):
    """Blocks that were evicted."""

    block_hashes: tuple[bytes, ...]


class AllBlocksCleared(msgspec.Struct, frozen=True, tag="AllBlocksCleared"):
    """The whole prefix cache was dropped."""


CacheEvent = BlockStored | BlockRemoved | AllBlocksCleared


class Load(msgspec.Struct, frozen=True, array_like=True):
    """The state of queue and pool after a step, and totals since the engine started.

    ``used_blocks`` belong to running requests, ``cached_blocks`` are idle but hittable, ``free_blocks`` empty; they
    add up to ``num_blocks``. ``queued_tokens`` is the number of prompt tokens still to be computed.
    """

    running: int
    waiting: int
    queued_tokens: int
    used_blocks: int
    cached_blocks: int
    free_blocks: int
    evictions: int
    preemptions: int
    collisions_rejected: int
    steps: int


class StepReport(msgspec.Struct, frozen=True, tag="step"):
    """Everything one step has to say. ``timing`` is None when nothing was computed (an abort, a refusal)."""

    outputs: tuple[Output, ...]
    load: Load
    timing: StepTiming | None = None
    events: tuple[CacheEvent, ...] = ()


class Reply(msgspec.Struct, frozen=True, tag="reply"):
    """The answer to a ``Call``; ``error`` is None when it succeeded."""

    id: int
    result: dict[str, Any] = {}
    error: str | None = None


FromEngine = EngineInfo | StepReport | Reply

# --- framing -----------------------------------------------------------------------------------------

_LENGTH = struct.Struct(">I")
_encoder = msgspec.msgpack.Encoder()
_to_engine = msgspec.msgpack.Decoder(ToEngine)
_from_engine = msgspec.msgpack.Decoder(FromEngine)


def frame(message: ToEngine | FromEngine) -> bytes:
    """Encode a message with its length in front, ready to be written to the socket."""
    body = _encoder.encode(message)
    return _LENGTH.pack(len(body)) + body


async def read_frame(reader: StreamReader) -> bytes:
    """Read the next frame and return its body.

    Raises:
        asyncio.IncompleteReadError: the stream has ended.
        ProtocolError: the frame is longer than ``MAX_FRAME_BYTES``.
    """
    return await reader.readexactly(_length(await reader.readexactly(_LENGTH.size), 0))


def take_frames(buffer: bytearray) -> Iterator[bytes]:
    """Cut complete frames off the front of ``buffer`` and yield their bodies; the beginning of the next one stays.

    Raises:
        ProtocolError: a frame is longer than ``MAX_FRAME_BYTES``.
    """
    start = 0
    try:
        while len(buffer) >= (body := start + _LENGTH.size):
            end = body + _length(buffer, start)
            if len(buffer) < end:
                break
            start = end
            yield bytes(buffer[body:end])
    finally:
        del buffer[:start]


def _length(data: bytes | bytearray, start: int) -> int:
    (length,) = _LENGTH.unpack_from(data, start)
    if length > MAX_FRAME_BYTES:
        raise ProtocolError(f"a frame of {length} bytes is longer than the {MAX_FRAME_BYTES} allowed")
    return int(length)


def decode_to_engine(body: bytes) -> ToEngine:
    """Decode a frame's body at the engine's end. Raises ``msgspec.DecodeError`` when it is malformed."""
    return _to_engine.decode(body)


def decode_from_engine(body: bytes) -> FromEngine:
    """Decode a frame's body at the gateway's end. Raises ``msgspec.DecodeError`` when it is malformed."""
    return _from_engine.decode(body)
